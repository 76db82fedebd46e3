"""Run torch.export with fallbacks, and translate its errors.

`capture` calls `export` on a model; writers of files call `export_graph` on the captured graph. The attempts are
non-strict before strict, and a free batch before a fixed one. A CaptureError names the line of the user's code, the
cause, and what to do.
"""

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
from scalepoint.compat.fast_export import FakeInputCache, NotRecordedError, record_program
from scalepoint.compat.recurrent_shapes import any_length_recurrent_shapes
from scalepoint.compat.torch_names import pytree
from scalepoint.errors import CaptureError, ScalepointWarning, short_repr
from scalepoint.graph.dry_run import dry_run
from scalepoint.graph.dynamic_axes import Axes, AxisChooser, get_inputs_by_parameter, input_name, make_axis_chooser
from scalepoint.graph.nodes import recorded_meta
from scalepoint.graph.origin import get_origin
from scalepoint.graph.resizing import check_names, explain_fixed_axis, run_at_double_size
from scalepoint.graph.user_traceback import has_local_of_type, has_passed_through, user_level, user_line, user_module

# Parts of torch's messages about control flow or shapes that depend on tensor values.
DATA_DEPENDENT_PHRASES = (
    "data-dependent", "datadependent", "data dependent", "dynamicoutputshape", ".item()", "unbacked",
)  # fmt: skip
_LEAVE_OUT_HINT = (
    "Leave that axis out. If another input has the same size, give its axis the same name. Or make the model "
    "independent of the size: no layer, table or reshape for one size only"
)
# (strict, dynamic) of the attempts to export, in their order.
DYNAMIC_ATTEMPTS = ((False, True), (True, True))
FIXED_ATTEMPTS = ((False, False), (True, False))


def export(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic: bool, axes: Axes | None = None
) -> ExportedProgram:
    """Export a model with the first attempt that keeps every batch and every named axis free.

    If no attempt does, return the program with the fewest fixed batches.

    Raises:
        CaptureError: All attempts fail, or torch.export fixes a named axis.
    """
    args, kwargs = pytree.tree_map(make_contiguous, (args, kwargs))
    wide = widen_batch(args, kwargs)
    is_wide = _differs((args, kwargs), wide)
    first_error: Exception | None = None
    fixed_axis = ""  # description of a named axis that torch.export fixed
    programs_with_fixed_batch: list[ExportedProgram] = []
    for strict, is_dynamic in (*DYNAMIC_ATTEMPTS, *FIXED_ATTEMPTS) if dynamic else FIXED_ATTEMPTS:
        if fixed_axis:
            break  # the other attempts would fix it too
        if programs_with_fixed_batch and not is_dynamic and not is_wide:
            break  # a fixed attempt would give the same program; only a widened batch must be recorded again
        choose_axes = make_axis_chooser(axes or {}, dynamic=is_dynamic)
        try:
            program = _export_once(model, wide if is_dynamic else (args, kwargs), strict, choose_axes)
        except Exception as error:  # torch.export raises many exceptions; the next attempt may succeed
            first_error = first_error or error
            if "not a known type" in str(error) and not _register_outputs(model, args, kwargs):
                break  # no other attempt can represent this output either
            continue
        check_names(program, axes or {})
        fixed_axis = explain_fixed_axis(program, axes or {})
        if fixed_axis:
            continue
        if not is_dynamic or not find_fixed_batches(program):
            return program
        programs_with_fixed_batch.append(program)
    if programs_with_fixed_batch and not is_wide:
        return min(programs_with_fixed_batch, key=lambda program: len(find_fixed_batches(program)))
    if fixed_axis:
        double_size_error = run_at_double_size(model, (args, kwargs), axes or {})
        raise CaptureError(f"dynamic_axes: {fixed_axis}.{double_size_error} {_LEAVE_OUT_HINT}")
    raise _translate_error(model, args, kwargs, first_error, axes) from first_error


def _differs(inputs: Any, widened: Any) -> bool:
    """Whether `widened` has another tensor than `inputs` at any leaf."""
    pairs = zip(pytree.tree_leaves(inputs), pytree.tree_leaves(widened), strict=True)
    return any(value is not widened_value for value, widened_value in pairs)


def export_graph(
    model: fx.GraphModule,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic: bool,
    choose_axes: AxisChooser | None = None,
    fake_input_cache: FakeInputCache | None = None,
    *,
    has_code: bool = True,
) -> ExportedProgram:
    """Return the program of a captured graph: recorded in one run, or else made by torch.export.

    Args:
        model: The captured graph.
        args: Example inputs by position.
        kwargs: Example inputs by name.
        dynamic: Whether axes may change.
        choose_axes: Returns the dynamic axes of an input. Default: the batch, the length of token sequences, and the
            axes named at capture.
        fake_input_cache: Shared by the graphs of one capture.
        has_code: False if only the nodes of the program are read.
    """
    axes: Axes = {}
    if choose_axes is None:
        axes = get_origin(model).axes
        choose_axes = make_axis_chooser(axes, dynamic=dynamic)
    elif not dynamic:
        choose_axes = _no_axes
    inputs: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(make_contiguous, (args, kwargs))
    wide = widen_batch(*inputs) if dynamic else inputs
    if not patches_enabled():
        model.recompile()  # torch.export traces the code of the graph, which may be older than its nodes
        return export(model, args, kwargs, dynamic, axes)
    options: Any = {"writes_code": has_code, "node_meta": recorded_meta}
    try:
        with export_logs_silenced():
            program: ExportedProgram = record_program(model, *wide, choose_axes, fake_input_cache, **options)
            if _differs(inputs, wide) and find_fixed_batches(program):
                program = record_program(model, *inputs, make_axis_chooser(axes, dynamic=False), **options)
            if fixed_axis := explain_fixed_axis(program, axes):
                raise NotRecordedError(fixed_axis)
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


def _no_axes(name: str, value: Any) -> tuple[int, ...]:
    return ()


def make_contiguous(value: Any) -> Any:
    """Make a tensor contiguous: torch.onnx fails on the stride guards that torch.export adds for other layouts."""
    return value.contiguous() if isinstance(value, Tensor) and value.layout == torch.strided else value


def _export_once(
    model: nn.Module, inputs: tuple[tuple[Any, ...], dict[str, Any]], strict: bool, choose_axes: AxisChooser
) -> ExportedProgram:
    def dimensions(path: Any, value: Any) -> Any:
        return dict.fromkeys(sorted(choose_axes(input_name(path), value)), torch.export.Dim.AUTO) or None

    shapes = pytree.tree_map_with_path(dimensions, get_inputs_by_parameter(model, *inputs))
    with export_logs_silenced(), any_length_recurrent_shapes():
        return torch.export.export(model, *inputs, dynamic_shapes=shapes, strict=strict)


def load(path: Path) -> ExportedProgram:
    """Load a program that torch.export saved. This runs code from the file, so the user must trust it."""
    try:
        with export_logs_silenced():
            return torch.export.load(path)  # noqa: TID251  # the caller passed trust=True
    except Exception as error:  # the file can contain anything
        raise CaptureError(
            f"{short_repr(str(path))} is not a program that torch.export can load. {_format_error(error)}"
        ) from error


def find_fixed_batches(program: ExportedProgram) -> dict[str, int]:
    """Return the inputs whose first axis is a constant in the program, and its size."""
    user_inputs = set(program.graph_signature.user_inputs)
    inputs = [node for node in program.graph.nodes if node.op == "placeholder" and node.name in user_inputs]
    shapes = {node.name: tuple(node.meta["val"].shape) for node in inputs if isinstance(node.meta.get("val"), Tensor)}
    shapes_with_batch = {name: shape for name, shape in shapes.items() if _has_batch(shape)}
    return {name: int(shape[0]) for name, shape in shapes_with_batch.items() if is_concrete_int(shape[0])}


def _has_batch(shape: tuple[int, ...]) -> bool:
    """Whether the first axis is a batch. A vector of one value is a setting, not a batch."""
    if len(shape) == 1:
        return not (is_concrete_int(shape[0]) and shape[0] == 1)
    return len(shape) > 1


def _register_outputs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Register the class that the model returns with torch.export.

    Returns:
        False if the class is registered already, or is neither a dict nor a dataclass.
    """
    kind = type(dry_run(model, args, kwargs))
    if kind in pytree.SUPPORTED_NODES:
        return False
    if issubclass(kind, dict):

        def flatten(value: Any) -> tuple[list[Any], list[Any]]:
            return list(value.values()), list(value)

        def unflatten(values: Any, keys: Any) -> Any:
            return kind(**dict(zip(keys, values, strict=True)))

        pytree.register_pytree_node(kind, flatten, unflatten)
    elif is_dataclass(kind):
        torch.export.register_dataclass(kind)
    else:
        return False
    return True


def _translate_error(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception | None, axes: Axes | None = None
) -> CaptureError:
    """Return an error that says what failed, at which line of the user's code, and what to do."""
    name = type(model).__name__
    try:
        with export_logs_silenced():
            dry_run(model, args, kwargs)
    except Exception as model_error:  # user code can raise any exception
        message = f"{_format_error(model_error)}{_hint_about_inputs(args, kwargs)}"
        return CaptureError(f"{name} itself fails on these example inputs{user_line(model_error)}. {message}")
    message = "" if error is None else str(error)
    if "not a known type" in message:
        return CaptureError(f"{name} cannot be captured: {_describe_unknown_output(model, message)}")
    if axes and _is_exportable(model, args, kwargs):
        axis_list = ", ".join(
            f"{label} (axis {axis} of {input_name!r})"
            for input_name, axis_names in axes.items()
            for axis, label in axis_names.items()
        )
        return CaptureError(
            f"{name} can be captured without dynamic_axes, but not with {axis_list}{user_line(error)}. "
            f"{_format_error(error)} Leave out the axes that the model computes with, or do not capture the submodule "
            "of that line, leave=['path']"
        )
    return CaptureError(
        f"{name} cannot be captured{user_line(error)}. {_format_error(error)} {_make_hint(model, error)}"
    )


def _is_exportable(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether torch.export succeeds without free axes."""
    for strict in (False, True):
        with suppress(Exception):  # torch.export raises many exceptions
            return bool(_export_once(model, (args, kwargs), strict, _no_axes))
    return False


def _hint_about_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Explain inputs without a tensor: the user passed a loader or a shape instead of a batch."""
    leaves = pytree.tree_leaves((args, kwargs))
    if any(isinstance(leaf, Tensor) for leaf in leaves):
        return ""
    types = ", ".join(dict.fromkeys(type(leaf).__name__ for leaf in leaves)) or "nothing"
    return f" There is no tensor among them ({types}): pass one batch, such as next(iter(loader)) or torch.randn(shape)"


def _describe_unknown_output(model: nn.Module, message: str) -> str:
    """Describe an output of a class that torch.export does not support, named in its message."""
    match = re.search(r"<class '([^']+)'>", message)
    description = f"it returns a {match[1].rpartition('.')[2] if match else 'value'}, which a graph cannot return"
    if hasattr(getattr(model, "config", None), "use_cache"):
        return (
            f"{description}. A file has no state between two calls. use_cache is False in all configs while the model "
            "is captured: do not pass use_cache=True as an input, and do not return a cache"
        )
    return f"{description}. Return tensors, numbers, or tuples, lists, dicts and dataclasses of them"


def _make_hint(model: nn.Module, error: Exception | None) -> str:
    """Return advice for a failed export: packed sequences, values that a trace does not have, or another branch."""
    calls_packing = has_passed_through(error, "pack_padded_sequence", "pad_packed_sequence", "pack_sequence")
    if calls_packing or has_local_of_type(error, PackedSequence):
        return (
            "Packed sequences have a number of rows that depends on the lengths, which a file cannot represent: run "
            "the recurrent layer on the padded tensor, and mask or select its outputs by the lengths"
        )
    path = user_module(error, model)
    leave_option = f"leave=[{path!r}]" if path else "leave=['path.of.submodule']"
    if any(phrase in f"{type(error).__name__} {error}".lower() for phrase in DATA_DEPENDENT_PHRASES):
        return (
            "Make that line independent of tensor values (torch.where, torch.cond), or do not capture the submodule of "
            f"that line: {leave_option}"
        )
    return (
        "The model runs on these inputs, but takes another branch while torch.export traces it without values. Often "
        "the cause is an input that is missing or all ones (a mask): pass that input, or omit it. Or do not capture "
        f"the submodule of that line: {leave_option}"
    )


def _format_error(error: Exception | None) -> str:
    """Format the class and the first line of an error."""
    line = next(iter(str(error).strip().splitlines()), "").rstrip(" .")
    return f"{type(error).__name__}: {line}."


def widen_batch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Repeat inputs with a batch of one to a batch of two: torch.export treats a size of one as a constant."""

    def widen(value: Any) -> Any:
        if isinstance(value, Tensor) and value.ndim > 1 and value.shape[0] == 1:
            return value.repeat(2, *(1 for _ in value.shape[1:]))
        return value

    wide: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(widen, (args, kwargs))
    return wide


@contextmanager
def export_logs_silenced() -> Iterator[None]:
    """Silence warnings, logs and prints of torch.export, which are about its internals. Errors are still raised.

    All logging is disabled, because torch creates loggers and handlers while it works. The logger torch.__trace ignores
    that and sends thousands of records to its handlers (pytest has one), so its handlers are removed meanwhile.
    """
    trace_logger, previous_level = logging.getLogger("torch.__trace"), logging.root.manager.disable
    handlers, trace_logger.handlers = trace_logger.handlers, []
    logging.disable()
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous_level)
        trace_logger.handlers = handlers
