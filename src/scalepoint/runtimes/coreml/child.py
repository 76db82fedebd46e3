"""An .mlpackage in Core ML, or, where there is none, evaluated as MIL defines its operations; started by
`scalepoint.runtimes`, of which nothing is imported.

An evaluation is in float32, whatever type the program names: the stored numbers are the file's, the roundings of
float16 sums are a device's own. Codes, scales and tables of weights are unpacked by coremltools.
"""

import inspect
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np

logging.disable(logging.WARNING)  # of versions of torch, and of what only a Mac has
warnings.simplefilter("ignore")

# coremltools takes seconds for those that it finds
OTHERS = ("executorch", "sklearn", "tensorflow", "torchao", "transformers", "xgboost")
HIDDEN = [name for name in OTHERS if name not in sys.modules]
sys.modules |= dict.fromkeys(HIDDEN)  # type: ignore[arg-type]  # None: as if it were not installed
import coremltools  # noqa: E402
import torch  # noqa: E402
from coremltools.converters.mil.frontend.milproto.load import load  # noqa: E402
from torch.nn import functional as F  # noqa: E402

for name in HIDDEN:
    del sys.modules[name]

MULTIPLY = ("conv", "conv_transpose", "linear", "matmul")
HOME = Path("Data") / "com.apple.CoreML"


class NotEvaluatedError(Exception):
    """The file has an operation that is not evaluated here: nothing is wrong with the file."""


class File:
    """options: threads (0: as torch chooses)."""

    gaps = (NotEvaluatedError,)

    def __init__(self, path: str, options: dict[str, Any]) -> None:
        if options.get("threads"):
            torch.set_num_threads(options["threads"])
        self.spec = coremltools.proto.Model_pb2.Model()
        self.spec.ParseFromString((Path(path) / HOME / "model.mlmodel").read_bytes())
        self.inputs = [each.name for each in self.spec.description.input]
        self.outputs = [each.name for each in self.spec.description.output]
        self.operations = _operations(self.spec, Path(path) / HOME / "weights")
        self.model = coremltools.models.MLModel(path) if sys.platform == "darwin" else None

    def run(self, feeds: dict[str, np.ndarray]) -> list[tuple[str, np.ndarray]]:
        for each in self.spec.description.input:
            given, taken = feeds[each.name].shape, tuple(each.type.multiArrayType.shape)
            if given != taken:
                raise ValueError(
                    f"input {each.name} has the shape {given}: the file takes {taken}, that of its example"
                )
        if self.model is not None:
            found = self.model.predict({name: _fed(value) for name, value in feeds.items()})
            return [(name, np.asarray(found[name])) for name in self.outputs]
        values = {name: torch.from_numpy(np.array(_fed(feeds[name]))) for name in self.inputs}
        with torch.inference_mode():
            for op in self.operations:
                _evaluate(op, values)
        return [(name, values[name].numpy()) for name in self.outputs]

    def executed(self) -> list[dict[str, Any]]:
        """What the program asks for; which unit runs it, Core ML decides on the device."""
        return [_told(op) for op in self.operations if op.op_type != "const"]


def _operations(spec: Any, weights: Path) -> list[Any]:
    program = load(spec, spec.specificationVersion, file_weights_dir=str(weights))
    return list(program.functions["main"].operations)


def _fed(value: np.ndarray) -> np.ndarray:
    return value.astype(np.int32) if value.dtype == np.int64 else value


def _told(op: Any) -> dict[str, Any]:
    low = None
    kind = op.op_type
    weight = op.inputs.get("weight", op.inputs.get("y"))
    is_stored = weight is not None and (weight.val is not None or _made_by(weight, "constexpr_"))
    if kind in MULTIPLY and is_stored:
        low = _made_by(weight, "constexpr_")
        takes = "codes" if _made_by(op.inputs["x"], "dequantize") else "float"
        kind = f"{kind}, narrow weights x {takes}" if low else kind
    return {"name": op.outputs[0].name, "op": kind, "low": low, "why": "" if low is not False else "float weights"}


def _made_by(value: Any, kind: str) -> bool:
    return value.op is not None and value.op.op_type.startswith(kind)


def _evaluate(op: Any, values: dict[str, torch.Tensor]) -> None:
    """One operation: its operands by name are looked up, its results are put beside them."""
    known = [each.val for each in op.outputs]
    if op.op_type.startswith("constexpr_"):
        made = op.materialized_val_inference()
        known = list(made) if isinstance(made, tuple) else [made]
    if any(each is None for each in known):
        if op.op_type not in TABLE:
            raise NotEvaluatedError(f"{op.op_type} ({op.name}) can only be checked on macOS, where Core ML runs it")
        given = {name: _operand(value, values) for name, value in op.inputs.items() if value is not None}
        _check_settings(op, given)
        found = TABLE[op.op_type](**given)
        known = list(found) if isinstance(found, tuple) else [found]
    for output, value in zip(op.outputs, known, strict=True):
        values[output.name] = value if isinstance(value, torch.Tensor) else _tensor(value)


def _check_settings(op: Any, given: dict[str, Any]) -> None:
    try:
        inspect.signature(TABLE[op.op_type]).bind(**given)
    except TypeError as error:
        raise NotEvaluatedError(
            f"{op.op_type} ({op.name}) with these settings can only be checked on macOS, where Core ML runs it: {error}"
        ) from error


def _operand(value: Any, values: dict[str, torch.Tensor]) -> Any:
    """A tensor, or the plain value of a setting."""
    if isinstance(value, list | tuple):
        return [_operand(each, values) for each in value]
    if value.name in values:
        return values[value.name]
    constant = value.val
    is_float = isinstance(constant, np.ndarray | np.floating) and np.asarray(constant).dtype.kind == "f"
    return _tensor(constant) if is_float else constant


def _tensor(value: Any) -> Any:
    if isinstance(value, str | list | tuple):
        return value
    array = np.asarray(value)
    if array.dtype.kind == "f":
        array = array.astype(np.float32)
    elif array.dtype not in (np.bool_, np.int8, np.uint8, np.int32, np.int64):
        array = array.astype(np.int32)
    return torch.from_numpy(np.array(array))


def _of(value: Any) -> Any:
    """What torch takes as a number or as a list of numbers."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.tolist()
    return value.item() if isinstance(value, np.generic) else value


def _both(value: Any, like: Any = None) -> torch.Tensor:
    made = value if isinstance(value, torch.Tensor) else _tensor(value)
    is_wide = like is not None and isinstance(like, torch.Tensor) and like.is_floating_point()
    return made.to(like.dtype) if is_wide and not made.is_floating_point() else made


def quantize(input: torch.Tensor, scale: Any, output_dtype: str, zero_point: Any = None, axis: Any = None) -> Any:  # noqa: A002
    """clip(round(input / scale) + zero_point)"""
    scale, zero = _along(scale, input, axis), 0 if zero_point is None else _along(zero_point, input, axis)
    low, high = (0, 255) if output_dtype == "uint8" else (-128, 127)
    codes = (torch.round(input / scale) + zero).clamp(low, high)
    return codes.to(torch.uint8 if output_dtype == "uint8" else torch.int8)


def dequantize(input: torch.Tensor, scale: Any, zero_point: Any = None, axis: Any = None) -> torch.Tensor:  # noqa: A002
    """(input - zero_point) scale"""
    zero = 0 if zero_point is None else _along(zero_point, input, axis)
    return (input.to(torch.float32) - zero) * _along(scale, input, axis)


def _along(value: Any, tensor: torch.Tensor, axis: Any) -> torch.Tensor:
    made = _both(value).to(torch.float32)
    shape = [1] * tensor.ndim
    if made.ndim:
        shape[int(axis)] = -1
    return made.view(shape)


def _padded(x: torch.Tensor, pad_type: str, pad: Any, sizes: Any, strides: Any, filling: float = 0.0) -> torch.Tensor:
    """With the borders that an operation over windows asks for; sizes are those of a window, dilated."""
    if pad_type == "valid":
        return x
    if pad_type == "custom":
        borders = [int(each) for each in pad]
    else:
        borders = []
        for extent, size, stride in zip(x.shape[2:], sizes, strides, strict=True):
            total = max((-(-extent // stride) - 1) * stride + size - extent, 0)
            less, more = total // 2, total - total // 2
            borders += [less, more] if pad_type == "same" else [more, less]
    pairs = [borders[at : at + 2] for at in range(0, len(borders), 2)]
    flat = [each for pair in reversed(pairs) for each in pair]
    return F.pad(x, flat, value=filling) if any(flat) else x


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
    strides = [1] * axes if strides is None else _of(strides)
    dilations = [1] * axes if dilations is None else _of(dilations)
    sizes = [(size - 1) * apart + 1 for size, apart in zip(weight.shape[2:], dilations, strict=True)]
    x = _padded(x, pad_type, pad, sizes, strides)
    run = (F.conv1d, F.conv2d, F.conv3d)[axes - 1]
    return run(x, weight, bias, stride=strides, dilation=dilations, groups=int(groups))


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
    strides = [1] * axes if strides is None else _of(strides)
    dilations = [1] * axes if dilations is None else _of(dilations)
    run = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[axes - 1]
    whole = run(x, weight, bias, stride=strides, dilation=dilations, groups=int(groups))
    before = [0] * axes if pad is None or pad_type != "custom" else [int(each) for each in pad][::2]
    after = [0] * axes if pad is None or pad_type != "custom" else [int(each) for each in pad][1::2]
    wanted = None if output_shape is None else _of(output_shape)[2:]
    for axis in range(axes):
        extent = whole.shape[axis + 2] - before[axis] - after[axis] if wanted is None else wanted[axis]
        short = before[axis] + extent - whole.shape[axis + 2]
        if short > 0:  # an output padding beyond the last window
            whole = torch.cat([whole, _border(whole, axis + 2, short, bias)], axis + 2)
        whole = whole.narrow(axis + 2, before[axis], extent)
    return whole


def _border(x: torch.Tensor, axis: int, size: int, bias: Any) -> torch.Tensor:
    shape = list(x.shape)
    shape[axis] = size
    values = torch.zeros(x.shape[1]) if bias is None else bias
    return values.view(1, -1, *(1 for _ in shape[2:])).expand(shape)


def _pool(x: Any, kernel_sizes: Any, strides: Any, pad_type: str, pad: Any, ceil_mode: Any, average: Any) -> Any:
    sizes, axes = _of(kernel_sizes), x.ndim - 2
    strides = sizes if strides is None else _of(strides)
    filling = 0.0 if average is not None else float("-inf")
    wide = _padded(x, pad_type, pad, sizes, strides, filling)
    ceil = bool(ceil_mode) if ceil_mode is not None else False
    if average is None:
        return (F.max_pool1d, F.max_pool2d, F.max_pool3d)[axes - 1](wide, sizes, strides, ceil_mode=ceil)
    run = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[axes - 1]
    mean = run(wide, sizes, strides, ceil_mode=ceil)
    if not average or wide is x:
        return mean
    return mean / run(_padded(torch.ones_like(x), pad_type, pad, sizes, strides), sizes, strides, ceil_mode=ceil)


def max_pool(
    x: Any, kernel_sizes: Any, strides: Any = None, pad_type: str = "valid", pad: Any = None, ceil_mode: Any = None
) -> Any:
    return _pool(x, kernel_sizes, strides, pad_type, pad, ceil_mode, None)


def avg_pool(
    x: Any,
    kernel_sizes: Any,
    strides: Any = None,
    pad_type: str = "valid",
    pad: Any = None,
    exclude_padding_from_average: Any = False,
    ceil_mode: Any = None,
) -> Any:
    return _pool(x, kernel_sizes, strides, pad_type, pad, ceil_mode, bool(exclude_padding_from_average))


def slice_by_index(
    x: Any,
    begin: Any,
    end: Any,
    stride: Any = None,
    begin_mask: Any = None,
    end_mask: Any = None,
    squeeze_mask: Any = None,
) -> Any:
    begin, end = _of(begin), _of(end)
    steps = [1] * x.ndim if stride is None else _of(stride)
    masks = [[False] * x.ndim if each is None else _of(each) for each in (begin_mask, end_mask, squeeze_mask)]
    for axis in range(x.ndim):
        if masks[2][axis]:
            x = x.narrow(axis, begin[axis] % x.shape[axis], 1)
            continue
        size = x.shape[axis]
        first, last, _ = slice(
            None if masks[0][axis] else begin[axis], None if masks[1][axis] else end[axis], steps[axis]
        ).indices(size)
        x = x.index_select(axis, torch.arange(first, last, steps[axis]))
    return x.squeeze([axis for axis in range(x.ndim) if masks[2][axis]]) if any(masks[2]) else x


def split(x: Any, axis: Any, num_splits: Any = None, split_sizes: Any = None) -> tuple[Any, ...]:
    sizes = _of(split_sizes) if split_sizes is not None else x.shape[int(axis)] // int(num_splits)
    return tuple(x.split(sizes, int(axis)))


def gather(x: Any, indices: Any, axis: Any = 0, batch_dims: Any = 0, validate_indices: Any = False) -> Any:
    axis, indices = int(axis), _both(indices).long()
    if int(batch_dims):
        raise NotEvaluatedError("gather with batch_dims can only be checked on macOS, where Core ML runs it")
    picked = torch.where(indices < 0, indices + x.shape[axis], indices)
    rows = x.index_select(axis, picked.reshape(-1))
    return rows.reshape(*x.shape[:axis], *picked.shape, *x.shape[axis + 1 :])


def layer_norm(x: Any, axes: Any = None, gamma: Any = None, beta: Any = None, epsilon: Any = 1e-5) -> Any:
    places = [axis % x.ndim for axis in (_of(axes) if axes is not None else range(x.ndim))]
    return F.layer_norm(x, [x.shape[axis] for axis in places], gamma, beta, float(epsilon))


def batch_norm(x: Any, mean: Any, variance: Any, gamma: Any = None, beta: Any = None, epsilon: Any = 1e-5) -> Any:
    return F.batch_norm(x, mean, variance, gamma, beta, eps=float(epsilon))


def instance_norm(x: Any, gamma: Any = None, beta: Any = None, epsilon: Any = 1e-5) -> Any:
    return F.instance_norm(x, weight=gamma, bias=beta, eps=float(epsilon))


def pad(x: Any, pad: Any, mode: str = "constant", constant_val: Any = 0.0) -> Any:
    pairs = [_of(pad)[at : at + 2] for at in range(0, len(pad), 2)]
    flat = [each for pair in reversed(pairs) for each in pair]
    names = {"constant": "constant", "reflect": "reflect", "replicate": "replicate"}
    if mode == "constant":
        return F.pad(x, flat, value=float(_of(constant_val)))
    while len(flat) > 2 and not any(flat[-2:]):  # of leading axes, which torch does not reflect
        flat = flat[:-2]
    return F.pad(x, flat, mode=names[mode])


def attention(query: Any, key: Any, value: Any, attn_mask: Any = None) -> Any:
    return F.scaled_dot_product_attention(query, key, value, None if attn_mask is None else _both(attn_mask))


def matmul(x: Any, y: Any, transpose_x: Any = False, transpose_y: Any = False) -> Any:
    x, y = _both(x), _both(y)
    return (x.transpose(-1, -2) if transpose_x else x) @ (y.transpose(-1, -2) if transpose_y else y)


def cast(x: Any, dtype: str) -> Any:
    kinds = {"bool": torch.bool, "int32": torch.int32, "int16": torch.int32, "uint16": torch.int32}
    return _both(x).to(kinds.get(dtype, torch.float32))


def select(cond: Any, a: Any, b: Any) -> Any:
    return torch.where(_both(cond).bool(), _both(a, b), _both(b, a))


def upsample(x: Any, scale_factor_height: Any = 1, scale_factor_width: Any = 1) -> Any:
    factors = [float(scale_factor_height), float(scale_factor_width)]
    return F.interpolate(x, scale_factor=factors, mode="nearest")


def _binary(function: Any) -> Any:
    return lambda x, y: function(_both(x, y), _both(y, x))


def _reduced(function: Any) -> Any:
    def run(x: Any, axes: Any = None, keep_dims: Any = False) -> Any:
        places = list(range(x.ndim)) if axes is None else _of(axes)
        return function(x, places, bool(keep_dims))

    return run


TABLE: dict[str, Any] = {
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
    "softplus": lambda x: F.softplus(x),  # noqa: PLW0108  # a builtin has no signature to check settings against
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
    "reduce_mean": _reduced(lambda x, axes, keep: x.mean(axes, keep)),
    "reduce_sum": _reduced(lambda x, axes, keep: x.sum(axes, keep)),
    "reduce_max": _reduced(lambda x, axes, keep: x.amax(axes, keep)),
    "reduce_min": _reduced(lambda x, axes, keep: x.amin(axes, keep)),
    "reduce_l2_norm": _reduced(lambda x, axes, keep: x.square().sum(axes, keep).sqrt()),
    "reduce_sum_square": _reduced(lambda x, axes, keep: x.square().sum(axes, keep)),
    "reduce_argmax": lambda x, axis=-1, keep_dims=False, output_dtype="int32": _place(x.argmax, axis, keep_dims),
    "reduce_argmin": lambda x, axis=-1, keep_dims=False, output_dtype="int32": _place(x.argmin, axis, keep_dims),
    "reshape": lambda x, shape: x.reshape([x.shape[at] if size == 0 else size for at, size in enumerate(_of(shape))]),
    "transpose": lambda x, perm: x.permute(_of(perm)),
    "expand_dims": lambda x, axes: _expanded(x, _of(axes)),
    "squeeze": lambda x, axes=None: x.squeeze() if axes is None else x.squeeze(_of(axes)),
    "concat": lambda values, axis, interleave=False: torch.cat([_both(each) for each in values], int(axis)),
    "stack": lambda values, axis: torch.stack([_both(each) for each in values], int(axis)),
    "tile": lambda x, reps: x.repeat(_of(reps)),
    "pad": pad,
    "crop": lambda x, crop_height, crop_width: _cropped(x, [*_of(crop_height), *_of(crop_width)]),
    "split": split,
    "slice_by_index": slice_by_index,
    "slice_by_size": lambda x, begin, size: _sliced(x, _of(begin), _of(size)),
    "gather": gather,
    "select": select,
    "cast": cast,
    "identity": lambda x: x,
    "upsample_nearest_neighbor": upsample,
    "pixel_shuffle": lambda x, upscale_factor: F.pixel_shuffle(x, int(upscale_factor)),
}


def _place(find: Any, axis: Any, keep_dims: Any) -> torch.Tensor:
    return find(int(axis), bool(keep_dims)).to(torch.int32)  # type: ignore[no-any-return]


def _channels(values: Any, x: torch.Tensor) -> torch.Tensor:
    """One value for each channel, the second axis of x."""
    return _both(values).view(-1, *(1 for _ in x.shape[2:]))


def _expanded(x: Any, axes: Any) -> Any:
    for axis in sorted(axis % (x.ndim + len(axes)) for axis in axes):
        x = x.unsqueeze(axis)
    return x


def _cropped(x: Any, borders: Any) -> Any:
    top, bottom, left, right = borders
    return x[..., top : x.shape[-2] - bottom, left : x.shape[-1] - right]


def _sliced(x: Any, begin: Any, size: Any) -> Any:
    for axis, (first, extent) in enumerate(zip(begin, size, strict=True)):
        x = x.narrow(axis, first, x.shape[axis] - first if extent == -1 else extent)
    return x
