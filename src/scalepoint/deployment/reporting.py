"""From what a deployment did to its report."""

import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import torch
from torch import fx, nn

import scalepoint
from scalepoint.analysis import compare, histograms
from scalepoint.deployment.trials import Trial
from scalepoint.patterns.language import kind_of
from scalepoint.quantize import coverage
from scalepoint.report import GraphNode, Histogram, LayerError, Metric, Report
from scalepoint.targets import Target
from scalepoint.targets.cpu import instruction_set

WORST = 4
KINDS = {"weight": "weight"}


def make_report(
    model: nn.Module,
    best: Trial,
    trials: Sequence[Trial],
    float_score: float | None,
    target: Target,
    data: Any,
    timings: Mapping[str, float],
) -> Report:
    """Everything that was found, and how each layer fares on the data."""
    compared = compare(None, best.model, data, local=False, progress=False)
    layers = tuple(
        LayerError(row.name, row.sqnr_db, row.cosine, row.saturation, row.used_range, row.weight_sqnr_db)
        for row in compared.rows
    )
    worst = [row.name for row in compared.worst(WORST)]
    metric: tuple[Metric, ...] = ()
    if float_score is not None and best.score is not None:
        metric = (
            Metric("score", float_score, runtime_value=best.score)
            if best.is_judged_in_runtime
            else Metric("score", float_score, quantized_value=best.score),
        )
    return Report(
        title=type(model).__name__,
        target=target.name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        coverage=coverage(best.model),
        environment=environment(target),
        config=best.config.to_dict(),
        accuracy=metric,
        layers=layers,
        histograms=tuple(
            Histogram(
                each.name, "weight" if each.role == "weight" else "activation", each.edges, each.counts, low, high
            )
            for each in histograms(best.model, data, worst, progress=False)
            if (low := each.low) is not None and (high := each.high) is not None
        ),
        verification=best.verification,
        timings=dict(timings),
        warnings=tuple(f"trial {index}: score {trial.score}" for index, trial in enumerate(trials[:-1])),
        graph=placement(best.model),
    )


def environment(target: Target) -> dict[str, Any]:
    """What the numbers depend on."""
    return {
        "scalepoint": scalepoint.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "instructions": instruction_set(),
        **{f"target {name}": str(value) for name, value in target.options.items()},
    }


def placement(model: fx.GraphModule) -> tuple[GraphNode, ...]:
    """The graph as it runs: groups and stubs, by the paths of their modules."""
    names = {
        node: str(node.target) if node.op in ("call_module", "placeholder") else node.name for node in model.graph.nodes
    }
    precision = {row.name: row.precision for row in coverage(model).operations}
    return tuple(
        GraphNode(
            names[node],
            str(node.meta.get("pattern") or kind_of(node)),
            tuple(names[source] for source in node.all_input_nodes),
            precision.get(names[node], "Q/DQ" if kind_of(node) == "quant" else "float"),
        )
        for node in model.graph.nodes
        if node.op != "output"
    )
