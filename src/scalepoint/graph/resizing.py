"""Whether a graph with free axes really is the model at other sizes: what torch noted of them, and a run at some.

size of the example  --guards of torch.export-->  the step in which it may change  --a run of both-->  sizes tried
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
from scalepoint.graph.dry_run import dry_run
from scalepoint.graph.dynamic_axes import Axes, get_named_inputs, is_dynamic, resize_inputs
from scalepoint.graph.nodes import find_random_nodes
from scalepoint.graph.user_traceback import user_line
from scalepoint.support.formatting import one_line

LARGEST_STEP, STEPS = 256, 8  # 64 + 29 and 64 + 58 may do for a model of multiples of 32, 64 + 87 does not
NEAR = 1e-4  # of the largest value: what two ways to compute the same may differ by
_OTHER_FIX = (
    ". Or compute with x.shape[axis] in whole numbers (//, not int() of a fraction); or, where the model goes another "
    "way at these sizes alone (a table of positions that fits as it is), give an example of others"
)
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class AllowedSizes:
    """The sizes of named axes that torch.export saw nothing against, by their symbols in a program."""

    example: Mapping[str, int]  # size by name
    symbols: Mapping[str, tuple[Any, ...]]  # of every name; one that torch made an expression of is left out
    guards: tuple[Any, ...]  # what must hold, over the symbols
    values: Mapping[Any, Any]  # of all symbols in the example
    same: Mapping[Any, Any]  # what torch found a symbol to be by others

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Whether nothing speaks against these; names that are not among them have the example's."""
        changed = {symbol: size for name, size in sizes.items() for symbol in self.symbols.get(name, ())}
        values = {**self.values, **changed}
        values |= {symbol: each.xreplace(values) for symbol, each in self.same.items()}
        moved = {symbol for symbol, value in values.items() if value != self.values.get(symbol)}
        concerned = (each for each in self.guards if not each.free_symbols.isdisjoint(moved))
        return not any(each.xreplace(values) == False for each in concerned)  # noqa: E712  # sympy's own false

    def against(self, name: str) -> str:
        """What speaks against twice the size, in names of the axes."""
        names = {symbol: type(symbol)(label) for label, own in self.symbols.items() for symbol in own}
        for guard in self.guards:
            if not replace(self, guards=(guard,)).holds({name: 2 * self.example[name]}):
                return f": it noted {guard.xreplace(names)}"
        return ""

    @cached_property
    def steps(self) -> Mapping[str, int]:
        """The smallest step by which each size may grow again and again, or shrink; 0 where there is none."""
        return {name: self._step(name, size) for name, size in self.example.items()}

    def _step(self, name: str, size: int) -> int:
        for sign in (1, -1):
            for step in range(1, LARGEST_STEP + 1):
                wanted = [each for count in range(1, STEPS + 1) if (each := size + sign * count * step) > 1]
                if wanted and all(self.holds({name: each}) for each in wanted):
                    return step
        return 0

    def others(self) -> Iterator[dict[str, int]]:
        """Other sizes, all names at once: half as large again and a quarter smaller in turns, then what is simpler."""
        up = {name: size + _round_to_step(size / 2, self.steps[name]) for name, size in self.example.items()}
        down = {name: size - _round_to_step(size / 4, self.steps[name]) for name, size in self.example.items()}
        down = {name: size if size > 1 else up[name] for name, size in down.items()}
        mixed = [{name: (up, down)[at % 2][name] for at, name in enumerate(self.example)}]
        next_one = {name: size + self.steps[name] for name, size in self.example.items()}
        double = {name: 2 * size for name, size in self.example.items()}
        half = {name: max(2, size // 2) for name, size in self.example.items()}
        seen: list[dict[str, int]] = [dict(self.example)]
        for sizes in (*mixed, up, down, next_one, double, half):
            if sizes not in seen and self.holds(sizes):
                seen.append(sizes)
                yield sizes


def _round_to_step(size: float, step: int) -> int:
    """To steps, at least one."""
    return max(1, round(size / step)) * step if step else 0


def find_allowed_sizes(program: ExportedProgram, axes: Axes) -> AllowedSizes:
    """What the guards of a program say of the named axes."""
    example: dict[str, int] = {}
    symbols: dict[str, tuple[Any, ...]] = {}
    own: Any = None
    for _, _, label, size in _iterate_extents(program, axes):
        example[label] = int(size.node.hint)
        expression, own = size.node.expr, size.node.shape_env
        symbols[label] = (*symbols.get(label, ()), *((expression,) if expression.is_Symbol else ()))
    guards = dict.fromkeys(guard.expr for guard in own.guards)
    return AllowedSizes(example, symbols, tuple(guards), dict(own.backed_var_to_val), dict(own.replacements))


def explain_fixed_axis(program: ExportedProgram, axes: Axes) -> str:
    """The first named axis that is a number in a program, in words."""
    for name, axis, label, size in _iterate_extents(program, axes):
        if not is_dynamic(size):
            return f"the model computes with axis {axis} of {name!r} ({label}) as a number, {size}"
    return ""


def check_names(program: ExportedProgram, axes: Axes) -> None:
    """A CaptureError where two names stand for one size."""
    seen: dict[Any, str] = {}
    for _, _, label, size in _iterate_extents(program, axes):
        if is_dynamic(size) and seen.setdefault(size.node.expr, label) != label:
            first = seen[size.node.expr]
            raise CaptureError(
                f"dynamic_axes: for this example the model takes {first!r} and {label!r} for one size: give it one "
                "name, or, where they may differ, an example in which they do"
            )


def _iterate_extents(program: ExportedProgram, axes: Axes) -> Iterator[tuple[str, int, str, Any]]:
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    return ((name, axis, label, values[name].shape[axis]) for name, own in axes.items() for axis, label in own.items())


def run_at_double_size(model: nn.Module, inputs: Inputs, axes: Axes) -> str:
    """What the model itself says of the first named axis that is made twice as long, if it fails then."""
    example = dict(_iterate_double_sizes(model, inputs, axes))
    for label, size in example.items():
        try:
            dry_run(model, *resize_inputs(model, inputs, axes, {label: 2 * size}))
        except Exception as error:  # the user's code raises what it likes
            return f" With {label} {2 * size} it fails{user_line(error)}: {_format_error(error)}."
    return ""


def _iterate_double_sizes(model: nn.Module, inputs: Inputs, axes: Axes) -> Iterator[tuple[str, int]]:
    values = get_named_inputs(model, *inputs)
    return ((label, values[name].shape[axis]) for name, own in axes.items() for axis, label in own.items())


def _format_error(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(str(error).strip().partition(chr(10))[0]).rstrip(' .')}"


def check_at_other_sizes(
    model: nn.Module, graph: fx.GraphModule, inputs: Inputs, axes: Axes, sizes: AllowedSizes
) -> dict[str, int]:
    """Other sizes at which the graph gives what the model gives; a CaptureError where it gives something else, or the
    model runs at none."""
    name, first = type(model).__name__, None
    fixed = [each for each, step in sizes.steps.items() if not step]
    for other in sizes.others() if not fixed else ():
        resized_inputs = resize_inputs(model, inputs, axes, other)
        try:
            expected = dry_run(model, *resized_inputs)
        except Exception as error:  # the user's code raises what it likes
            first = first or (other, error)
            continue
        _check_same(name, graph, resized_inputs, expected, other)
        return other
    if first is None:
        double_size_error = run_at_double_size(model, inputs, axes)
        way_out = "" if double_size_error else _OTHER_FIX
        raise CaptureError(
            f"dynamic_axes: torch.export finds no other {' or '.join(fixed or sizes.example)} that {name} could take "
            f"than the example's{sizes.against((fixed or list(sizes.example))[0])}.{double_size_error} "
            f"Leave that axis out{way_out}"
        )
    other, why = first
    raise CaptureError(
        f"dynamic_axes: {name} itself fails at every other size that was tried; at {format_sizes(other)}"
        f"{user_line(why)}: {_format_error(why)}. Leave out the axes that cannot change, or give an example of sizes "
        "between others that it takes"
    )


def format_sizes(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in sizes.items())


def _check_same(name: str, graph: fx.GraphModule, inputs: Inputs, expected: Any, sizes: Mapping[str, int]) -> None:
    where = f"dynamic_axes: at {format_sizes(sizes)} the captured graph"
    way_out = (
        "It holds what the model computed with the example's sizes: leave that axis out, or the submodule as it is"
    )
    try:
        outputs = dry_run(graph, *inputs)
    except Exception as error:  # a size that was written into the graph
        raise CaptureError(f"{where} fails, {name} does not. {_format_error(error)}. {way_out}") from error
    if find_random_nodes(graph):
        return
    for one, other in zip(pytree.tree_leaves(expected), pytree.tree_leaves(outputs), strict=True):
        if isinstance(one, Tensor) and isinstance(other, Tensor) and not _is_near(one, other):
            raise CaptureError(f"{where} gives other values than {name}. {way_out}, leave=['path']")


def _is_near(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or not one.is_floating_point():
        return torch.equal(one, other)
    same = (one == other) | (one.isnan() & other.isnan())
    apart = torch.where(same, torch.zeros_like(one), (one - other).abs())
    finite = one.abs()[one.isfinite()]
    return not one.numel() or bool(apart.max() <= NEAR * (finite.max() if finite.numel() else 0))
