"""Check that a graph with free axes computes the same as the model at other sizes.

size in the example  --guards of torch.export-->  the step in which it may change  --run both-->  compared sizes
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from scalepoint.compat.torch_names import pytree
from scalepoint.errors import CaptureError
from scalepoint.graph.constant_nodes import find_random_nodes
from scalepoint.graph.dry_run import BoundInputs, dry_run
from scalepoint.graph.dynamic_axes import Axes, get_named_inputs, is_dynamic, resize_inputs
from scalepoint.graph.user_traceback import user_line
from scalepoint.support.formatting import to_one_line

LARGEST_STEP = 256
# A step is accepted if this number of its multiples satisfies the guards. Fewer can do so by chance: for a model that
# takes multiples of 32, guards may allow 64 + 29 and 64 + 58, but not 64 + 87.
TESTED_MULTIPLES = 8
RELATIVE_TOLERANCE = 1e-4  # relative to the largest value of an output
_OTHER_FIX = (
    ". Or compute with x.shape[axis] in whole numbers (//, not int() of a fraction). If the model takes another branch "
    "for these sizes only (a table of positions that needs no resizing), pass an example with other sizes"
)


@dataclass(frozen=True)
class AllowedSizes:
    """The sizes of named axes that the guards of torch.export allow. Symbols and guards are sympy expressions."""

    example: Mapping[str, int]  # axis name -> size in the example
    symbols: Mapping[str, tuple[Any, ...]]  # axis name -> its symbols, without sizes that became expressions
    guards: tuple[Any, ...]  # conditions on the symbols
    values: Mapping[Any, Any]  # symbol -> value in the example
    replacements: Mapping[Any, Any]  # symbol -> the expression of other symbols that torch replaced it by

    def is_allowed(self, sizes: Mapping[str, int]) -> bool:
        """Whether no guard forbids these sizes. Names that are missing have the size of the example."""
        changed = {symbol: size for name, size in sizes.items() for symbol in self.symbols.get(name, ())}
        values = {**self.values, **changed}
        values |= {symbol: expression.xreplace(values) for symbol, expression in self.replacements.items()}
        changed_symbols = {symbol for symbol, value in values.items() if value != self.values.get(symbol)}
        guards = (guard for guard in self.guards if not guard.free_symbols.isdisjoint(changed_symbols))
        return not any(guard.xreplace(values) == False for guard in guards)  # noqa: E712  # sympy's false

    def describe_guard(self, name: str) -> str:
        """Describe the first guard that forbids twice the size of an axis, with axis names for symbols."""
        names = {symbol: type(symbol)(label) for label, symbols in self.symbols.items() for symbol in symbols}
        for guard in self.guards:
            if not replace(self, guards=(guard,)).is_allowed({name: 2 * self.example[name]}):
                return f": it has the guard {guard.xreplace(names)}"
        return ""

    @cached_property
    def steps(self) -> Mapping[str, int]:
        """The smallest step by which each size may grow (or else shrink) repeatedly; 0 if there is none."""
        return {name: self._find_step(name, size) for name, size in self.example.items()}

    def _find_step(self, name: str, size: int) -> int:
        for sign in (1, -1):
            for step in range(1, LARGEST_STEP + 1):
                candidates = [size + sign * count * step for count in range(1, TESTED_MULTIPLES + 1)]
                candidates = [candidate for candidate in candidates if candidate > 1]
                if candidates and all(self.is_allowed({name: candidate}) for candidate in candidates):
                    return step
        return 0

    def iterate_other_sizes(self) -> Iterator[dict[str, int]]:
        """Yield allowed sizes of all names that differ from the example; those that find most errors come first.

        Larger and smaller sizes alternately, all larger by half, all smaller by a quarter, one step larger, double,
        half.
        """
        mixed: dict[str, int] = {}
        larger: dict[str, int] = {}
        smaller: dict[str, int] = {}
        for index, (name, size) in enumerate(self.example.items()):
            step = self.steps[name]
            larger[name] = size + _round_to_step(size / 2, step)
            reduced = size - _round_to_step(size / 4, step)
            smaller[name] = reduced if reduced > 1 else larger[name]
            mixed[name] = larger[name] if index % 2 == 0 else smaller[name]
        one_step_larger = {name: size + self.steps[name] for name, size in self.example.items()}
        double = {name: 2 * size for name, size in self.example.items()}
        half = {name: max(2, size // 2) for name, size in self.example.items()}
        used: list[dict[str, int]] = [dict(self.example)]
        for sizes in (mixed, larger, smaller, one_step_larger, double, half):
            if sizes not in used and self.is_allowed(sizes):
                used.append(sizes)
                yield sizes


def _round_to_step(size: float, step: int) -> int:
    """Round to a positive multiple of the step; 0 if there is no step."""
    return max(1, round(size / step)) * step if step else 0


def find_allowed_sizes(program: ExportedProgram, axes: Axes) -> AllowedSizes:
    """Read the guards of a program on the named axes."""
    example: dict[str, int] = {}
    symbols: dict[str, tuple[Any, ...]] = {}
    shape_env: Any = None
    for _, _, label, size in _iterate_sizes(program, axes):
        example[label] = int(size.node.hint)
        expression, shape_env = size.node.expr, size.node.shape_env
        symbols.setdefault(label, ())
        if expression.is_Symbol:
            symbols[label] += (expression,)
    guards = dict.fromkeys(guard.expr for guard in shape_env.guards)
    return AllowedSizes(
        example, symbols, tuple(guards), dict(shape_env.backed_var_to_val), dict(shape_env.replacements)
    )


def explain_fixed_axis(program: ExportedProgram, axes: Axes) -> str:
    """Describe the first named axis that is a constant in a program; "" if there is none."""
    for name, axis, label, size in _iterate_sizes(program, axes):
        if not is_dynamic(size):
            return f"the model computes with axis {axis} of {name!r} ({label}) as a number, {size}"
    return ""


def check_names(program: ExportedProgram, axes: Axes) -> None:
    """Raise CaptureError if torch.export found that two names have one size."""
    labels: dict[Any, str] = {}
    for _, _, label, size in _iterate_sizes(program, axes):
        if is_dynamic(size) and labels.setdefault(size.node.expr, label) != label:
            first = labels[size.node.expr]
            raise CaptureError(
                f"dynamic_axes: for this example the model needs {first!r} and {label!r} to be equal: use one name for "
                "both, or, if they may differ, an example in which they differ"
            )


def _iterate_sizes(program: ExportedProgram, axes: Axes) -> Iterator[tuple[str, int, str, Any]]:
    """Yield input, axis, axis name and size in the program of every named axis."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    for name, axis_names in axes.items():
        for axis, label in axis_names.items():
            yield name, axis, label, values[name].shape[axis]


def run_at_double_size(model: nn.Module, inputs: BoundInputs, axes: Axes) -> str:
    """Run the model with each named axis twice as long, and describe the first error; "" if it never fails."""
    values = get_named_inputs(model, *inputs)
    sizes: dict[str, int] = {}
    for name, axis_names in axes.items():
        sizes |= {label: values[name].shape[axis] for axis, label in axis_names.items()}
    for label, size in sizes.items():
        try:
            dry_run(model, *resize_inputs(model, inputs, axes, {label: 2 * size}))
        except Exception as error:  # user code can raise any exception
            return f" With {label} {2 * size} it fails{user_line(error)}: {_format_error(error)}."
    return ""


def _format_error(error: Exception) -> str:
    return f"{type(error).__name__}: {to_one_line(str(error).strip().partition(chr(10))[0]).rstrip(' .')}"


def check_at_other_sizes(
    model: nn.Module, graph: fx.GraphModule, inputs: BoundInputs, axes: Axes, sizes: AllowedSizes
) -> dict[str, int]:
    """Compare the graph with the model at other sizes.

    Returns:
        The first sizes at which the model runs and the graph gives the same outputs.

    Raises:
        CaptureError: The graph gives other outputs, the guards allow no other size, or the model fails at all sizes.
    """
    name = type(model).__name__
    first_failure: tuple[dict[str, int], Exception] | None = None
    fixed = [axis_name for axis_name, step in sizes.steps.items() if not step]
    for other_sizes in sizes.iterate_other_sizes() if not fixed else ():
        resized_inputs = resize_inputs(model, inputs, axes, other_sizes)
        try:
            expected = dry_run(model, *resized_inputs)
        except Exception as error:  # user code can raise any exception
            first_failure = first_failure or (other_sizes, error)
            continue
        _check_same(name, graph, resized_inputs, expected, other_sizes)
        return other_sizes
    if first_failure is None:
        axis_names = fixed or list(sizes.example)
        double_size_error = run_at_double_size(model, inputs, axes)
        other_fix = "" if double_size_error else _OTHER_FIX
        raise CaptureError(
            f"dynamic_axes: torch.export finds that {name} accepts only the {' or '.join(axis_names)} of the "
            f"example{sizes.describe_guard(axis_names[0])}.{double_size_error} Leave that axis out{other_fix}"
        )
    failed_sizes, failure = first_failure
    raise CaptureError(
        f"dynamic_axes: {name} itself fails at all other sizes that were tried; at {format_sizes(failed_sizes)}"
        f"{user_line(failure)}: {_format_error(failure)}. Leave out the axes that cannot change, or pass an example "
        "whose sizes the model accepts when they are a bit larger and smaller"
    )


def format_sizes(sizes: Mapping[str, int]) -> str:
    """Format sizes for a message: "height 64, width 48"."""
    return ", ".join(f"{name} {size}" for name, size in sizes.items())


def _check_same(name: str, graph: fx.GraphModule, inputs: BoundInputs, expected: Any, sizes: Mapping[str, int]) -> None:
    prefix = f"dynamic_axes: at {format_sizes(sizes)} the captured graph"
    advice = (
        "It contains values that the model computed from the sizes of the example: leave that axis out, or do not "
        "capture the submodule that computes them"
    )
    try:
        outputs = dry_run(graph, *inputs)
    except Exception as error:  # a size of the example is a constant of the graph
        raise CaptureError(f"{prefix} fails, {name} does not. {_format_error(error)}. {advice}") from error
    if find_random_nodes(graph):
        return
    for model_output, graph_output in zip(pytree.tree_leaves(expected), pytree.tree_leaves(outputs), strict=True):
        if not isinstance(model_output, Tensor) or not isinstance(graph_output, Tensor):
            continue
        if not _is_close(model_output, graph_output):
            raise CaptureError(f"{prefix} gives other values than {name}. {advice}, leave=['path']")


def _is_close(expected: Tensor, actual: Tensor) -> bool:
    if expected.shape != actual.shape or not expected.is_floating_point():
        return torch.equal(expected, actual)
    if not expected.numel():
        return True
    is_same = (expected == actual) | (expected.isnan() & actual.isnan())
    difference = torch.where(is_same, torch.zeros_like(expected), (expected - actual).abs())
    finite = expected.abs()[expected.isfinite()]
    return bool(difference.max() <= RELATIVE_TOLERANCE * (finite.max() if finite.numel() else 0))
