"""compare: where the quantized model differs from the float model, layer by layer, on streamed data.

    sqnr_db        10 log10(sum x^2 / sum (x - y)^2)   x the layer's output in float, y in the quantized model
    local_sqnr_db  the same, if the layer alone is quantized: it reads the float input through its own quantizers
    cosine         sum x y / sqrt(sum x^2 sum y^2)

A layer with a good local error and a bad one in the quantized model only passes on the error of earlier layers.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from rich import box
from rich.table import Table
from rich.text import Text
from torch import fx, nn

from scalepoint import distributed
from scalepoint.analysis.layers import (
    AnalyzedLayer,
    check_has_active_quantizers,
    get_code_range,
    get_layers,
    get_quantized_part,
)
from scalepoint.analysis.paired_runner import FloatAndQuantizedRunner
from scalepoint.analysis.statistics import ErrorSums, RangeUsage, decibels, energy, finite_or_none, merge_over_ranks
from scalepoint.compat.torch_names import pytree
from scalepoint.errors import UsageError, short_repr
from scalepoint.graph.module_state import eval_mode
from scalepoint.patterns import get_kind
from scalepoint.quantize.batches import Data
from scalepoint.quantize.feeding import feed_data
from scalepoint.quantize.quantizers import QuantStub
from scalepoint.quantize.shadow_models import wrap_with_signature
from scalepoint.results import LayerError
from scalepoint.support.formatting import format_plural, render_as_text, to_one_line
from scalepoint.support.torch_state import serialized


@dataclass(frozen=True)
class OutputError:
    """Error of one output of the quantized model against the float model."""

    name: str
    sqnr_db: float
    cosine: float


@dataclass(frozen=True)
class Comparison:
    """The errors of a quantized model.

    Attributes:
        rows: Errors of all layers, in graph order.
        outputs: Errors of the outputs.
        graph_sqnr_db: Outputs of the graph without quantizers against the float model: the error of everything but
            quantization.
        batches: Number of batches.
    """

    rows: tuple[LayerError, ...]
    outputs: tuple[OutputError, ...]
    graph_sqnr_db: float
    batches: int

    def worst(self, n: int = 5) -> list[LayerError]:
        """Return the n layers with the largest error: the local one, or that in the quantized model if not measured."""
        return sorted(self.rows, key=lambda row: -row.badness)[:n]

    def table(self, rows: Iterable[LayerError] | None = None) -> Table:
        """Return a rich table with one line per layer.

        Args:
            rows: The layers to show; all if None.
        """
        table = Table(title=Text(self.summary()), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("layer", overflow="fold")
        for column in ("dB", "local", "w", "clip", "used"):
            table.add_column(column, justify="right", no_wrap=True)
        for row in self.rows if rows is None else rows:
            levels = (row.sqnr_db, row.local_sqnr_db, row.weight_sqnr_db)
            table.add_row(
                Text(to_one_line(row.name)),
                *map(_format_level, levels),
                *map(_format_share, (row.saturation, row.used_range)),
            )
        return table

    def summary(self) -> str:
        """Return one line: how many layers and batches were compared, and the SQNR of each output."""
        text = ", ".join(f"{output.name} {_format_level(output.sqnr_db)} dB" for output in self.outputs)
        return to_one_line(f"{format_plural(len(self.rows), 'layer')}, {format_plural(self.batches, 'batch')}: {text}")

    def __str__(self) -> str:
        return render_as_text(self.table())

    def to_list(self) -> list[dict[str, Any]]:
        """Return plain values for JSON. A ratio that is not finite (no error, no signal) is None."""
        return [{name: finite_or_none(value) for name, value in vars(row).items()} for row in self.rows]


def _format_level(value: float | None) -> str:
    if value is None:
        return ""
    return "exact" if value == math.inf else f"{value:.1f}"


def _format_share(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0%}" if value >= 0.01 or value == 0 else "<1%"


@serialized
@distributed.participating()
def compare(
    float_model: Callable[..., Any] | None,
    quantized: fx.GraphModule,
    data: Data,
    *,
    local: bool = True,
    max_batches: int | None = None,
    progress: bool | None = None,
) -> Comparison:
    """Measure the error of every layer of a calibrated model.

    Layers are compared with the same graph without quantizers. Only sums are kept, so memory does not grow with the
    data. Both models stay unchanged.

    Args:
        float_model: The model whose outputs are the reference. None uses the graph without quantizers.
        quantized: The calibrated model.
        data: As for `calibrate`.
        local: Also measure the error that each layer adds by itself. False saves a third of the time.
        max_batches: Stop after this many batches.
        progress: Show a progress bar. None shows it on a terminal only.

    Returns:
        The errors per layer and of the outputs.
    """
    check_has_active_quantizers(quantized)
    if float_model is not None and not callable(float_model):
        raise UsageError(f"float_model= must be a module, another callable or None, got {short_repr(float_model)}")
    outputs = _OutputErrorSums(float_model)
    layer_sums = _LayerErrorSums(get_layers(quantized), outputs, local)
    runner = FloatAndQuantizedRunner(quantized, layer_sums)
    layer_sums.prepare(runner.quantized_model)
    run = wrap_with_signature(quantized, runner)
    run.register_forward_hook(outputs, with_kwargs=True)
    with eval_mode(float_model):
        feed_result = feed_data(
            run, data, "comparing", max_batches=max_batches, progress=progress, merge=layer_sums.merge
        )
    rows = tuple(layer_sums.row(layer, runner.quantized_model) for layer in layer_sums.layers)
    return Comparison(rows, outputs.rows(), outputs.graph.sqnr_db, feed_result.calls)


class _LayerErrorSums:
    """Sums at each layer and activation quantizer; the `visit` function of the runner.

    Attributes:
        layers: The layers.
        outputs: The sums of the outputs, which get the float outputs of every batch.
        by_node: Layer of a node.
        total: Errors in the quantized model.
        local: Errors if the layer alone is quantized.
        usages: How values use the range of each activation quantizer that has one, by its target.
    """

    def __init__(self, layers: list[AnalyzedLayer], outputs: "_OutputErrorSums", local: bool) -> None:
        self.layers, self.outputs = layers, outputs
        self.by_node = {layer.node: layer for layer in layers}
        self.total = {layer.node: ErrorSums() for layer in layers}
        self.local = {layer.node: ErrorSums() for layer in layers if local and layer.precision != "float"}
        self.usages: dict[str, RangeUsage] = {}

    def prepare(self, quantized_model: nn.Module) -> None:
        """Start counting for each activation quantizer with one static range."""
        for name, module in quantized_model.named_modules():
            if not isinstance(module, QuantStub) or not module.enabled:
                continue
            code_range = get_code_range(module)
            if code_range is not None and code_range[0].numel() == 1:
                step = 0.0 if module.quantizer.grid.format.is_float else float(module.scale)
                self.usages[name] = RangeUsage(float(code_range[0]), float(code_range[1]), step)

    def __call__(self, node: fx.Node, runner: FloatAndQuantizedRunner) -> None:
        if node.op == "output":
            self.outputs.set_reference(runner.exact[node])
        elif get_kind(node) == "quant" and str(node.target) in self.usages:
            source = node.all_input_nodes[0]
            self.usages[str(node.target)].add(runner.noisy[source])
        elif node in self.by_node:
            self.total[node].add(runner.exact[node], runner.noisy[node])
            if node in self.local:
                self.local[node].add(runner.exact[node], _run_alone(node, runner))

    def merge(self) -> None:
        """Add the sums of the other ranks."""
        outputs = self.outputs.sums_of_all_ranks()
        merge_over_ranks([*self.total.values(), *self.local.values(), *self.usages.values(), *outputs])

    def row(self, layer: AnalyzedLayer, quantized_model: nn.Module) -> LayerError:
        total, local = self.total[layer.node], self.local.get(layer.node)
        targets = [str(stub.target) for stub in layer.stub_nodes]
        usages = [self.usages[target] for target in targets if target in self.usages and self.usages[target].count]
        return LayerError(
            name=layer.name,
            kind=layer.kind,
            precision=layer.precision,
            sqnr_db=total.sqnr_db,
            cosine=total.cosine,
            local_sqnr_db=None if local is None else local.sqnr_db,
            weight_sqnr_db=_weight_sqnr(layer, quantized_model),
            saturation=max((usage.saturation for usage in usages), default=None),
            end_share=max((usage.end_share for usage in usages), default=None),
            used_range=min((usage.used for usage in usages), default=None),
            macs=layer.macs,
            parameters=layer.parameters,
        )


def _run_alone(node: fx.Node, runner: FloatAndQuantizedRunner) -> Any:
    """Run a quantized layer on float inputs, which pass its own activation quantizers."""

    def quantize_input(source: fx.Node) -> Any:
        # In float an activation quantizer returns its input. The value before it may be dropped already.
        stubs, value = [], runner.exact[source]
        while get_kind(source) == "quant":
            stubs.append(runner.quantized_model.get_submodule(str(source.target)))
            source = source.all_input_nodes[0]
        for stub in reversed(stubs):
            value = stub(value)
        return value

    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), quantize_input)
    return runner.quantized_model.get_submodule(str(node.target))(*args, **kwargs)


@torch.no_grad()
def _weight_sqnr(layer: AnalyzedLayer, quantized_model: nn.Module) -> float | None:
    """Return the weight with the batch norm folded in, against its quantized form; None if it is not quantized."""
    part = get_quantized_part(quantized_model, layer)
    if part is None or not part.weight_quant.enabled or part.weight_quant.quantizer.is_disabled():
        return None
    weight, _ = part.fold_norm()
    return decibels(energy(weight), energy(weight.float() - part.quantize_weight(weight).float()))


class _OutputErrorSums:
    """Sums over the outputs against those of the float model. A forward hook of the quantized model.

    Attributes:
        float_model: The reference; None for the graph without quantizers.
        graph: The graph without quantizers against the reference.
        by_output: The quantized model against the reference.
    """

    def __init__(self, float_model: Callable[..., Any] | None) -> None:
        self.float_model = float_model
        self.graph = ErrorSums()
        self.by_output: dict[str, ErrorSums] = {}
        self._exact: Any = None  # outputs of the graph without quantizers, in the current batch

    def set_reference(self, exact: Any) -> None:
        """Store the outputs of the graph without quantizers, for the hook that follows."""
        self._exact = [leaf for leaf in pytree.tree_leaves(exact) if isinstance(leaf, torch.Tensor)]

    def __call__(self, run: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        exact, self._exact = self._exact, None
        reference_output = exact if self.float_model is None else self.float_model(*args, **kwargs)
        references = [leaf for leaf in pytree.tree_leaves(reference_output) if isinstance(leaf, torch.Tensor)]
        values = [
            (f"output{pytree.keystr(path)}", leaf)
            for path, leaf in pytree.tree_flatten_with_path(output)[0]
            if isinstance(leaf, torch.Tensor)
        ]
        reference_shapes = [tuple(reference.shape) for reference in references]
        shapes = [tuple(value.shape) for _, value in values]
        if reference_shapes != shapes:
            raise UsageError(
                f"outputs of the float model have shapes {reference_shapes}, of the quantized model {shapes}: they are "
                "not the same model"
            )
        for reference, of_graph, (name, value) in zip(references, exact, values, strict=True):
            if reference.is_floating_point():
                self.by_output.setdefault(name, ErrorSums()).add(reference, value)
                self.graph.add(reference, of_graph)

    def sums_of_all_ranks(self) -> list[ErrorSums]:
        """Return all sums, with empty ones for outputs that only other ranks have seen."""
        parts = distributed.gather_values("naming outputs", list(self.by_output))
        names = dict.fromkeys(name for part in parts for name in part)
        self.by_output = {name: self.by_output.get(name, ErrorSums()) for name in names}
        return [self.graph, *self.by_output.values()]

    def rows(self) -> tuple[OutputError, ...]:
        return tuple(OutputError(name, sums.sqnr_db, sums.cosine) for name, sums in self.by_output.items())
