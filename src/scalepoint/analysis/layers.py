"""The layers of a quantized model: each fused group, and each operation with weights that stands alone."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from scalepoint.errors import UsageError, did_you_mean
from scalepoint.operation_coverage import Coverage, CoverageRow
from scalepoint.patterns import Fused, get_kind
from scalepoint.quantize.operations import get_part_kind
from scalepoint.quantize.quantized_layers import QuantizedLayer
from scalepoint.quantize.quantizers import QuantizerBase, QuantStub
from scalepoint.quantize.record import coverage, record_of


@dataclass(frozen=True)
class AnalyzedLayer:
    """One row of an analysis: a node of the graph under the name that coverage and overrides use."""

    name: str
    kind: str
    precision: str
    macs: int | None
    parameters: int
    node: fx.Node

    @property
    def stub_nodes(self) -> list[fx.Node]:
        """The stubs that it reads."""
        return [each for each in self.node.all_input_nodes if get_kind(each) == "quant"]


def get_layers(model: fx.GraphModule) -> list[AnalyzedLayer]:
    """In graph order; what coverage does not count (an add, a pool) is there too when it is a group."""
    rows, nodes = coverage(model).operations, {node.name: node for node in model.graph.nodes}
    return [
        _make_uncounted_layer(model, nodes[site.node], site.name)
        if site.coverage_index is None
        else _make_counted_layer(nodes[site.node], rows[site.coverage_index])
        for site in record_of(model).sites
    ]


def _make_counted_layer(node: fx.Node, row: CoverageRow) -> AnalyzedLayer:
    return AnalyzedLayer(row.name, row.kind, row.precision, row.macs, row.parameters, node)


def _make_uncounted_layer(model: fx.GraphModule, node: fx.Node, name: str) -> AnalyzedLayer:
    module = model.get_submodule(str(node.target))
    kind = get_part_kind(module.weighted_part) if isinstance(module, Fused) else get_kind(node)
    stubs = [each for each in model.modules() if isinstance(each, QuantStub) and name in each.consumers]
    words = sorted({str(stub.spec.to_dict()["dtype"]) for stub in stubs if stub.enabled})
    return AnalyzedLayer(name, kind, f"x {' / '.join(words)}" if words else "float", 0, 0, node)


def select_layers(layers: list[AnalyzedLayer], names: list[str]) -> list[AnalyzedLayer]:
    """The layers of these names, in their order; an unknown name is an error with the nearest one."""
    known = {layer.name: layer for layer in reversed(layers)}
    for name in names:
        if name not in known:
            raise UsageError(f"no layer {name!r} in this model: {did_you_mean(name, known)[:400]}")
    return [known[name] for name in names]


def get_quantizers(model: nn.Module) -> list[QuantizerBase]:
    return [module for module in model.modules() if isinstance(module, QuantizerBase)]


def get_quantized_part(model: nn.Module, layer: AnalyzedLayer) -> QuantizedLayer | None:
    """The part of a layer that has a quantized weight."""
    if layer.node.op != "call_module":
        return None
    module = model.get_submodule(str(layer.node.target))
    parts: Iterator[nn.Module] = iter(module.parts.values()) if isinstance(module, Fused) else iter((module,))
    return next((part for part in parts if isinstance(part, QuantizedLayer)), None)


def get_code_range(quantizer: QuantizerBase) -> tuple[Tensor, Tensor] | None:
    """The values of the lowest and the highest code; None where each tensor gets a range of its own."""
    if quantizer.calculator.always_called and not quantizer.is_learned:
        return None
    grid = quantizer.quantizer.grid
    scale = quantizer.scale.detach()
    if quantizer.minval is not None:
        return quantizer.minval, quantizer.minval + grid.span * scale
    zero = 0 if grid.format.is_float else quantizer.zero_point
    low, high = (torch.as_tensor(end - zero, dtype=torch.float32) for end in (grid.low, grid.high))
    return low * scale, high * scale


def check_has_active_quantizers(model: nn.Module) -> Coverage:
    """The coverage of a model whose quantizers have ranges and are on."""
    found = coverage(model)
    quantizers = get_quantizers(model)
    if not any(each.enabled for each in quantizers):
        raise UsageError(
            f"none of the {len(quantizers)} quantizers of this model is on: calibrate it first, or enable_fake_quant"
        )
    return found
