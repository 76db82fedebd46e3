"""export(): writes a quantized model as the file that its target runs."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx

from scalepoint.errors import ExportError, ScalepointWarning
from scalepoint.formats.differences import describe_differences
from scalepoint.formats.format import ExportRequest, FileFormat
from scalepoint.formats.metadata import build_metadata
from scalepoint.formats.registry import find_format
from scalepoint.graph.capture import as_inputs
from scalepoint.graph.user_traceback import user_level
from scalepoint.numerics import dtype_name
from scalepoint.quantize.record import has_record, record_of
from scalepoint.support.output_folder import check_path
from scalepoint.support.torch_state import serialized
from scalepoint.targets import Target, find_target
from scalepoint.targets.target import parse_float_dtype

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@serialized
def export(
    model: fx.GraphModule,
    path: str | Path,
    example_inputs: Any,
    *,
    kwargs: Mapping[str, Any] | None = None,
    target: str | Target | None = None,
    float_path: str | Path | None = None,
    float_dtype: str | torch.dtype | None = None,
    dynamic: bool = True,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Write a quantized model to a file in the format of its target. A failed export leaves an old file unchanged.

    Args:
        model: The quantized model.
        path: The file to write. Its suffix must be that of the format, for example ".onnx".
        example_inputs: Inputs with the same structure, dtypes and shapes as those of the capture.
        kwargs: Keyword inputs of the model.
        target: The target to write for; default: the target of the model.
        float_path: Also write the float model of the same capture to this file, for comparison.
        float_dtype: "float16" or "bfloat16": the dtype of the scales and of everything that is not quantized, for
            compilers that compute in the dtypes of the file. Inputs and outputs stay float32.
        dynamic: Make the batch axis dynamic in the file.
        metadata: Labels, preprocessing and the like, stored in the file next to versions, target and config.

    Returns:
        The path of the file.

    Raises:
        ExportError: The model was quantized for another target, or cannot be written in this format.
        TargetError: The model has an operation that the target does not support.
        UsageError: The metadata cannot be stored.

    Example:
        quantized = scalepoint.quantize(model, example, config, forward_loop=batches, target="onnxruntime")
        scalepoint.export(quantized, "model.onnx", example)
    """
    path = Path(path)
    float_file = None if float_path is None else Path(float_path)
    paths = [path] if float_file is None else [path, float_file]
    for output_path in paths:
        check_path(output_path, "path")
    model_target = record_of(model).target if has_record(model) else None
    file_target = find_target(target) if target is not None else model_target
    if file_target is not None and model_target is not None and file_target.name != model_target.name:
        raise ExportError(
            f"this model was quantized for target {model_target.name!r}: run transform and insert_qdq again with "
            f"target={file_target.name!r}"
        )
    file_format = find_format("onnx" if file_target is None else file_target.format)
    for output_path in paths:
        _check_suffix(output_path, file_format, file_target)
        output_path.parent.mkdir(parents=True, exist_ok=True)
    dtype = _resolve_float_dtype(float_dtype, file_target)
    file_metadata = build_metadata(model, file_target, metadata)
    inputs = as_inputs(example_inputs, kwargs)
    for difference in describe_differences(model, inputs):
        warnings.warn(ScalepointWarning(difference), stacklevel=user_level())
    request = ExportRequest(inputs, file_target, float_file, dtype, dynamic, metadata=file_metadata)
    file_format.write(model, path, request)
    return path


def _check_suffix(path: Path, file_format: FileFormat, target: Target | None) -> None:
    if path.suffix != file_format.suffix:
        subject = "this model is written as" if target is None else f"target {target.name!r} writes"
        raise ExportError(f"{path.name}: {subject} {file_format.name}: the file name must end in {file_format.suffix}")


def _resolve_float_dtype(float_dtype: str | torch.dtype | None, target: Target | None) -> torch.dtype:
    if target is not None:
        return target.check_float_dtype(float_dtype)
    dtype = parse_float_dtype(float_dtype)
    if dtype not in FLOAT_DTYPES:
        raise ExportError(f"float_dtype= must be {' or '.join(map(dtype_name, FLOAT_DTYPES))}, got {dtype_name(dtype)}")
    return dtype
