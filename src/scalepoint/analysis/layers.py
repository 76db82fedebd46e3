"""The layers of a quantized model: each fused group, and each single operation with weights."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from scalepoint.errors import UsageError, did_you_mean
from scalepoint.operation_coverage import Coverage
from scalepoint.patterns import Fused, get_kind
from scalepoint.quantize.operations import get_part_kind
from scalepoint.quantize.quantized_layers import QuantizedLayer
from scalepoint.quantize.quantizers import QuantizerBase, QuantStub
from scalepoint.quantize.record import coverage, record_of


@dataclass(frozen=True)
class AnalyzedLayer:
    """A node of the graph under the name that coverage and overrides use.

    Attributes:
        name: The name.
        kind: Kind of operation.
        precision: How it is quantized.
        macs: Multiply-accumulates of one forward.
        parameters: Number of weights.
        node: The node.
    """

    name: str
    kind: str
    precision: str
    macs: int | None
    parameters: int
    node: fx.Node

    @property
    def stub_nodes(self) -> list[fx.Node]:
        """The activation quantizers that it reads."""
        return [source for source in self.node.all_input_nodes if get_kind(source) == "quant"]


def get_layers(model: fx.GraphModule) -> list[AnalyzedLayer]:
    """Return the layers in graph order, including groups that the coverage does not count (an add, a pool)."""
    rows, nodes = coverage(model).operations, {node.name: node for node in model.graph.nodes}
    layers = []
    for site in record_of(model).sites:
        node = nodes[site.node]
        if site.coverage_index is None:
            layers.append(_make_uncounted_layer(model, node, site.name))
        else:
            row = rows[site.coverage_index]
            layers.append(AnalyzedLayer(row.name, row.kind, row.precision, row.macs, row.parameters, node))
    return layers


def _make_uncounted_layer(model: fx.GraphModule, node: fx.Node, name: str) -> AnalyzedLayer:
    module = model.get_submodule(str(node.target))
    kind = get_part_kind(module.weighted_part) if isinstance(module, Fused) else get_kind(node)
    stubs = [stub for stub in model.modules() if isinstance(stub, QuantStub) and name in stub.consumers]
    dtypes = sorted({str(stub.spec.to_dict()["dtype"]) for stub in stubs if stub.enabled})
    return AnalyzedLayer(name, kind, f"x {' / '.join(dtypes)}" if dtypes else "float", 0, 0, node)


def select_layers(layers: list[AnalyzedLayer], names: list[str]) -> list[AnalyzedLayer]:
    """Return the layers with these names, in the order of the names. Raises UsageError for an unknown name."""
    layers_by_name = {layer.name: layer for layer in reversed(layers)}  # of equal names the first layer
    for name in names:
        if name not in layers_by_name:
            raise UsageError(f"no layer {name!r} in this model: {did_you_mean(name, layers_by_name)[:400]}")
    return [layers_by_name[name] for name in names]


def get_quantizers(model: nn.Module) -> list[QuantizerBase]:
    return [module for module in model.modules() if isinstance(module, QuantizerBase)]


def get_quantized_part(model: nn.Module, layer: AnalyzedLayer) -> QuantizedLayer | None:
    """Return the part of a layer that has a quantized weight."""
    if layer.node.op != "call_module":
        return None
    module = model.get_submodule(str(layer.node.target))
    parts: Iterator[nn.Module] = iter(module.parts.values()) if isinstance(module, Fused) else iter((module,))
    return next((part for part in parts if isinstance(part, QuantizedLayer)), None)


def get_code_range(quantizer: QuantizerBase) -> tuple[Tensor, Tensor] | None:
    """Return the values of the lowest and the highest code; None if each tensor gets a range of its own."""
    # Dynamic and learned quantizers compute in every call, but a learned scale does not depend on the tensor.
    if quantizer.calculator.always_called and not quantizer.is_learned:
        return None
    grid = quantizer.quantizer.grid
    scale = quantizer.scale.detach()
    if quantizer.minval is not None:
        return quantizer.minval, quantizer.minval + grid.span * scale
    zero_point = 0 if grid.format.is_float else quantizer.zero_point
    low, high = (torch.as_tensor(code - zero_point, dtype=torch.float32) for code in (grid.low, grid.high))
    return low * scale, high * scale


def check_has_active_quantizers(model: nn.Module) -> Coverage:
    """Return the coverage of a quantized model. Raises UsageError if all its quantizers are off."""
    model_coverage = coverage(model)
    quantizers = get_quantizers(model)
    if not any(quantizer.enabled for quantizer in quantizers) and not model_coverage.is_float_for_speed:
        raise UsageError(
            f"all {len(quantizers)} quantizers of this model are off: calibrate it first, or call enable_fake_quant"
        )
    return model_coverage
