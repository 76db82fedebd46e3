"""torch.export as a ladder: non-strict before strict, a free batch before a fixed one, and its errors in our words."""

import inspect
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import is_dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import is_concrete_int
from torch.utils import _pytree as pytree

from scalepoint.errors import CaptureError, shown
from scalepoint.graph.blame import user_line, user_module
from scalepoint.graph.dry_run import dry_run
from scalepoint.graph.program import Known, program_of, warn_of_tracing

DATA_DEPENDENT = ("data-dependent", "datadependent", "data dependent", "dynamicoutputshape", ".item()", "unbacked")
RUNGS = ((False, True), (True, True), (False, False), (True, False))  # (strict, dynamic)


def export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic: bool) -> ExportedProgram:
    """The program of the first rung that succeeds with every batch free, else the best that there is."""
    args, kwargs = pytree.tree_map(contiguous, (args, kwargs))
    first: Exception | None = None
    fixed: list[ExportedProgram] = []  # programs in which torch.export took the batch for a constant
    wide = widened(args, kwargs)
    is_wide = any(one is not other for one, other in zip(*map(pytree.tree_leaves, ((args, kwargs), wide)), strict=True))
    for strict, is_dynamic in RUNGS if dynamic else RUNGS[2:]:
        if fixed and not is_dynamic and not is_wide:
            break
        try:
            program = _export_once(model, wide if is_dynamic else (args, kwargs), strict, is_dynamic)
        except Exception as error:  # torch.export raises every kind; each is a rung of the ladder
            if "not a known type" in str(error):
                _register_outputs(model, args, kwargs)
            first = first or error
            continue
        if not is_dynamic or not fixed_batch(program):
            return program
        fixed.append(program)
    if fixed and not is_wide:
        return min(fixed, key=lambda program: len(fixed_batch(program)))
    raise _explained(model, args, kwargs, first) from first


def export_graph(
    model: fx.GraphModule,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic: bool,
    axes: Callable[[Tensor], Iterable[int]] | None = None,
    known: Known | None = None,
) -> ExportedProgram:
    """The program of a graph that was captured: noted in one run, else by the ladder. `axes` tells which of an input's
    may change, the batch and the length of token sequences unless given; `known` is shared by graphs of one capture."""
    free = axes or (lambda value: _dimensions(value) or ())
    given: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(contiguous, (args, kwargs))
    wide = widened(*given) if dynamic else given
    try:
        with quiet():
            program = program_of(model, *wide, lambda value: free(value) if dynamic else (), known)
            is_wide = any(one is not other for one, other in zip(*map(pytree.tree_leaves, (given, wide)), strict=True))
            return program_of(model, *given, lambda _: ()) if is_wide and fixed_batch(program) else program
    except Exception as error:  # a run without values raises every kind; the ladder says what is wrong, if anything is
        why = error
    found = export(model, args, kwargs, dynamic)
    warn_of_tracing(why)
    return found


def contiguous(value: Any) -> Any:
    """torch.export guards the strides of views and channels-last examples, and torch.onnx trips over such guards."""
    return value.contiguous() if isinstance(value, Tensor) and value.layout == torch.strided else value


def _export_once(
    model: nn.Module, inputs: tuple[tuple[Any, ...], dict[str, Any]], strict: bool, is_dynamic: bool
) -> ExportedProgram:
    shapes = pytree.tree_map(_dimensions, inputs) if is_dynamic else None
    if shapes is not None:
        shapes = _by_parameter(model, shapes)
    with quiet():
        return torch.export.export(model, *inputs, dynamic_shapes=shapes, strict=strict)


def load(path: Path) -> ExportedProgram:
    """A program that torch.export saved. Loading runs code from the file: only for files that the user trusts."""
    try:
        with quiet():
            return torch.export.load(path)
    except Exception as error:  # a file may be anything
        raise CaptureError(f"{shown(str(path))} is no program that torch.export can load. {_said(error)}") from error


def fixed_batch(program: ExportedProgram) -> dict[str, int]:
    """The inputs whose first axis is a constant in the program, and its extent."""
    own = set(program.graph_signature.user_inputs)
    inputs = [node for node in program.graph.nodes if node.op == "placeholder" and node.name in own]
    shapes = {node.name: tuple(node.meta["val"].shape) for node in inputs if isinstance(node.meta.get("val"), Tensor)}
    return {name: int(shape[0]) for name, shape in shapes.items() if _has_batch(shape) and is_concrete_int(shape[0])}


def _has_batch(shape: tuple[int, ...]) -> bool:
    """A vector of one value is a setting, not a batch."""
    return len(shape) > 1 or (len(shape) == 1 and not (is_concrete_int(shape[0]) and shape[0] == 1))


def _register_outputs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tell torch.export of the dataclass or dict that the model gives, so that the next rung takes it."""
    kind = type(dry_run(model, args, kwargs))
    if kind in pytree.SUPPORTED_NODES:
        return
    if issubclass(kind, dict):
        pytree.register_pytree_node(
            kind, lambda d: (list(d.values()), list(d)), lambda v, keys: kind(**dict(zip(keys, v, strict=True)))
        )
    elif is_dataclass(kind):
        torch.export.register_dataclass(kind)


def _explained(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception | None
) -> CaptureError:
    """What failed, at which line of the user's code, why, and the way out."""
    name = type(model).__name__
    try:
        with quiet():
            dry_run(model, args, kwargs)
    except Exception as own:  # the user's code raises what it likes
        said = f"{_said(own)}{_hint(args, kwargs)}"
        return CaptureError(f"{name} itself fails on these example inputs{user_line(own)}. {said}")
    said = "" if error is None else str(error)
    if "not a known type" in said:
        return CaptureError(f"{name} cannot be captured: {_unknown_output(model, said)}")
    return CaptureError(f"{name} cannot be captured{user_line(error)}. {_said(error)} {_way_out(model, error)}")


def _hint(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """For who gave a loader or a shape instead of a batch."""
    given = pytree.tree_leaves((args, kwargs))
    if any(isinstance(each, Tensor) for each in given):
        return ""
    kinds = ", ".join(dict.fromkeys(type(each).__name__ for each in given)) or "nothing"
    return f" There is no tensor among them ({kinds}): give one batch, such as next(iter(loader)) or torch.randn(shape)"


def _unknown_output(model: nn.Module, said: str) -> str:
    found = re.search(r"<class '([^']+)'>", said)
    given = f"it gives a {found[1].rpartition('.')[2] if found else 'value'}, which a graph cannot hold"
    if getattr(getattr(model, "config", None), "use_cache", False):
        return f"{given}. A file keeps nothing between two calls: set model.config.use_cache = False"
    return f"{given}. Return tensors, numbers, tuples, lists, dicts or dataclasses of them"


def _way_out(model: nn.Module, error: Exception | None) -> str:
    """By what went wrong: a value that a trace does not have, or code that goes another way without values."""
    path = user_module(error, model)
    left = f"leave=[{path!r}]" if path else "leave=['path.of.submodule']"
    if any(word in f"{type(error).__name__} {error}".lower() for word in DATA_DEPENDENT):
        return (
            "Make that line independent of tensor values (torch.where, torch.cond), or leave the submodule that it "
            f"stands in as it is: {left}"
        )
    return (
        "The model runs on these inputs, but goes another way while torch.export traces it, without values: often "
        "because of an input that is absent or all ones (a mask). Give that input, or leave it out; or leave the "
        f"submodule that the line stands in as it is: {left}"
    )


def _said(error: Exception | None) -> str:
    line = next(iter(str(error).strip().splitlines()), "").rstrip(" .")
    return f"{type(error).__name__}: {line}."


def widened(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs with a batch of two where it was one: torch.export takes an extent of one for a constant."""

    def widen(value: Any) -> Any:
        if isinstance(value, Tensor) and value.ndim > 1 and value.shape[0] == 1:
            return value.repeat(2, *(1 for _ in value.shape[1:]))
        return value

    wide: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(widen, (args, kwargs))
    return wide


def _dimensions(value: Any) -> Any:
    """Which axes of an input may change: the batch, and the length of token sequences."""
    if not isinstance(value, Tensor) or value.ndim == 0:
        return None
    auto = torch.export.Dim.AUTO
    return {0: auto, 1: auto} if not value.is_floating_point() and value.ndim == 2 else {0: auto}


def _by_parameter(model: nn.Module, shapes: tuple[tuple[Any, ...], dict[str, Any]]) -> dict[str, Any]:
    """Shapes as torch.export wants them: by the name of each parameter, those of *args as one, of **kwargs each."""
    signature = inspect.signature(model.forward)
    found = dict(signature.bind(*shapes[0], **shapes[1]).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind == parameter.VAR_KEYWORD:
            found |= found.pop(name, {})
    return found


@contextmanager
def quiet() -> Iterator[None]:
    """torch.export prints and logs of its own internals; what matters to the user is raised.

    Logging is off as a whole: torch makes loggers and handlers while it works. Its trace log ignores that, and writes
    thousands of records to whoever listens (pytest does), so nobody listens meanwhile.
    """
    trace, disabled = logging.getLogger("torch.__trace"), logging.root.manager.disable
    listening, trace.handlers = trace.handlers, []
    logging.disable()
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        trace.handlers = listening
