"""Compare a Core ML file with its model bit by bit: codes and their dtype, scales, zero points, palette tables.

coremltools reads the file back, so this finds what its converter, one of its passes or a later edit has changed.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from scalepoint.formats.apple.coreml.package import read_operations, read_spec, without_warnings
from scalepoint.formats.apple.describe_unequal import describe_unequal
from scalepoint.formats.apple.stored import (
    StoredPalette,
    StoredStub,
    StoredWeight,
    build_coreml_graph,
    operation_label,
)
from scalepoint.spec.spec import to_dtype

_NUMBER_SUFFIX = re.compile(r"_\d+$")
_FLOAT16_SUFFIX = "_cast_fp16"  # coremltools appends it to the names of operations that it casts to float16


def compare_with_model(path: Path, model: fx.GraphModule) -> list[str]:
    """Return one sentence for every tensor that differs between file and model; an empty list if all are equal."""
    metadata = dict(read_spec(path).description.metadata.userDefined)
    scale_dtype = to_dtype(metadata.get("scalepoint.float_dtype", "float32"))
    stored = build_coreml_graph(model, scale_dtype)
    operations = read_operations(path)
    with without_warnings():
        weights = {
            op.name.removesuffix(_FLOAT16_SUFFIX): op for op in operations if op.op_type.startswith("constexpr_")
        }
        quantizers = [op for op in operations if op.op_type == "quantize"]
        return [*_compare_weights(stored, weights, scale_dtype), *_compare_stubs(stored, quantizers, scale_dtype)]


def _compare_weights(stored: fx.GraphModule, operations: dict[str, Any], scale_dtype: torch.dtype) -> Iterator[str]:
    for path, module in stored.named_modules():
        if not isinstance(module, StoredWeight | StoredPalette):
            continue
        op = operations.get(operation_label(path))
        if op is not None:
            yield from _compare_weight(path, module, op, scale_dtype)
        elif not any(_has_weight(candidate, path, module, scale_dtype) for candidate in operations.values()):
            yield f"{path}: its weight is not in the file as codes"


def _has_weight(op: Any, path: str, module: StoredWeight | StoredPalette, scale_dtype: torch.dtype) -> bool:
    """Whether an operation with another name holds this weight: coremltools stores equal constants once."""
    if _declared_type(op) != module.fmt or tuple(op.outputs[0].shape) != tuple(module.codes.shape):
        return False
    return not any(_compare_weight(path, module, op, scale_dtype))


def _compare_weight(
    path: str, module: StoredWeight | StoredPalette, op: Any, scale_dtype: torch.dtype
) -> Iterator[str]:
    file_dtype = _declared_type(op)
    if file_dtype != module.fmt:
        yield f"{path}: its codes are {file_dtype} in the file, {module.fmt} in the model"
    yield from describe_unequal(path, "codes", _to_dense(op), module.codes)
    if isinstance(module, StoredPalette):
        table = op.inputs.get("lut")
        entries = np.zeros(0) if table is None else table.val
        expected = module.tables.to(scale_dtype)
        yield from describe_unequal(path, "entries", np.asarray(entries).reshape(-1), expected.reshape(-1))
        return
    scale, zero_point = module.broadcast_parameters()
    file_scale = np.asarray(op.scale.val)
    if file_scale.size not in (1, scale.numel()):
        yield f"{path}: {file_scale.size} scales in the file, {scale.numel()} in the model"
        return
    yield from describe_unequal(path, "scales", _reshape_like_scale(file_scale, scale), scale.to(scale_dtype))
    yield from describe_unequal(
        path,
        "zero points",
        _reshape_like_scale(_read_zero_point(op), scale),
        torch.zeros_like(scale) if zero_point is None else zero_point,
    )


def _compare_stubs(stored: fx.GraphModule, operations: list[Any], scale_dtype: torch.dtype) -> Iterator[str]:
    stubs = {
        operation_label(path): (path, module)
        for path, module in stored.named_modules()
        if isinstance(module, StoredStub)
    }
    compared = set()
    for op in operations:
        name = op.name.removesuffix(_FLOAT16_SUFFIX)
        if name not in stubs:  # coremltools numbers the operations of a stub that is called several times
            name = _NUMBER_SUFFIX.sub("", name)
        if name not in stubs:
            yield f"{op.name}: the file quantizes here, the model does not"
            continue
        path, stub = stubs[name]
        compared.add(name)
        yield from describe_unequal(path, "scale", op.scale.val, stub.scale.to(scale_dtype))
        zero_point = 0 if op.zero_point is None else op.zero_point.val
        yield from describe_unequal(path, "zero point", zero_point, stub.zero_point)
        if op.output_dtype.val != stub.fmt:
            yield f"{path}: its codes are {op.output_dtype.val} in the file, {stub.fmt} in the model"
    for name, (path, _) in stubs.items():
        if name not in compared:
            yield f"{path}: the file does not quantize here"


_CODES_INPUT = {  # operation of MIL -> its input that holds the codes
    "constexpr_affine_dequantize": "quantized_data",
    "constexpr_blockwise_shift_scale": "data",
    "constexpr_lut_to_dense": "indices",
    "constexpr_sparse_blockwise_shift_scale": "nonzero_data",
}


def _read_codes(op: Any) -> Any:
    return op.inputs[_CODES_INPUT[op.op_type]]


def _to_dense(op: Any) -> Any:
    """Return the codes of a weight, with the zeros that a sparse weight omits."""
    codes = _read_codes(op).val
    if "data_mask" not in op.inputs:
        return codes
    is_nonzero = np.asarray(op.data_mask.val).astype(bool)
    dense = np.zeros(is_nonzero.shape, np.int8 if codes.dtype.kind == "i" else np.uint8)
    dense[is_nonzero] = codes
    return dense


def _declared_type(op: Any) -> str:
    """Return the dtype that the file declares for the codes, such as "int4"; numpy stores them as int8."""
    from coremltools.converters.mil.mil import types  # noqa: PLC0415

    return str(types.builtin_to_string(_read_codes(op).dtype))


def _read_zero_point(op: Any) -> Any:
    zero_point = op.zero_point if op.op_type == "constexpr_affine_dequantize" else op.offset
    return 0 if zero_point is None else zero_point.val


def _reshape_like_scale(value: Any, scale: Tensor) -> np.ndarray:
    """Reshape to the axes of `scale`: constexpr_affine_dequantize has a scalar or one axis."""
    array = np.asarray(value)
    return np.broadcast_to(array, tuple(scale.shape)) if array.ndim == 0 else array.reshape(tuple(scale.shape))
