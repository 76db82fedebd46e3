"""A Core ML file against its model, bit by bit: codes and their width, scales, zero points, tables.

What is written is read back by coremltools, so this finds what a converter, a pass or a later hand has changed.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from scalepoint.formats.apple.package import read_operations, read_spec, without_warnings
from scalepoint.formats.apple.stored import (
    CoreMlStoredPalette,
    CoreMlStoredStub,
    CoreMlStoredWeight,
    build_coreml_graph,
    operation_label,
)
from scalepoint.spec.spec import to_dtype

_NUMBER_SUFFIX = re.compile(r"_\d+$")
_FLOAT16_SUFFIX = "_cast_fp16"  # what coremltools adds to the name of what it narrows


def compare_with_model(path: Path, model: fx.GraphModule) -> list[str]:
    """In words, one for every tensor that the file does not hold as the model does; none: all are equal."""
    said = dict(read_spec(path).description.metadata.userDefined)
    kind = to_dtype(said.get("scalepoint.float_dtype", "float32"))
    stored = build_coreml_graph(model, kind)
    operations = read_operations(path)
    with without_warnings():
        weights = {
            op.name.removesuffix(_FLOAT16_SUFFIX): op for op in operations if op.op_type.startswith("constexpr_")
        }
        quantizers = [op for op in operations if op.op_type == "quantize"]
        return [*_compare_weights(stored, weights, kind), *_compare_stubs(stored, quantizers, kind)]


def _compare_weights(stored: fx.GraphModule, found: dict[str, Any], kind: torch.dtype) -> Iterator[str]:
    for path, module in stored.named_modules():
        if not isinstance(module, CoreMlStoredWeight | CoreMlStoredPalette):
            continue
        op = found.get(operation_label(path))
        if op is not None:
            yield from _compare_weight(path, module, op, kind)
        elif not any(_is_equal(path, module, each, kind) for each in found.values()):
            yield f"{path}: its weight is not in the file as codes"


def _is_equal(path: str, module: CoreMlStoredWeight | CoreMlStoredPalette, op: Any, kind: torch.dtype) -> bool:
    """Whether an operation under another name has this weight: coremltools stores equal constants once."""
    is_candidate = _declared_type(op) == module.fmt and tuple(op.outputs[0].shape) == tuple(module.codes.shape)
    return is_candidate and not any(_compare_weight(path, module, op, kind))


def _compare_weight(
    path: str, module: CoreMlStoredWeight | CoreMlStoredPalette, op: Any, kind: torch.dtype
) -> Iterator[str]:
    if (stored_in := _declared_type(op)) != module.fmt:
        yield f"{path}: its codes are stored as {stored_in}, not as {module.fmt}"
    yield from _describe_unequal(path, "codes", _to_dense(op), module.codes)
    if isinstance(module, CoreMlStoredPalette):
        held = op.inputs.get("lut")
        values = np.zeros(0) if held is None else held.val
        tables = module.tables.to(kind)
        yield from _describe_unequal(path, "entries", np.asarray(values).reshape(-1), tables.reshape(-1))
        return
    scale, zero = module.broadcast_parameters()
    held_scale = np.asarray(op.scale.val)
    if held_scale.size not in (1, scale.numel()):
        yield f"{path}: {held_scale.size} scales in the file, {scale.numel()} in the model"
        return
    yield from _describe_unequal(path, "scales", _reshape_like_scale(held_scale, scale), scale.to(kind))
    yield from _describe_unequal(
        path,
        "zero points",
        _reshape_like_scale(_read_zero_point(op), scale),
        torch.zeros_like(scale) if zero is None else zero,
    )


def _compare_stubs(stored: fx.GraphModule, found: list[Any], kind: torch.dtype) -> Iterator[str]:
    stubs = {
        operation_label(path): (path, each)
        for path, each in stored.named_modules()
        if isinstance(each, CoreMlStoredStub)
    }
    seen = set()
    for op in found:
        name = op.name.removesuffix(_FLOAT16_SUFFIX)
        name = name if name in stubs else _NUMBER_SUFFIX.sub("", name)
        if name not in stubs:
            yield f"{op.name}: the file quantizes here, the model does not"
            continue
        path, stub = stubs[name]
        seen.add(name)
        yield from _describe_unequal(path, "scale", op.scale.val, stub.scale.to(kind))
        zero = 0 if op.zero_point is None else op.zero_point.val
        yield from _describe_unequal(path, "zero point", zero, stub.zero_point)
        if op.output_dtype.val != stub.fmt:
            yield f"{path}: codes of {op.output_dtype.val} in the file, of {stub.fmt} in the model"
    yield from (f"{path}: the file does not quantize here" for name, (path, _) in stubs.items() if name not in seen)


_CODES = {
    "constexpr_affine_dequantize": "quantized_data",
    "constexpr_blockwise_shift_scale": "data",
    "constexpr_lut_to_dense": "indices",
    "constexpr_sparse_blockwise_shift_scale": "nonzero_data",
}


def _read_codes(op: Any) -> Any:
    return op.inputs[_CODES[op.op_type]]


def _to_dense(op: Any) -> Any:
    """The codes with the zeros that a sparse weight leaves away."""
    held = _read_codes(op).val
    if "data_mask" not in op.inputs:
        return held
    is_kept = np.asarray(op.data_mask.val).astype(bool)
    dense = np.zeros(is_kept.shape, np.int8 if held.dtype.kind == "i" else np.uint8)
    dense[is_kept] = held
    return dense


def _declared_type(op: Any) -> str:
    """int4, from the type that the file declares."""
    from coremltools.converters.mil.mil import types  # noqa: PLC0415

    return str(types.builtin_to_string(_read_codes(op).dtype))


def _read_zero_point(op: Any) -> Any:
    held = op.zero_point if op.op_type == "constexpr_affine_dequantize" else op.offset
    return 0 if held is None else held.val


def _reshape_like_scale(value: Any, scale: Tensor) -> np.ndarray:
    """With the axes of the scale: an affine one is a number or a row."""
    array = np.asarray(value)
    return np.broadcast_to(array, tuple(scale.shape)) if array.ndim == 0 else array.reshape(tuple(scale.shape))


def _describe_unequal(path: str, what: str, held: Any, wanted: Tensor) -> Iterator[str]:
    expected = wanted.detach().numpy()
    array = np.asarray(held)
    array = array.astype(expected.dtype) if array.dtype != expected.dtype else array
    if array.shape != expected.shape:
        yield f"{path}: {what} of shape {array.shape} in the file, {expected.shape} in the model"
    elif array.tobytes() != np.ascontiguousarray(expected).tobytes():
        places = np.flatnonzero(array.reshape(-1) != expected.reshape(-1))
        at = int(places[0]) if len(places) else 0
        yield (
            f"{path}: {len(places)} of {array.size} {what} are others in the file, the first "
            f"{array.reshape(-1)[at]} instead of {expected.reshape(-1)[at]}"
        )
