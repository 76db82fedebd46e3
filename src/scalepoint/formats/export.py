"""export: a quantized model as the file that its target runs."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx

from scalepoint.errors import ExportError, ScalepointWarning
from scalepoint.formats.format import FileFormat, Writing
from scalepoint.formats.metadata import metadata_of
from scalepoint.formats.otherwise import otherwise
from scalepoint.formats.registry import find_format
from scalepoint.graph.capture import as_inputs
from scalepoint.graph.user_traceback import user_level
from scalepoint.numerics import dtype_name
from scalepoint.quantize.record import has_record, record_of
from scalepoint.support.output_folder import check_path
from scalepoint.support.torch_state import serialized
from scalepoint.targets import Target, find_target
from scalepoint.targets.target import parse_float_dtype

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


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
    """Write the model to `path` in its target's format; the file appears whole or not at all. Returns the path.

    `target` is that of the model unless given. `float_path` receives the float model of the same capture, to compare.
    `float_dtype` ("float16", "bfloat16") is the type of what is not quantized and of the scales, for compilers that
    run the types of the file; inputs and outputs stay float32. `metadata` (labels, preprocessing, ...) is kept in the
    file, beside versions, target, config and calibration; `about` reads it.
    """
    path = Path(path)
    for each in (path, *(() if float_path is None else (Path(float_path),))):
        check_path(each, "path")
    own = record_of(model).target if has_record(model) else None
    chosen = find_target(target) if target is not None else own
    if chosen is not None and own is not None and chosen.name != own.name:
        raise ExportError(
            f"the quantizers of this model were placed for {own.name!r}: transform and insert for {chosen.name!r} anew"
        )
    form = find_format("onnx" if chosen is None else chosen.format)
    for each in (path, *((Path(float_path),) if float_path is not None else ())):
        _check_suffix(each, form, chosen)
        each.parent.mkdir(parents=True, exist_ok=True)
    kind, said = _float_type(float_dtype, chosen), metadata_of(model, chosen, metadata)
    beside = None if float_path is None else Path(float_path)
    inputs = as_inputs(example_inputs, kwargs)
    for each in otherwise(model, inputs):
        warnings.warn(ScalepointWarning(each), stacklevel=user_level())
    form.write(model, path, Writing(inputs, chosen, beside, kind, dynamic, metadata=said))
    return path


def _check_suffix(path: Path, form: FileFormat, target: Target | None) -> None:
    """By its name a file is known to runtimes and people."""
    if path.suffix != form.suffix:
        who = "this model is written as" if target is None else f"target {target.name!r} writes"
        raise ExportError(f"{path.name}: {who} {form.name}, in files that end in {form.suffix}")


def _float_type(given: str | torch.dtype | None, target: Target | None) -> torch.dtype:
    if target is not None:
        return target.check_float_dtype(given)
    kind = parse_float_dtype(given)
    if kind not in FLOATS:
        raise ExportError(f"float_dtype={dtype_name(kind)}: use {' or '.join(map(dtype_name, FLOATS))}")
    return kind
