"""The products of layers in the simulation, next to those that a runtime returns: layer outputs without their bias."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
from torch import Tensor, fx, nn

from scalepoint.graph.dry_run import BoundInputs
from scalepoint.quantize.quantized_layers import QuantizedLayer
from scalepoint.support.coreai_text import product_name
from scalepoint.verification.simulation import simulate, to_file_array


def simulate_products(model: fx.GraphModule, inputs: BoundInputs) -> dict[str, np.ndarray]:
    """Run the simulation and return the product of every quantized layer that runs once, by its path."""
    calls: dict[str, list[np.ndarray]] = {}
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if isinstance(module, QuantizedLayer) and not module.weight_quant.quantizer.is_disabled():
                handle = module.register_forward_hook(_record_product(calls.setdefault(name, [])))
                hooks.callback(handle.remove)
        simulate(model, inputs)
    return {name: arrays[0] for name, arrays in calls.items() if len(arrays) == 1}


def _record_product(calls: list[np.ndarray]) -> Any:
    def record(layer: nn.Module, inputs: Any, output: Tensor) -> None:
        assert isinstance(layer, QuantizedLayer)  # noqa: S101  # only these have the hook
        bias = layer.get_deployed().bias
        if bias is not None:
            shape = [1] * output.ndim
            shape[_find_channel_axis(layer.weight, output)] = -1
            output = output - bias.detach().view(shape)
        calls.append(to_file_array(output))

    return record


def _find_channel_axis(weight: Tensor, output: Tensor) -> int:
    """Return the last axis for a linear layer. A convolution has one axis before its channels only with a batch."""
    return -1 if weight.ndim == 2 else output.ndim - weight.ndim + 1


def match_products(
    expected: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Pair the products of the simulation with those of the runtime, by layer, in the order of the model.

    A file may compute the product of a linear layer with its leading axes joined.
    """
    pairs = {}
    for path, product in expected.items():
        group, _, role = path.rpartition(".")
        actual = outputs.get(product_name(f"{group}.stored_{role}"))
        if actual is not None and actual.size == product.size:
            pairs[path] = (product, actual.reshape(product.shape))
    return pairs
