"""transform: capture a model and group its operations as the compiler of the target fuses them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor, fx, nn

from scalepoint.compat.torch_names import pytree
from scalepoint.errors import GraphError, PatternError
from scalepoint.graph import capture, check_graph
from scalepoint.graph.capture import Model, as_inputs, load_if_path
from scalepoint.graph.dry_run import clone_tensors
from scalepoint.graph.lift import as_operation
from scalepoint.graph.module_state import eval_mode
from scalepoint.graph.nodes import get_state, inherit_meta, set_state
from scalepoint.graph.serialization import store_description
from scalepoint.patterns.base import BASE_PATTERNS
from scalepoint.patterns.conversions import convert
from scalepoint.patterns.language import Pattern, PatternMatch, Refusal, get_layer_name
from scalepoint.patterns.plan import TransformationPlan, make_plan
from scalepoint.support.formatting import to_one_line
from scalepoint.support.torch_state import serialized
from scalepoint.targets import Target, find_target


@dataclass(frozen=True)
class TransformationState:
    """Stored on a transformed graph: its target, and the near matches that patterns refused."""

    target: Target | None = None
    refusals: tuple[Refusal, ...] = ()


def get_transformation_state(model: nn.Module) -> TransformationState:
    return get_state(model, TransformationState) or TransformationState()


@dataclass(frozen=True)
class TransformationReport:
    """The result of applying a plan.

    Attributes:
        applied: Matches that were fused.
        skipped: Matches that were not fused; each has a reason.
        refusals: Operations that a pattern almost matched, and why it does not.
    """

    applied: tuple[PatternMatch, ...]
    skipped: tuple[PatternMatch, ...]
    refusals: tuple[Refusal, ...]

    def counts(self) -> dict[str, int]:
        return dict(Counter(match.pattern.name for match in self.applied))

    def table(self) -> Table:
        table = Table(title=f"{len(self.applied)} groups, {len(self.skipped)} skipped")
        for column in ("pattern", "applied", "skipped"):
            table.add_column(column, overflow="fold")
        skipped = Counter(match.pattern.name for match in self.skipped)
        for name in sorted({*self.counts(), *skipped}):
            table.add_row(Text(to_one_line(name)), str(self.counts().get(name, 0)), str(skipped[name]))
        return table


@dataclass(frozen=True)
class TransformationResult:
    """The transformed graph.

    Attributes:
        model: The graph, whose nodes call fused modules.
        matches: The matches that were fused.
        report: What was fused and what was skipped.
    """

    model: fx.GraphModule = field(repr=False)
    matches: list[PatternMatch]
    report: TransformationReport


@serialized
def transform(
    model: Model,
    args: Any = None,
    patterns: Sequence[Pattern] | None = None,
    target: str | Target | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    copy: bool = True,
    dynamic: bool = True,
    dynamic_axes: Any = None,
    leave: Sequence[str] = (),
    trust: bool = False,
    check: bool = False,
) -> TransformationResult:
    """Capture a model and group its operations by patterns, such as convolution + batch norm + ReLU.

    Args:
        model: A module, an ExportedProgram, or the path of an .onnx or .pt2 file.
        args: Example inputs: a tensor, a tuple, or a dict of keyword inputs.
        patterns: The patterns to look for; those of the target by default.
        target: A target or its name.
        kwargs: Keyword inputs of the model.
        copy: False shares the parameters with the given model.
        dynamic: Keep the batch axis free.
        dynamic_axes: Further axes that stay free, such as {"x": {2: "height", 3: "width"}}.
        leave: Names of submodules that are called as they are and not quantized.
        trust: Allow loading a .pt2 file, which can run code.
        check: Run both models on the inputs and compare their outputs.

    Returns:
        The transformed graph and its matches.
    """
    model = load_if_path(model, trust)
    plan = get_transformation_plan(
        model, args, patterns, target, kwargs=kwargs, copy=copy, dynamic=dynamic, dynamic_axes=dynamic_axes, leave=leave
    )
    result = apply_transformation_plan(plan)
    if check:
        _check_same_outputs(model if isinstance(model, nn.Module) else model.module(), result.model, args, kwargs)
    return result


def get_transformation_plan(
    model: Model,
    args: Any = None,
    patterns: Sequence[Pattern] | None = None,
    target: str | Target | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    copy: bool = True,
    dynamic: bool = True,
    dynamic_axes: Any = None,
    leave: Sequence[str] = (),
    trust: bool = False,
) -> TransformationPlan:
    """Capture a model and list what `transform` would fuse, without fusing it.

    Edit `match.apply` of the matches, then call `apply_transformation_plan`.

    Args:
        model: A module, an ExportedProgram, or the path of an .onnx or .pt2 file.
        args: Example inputs: a tensor, a tuple, or a dict of keyword inputs.
        patterns: The patterns to look for; those of the target by default.
        target: A target or its name.
        kwargs: Keyword inputs of the model.
        copy: False shares the parameters with the given model.
        dynamic: Keep the batch axis free.
        dynamic_axes: Further axes that stay free, such as {"x": {2: "height", 3: "width"}}.
        leave: Names of submodules that are called as they are and not quantized.
        trust: Allow loading a .pt2 file, which can run code.

    Returns:
        The plan.
    """
    known_target = None if target is None else find_target(target)
    if known_target is not None:
        known_target.check_free_sizes(dynamic_axes)
    graph_module = capture_for_plan(
        model, args, kwargs, copy=copy, dynamic=dynamic, dynamic_axes=dynamic_axes, leave=leave, trust=trust
    )
    return plan_captured_graph(graph_module, patterns, known_target)


def capture_for_plan(model: Model, args: Any, kwargs: Mapping[str, Any] | None, **options: Any) -> fx.GraphModule:
    """Capture a model for `plan_captured_graph`.

    Args:
        model: A module, an ExportedProgram, or the path of an .onnx or .pt2 file.
        args: Example inputs: a tensor, a tuple, or a dict of keyword inputs.
        kwargs: Keyword inputs of the model.
        **options: Further arguments of `capture`.

    Returns:
        The graph, with a description of itself that `save` writes.
    """
    graph_module = capture(model, args, kwargs, **options)
    store_description(graph_module)
    return graph_module


def plan_captured_graph(
    graph_module: fx.GraphModule, patterns: Sequence[Pattern] | None = None, target: str | Target | None = None
) -> TransformationPlan:
    """Return the plan for a captured graph. Conversions are applied now, fusions when the plan is applied."""
    known_target = None if target is None else find_target(target)
    converted = convert(graph_module) if known_target is None else convert(graph_module, known_target.conversions)
    if patterns is None:
        patterns = BASE_PATTERNS if known_target is None else known_target.patterns
    plan = make_plan(graph_module, tuple(patterns))
    plan.converted = converted
    set_state(graph_module, TransformationState(known_target))
    return plan


def apply_transformation_plan(plan: TransformationPlan) -> TransformationResult:
    """Fuse every match of a plan whose `apply` is True.

    Args:
        plan: What `get_transformation_plan` returned, possibly edited.

    Returns:
        The transformed graph and its matches. A match that cannot be fused is skipped and keeps the reason.
    """
    if plan.is_applied:
        raise PatternError("this plan is already applied: make a new one with get_transformation_plan")
    plan.is_applied = True
    applied: list[PatternMatch] = []
    skipped: list[PatternMatch] = []
    for match in plan.matches:
        if not match.apply:
            match.reason = match.reason or "switched off in the plan"
            skipped.append(match)
            continue
        try:
            _fuse(plan.model, match)
            applied.append(match)
        except Exception as error:  # a user's pattern may raise anything; the other matches are still applied
            match.apply, match.reason = False, f"{type(error).__name__}: {error}"
            skipped.append(match)
    plan.model.recompile()
    check_graph(plan.model)
    report = TransformationReport(tuple(applied), tuple(skipped), tuple(plan.refusals))
    set_state(plan.model, replace(get_transformation_state(plan.model), refusals=report.refusals))
    return TransformationResult(plan.model, applied, report)


def _fuse(model: fx.GraphModule, match: PatternMatch) -> None:
    """Replace the nodes of a match by one call of its fused module."""
    inputs: list[fx.Node] = []
    wiring: list[list[int | None]] = []
    parts: dict[str, nn.Module] = {}
    previous: fx.Node | None = None
    for role, node in match.nodes.items():
        parts[role], sources = _module_and_inputs(model, node)
        inputs += [source for source in sources if source is not previous and source not in inputs]
        # None is the output of the part before.
        wiring.append([None if source is previous else inputs.index(source) for source in sources])
        previous = node
    match.fused = _add_fused_module(model, match, match.pattern.make(parts, wiring))
    last = list(match.nodes.values())[-1]
    with model.graph.inserting_before(last):
        fused = model.graph.call_module(match.fused, tuple(inputs))
    inherit_meta(fused, last, kind="fused")
    last.replace_all_uses_with(fused)
    for node in reversed(list(match.nodes.values())):
        model.graph.erase_node(node)


def _module_and_inputs(model: fx.GraphModule, node: fx.Node) -> tuple[nn.Module, list[fx.Node]]:
    """Return the module of a node and its input nodes. A function call becomes an operation module."""
    if node.op == "call_module":
        return model.get_submodule(str(node.target)), list(node.all_input_nodes)
    return as_operation(node, model)


def _add_fused_module(model: fx.GraphModule, match: PatternMatch, module: nn.Module) -> str:
    """Add the module under a readable name: layer1.0.conv1 with bn1 and relu becomes layer1.0.conv1_bn1_relu."""
    paths = [get_layer_name(node) for node in match.nodes.values()]
    leaves = [path.rpartition(".")[2] for path in paths[1:]] or ["fused"]
    name = unused_name = "_".join([paths[0], *leaves])
    number = 0
    parent = model.get_submodule(name.rpartition(".")[0])
    while hasattr(parent, unused_name.rpartition(".")[2]):
        number += 1
        unused_name = f"{name}_{number}"
    model.add_submodule(unused_name, module)
    return unused_name


def _check_same_outputs(
    model: nn.Module, graph_module: fx.GraphModule, args: Any, kwargs: Mapping[str, Any] | None
) -> None:
    """Raise GraphError if an output differs in eval mode: max |difference| > 1e-4 * max |output|."""
    if args is None and not kwargs:
        raise PatternError("check=True needs example inputs")
    inputs = as_inputs(args, kwargs)
    outputs = []
    with eval_mode(model), eval_mode(graph_module), torch.no_grad():
        for run in (model, graph_module):
            positional, keyword = clone_tensors(inputs)
            outputs.append(pytree.tree_leaves(run(*positional, **keyword)))
    for index, (expected, actual) in enumerate(zip(*outputs, strict=True)):
        if not isinstance(expected, Tensor) or not expected.is_floating_point():
            continue
        difference, size = (expected - actual).abs().max(), expected.abs().max()
        if not bool(difference <= 1e-4 * size):
            raise GraphError(
                f"output {index} of the transformed graph differs from the model by {float(difference):.3g}; its "
                f"largest value is {float(size):.3g}"
            )
