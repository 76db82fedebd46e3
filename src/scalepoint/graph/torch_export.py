"""torch.export as a ladder: non-strict before strict, a free batch before a fixed one, and its errors in our words."""

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import is_dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import is_concrete_int
from torch.nn.utils.rnn import PackedSequence

from scalepoint.compat import patches_enabled
from scalepoint.compat.fast_export import NotRecordedError, SizeCache, record_program
from scalepoint.compat.recurrent_shapes import any_length_recurrent_shapes
from scalepoint.compat.torch_names import pytree
from scalepoint.errors import CaptureError, ScalepointWarning, short_repr
from scalepoint.graph.dry_run import dry_run
from scalepoint.graph.dynamic_axes import Axes, AxisChooser, get_inputs_by_parameter, input_name, make_axis_chooser
from scalepoint.graph.nodes import recorded_meta
from scalepoint.graph.origin import get_origin
from scalepoint.graph.resizing import check_names, explain_fixed_axis, run_at_double_size
from scalepoint.graph.user_traceback import has_local_of_type, has_passed_through, user_level, user_line, user_module

DATA_DEPENDENT = ("data-dependent", "datadependent", "data dependent", "dynamicoutputshape", ".item()", "unbacked")
_LEAVE_OUT_HINT = (
    "Leave that axis out; where another input has the same size, name that axis so too; or make the model independent "
    "of the size: no layer, table or reshape for one size alone"
)
ATTEMPTS = ((False, True), (True, True), (False, False), (True, False))  # (strict, dynamic)


def export(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic: bool, axes: Axes | None = None
) -> ExportedProgram:
    """The program of the first rung that succeeds with every batch and every named axis free, else the best that there
    is; of named axes none may be fixed."""
    args, kwargs = pytree.tree_map(make_contiguous, (args, kwargs))
    first: Exception | None = None
    held = ""  # the named axes that torch.export took for constants
    fixed: list[ExportedProgram] = []  # programs in which it took the batch for one
    wide = widen_batch(args, kwargs)
    is_wide = any(one is not other for one, other in zip(*map(pytree.tree_leaves, ((args, kwargs), wide)), strict=True))
    for strict, is_dynamic in ATTEMPTS if dynamic else ATTEMPTS[2:]:
        if held or (fixed and not is_dynamic and not is_wide):
            break
        free = make_axis_chooser(axes or {}, dynamic=is_dynamic)
        try:
            program = _export_once(model, wide if is_dynamic else (args, kwargs), strict, free)
        except Exception as error:  # torch.export raises every kind; each is a rung of the ladder
            first = first or error
            if "not a known type" in str(error) and not _register_outputs(model, args, kwargs):
                break  # no other way of exporting can represent this output either
            continue
        check_names(program, axes or {})
        if why := explain_fixed_axis(program, axes or {}):
            held = why
        elif not is_dynamic or not find_fixed_batches(program):
            return program
        else:
            fixed.append(program)
    if fixed and not is_wide:
        return min(fixed, key=lambda program: len(find_fixed_batches(program)))
    if held:
        double_size_error = run_at_double_size(model, (args, kwargs), axes or {})
        raise CaptureError(f"dynamic_axes: {held}.{double_size_error} {_LEAVE_OUT_HINT}")
    raise _translate_error(model, args, kwargs, first, axes) from first


def export_graph(
    model: fx.GraphModule,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic: bool,
    free: AxisChooser | None = None,
    size_cache: SizeCache | None = None,
    *,
    has_code: bool = True,
) -> ExportedProgram:
    """Return the program of a captured graph: recorded in one run, or else made by torch.export.

    Args:
        model: The captured graph.
        args: Example inputs by position.
        kwargs: Example inputs by name.
        dynamic: Whether axes may change.
        free: Returns the dynamic axes of an input. Default: the batch, the length of token sequences, and the axes
            named at capture.
        size_cache: Shared by the graphs of one capture.
        has_code: False if only the nodes of the program are read.
    """
    axes = get_origin(model).axes if free is None else {}
    choose_axes = (
        make_axis_chooser(axes, dynamic=dynamic) if free is None else free if dynamic else (lambda name, value: ())
    )
    inputs: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(make_contiguous, (args, kwargs))
    wide = widen_batch(*inputs) if dynamic else inputs
    if not patches_enabled():
        model.recompile()  # torch.export traces the code of the graph, which may be older than its nodes
        return export(model, args, kwargs, dynamic, axes)
    options: Any = {"writes_code": has_code, "node_meta": recorded_meta}
    try:
        with export_logs_silenced():
            program: ExportedProgram = record_program(model, *wide, choose_axes, size_cache, **options)
            is_wide = any(one is not other for one, other in zip(*map(pytree.tree_leaves, (inputs, wide)), strict=True))
            if is_wide and find_fixed_batches(program):
                program = record_program(model, *inputs, make_axis_chooser(axes, dynamic=False), **options)
            if why := explain_fixed_axis(program, axes):
                raise NotRecordedError(why)
            return program
    except Exception as error:  # of any kind; torch.export explains what is wrong, if anything
        recording_error = error
    model.recompile()  # torch.export traces the code of the graph, which may be older than its nodes
    exported = export(model, args, kwargs, dynamic, axes)
    warn_about_second_trace(recording_error)
    return exported


def warn_about_second_trace(error: Exception) -> None:
    """Warn that torch traces the model again to write the file, and why."""
    reason = str(error) if isinstance(error, NotRecordedError) else f"{type(error).__name__}: {error}"
    first_line = next(iter(reason.strip().splitlines()), "").rstrip(" .")
    warnings.warn(
        ScalepointWarning(f"torch traces the model once more to write the file, which may take minutes: {first_line}"),
        stacklevel=user_level(),
    )


def make_contiguous(value: Any) -> Any:
    """torch.export guards the strides of views and channels-last examples, and torch.onnx trips over such guards."""
    return value.contiguous() if isinstance(value, Tensor) and value.layout == torch.strided else value


def _export_once(
    model: nn.Module, inputs: tuple[tuple[Any, ...], dict[str, Any]], strict: bool, free: AxisChooser
) -> ExportedProgram:
    def dimensions(path: Any, value: Any) -> Any:
        return dict.fromkeys(sorted(free(input_name(path), value)), torch.export.Dim.AUTO) or None

    shapes = pytree.tree_map_with_path(dimensions, get_inputs_by_parameter(model, *inputs))
    with export_logs_silenced(), any_length_recurrent_shapes():
        return torch.export.export(model, *inputs, dynamic_shapes=shapes, strict=strict)


def load(path: Path) -> ExportedProgram:
    """A program that torch.export saved. Loading runs code from the file: only for files that the user trusts."""
    try:
        with export_logs_silenced():
            return torch.export.load(path)  # noqa: TID251  # the caller passed trust=True
    except Exception as error:  # a file may be anything
        raise CaptureError(
            f"{short_repr(str(path))} is no program that torch.export can load. {_format_error(error)}"
        ) from error


def find_fixed_batches(program: ExportedProgram) -> dict[str, int]:
    """The inputs whose first axis is a constant in the program, and its extent."""
    user_inputs = set(program.graph_signature.user_inputs)
    inputs = [node for node in program.graph.nodes if node.op == "placeholder" and node.name in user_inputs]
    shapes = {node.name: tuple(node.meta["val"].shape) for node in inputs if isinstance(node.meta.get("val"), Tensor)}
    return {name: int(shape[0]) for name, shape in shapes.items() if _has_batch(shape) and is_concrete_int(shape[0])}


def _has_batch(shape: tuple[int, ...]) -> bool:
    """A vector of one value is a setting, not a batch."""
    return len(shape) > 1 or (len(shape) == 1 and not (is_concrete_int(shape[0]) and shape[0] == 1))


def _register_outputs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Register the dataclass or dict that the model returns with torch.export. False if it is neither, or known."""
    kind = type(dry_run(model, args, kwargs))
    if kind in pytree.SUPPORTED_NODES:
        return False
    if issubclass(kind, dict):
        pytree.register_pytree_node(
            kind, lambda d: (list(d.values()), list(d)), lambda v, keys: kind(**dict(zip(keys, v, strict=True)))
        )
    elif is_dataclass(kind):
        torch.export.register_dataclass(kind)
    else:
        return False
    return True


def _translate_error(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception | None, axes: Axes | None = None
) -> CaptureError:
    """What failed, at which line of the user's code, why, and the way out."""
    name = type(model).__name__
    try:
        with export_logs_silenced():
            dry_run(model, args, kwargs)
    except Exception as own:  # the user's code raises what it likes
        message = f"{_format_error(own)}{_hint_about_inputs(args, kwargs)}"
        return CaptureError(f"{name} itself fails on these example inputs{user_line(own)}. {message}")
    message = "" if error is None else str(error)
    if "not a known type" in message:
        return CaptureError(f"{name} cannot be captured: {_describe_unknown_output(model, message)}")
    if axes and _is_captured(model, args, kwargs):
        named = ", ".join(
            f"{label} (axis {axis} of {each!r})" for each, own in axes.items() for axis, label in own.items()
        )
        return CaptureError(
            f"{name} cannot be captured with dynamic_axes, without them it can{user_line(error)}. "
            f"{_format_error(error)} Leave out of {named} what the model computes with, or the submodule "
            "that the line stands in as it is, leave=['path']"
        )
    return CaptureError(
        f"{name} cannot be captured{user_line(error)}. {_format_error(error)} {_make_hint(model, error)}"
    )


def _is_captured(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Without free axes."""
    for strict in (False, True):
        with suppress(Exception):  # torch.export raises every kind
            return bool(_export_once(model, (args, kwargs), strict, lambda name, value: ()))
    return False


def _hint_about_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """For who gave a loader or a shape instead of a batch."""
    leaves = pytree.tree_leaves((args, kwargs))
    if any(isinstance(each, Tensor) for each in leaves):
        return ""
    kinds = ", ".join(dict.fromkeys(type(each).__name__ for each in leaves)) or "nothing"
    return f" There is no tensor among them ({kinds}): give one batch, such as next(iter(loader)) or torch.randn(shape)"


def _describe_unknown_output(model: nn.Module, said: str) -> str:
    match = re.search(r"<class '([^']+)'>", said)
    description = f"it gives a {match[1].rpartition('.')[2] if match else 'value'}, which a graph cannot hold"
    if hasattr(getattr(model, "config", None), "use_cache"):
        return (
            f"{description}. A file keeps nothing between two calls. use_cache is off in all configs while the model "
            "is captured: do not pass use_cache=True as an input, and return no cache"
        )
    return f"{description}. Return tensors, numbers, tuples, lists, dicts or dataclasses of them"


def _make_hint(model: nn.Module, error: Exception | None) -> str:
    """By what went wrong: a value that a trace does not have, or code that goes another way without values."""
    if has_passed_through(error, "pack_padded_sequence", "pad_packed_sequence", "pack_sequence") or has_local_of_type(
        error, PackedSequence
    ):
        return (
            "Packed sequences have as many rows as the lengths say, which no file can hold: run the recurrent layer on "
            "the padded tensor, and mask or pick its outputs by the lengths"
        )
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


def _format_error(error: Exception | None) -> str:
    line = next(iter(str(error).strip().splitlines()), "").rstrip(" .")
    return f"{type(error).__name__}: {line}."


def widen_batch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs with a batch of two where it was one: torch.export takes an extent of one for a constant."""

    def widen(value: Any) -> Any:
        if isinstance(value, Tensor) and value.ndim > 1 and value.shape[0] == 1:
            return value.repeat(2, *(1 for _ in value.shape[1:]))
        return value

    wide: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(widen, (args, kwargs))
    return wide


@contextmanager
def export_logs_silenced() -> Iterator[None]:
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
