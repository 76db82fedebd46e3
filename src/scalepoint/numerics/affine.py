"""The arithmetic of quantization: one sequence of steps, which `quantize.py` and `fake_quantize.py` run.

    t = (x - shift) / scale, rounded when the codes are integers
    c = clamp(t, low, high), rounded to the format when the codes are floats      the centred code: code - zero point
    y = c * scale + shift                                                        the dequantized value

            shift     low                       high                      code
    ZP      0         grid.low - zero_point     grid.high - zero_point    c + zero_point
    MINVAL  minval    0                         grid.high - grid.low      c + grid.low
    float   0         grid.low                  grid.high                 c

A true division and a zero point added after rounding give ONNX Runtime's QuantizeLinear in every code;
multiplying by 1/scale does not. NaN stays NaN, so that a broken activation is visible in the output. Large tensors on a
CPU are processed in pieces that fit into its cache, but not while torch.compile or export trace.
"""

import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scalepoint.numerics.formats import Format, Grid, QuantizationFormulation
from scalepoint.numerics.qparams import QParams
from scalepoint.numerics.rounding import round_to_float

FEW_ELEMENTS = 1024  # for so few elements, fewer calls matter more than faster ones
HALF_MAX = torch.finfo(torch.float16).max
# A piece of float32 values, its result and one scratch buffer fit into the L2 cache of a core.
PIECE_ELEMENTS = 131072
MIN_INDEXED_ELEMENTS = 4096  # in smaller tensors a mask of the clamped elements costs nothing
# An index has the size of 8 mask elements: indices are stored for a piece if they take at most 1/8 of its mask.
MIN_ELEMENTS_PER_INDEX = 64
MAX_INDICES_OF_SMALL_PIECE = 64  # for the last piece, which can be short: so many indices are stored in any case
# _find_outside views a piece of this size or larger as a table with this many rows: 8192 elements as 16 x 512.
MIN_TABLE_ELEMENTS = 4096
TABLE_ROWS = 16


class Steps(NamedTuple):
    """The operands of the steps. Tensors broadcast against the blocked view of the input."""

    scale: Tensor
    shift: Tensor | None
    low: Tensor | float
    high: Tensor | float

    def map(self, change: Callable[[Tensor], Tensor]) -> "Steps":
        """Apply a function to each tensor."""
        values: list[Any] = [change(value) if isinstance(value, Tensor) else value for value in self]
        return Steps(*values)

    @property
    def is_uniform(self) -> bool:
        return all(value.numel() == 1 for value in self if isinstance(value, Tensor))


def make_steps(qparams: QParams, grid: Grid, *, fixed_zero: bool = False) -> Steps:
    """Precompute the operands of `fake_quantize_by_steps` from quantization parameters.

    Args:
        qparams: Scale, zero point and minval.
        grid: dtype, scheme and formulation.
        fixed_zero: The zero point is the middle of a symmetric grid.
    """
    scale, zero_point, minval = qparams
    if grid.format.is_float:
        return Steps(scale, shift=None, low=grid.low, high=grid.high)
    if grid.formulation == QuantizationFormulation.MINVAL:
        return Steps(scale, shift=minval, low=0.0, high=grid.span)
    if zero_point is None or (fixed_zero and grid.is_symmetric):
        return Steps(scale, shift=None, low=grid.low - grid.middle, high=grid.high - grid.middle)
    offset = zero_point.to(scale.dtype)
    return Steps(scale, shift=None, low=grid.low - offset, high=grid.high - offset)


def code_offset(qparams: QParams, grid: Grid) -> Tensor | float:
    """Return code - centred code."""
    if grid.format.is_float:
        return 0.0
    if grid.formulation == QuantizationFormulation.MINVAL:
        return grid.low
    if qparams.zero_point is None:
        return grid.middle
    return qparams.zero_point.to(qparams.scale.dtype)


def to_unclamped_code(
    x: Tensor, steps: Steps, fmt: Format, out: Tensor | None = None, *, in_place: bool = True
) -> Tensor:
    """Compute t. The first operation makes a new tensor, or fills `out`; the others work in place."""
    if steps.shift is not None:
        x = torch.sub(x, steps.shift, out=out)
        out = x if in_place else None  # the difference is a tensor of ours, which the division may overwrite
    t = torch.div(x, steps.scale) if out is None else torch.div(x, steps.scale, out=out)
    if fmt.is_float:
        return t
    return t.round_() if in_place else t.round()


def clamp(t: Tensor, steps: Steps, out: Tensor | None = None) -> Tensor:
    """Compute c from t, without the rounding of float formats. `out` may be t."""
    if isinstance(steps.low, Tensor) and isinstance(steps.high, Tensor):
        # Two vectorized passes: torch.clamp with broadcast tensor bounds runs a scalar loop.
        t = torch.maximum(t, steps.low, out=out)
        return torch.minimum(t, steps.high, out=out)
    low, high = float(steps.low), float(steps.high)
    return t.clamp_(low, high) if out is t else torch.clamp(t, low, high, out=out)


def restore(c: Tensor, steps: Steps, *, in_place: bool = False) -> Tensor:
    """Compute y from c."""
    y = c.mul_(steps.scale) if in_place else c * steps.scale
    if steps.shift is not None:
        y = y.add_(steps.shift) if in_place else y + steps.shift
    return y


def cast_to_input_dtype(y: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast y to the dtype of the input. A y beyond the largest float16 is clamped to it, not infinite."""
    if y.dtype == dtype:
        return y
    return y.clamp(-HALF_MAX, HALF_MAX).to(dtype) if dtype == torch.float16 else y.to(dtype)


def compute_centred_code(x: Tensor, steps: Steps, fmt: Format) -> Tensor:
    """Compute c as float32."""
    c = clamp(to_unclamped_code(x, steps, fmt, in_place=False), steps)
    return round_to_float(c, fmt) if fmt.is_float else c


def round_trip_traced(x: Tensor, steps: Steps, fmt: Format) -> tuple[Tensor, Tensor]:
    """Compute (y, mask of values inside the range) without in-place operations, for export, compile and vmap."""
    t = to_unclamped_code(x, steps, fmt, in_place=False)
    c = clamp(t, steps)
    inside = t == c
    if fmt.is_float:
        c = round_to_float(c, fmt)
    return restore(c, steps), inside


class ClampRecorder:
    """Records which values of a tensor are clamped (or NaN), piece by piece.

    Stores their indices for a piece that has few, else a mask. `finish` returns one of them for the whole tensor.

    Attributes:
        inside: Mask of the values that are not clamped; None while no piece needed it.
    """

    def __init__(self, x: Tensor) -> None:
        self._shape, self._device = x.shape, x.device
        self._next_index = 0
        self._indices: list[Tensor] = []
        self.inside: Tensor | None = None

    def add_piece(self, t: Tensor, steps: Steps) -> None:
        """Record the next piece, by its t before the clamp."""
        start = self._next_index
        self._next_index += t.numel()
        has_scalar_limits = not isinstance(steps.low, Tensor) or steps.is_uniform
        outside = _find_outside(t.view(-1), float(steps.low), float(steps.high)) if has_scalar_limits else None
        max_indices = max(t.numel() // MIN_ELEMENTS_PER_INDEX, MAX_INDICES_OF_SMALL_PIECE)
        if outside is not None and outside.numel() <= max_indices:
            self._indices.append(outside.add_(start))
            return
        if self.inside is None:
            self.inside = torch.ones(self._shape, dtype=torch.bool, device=self._device)
        torch.eq(t, clamp(t, steps), out=self.inside.view(-1)[start : self._next_index].view(t.shape))

    def finish(self) -> tuple[Tensor | None, Tensor | None]:
        """Return (mask of the values inside, indices of the clamped ones in the flat tensor) after the last piece.

        At least one is None: both if nothing is clamped and no piece needed a mask.
        """
        parts = [part for part in self._indices if part.numel()]
        if not parts:
            return self.inside, None
        indices = torch.cat(parts)
        if self.inside is None:
            return None, indices
        self.inside.view(-1)[indices] = False
        return self.inside, None


def _find_outside(t: Tensor, low: float, high: float) -> Tensor | None:
    """Return the indices of values outside of the limits; None if there are many.

    The values are viewed as a table, such as 8192 values as 16 rows x 512 columns. Only in columns whose smallest or
    largest value is outside all values are compared: comparing the whole table takes far longer.
    """
    if float(t.amin()) >= low and float(t.amax()) <= high:
        return t.new_empty(0, dtype=torch.int64)
    end = len(t) - len(t) % TABLE_ROWS if len(t) >= MIN_TABLE_ELEMENTS else 0
    table = t[:end].view(TABLE_ROWS, -1)
    is_column_outside = is_outside(table.amin(0), low, high).logical_or_(is_outside(table.amax(0), low, high))
    columns = is_column_outside.nonzero().view(-1)
    if 4 * len(columns) > table.shape[1]:
        return None
    row, column = is_outside(table[:, columns], low, high).nonzero().unbind(1)
    indices = row.mul_(table.shape[1]).add_(columns[column])
    if end == len(t):
        return indices
    rest = is_outside(t[end:], low, high).nonzero().view(-1).add_(end)
    return torch.cat((indices, rest))


def is_outside(t: Tensor, low: float, high: float) -> Tensor:
    """Return a mask of the values outside of the limits. NaN is outside."""
    return t.clamp(low, high).ne(t)


def round_trip(
    x: Tensor, steps: Steps, fmt: Format, *, out: Tensor | None = None, clamped: ClampRecorder | None = None
) -> Tensor:
    """Compute y in the dtype of x; `clamped` records what is clamped.

    Works in place on the output, in pieces that fit into the cache if the tensor is large.
    """
    if x.numel() >= 2 * PIECE_ELEMENTS and x.device.type == "cpu" and x.is_contiguous():
        out = torch.empty_like(x) if out is None else out
        _round_trip_in_pieces(x, steps, fmt, out, clamped)
        return out
    return cast_to_input_dtype(_round_trip_whole(x, steps, fmt, out, clamped), x.dtype)


def _round_trip_whole(
    x: Tensor, steps: Steps, fmt: Format, out: Tensor | None, clamped: ClampRecorder | None
) -> Tensor:
    """Compute y at once. The first step makes the output, in the memory format of x; the others work in place."""
    if out is None and not x.is_contiguous():
        out = torch.empty_like(x, dtype=torch.float32)
    # Only a float32 output can hold the intermediate values.
    work = out if out is not None and out.dtype == torch.float32 else None
    t = to_unclamped_code(_as_float32(x), steps, fmt, work)
    if clamped is not None and (x.numel() < MIN_INDEXED_ELEMENTS or x.device.type != "cpu" or not t.is_contiguous()):
        clamped.inside = torch.eq(t, clamp(t, steps))
    elif clamped is not None:
        clamped.add_piece(t, steps)
    c = clamp(t, steps, t)
    if fmt.is_float:
        if fmt.cast and c.numel() <= FEW_ELEMENTS:
            # For a few elements one slow kernel (the cast) is faster than six fast ones; the values are the same.
            c = c.to(fmt.cast).to(torch.float32)
        else:
            c = round_to_float(c, fmt, out=c)
    y = restore(c, steps, in_place=True)
    if out is None or y is out:
        return y
    return out.copy_(cast_to_input_dtype(y, out.dtype))


def _round_trip_in_pieces(x: Tensor, steps: Steps, fmt: Format, out: Tensor, clamped: ClampRecorder | None) -> None:
    """Compute y into `out`, piece by piece."""
    scratch = ScratchBuffers()
    for part, target, piece_steps in _iterate_pieces(x, out, steps):
        work = target if target.dtype == torch.float32 else scratch(part, 1)
        t = to_unclamped_code(_as_float32(part), piece_steps, fmt, work)
        if clamped is not None:
            clamped.add_piece(t, piece_steps)
        c = clamp(t, piece_steps, work)
        if fmt.is_float:
            round_to_float(c, fmt, out=c, scratch=scratch(part))
        restore(c, piece_steps, in_place=True)
        if c is not target:
            target.copy_(cast_to_input_dtype(c, target.dtype))


def quantize_in_pieces(x: Tensor, qparams: QParams, grid: Grid, dtype: torch.dtype) -> Tensor:
    """Quantize to an integer format with one zero point, piece by piece. Returns codes in `dtype`."""
    # The first zero point stands for all: the caller has checked that they are equal.
    zero_point = None if qparams.zero_point is None else qparams.zero_point.reshape(-1)[:1]
    single = qparams._replace(zero_point=zero_point)
    steps, offset = make_steps(single, grid), float(code_offset(single, grid))
    steps = steps._replace(low=float(steps.low), high=float(steps.high))
    out, scratch = torch.empty(x.shape, dtype=dtype, device=x.device), ScratchBuffers()
    for part, target, piece_steps in _iterate_pieces(x, out, steps):
        c = to_unclamped_code(_as_float32(part), piece_steps, grid.format, scratch(part))
        clamp(c, piece_steps, c).add_(offset)
        target.copy_(torch.nan_to_num(c, nan=grid.low, out=c))
    return out


def _iterate_pieces(x: Tensor, out: Tensor, steps: Steps) -> Iterator[tuple[Tensor, Tensor, Steps]]:
    """Yield matching rows of input, output and parameters, about PIECE_ELEMENTS for each thread."""
    if steps.is_uniform:
        x, out, steps = x.view(-1), out.view(-1), steps.map(lambda value: value.reshape(1))
    else:
        steps = steps.map(lambda value: value.reshape((1,) * (x.ndim - value.ndim) + value.shape))
    while x.shape[0] == 1:  # the first axis is divided into pieces, so it must have several rows
        x, out, steps = x[0], out[0], steps.map(lambda value: value[0])
    rows = max(1, PIECE_ELEMENTS * torch.get_num_threads() // (x.numel() // x.shape[0]))
    for start in range(0, x.shape[0], rows):
        stop = start + rows
        part = steps.map(lambda value: value if value.shape[0] == 1 else value[start:stop])  # noqa: B023  # used at once
        yield x[start:stop], out[start:stop], part


def _as_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float32 else x.to(torch.float32)


class _ThreadLocal(threading.local):
    def __init__(self) -> None:
        self.scratch: dict[int, Tensor] = {}


_THREAD_LOCAL = _ThreadLocal()


class ScratchBuffers:
    """Scratch memory for pieces. All pieces use the same memory, so it stays in cache.

    A buffer of at most PIECE_ELEMENTS on a CPU belongs to the thread and is reused by later calls: the system clears
    new memory, which is slow. A thread must not use such buffers in two nested loops. Larger buffers belong to this
    object, as for the pieces of `round_trip` if torch has two or more threads.
    """

    def __init__(self) -> None:
        self._buffers: dict[int, Tensor] = {}

    def __call__(self, piece: Tensor, number: int = 0) -> Tensor:
        """Return a float32 tensor shaped like a piece. Different numbers give different memory."""
        is_shared = piece.device.type == "cpu" and piece.numel() <= PIECE_ELEMENTS
        buffers = _THREAD_LOCAL.scratch if is_shared else self._buffers
        buffer = buffers.get(number)
        if buffer is None or buffer.numel() < piece.numel():
            with torch.inference_mode(False):
                size = PIECE_ELEMENTS if is_shared else piece.numel()
                buffer = buffers[number] = torch.empty(size, dtype=torch.float32, device=piece.device)
        return buffer[: piece.numel()].view(piece.shape)
