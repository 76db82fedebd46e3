"""An .onnx file as the model of a run: its module, example inputs, free axes, and the comparison with the file."""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from scalepoint import distributed
from scalepoint.errors import ScalepointWarning, UsageError, VerificationError
from scalepoint.formats.metadata import KEY_PREFIX
from scalepoint.graph.user_traceback import user_level
from scalepoint.options import DeployOptions, options_for
from scalepoint.support.formatting import escape_unprintable
from scalepoint.support.progress import write_line

if TYPE_CHECKING:
    from scalepoint.onnx_reader import OnnxModel
    from scalepoint.pipeline.job import Job


@dataclass(frozen=True)
class OnnxSource:
    """A file that was read.

    Attributes:
        path: The file.
        model: Its module.
        example: One set of inputs.
        free_axes: Names of the free axes after the first: {input: {axis: name}}. Axes of size 1 in the example are left
            out.
        metadata: The metadata of the file.
    """

    path: Path
    model: "OnnxModel"
    example: Any
    free_axes: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)


def is_onnx_file(model: object) -> bool:
    return isinstance(model, str | Path) and Path(model).suffix.lower() == ".onnx"


def check_no_file_options(options: DeployOptions) -> None:
    """Raise UsageError for an option of .onnx files if the model is not one."""
    for name in options_for("onnx files"):
        if getattr(options, name):
            hint = ": pass example_inputs with these sizes" if name == "shape" else ""
            raise UsageError(f"{name}= is for .onnx files{hint}")


def read_source(
    path: str | Path, example: Any, kwargs: Any, data: Any, options: DeployOptions, progress: bool | None
) -> OnnxSource:
    """Read the file. Without example inputs, use the first batch of the data, or random ones."""
    from scalepoint.onnx_reader import load_onnx  # noqa: PLC0415  # loads onnx

    model = load_onnx(path, fixed_inputs=options.fixed_inputs, requantize=options.requantize)
    if example is None and not kwargs:
        example = _choose_example(model, data, options.shape, show=progress is not False)
    elif options.shape:
        raise UsageError("shape= is for files without example_inputs: pass one of them")
    metadata = {
        key: text
        for key, text in model.metadata.items()
        if escape_unprintable(key) == key and not key.startswith(KEY_PREFIX)
    }
    return OnnxSource(Path(path).resolve(), model, example, _named_axes(model, example), metadata)


def _choose_example(model: "OnnxModel", data: Any, shape: Mapping[str, Any] | None, *, show: bool) -> Any:
    from scalepoint.onnx_reader.example import choose_shapes  # noqa: PLC0415

    # The first batch of an iterator would be missing in calibration.
    is_batches = isinstance(data, Iterable) and not isinstance(data, Iterator | Mapping | Tensor | str)
    if not shape and is_batches and not callable(data):
        for batch in islice(data, 1):
            return _inputs_of_batch(model, batch)
    shapes, defaults = choose_shapes(model.inputs, named_shapes(model, shape or {}))
    if show and defaults:
        sizes = ", ".join(f"{name}={size}" for name, size in defaults.items())
        input_name = next(iter(shapes))
        shape_text = ",".join(map(str, shapes[input_name]))
        write_line(
            f"the file has free axes: the example inputs have {sizes}. "
            f"Others: --shape {input_name}={shape_text} (shape=)"
        )
    return model.make_example(shapes)


def named_shapes(model: "OnnxModel", shapes: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the key of each shape that is the position of an input, such as "0", by the name of the input."""
    names = list(model.inputs)
    by_name = {}
    for key, shape in shapes.items():
        is_position = key not in names and key.isdecimal() and int(key) < len(names)
        by_name[names[int(key)] if is_position else key] = shape
    return by_name


def _inputs_of_batch(model: "OnnxModel", batch: Any) -> Any:
    from scalepoint.quantize.batches import to_model_inputs  # noqa: PLC0415

    args, kwargs = to_model_inputs(batch, model)
    return kwargs or args


def _named_axes(model: "OnnxModel", example: Any) -> dict[str, dict[int, str]]:
    """Return the free axes of the file, without those of size 1 in the example: torch.export makes these constant."""
    values = example if isinstance(example, Mapping) else dict(zip(model.inputs, _as_tuple(example), strict=False))
    axes = {}
    for name, labels in model.free_axes().items():
        value = values.get(name)
        if isinstance(value, Tensor):
            axes[name] = {axis: label for axis, label in labels.items() if value.shape[axis] > 1}
    return {name: labels for name, labels in axes.items() if labels}


def _as_tuple(example: Any) -> tuple[Any, ...]:
    return tuple(example) if isinstance(example, list | tuple) else (example,)


def check_source_file(job: "Job") -> None:
    """Compare the module with the file in ONNX Runtime, before any work.

    Raises:
        VerificationError: They differ; with allow_departure=True this is a warning.
    """
    from scalepoint.verification.onnx_parity import Parity, ParityResult, check_parity  # noqa: PLC0415

    model: Any = job.model
    inputs = dict(zip(model.inputs, job.example.args, strict=False)) | job.example.kwargs
    result = distributed.run_on_main("comparing with the file", lambda: check_parity(model, inputs), ParityResult)
    if result.status == Parity.DIFFERENT:
        if not job.options.allow_departure:
            raise VerificationError(
                f"{result.message}. Nothing was quantized. Please report this file; allow_departure=True deploys it "
                "all the same"
            )
        warnings.warn(ScalepointWarning(result.message), stacklevel=user_level())
    elif job.progress is not False:
        write_line(f"{job.source_file.name}: {result.message}" if job.source_file else result.message)
