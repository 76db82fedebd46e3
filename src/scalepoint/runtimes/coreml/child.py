"""Child program that runs an .mlpackage in Core ML on macOS, or evaluates it elsewhere.

`child_loop.py` starts it. It imports nothing of scalepoint. An evaluation follows the definitions of the MIL operations
and computes in float32 even if the file says float16, because the rounding of float16 sums depends on the device.
Codes, scales and tables of weights are unpacked by coremltools.
"""

import inspect
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np

logging.disable(logging.WARNING)  # coremltools warns about the version of torch and about parts that need a Mac
warnings.simplefilter("ignore")

# coremltools imports these packages if they are installed, which takes seconds. None makes an import fail.
OPTIONAL_IMPORTS = ("executorch", "sklearn", "tensorflow", "torchao", "transformers", "xgboost")
HIDDEN = [name for name in OPTIONAL_IMPORTS if name not in sys.modules]
sys.modules |= dict.fromkeys(HIDDEN)  # type: ignore[arg-type]
import coremltools  # noqa: E402
import torch  # noqa: E402
from coremltools.converters.mil.frontend.milproto.load import load  # noqa: E402
from torch.nn import functional as F  # noqa: E402

for name in HIDDEN:
    del sys.modules[name]

WEIGHTED_OPERATIONS = ("conv", "conv_transpose", "linear", "matmul")
MODEL_FOLDER = Path("Data") / "com.apple.CoreML"


class NotEvaluatedError(Exception):
    """The file has an operation that this program cannot evaluate. The file may be correct."""


class File:
    """A loaded package. Options: threads (0: torch chooses)."""

    gaps = (NotEvaluatedError,)

    def __init__(self, path: str, options: dict[str, Any]) -> None:
        if options.get("threads"):
            torch.set_num_threads(options["threads"])
        self.spec = coremltools.proto.Model_pb2.Model()
        self.spec.ParseFromString((Path(path) / MODEL_FOLDER / "model.mlmodel").read_bytes())
        self.inputs = [feature.name for feature in self.spec.description.input]
        self.outputs = [feature.name for feature in self.spec.description.output]
        self.operations = _read_operations(self.spec, Path(path) / MODEL_FOLDER / "weights")
        self.model = coremltools.models.MLModel(path) if sys.platform == "darwin" else None

    def run(self, feeds: dict[str, np.ndarray]) -> list[tuple[str, np.ndarray]]:
        for feature in self.spec.description.input:
            shape, expected = feeds[feature.name].shape, tuple(feature.type.multiArrayType.shape)
            if shape != expected:
                raise ValueError(
                    f"input {feature.name} has shape {shape}: the file takes only the shape of its example, {expected}"
                )
        if self.model is not None:
            outputs = self.model.predict({name: _narrow_integers(value) for name, value in feeds.items()})
            return [(name, np.asarray(outputs[name])) for name in self.outputs]
        values = {name: torch.from_numpy(np.array(_narrow_integers(feeds[name]))) for name in self.inputs}
        with torch.inference_mode():
            for op in self.operations:
                _evaluate(op, values)
        return [(name, values[name].numpy()) for name in self.outputs]

    def executed(self) -> list[dict[str, Any]]:
        """Return the operations of the file. Core ML decides only on the device where they run."""
        return [_describe_operation(op) for op in self.operations if op.op_type != "const"]


def _read_operations(spec: Any, weights: Path) -> list[Any]:
    program = load(spec, spec.specificationVersion, file_weights_dir=str(weights))
    return list(program.functions["main"].operations)


def _narrow_integers(value: np.ndarray) -> np.ndarray:
    """Convert int64 to int32: Core ML has no int64."""
    return value.astype(np.int32) if value.dtype == np.int64 else value


def _describe_operation(op: Any) -> dict[str, Any]:
    """Describe an operation. It runs in low precision if its weight is stored compressed (constexpr_...).

    "low" is None for an operation without a constant weight.
    """
    name, kind = op.outputs[0].name, op.op_type
    weight = op.inputs.get("weight", op.inputs.get("y"))
    is_compressed = weight is not None and _is_produced_by(weight, "constexpr_")
    is_constant = weight is not None and (weight.val is not None or is_compressed)
    if kind not in WEIGHTED_OPERATIONS or not is_constant:
        return {"name": name, "op": kind, "low": None, "why": ""}
    if not is_compressed:
        return {"name": name, "op": kind, "low": False, "why": "float weights"}
    data = "codes" if _is_produced_by(op.inputs["x"], "dequantize") else "float"
    return {"name": name, "op": f"{kind}, narrow weights x {data}", "low": True, "why": ""}


def _is_produced_by(value: Any, kind: str) -> bool:
    return value.op is not None and value.op.op_type.startswith(kind)


def _evaluate(op: Any, values: dict[str, torch.Tensor]) -> None:
    """Evaluate one operation. Its operands are read from `values`, and its results are added to `values`."""
    results = [output.val for output in op.outputs]  # not None for constants
    if op.op_type.startswith("constexpr_"):
        unpacked = op.materialized_val_inference()
        results = list(unpacked) if isinstance(unpacked, tuple) else [unpacked]
    if any(result is None for result in results):
        if op.op_type not in OPERATIONS:
            raise NotEvaluatedError(f"{op.op_type} ({op.name}) can only be checked on macOS, where Core ML runs it")
        arguments = {name: _read_operand(value, values) for name, value in op.inputs.items() if value is not None}
        _check_arguments(op, arguments)
        result = OPERATIONS[op.op_type](**arguments)
        results = list(result) if isinstance(result, tuple) else [result]
    for output, value in zip(op.outputs, results, strict=True):
        values[output.name] = value if isinstance(value, torch.Tensor) else _to_tensor(value)


def _check_arguments(op: Any, arguments: dict[str, Any]) -> None:
    """Raise NotEvaluatedError if the function here lacks an argument that the operation has."""
    try:
        inspect.signature(OPERATIONS[op.op_type]).bind(**arguments)
    except TypeError as error:
        raise NotEvaluatedError(
            f"{op.op_type} ({op.name}) with these settings can only be checked on macOS, where Core ML runs it: {error}"
        ) from error


def _read_operand(value: Any, values: dict[str, torch.Tensor]) -> Any:
    """Return an operand as a tensor, or as a plain Python value if it is a setting such as `axis`."""
    if isinstance(value, list | tuple):
        return [_read_operand(element, values) for element in value]
    if value.name in values:
        return values[value.name]
    constant = value.val
    is_float = isinstance(constant, np.ndarray | np.floating) and np.asarray(constant).dtype.kind == "f"
    return _to_tensor(constant) if is_float else constant


def _to_tensor(value: Any) -> Any:
    """Convert a constant to a tensor: floats become float32, integers that torch lacks become int32."""
    if isinstance(value, str | list | tuple):
        return value
    array = np.asarray(value)
    if array.dtype.kind == "f":
        array = array.astype(np.float32)
    elif array.dtype not in (np.bool_, np.int8, np.uint8, np.int32, np.int64):
        array = array.astype(np.int32)
    return torch.from_numpy(np.array(array))


def _to_python(value: Any) -> Any:
    """Convert a tensor, array or numpy number to a Python number or list."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.tolist()
    return value.item() if isinstance(value, np.generic) else value


def _as_tensor(value: Any, partner: Any = None) -> torch.Tensor:
    """Convert an operand to a tensor. An integer operand becomes float if its partner is a float tensor."""
    tensor = value if isinstance(value, torch.Tensor) else _to_tensor(value)
    if isinstance(partner, torch.Tensor) and partner.is_floating_point() and not tensor.is_floating_point():
        return tensor.to(partner.dtype)
    return tensor


# -- MIL operations that need more than one expression -----------------------------------------------------------------


def quantize(input: torch.Tensor, scale: Any, output_dtype: str, zero_point: Any = None, axis: Any = None) -> Any:  # noqa: A002
    """clip(round(input / scale) + zero_point)"""
    scale = _align(scale, input, axis)
    zero_point = 0 if zero_point is None else _align(zero_point, input, axis)
    low, high = (0, 255) if output_dtype == "uint8" else (-128, 127)
    codes = (torch.round(input / scale) + zero_point).clamp(low, high)
    return codes.to(torch.uint8 if output_dtype == "uint8" else torch.int8)


def dequantize(input: torch.Tensor, scale: Any, zero_point: Any = None, axis: Any = None) -> torch.Tensor:  # noqa: A002
    """(input - zero_point) * scale"""
    shift: Any = 0 if zero_point is None else _align(zero_point, input, axis)
    values: torch.Tensor = (input.to(torch.float32) - shift) * _align(scale, input, axis)
    return values


def _align(value: Any, tensor: torch.Tensor, axis: Any) -> torch.Tensor:
    """Reshape a scalar, or a vector with one value per index of `axis`, so that it broadcasts to the tensor."""
    values = _as_tensor(value).to(torch.float32)
    shape = [1] * tensor.ndim
    if values.ndim:
        shape[int(axis)] = -1
    return values.view(shape)


def _pad_windows(
    x: torch.Tensor, pad_type: str, pad: Any, window_sizes: Any, strides: Any, value: float = 0.0
) -> torch.Tensor:
    """Pad the input of a convolution or pool. `window_sizes` include the dilation.

    "same" and "same_lower" keep ceil(size / stride) windows; they put an odd element after or before the data.
    """
    if pad_type == "valid":
        return x
    if pad_type == "custom":
        borders = [int(border) for border in pad]
    else:
        borders = []
        for size, window_size, stride in zip(x.shape[2:], window_sizes, strides, strict=True):
            total = max((-(-size // stride) - 1) * stride + window_size - size, 0)
            smaller, larger = total // 2, total - total // 2
            borders += [smaller, larger] if pad_type == "same" else [larger, smaller]
    torch_borders = _reverse_pairs(borders)
    return F.pad(x, torch_borders, value=value) if any(torch_borders) else x


def _reverse_pairs(borders: list[int]) -> list[int]:
    """Reorder (before, after) pairs from the first axis first (MIL) to the last axis first (torch)."""
    pairs = [borders[index : index + 2] for index in range(0, len(borders), 2)]
    return [border for pair in reversed(pairs) for border in pair]


def conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    strides: Any = None,
    pad_type: str = "valid",
    pad: Any = None,
    dilations: Any = None,
    groups: Any = 1,
    bias: Any = None,
) -> torch.Tensor:
    axes = x.ndim - 2
    strides = [1] * axes if strides is None else _to_python(strides)
    dilations = [1] * axes if dilations is None else _to_python(dilations)
    window_sizes = [(size - 1) * dilation + 1 for size, dilation in zip(weight.shape[2:], dilations, strict=True)]
    x = _pad_windows(x, pad_type, pad, window_sizes, strides)
    convolve = (F.conv1d, F.conv2d, F.conv3d)[axes - 1]
    return convolve(x, weight, bias, stride=strides, dilation=dilations, groups=int(groups))


def conv_transpose(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Any = None,
    pad: Any = None,
    output_shape: Any = None,
    pad_type: str = "valid",
    strides: Any = None,
    dilations: Any = None,
    groups: Any = 1,
) -> torch.Tensor:
    axes = x.ndim - 2
    strides = [1] * axes if strides is None else _to_python(strides)
    dilations = [1] * axes if dilations is None else _to_python(dilations)
    convolve = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[axes - 1]
    output = convolve(x, weight, bias, stride=strides, dilation=dilations, groups=int(groups))
    borders = [0] * (2 * axes)
    if pad is not None and pad_type == "custom":
        borders = [int(border) for border in pad]
    expected_sizes = None if output_shape is None else _to_python(output_shape)[2:]
    for index, (before, after) in enumerate(zip(borders[::2], borders[1::2], strict=True)):
        axis = index + 2
        size = output.shape[axis] - before - after if expected_sizes is None else expected_sizes[index]
        missing = before + size - output.shape[axis]
        if missing > 0:  # output padding beyond the last window, where only the bias counts
            output = torch.cat([output, _bias_border(output, axis, missing, bias)], axis)
        output = output.narrow(axis, before, size)
    return output


def _bias_border(x: torch.Tensor, axis: int, size: int, bias: Any) -> torch.Tensor:
    """Return a tensor like x, but with this size along the axis, that contains the bias of each channel."""
    shape = list(x.shape)
    shape[axis] = size
    values = torch.zeros(x.shape[1]) if bias is None else bias
    return values.view(1, -1, *(1 for _ in shape[2:])).expand(shape)


def max_pool(
    x: Any, kernel_sizes: Any, strides: Any = None, pad_type: str = "valid", pad: Any = None, ceil_mode: Any = None
) -> Any:
    sizes = _to_python(kernel_sizes)
    strides = sizes if strides is None else _to_python(strides)
    padded = _pad_windows(x, pad_type, pad, sizes, strides, float("-inf"))
    pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[x.ndim - 3]
    return pool(padded, sizes, strides, ceil_mode=bool(ceil_mode))


def avg_pool(
    x: Any,
    kernel_sizes: Any,
    strides: Any = None,
    pad_type: str = "valid",
    pad: Any = None,
    exclude_padding_from_average: Any = False,
    ceil_mode: Any = None,
) -> Any:
    sizes, ceil = _to_python(kernel_sizes), bool(ceil_mode)
    strides = sizes if strides is None else _to_python(strides)
    padded = _pad_windows(x, pad_type, pad, sizes, strides)
    pool = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[x.ndim - 3]
    mean = pool(padded, sizes, strides, ceil_mode=ceil)
    if not exclude_padding_from_average or padded is x:
        return mean
    padded_ones = _pad_windows(torch.ones_like(x), pad_type, pad, sizes, strides)
    return mean / pool(padded_ones, sizes, strides, ceil_mode=ceil)


def slice_by_index(
    x: Any,
    begin: Any,
    end: Any,
    stride: Any = None,
    begin_mask: Any = None,
    end_mask: Any = None,
    squeeze_mask: Any = None,
) -> Any:
    begin, end = _to_python(begin), _to_python(end)
    steps = [1] * x.ndim if stride is None else _to_python(stride)
    ignores_begin, ignores_end, squeezes = (
        [False] * x.ndim if mask is None else _to_python(mask) for mask in (begin_mask, end_mask, squeeze_mask)
    )
    for axis in range(x.ndim):
        if squeezes[axis]:
            x = x.narrow(axis, begin[axis] % x.shape[axis], 1)
            continue
        start = None if ignores_begin[axis] else begin[axis]
        stop = None if ignores_end[axis] else end[axis]
        first, last, step = slice(start, stop, steps[axis]).indices(x.shape[axis])
        x = x.index_select(axis, torch.arange(first, last, step))
    squeezed_axes = [axis for axis in range(x.ndim) if squeezes[axis]]
    return x.squeeze(squeezed_axes) if squeezed_axes else x


def split(x: Any, axis: Any, num_splits: Any = None, split_sizes: Any = None) -> tuple[Any, ...]:
    sizes = _to_python(split_sizes) if split_sizes is not None else x.shape[int(axis)] // int(num_splits)
    return tuple(x.split(sizes, int(axis)))


def gather(x: Any, indices: Any, axis: Any = 0, batch_dims: Any = 0, validate_indices: Any = False) -> Any:
    axis, indices = int(axis), _as_tensor(indices).long()
    if int(batch_dims):
        raise NotEvaluatedError("gather with batch_dims can only be checked on macOS, where Core ML runs it")
    positive = torch.where(indices < 0, indices + x.shape[axis], indices)
    slices = x.index_select(axis, positive.reshape(-1))
    return slices.reshape(*x.shape[:axis], *positive.shape, *x.shape[axis + 1 :])


def layer_norm(x: Any, axes: Any = None, gamma: Any = None, beta: Any = None, epsilon: Any = 1e-5) -> Any:
    axes = list(range(x.ndim)) if axes is None else _to_python(axes)
    return F.layer_norm(x, [x.shape[axis] for axis in axes], gamma, beta, float(epsilon))


def batch_norm(x: Any, mean: Any, variance: Any, gamma: Any = None, beta: Any = None, epsilon: Any = 1e-5) -> Any:
    return F.batch_norm(x, mean, variance, gamma, beta, eps=float(epsilon))


def instance_norm(x: Any, gamma: Any = None, beta: Any = None, epsilon: Any = 1e-5) -> Any:
    return F.instance_norm(x, weight=gamma, bias=beta, eps=float(epsilon))


def pad(x: Any, pad: Any, mode: str = "constant", constant_val: Any = 0.0) -> Any:
    borders = _reverse_pairs(_to_python(pad))
    if mode == "constant":
        return F.pad(x, borders, value=float(_to_python(constant_val)))
    while len(borders) > 2 and not any(borders[-2:]):  # torch reflects and replicates only the last axes
        borders = borders[:-2]
    return F.pad(x, borders, mode=mode)


def attention(query: Any, key: Any, value: Any, attn_mask: Any = None) -> Any:
    return F.scaled_dot_product_attention(query, key, value, None if attn_mask is None else _as_tensor(attn_mask))


def matmul(x: Any, y: Any, transpose_x: Any = False, transpose_y: Any = False) -> Any:
    x, y = _as_tensor(x), _as_tensor(y)
    x = x.transpose(-1, -2) if transpose_x else x
    y = y.transpose(-1, -2) if transpose_y else y
    return x @ y


def cast(x: Any, dtype: str) -> Any:
    dtypes = {"bool": torch.bool, "int32": torch.int32, "int16": torch.int32, "uint16": torch.int32}
    return _as_tensor(x).to(dtypes.get(dtype, torch.float32))


def select(cond: Any, a: Any, b: Any) -> Any:
    return torch.where(_as_tensor(cond).bool(), _as_tensor(a, b), _as_tensor(b, a))


def upsample(x: Any, scale_factor_height: Any = 1, scale_factor_width: Any = 1) -> Any:
    factors = [float(scale_factor_height), float(scale_factor_width)]
    return F.interpolate(x, scale_factor=factors, mode="nearest")


def _find_index(find: Any, axis: Any, keep_dims: Any) -> torch.Tensor:
    return find(int(axis), bool(keep_dims)).to(torch.int32)  # type: ignore[no-any-return]


def _channels(values: Any, x: torch.Tensor) -> torch.Tensor:
    """Reshape one value per channel so that it broadcasts along the second axis of x."""
    return _as_tensor(values).view(-1, *(1 for _ in x.shape[2:]))


def _reshape(x: Any, shape: list[int]) -> Any:
    """Reshape; a size of 0 keeps the size of the input."""
    sizes = [x.shape[axis] if size == 0 else size for axis, size in enumerate(shape)]
    return x.reshape(sizes)


def _expand_dims(x: Any, axes: Any) -> Any:
    for axis in sorted(axis % (x.ndim + len(axes)) for axis in axes):
        x = x.unsqueeze(axis)
    return x


def _crop(x: Any, borders: Any) -> Any:
    top, bottom, left, right = borders
    return x[..., top : x.shape[-2] - bottom, left : x.shape[-1] - right]


def _slice_by_size(x: Any, begin: Any, sizes: Any) -> Any:
    """Slice every axis from `begin`; a size of -1 goes to the end."""
    for axis, (first, size) in enumerate(zip(begin, sizes, strict=True)):
        x = x.narrow(axis, first, x.shape[axis] - first if size == -1 else size)
    return x


def _binary(function: Any) -> Any:
    """Build an operation on two operands; an integer operand becomes float next to a float tensor."""
    return lambda x, y: function(_as_tensor(x, y), _as_tensor(y, x))


def _reduction(function: Any) -> Any:
    """Build an operation that reduces the given axes, or all axes without `axes`."""

    def reduce(x: Any, axes: Any = None, keep_dims: Any = False) -> Any:
        reduced_axes = list(range(x.ndim)) if axes is None else _to_python(axes)
        return function(x, reduced_axes, bool(keep_dims))

    return reduce


# Functions by MIL operation. Their parameters have the names of MIL, see `_check_arguments`.
OPERATIONS: dict[str, Any] = {
    "quantize": quantize,
    "dequantize": dequantize,
    "conv": conv,
    "conv_transpose": conv_transpose,
    "linear": lambda x, weight, bias=None: F.linear(x, weight, bias),
    "matmul": matmul,
    "scaled_dot_product_attention": attention,
    "max_pool": max_pool,
    "avg_pool": avg_pool,
    "layer_norm": layer_norm,
    "batch_norm": batch_norm,
    "instance_norm": instance_norm,
    "relu": lambda x: x.relu(),
    "relu6": lambda x: x.clamp(0, 6),
    "clip": lambda x, alpha, beta: x.clamp(float(alpha), float(beta)),
    "leaky_relu": lambda x, alpha: F.leaky_relu(x, float(alpha)),
    "prelu": lambda x, alpha: F.prelu(x, alpha.to(x.dtype)),
    "elu": lambda x, alpha=1.0: F.elu(x, float(alpha)),
    "gelu": lambda x, mode="EXACT": F.gelu(x, approximate="none" if mode == "EXACT" else "tanh"),
    "silu": lambda x: x * x.sigmoid(),
    "sigmoid": lambda x: x.sigmoid(),
    "sigmoid_hard": lambda x, alpha, beta: (x * float(alpha) + float(beta)).clamp(0, 1),
    "softmax": lambda x, axis=-1: x.softmax(int(axis)),
    "softplus": lambda x: F.softplus(x),  # noqa: PLW0108  # a builtin has no signature that _check_arguments could read
    "softplus_parametric": lambda x, alpha, beta: _channels(alpha, x) * F.softplus(x * _channels(beta, x)),
    "softsign": F.softsign,
    "clamped_relu": lambda x, alpha, beta: F.leaky_relu(x, float(alpha)).clamp(max=float(beta)),
    "scaled_tanh": lambda x, alpha=1.0, beta=1.0: float(alpha) * (x * float(beta)).tanh(),
    "linear_activation": lambda x, alpha, beta=0.0: x * float(alpha) + float(beta),
    "thresholded_relu": lambda x, alpha=1.0: x.where(x >= float(alpha), torch.zeros(())),
    "threshold": lambda x, alpha: x.clamp(min=float(alpha)),
    "tanh": lambda x: x.tanh(),
    "erf": lambda x: x.erf(),
    "exp": lambda x: x.exp(),
    "log": lambda x, epsilon=0.0: (x + float(epsilon)).log(),
    "sqrt": lambda x: x.sqrt(),
    "rsqrt": lambda x, epsilon=0.0: (x + float(epsilon)).rsqrt(),
    "square": lambda x: x.square(),
    "abs": lambda x: x.abs(),
    "sign": lambda x: x.sign(),
    "inverse": lambda x, epsilon=0.0: 1 / (x + float(epsilon)),
    "exp2": lambda x: x.exp2(),
    "ceil": lambda x: x.ceil(),
    "round": lambda x: x.round(),
    "tan": lambda x: x.tan(),
    "atan": lambda x: x.atan(),
    "sinh": lambda x: x.sinh(),
    "cosh": lambda x: x.cosh(),
    "sin": lambda x: x.sin(),
    "cos": lambda x: x.cos(),
    "floor": lambda x: x.floor(),
    "logical_not": lambda x: ~x.bool(),
    "add": _binary(torch.add),
    "sub": _binary(torch.sub),
    "mul": _binary(torch.mul),
    "real_div": _binary(torch.true_divide),
    "floor_div": _binary(torch.floor_divide),
    "pow": _binary(torch.pow),
    "maximum": _binary(torch.maximum),
    "minimum": _binary(torch.minimum),
    "equal": _binary(torch.eq),
    "not_equal": _binary(torch.ne),
    "greater": _binary(torch.gt),
    "greater_equal": _binary(torch.ge),
    "less": _binary(torch.lt),
    "less_equal": _binary(torch.le),
    "logical_and": _binary(torch.logical_and),
    "logical_or": _binary(torch.logical_or),
    "reduce_mean": _reduction(lambda x, axes, keep: x.mean(axes, keep)),
    "reduce_sum": _reduction(lambda x, axes, keep: x.sum(axes, keep)),
    "reduce_max": _reduction(lambda x, axes, keep: x.amax(axes, keep)),
    "reduce_min": _reduction(lambda x, axes, keep: x.amin(axes, keep)),
    "reduce_l2_norm": _reduction(lambda x, axes, keep: x.square().sum(axes, keep).sqrt()),
    "reduce_sum_square": _reduction(lambda x, axes, keep: x.square().sum(axes, keep)),
    "reduce_argmax": lambda x, axis=-1, keep_dims=False, output_dtype="int32": _find_index(x.argmax, axis, keep_dims),
    "reduce_argmin": lambda x, axis=-1, keep_dims=False, output_dtype="int32": _find_index(x.argmin, axis, keep_dims),
    "reshape": lambda x, shape: _reshape(x, _to_python(shape)),
    "transpose": lambda x, perm: x.permute(_to_python(perm)),
    "expand_dims": lambda x, axes: _expand_dims(x, _to_python(axes)),
    "squeeze": lambda x, axes=None: x.squeeze() if axes is None else x.squeeze(_to_python(axes)),
    "concat": lambda values, axis, interleave=False: torch.cat([_as_tensor(value) for value in values], int(axis)),
    "stack": lambda values, axis: torch.stack([_as_tensor(value) for value in values], int(axis)),
    "tile": lambda x, reps: x.repeat(_to_python(reps)),
    "pad": pad,
    "crop": lambda x, crop_height, crop_width: _crop(x, [*_to_python(crop_height), *_to_python(crop_width)]),
    "split": split,
    "slice_by_index": slice_by_index,
    "slice_by_size": lambda x, begin, size: _slice_by_size(x, _to_python(begin), _to_python(size)),
    "gather": gather,
    "select": select,
    "cast": cast,
    "identity": lambda x: x,
    "upsample_nearest_neighbor": upsample,
    "pixel_shuffle": lambda x, upscale_factor: F.pixel_shuffle(x, int(upscale_factor)),
}
