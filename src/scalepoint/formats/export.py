"""export: a quantized model as the file that its target runs."""

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
    """Write a quantized model to a file in the format of its target. The file appears whole or not at all.

    Args:
        model: The quantized model.
        path: The file to write.
        example_inputs: Inputs like those of the capture.
        kwargs: Keyword inputs of the model.
        target: The target to write for; that of the model by default.
        float_path: Also write the float model of the same capture to this file, for comparison.
        float_dtype: "float16" or "bfloat16": the type of the scales and of everything that is not quantized, for
            compilers that follow the types of the file. Inputs and outputs stay float32.
        dynamic: Keep the batch axis free in the file.
        metadata: Labels, preprocessing and the like, stored in the file next to versions, target and config.

    Returns:
        The path of the file.
    """
    path = Path(path)
    for item in (path, *(() if float_path is None else (Path(float_path),))):
        check_path(item, "path")
    model_target = record_of(model).target if has_record(model) else None
    chosen = find_target(target) if target is not None else model_target
    if chosen is not None and model_target is not None and chosen.name != model_target.name:
        raise ExportError(
            f"the quantizers of this model were placed for {model_target.name!r}: "
            f"transform and insert for {chosen.name!r} anew"
        )
    file_format = find_format("onnx" if chosen is None else chosen.format)
    for item in (path, *((Path(float_path),) if float_path is not None else ())):
        _check_suffix(item, file_format, chosen)
        item.parent.mkdir(parents=True, exist_ok=True)
    dtype, file_metadata = (
        _resolve_float_dtype(float_dtype, chosen),
        build_metadata(model, chosen, metadata),
    )
    float_file = None if float_path is None else Path(float_path)
    inputs = as_inputs(example_inputs, kwargs)
    for item in describe_differences(model, inputs):
        warnings.warn(ScalepointWarning(item), stacklevel=user_level())
    file_format.write(model, path, ExportRequest(inputs, chosen, float_file, dtype, dynamic, metadata=file_metadata))
    return path


def _check_suffix(path: Path, file_format: FileFormat, target: Target | None) -> None:
    """By its name a file is known to runtimes and people."""
    if path.suffix != file_format.suffix:
        subject = "this model is written as" if target is None else f"target {target.name!r} writes"
        raise ExportError(f"{path.name}: {subject} {file_format.name}, in files that end in {file_format.suffix}")


def _resolve_float_dtype(float_dtype: str | torch.dtype | None, target: Target | None) -> torch.dtype:
    if target is not None:
        return target.check_float_dtype(float_dtype)
    dtype = parse_float_dtype(float_dtype)
    if dtype not in FLOAT_DTYPES:
        raise ExportError(f"float_dtype={dtype_name(dtype)}: use {' or '.join(map(dtype_name, FLOAT_DTYPES))}")
    return dtype
