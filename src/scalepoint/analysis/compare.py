"""compare: where the quantized model departs from the float one, layer by layer, on streamed data.

    sqnr_db        10 log10(sum x^2 / sum (x - y)^2)   x the layer's output in float, y in the running quantized model
    local_sqnr_db  the same, when the layer alone is quantized: fed with the float input through its own stubs
    cosine         sum x y / sqrt(sum x^2 sum y^2)

A layer with a good local error and a bad one in the running model only passes on what others did.
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
from scalepoint.analysis.statistics import ErrorSums, RangeUsage, decibels, energy, merge_over_ranks
from scalepoint.compat.torch_names import pytree
from scalepoint.errors import UsageError, short_repr
from scalepoint.graph.module_state import eval_mode
from scalepoint.patterns import get_kind
from scalepoint.quantize.feeding import Data, feed_data
from scalepoint.quantize.quantizers import QuantStub
from scalepoint.quantize.shadow_models import wrap_with_signature
from scalepoint.results import LayerError
from scalepoint.support.formatting import one_line, plural, printed
from scalepoint.support.torch_state import serialized


@dataclass(frozen=True)
class OutputError:
    """Error of one output of the quantized model against the float model."""

    name: str
    sqnr_db: float
    cosine: float


@dataclass(frozen=True)
class Comparison:
    """Errors of all layers in graph order, and of the outputs."""

    rows: tuple[LayerError, ...]
    outputs: tuple[OutputError, ...]
    graph_sqnr_db: float  # of the same graph without quantizers against the float model: what is not quantization
    batches: int

    def worst(self, n: int = 5) -> list[LayerError]:
        """The n layers with the largest error of their own: local where measured, else in the running model."""
        return sorted(self.rows, key=lambda row: -row.badness)[:n]

    def table(self, rows: Iterable[LayerError] | None = None) -> Table:
        table = Table(title=Text(self.summary()), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("layer", overflow="fold")
        for column in ("dB", "local", "w", "clip", "used"):
            table.add_column(column, justify="right", no_wrap=True)
        for row in self.rows if rows is None else rows:
            levels = (row.sqnr_db, row.local_sqnr_db, row.weight_sqnr_db)
            table.add_row(
                Text(one_line(row.name)),
                *map(_format_level, levels),
                *map(_format_share, (row.saturation, row.used_range)),
            )
        return table

    def summary(self) -> str:
        text = ", ".join(f"{each.name} {_format_level(each.sqnr_db)} dB" for each in self.outputs)
        return one_line(f"{plural(len(self.rows), 'layer')}, {plural(self.batches, 'batch')}: {text}")

    def __str__(self) -> str:
        return printed(self.table())

    def to_list(self) -> list[dict[str, Any]]:
        """Plain values, for JSON: a level that is not finite (no error at all, no signal) is None."""
        return [{name: _finite_or_none(value) for name, value in vars(row).items()} for row in self.rows]


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _format_level(value: float | None) -> str:
    if value is None:
        return ""
    return "exact" if value == math.inf else f"{value:.1f}"


def _format_share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}" if value >= 0.01 or value == 0 else "<1%"


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
        raise UsageError(f"the float model is a module, or None, not {short_repr(float_model)}")
    outputs = _OutputErrorSums(float_model)
    watch = _LayerErrorSums(get_layers(quantized), outputs, local)
    steps = FloatAndQuantizedRunner(quantized, watch)
    watch.prepare(steps.live)
    run = wrap_with_signature(quantized, steps)
    run.register_forward_hook(outputs, with_kwargs=True)
    with eval_mode(float_model):
        fed = feed_data(run, data, "comparing", max_batches=max_batches, progress=progress, merge=watch.merge)
    rows = tuple(watch.row(layer, steps.live) for layer in watch.layers)
    return Comparison(rows, outputs.rows(), outputs.graph.sqnr_db, fed.calls)


class _LayerErrorSums:
    """What is added up at each node of the lockstep."""

    def __init__(self, layers: list[AnalyzedLayer], outputs: "_OutputErrorSums", local: bool) -> None:
        self.layers, self.outputs = layers, outputs
        self.by_node = {layer.node: layer for layer in layers}
        self.running = {layer.node: ErrorSums() for layer in layers}
        self.local = {layer.node: ErrorSums() for layer in layers if local and layer.precision != "float"}
        self.uses: dict[str, RangeUsage] = {}

    def prepare(self, live: nn.Module) -> None:
        """A record for each stub with one fixed range."""
        for name, module in live.named_modules():
            found = get_code_range(module) if isinstance(module, QuantStub) and module.enabled else None
            if isinstance(module, QuantStub) and found is not None and found[0].numel() == 1:
                step = 0.0 if module.quantizer.grid.format.is_float else float(module.scale)
                self.uses[name] = RangeUsage(float(found[0]), float(found[1]), step)

    def __call__(self, node: fx.Node, steps: FloatAndQuantizedRunner) -> None:
        if node.op == "output":
            self.outputs.take(steps.exact[node])
        elif get_kind(node) == "quant" and str(node.target) in self.uses:
            self.uses[str(node.target)].add(steps.noisy[node.args[0]])  # type: ignore[index]  # a stub has one input
        elif node in self.by_node:
            self.running[node].add(steps.exact[node], steps.noisy[node])
            if node in self.local:
                self.local[node].add(steps.exact[node], _run_alone(node, steps))

    def merge(self) -> None:
        """Take in what the other ranks have seen."""
        outputs = self.outputs.named()
        merge_over_ranks([*self.running.values(), *self.local.values(), *self.uses.values(), *outputs])

    def row(self, layer: AnalyzedLayer, live: nn.Module) -> LayerError:
        running, own = self.running[layer.node], self.local.get(layer.node)
        names = [str(stub.target) for stub in layer.stub_nodes]
        uses = [self.uses[name] for name in names if name in self.uses and self.uses[name].count]
        return LayerError(
            layer.name,
            layer.kind,
            layer.precision,
            running.sqnr_db,
            running.cosine,
            None if own is None else own.sqnr_db,
            _weight_sqnr(layer, live),
            max((use.saturation for use in uses), default=None),
            max((use.end_share for use in uses), default=None),
            min((use.used for use in uses), default=None),
            layer.macs,
            layer.parameters,
        )


def _run_alone(node: fx.Node, steps: FloatAndQuantizedRunner) -> Any:
    """The quantized layer on float inputs, which pass its own stubs."""

    def fed(source: fx.Node) -> Any:
        stubs, value = [], steps.exact[source]
        while get_kind(source) == "quant":
            stubs.append(steps.live.get_submodule(str(source.target)))
            source = source.all_input_nodes[0]
        for stub in reversed(stubs):
            value = stub(value)
        return value

    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), fed)
    return steps.live.get_submodule(str(node.target))(*args, **kwargs)


@torch.no_grad()
def _weight_sqnr(layer: AnalyzedLayer, live: nn.Module) -> float | None:
    """The folded weight against its quantized form."""
    weighted = get_quantized_part(live, layer)
    if weighted is None or not weighted.weight_quant.enabled or weighted.weight_quant.quantizer.is_disabled():
        return None
    weight, _ = weighted.fold_norm()
    return decibels(energy(weight), energy(weight.float() - weighted.quantize_weight(weight).float()))


class _OutputErrorSums:
    """The outputs of a batch against those of the float model: a forward hook."""

    def __init__(self, float_model: Callable[..., Any] | None) -> None:
        self.float_model = float_model
        self.graph = ErrorSums()
        self.found: dict[str, ErrorSums] = {}
        self._exact: Any = None

    def take(self, exact: Any) -> None:
        """The flat outputs of the graph without quantizers."""
        self._exact = [leaf for leaf in pytree.tree_leaves(exact) if isinstance(leaf, torch.Tensor)]

    def __call__(self, run: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        exact, self._exact = self._exact, None
        wanted = exact if self.float_model is None else self.float_model(*args, **kwargs)
        expected = [leaf for leaf in pytree.tree_leaves(wanted) if isinstance(leaf, torch.Tensor)]
        found = [
            (f"output{pytree.keystr(path)}", leaf)
            for path, leaf in pytree.tree_flatten_with_path(output)[0]
            if isinstance(leaf, torch.Tensor)
        ]
        if [each.shape for each in expected] != [each.shape for _, each in found]:
            raise UsageError(
                f"the float model gives {[tuple(each.shape) for each in expected]}, the quantized one "
                f"{[tuple(each.shape) for _, each in found]}: they are not the same model"
            )
        for reference, of_graph, (name, value) in zip(expected, exact, found, strict=True):
            if reference.is_floating_point():
                self.found.setdefault(name, ErrorSums()).add(reference, value)
                self.graph.add(reference, of_graph)

    def named(self) -> list[ErrorSums]:
        """All sums, of every output that some rank has seen."""
        parts = distributed.gather_values("naming outputs", list(self.found))
        names = dict.fromkeys(name for part in parts for name in part)
        self.found = {name: self.found.get(name, ErrorSums()) for name in names}
        return [self.graph, *self.found.values()]

    def rows(self) -> tuple[OutputError, ...]:
        return tuple(OutputError(name, each.sqnr_db, each.cosine) for name, each in self.found.items())
