"""The arithmetic itself: one sequence of steps, run whole when traced and in cache-sized pieces when eager.

    t = (x - shift) / scale, rounded when the codes are integers
    c = clamp(t, low, high), rounded to the format when the codes are floats      the centred code
    y = c * scale + shift                                                        what the code stands for

    ZP      shift = 0        low, high = limits - zero_point     code = c + zero_point
    MINVAL  shift = minval   low, high = 0, high - low           code = c + low
    float   shift = 0        low, high = limits                  code = c

A true division and a zero point added after rounding give ONNX Runtime's QuantizeLinear in every code;
multiplying by 1/scale does not. NaN stays NaN, so that a broken activation shows.
"""

import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scalepoint.numerics.formats import Format, Grid, QuantizationFormulation
from scalepoint.numerics.qparams import QParams
from scalepoint.numerics.rounding import round_to_float

SMALL = 1024
HALF_MAX = torch.finfo(torch.float16).max
PIECE = 131072  # float32 elements: a piece, its result and one scratch stay in a core's L2 cache, calls weigh little
MANY = 4096  # elements, below which a mask costs nothing
LINE = 16  # elements that are looked at together for a clamped one


class Steps(NamedTuple):
    """The numbers the steps use; tensors among them broadcast against the blocked view of the input."""

    scale: Tensor
    shift: Tensor | None
    low: Tensor | float
    high: Tensor | float

    def map(self, change: Callable[[Tensor], Tensor]) -> "Steps":
        values: list[Any] = [change(value) if isinstance(value, Tensor) else value for value in self]
        return Steps(*values)

    @property
    def is_uniform(self) -> bool:
        return all(value.numel() == 1 for value in self if isinstance(value, Tensor))


class ScratchBuffers:
    """Memory that pieces share: what one has used, the next finds in cache.

    A piece on a CPU has it from its thread, which keeps it: new memory is slow where the system must clear it first. So
    one loop at a time uses it.
    """

    def __init__(self) -> None:
        self._buffers: dict[int, Tensor] = {}

    def __call__(self, piece: Tensor, number: int = 0) -> Tensor:
        """A float32 tensor of the shape of a piece; each number has memory of its own."""
        is_usual = piece.device.type == "cpu" and piece.numel() <= PIECE
        buffers = _THREAD_LOCAL.scratch if is_usual else self._buffers
        buffer = buffers.get(number)
        if buffer is None or buffer.numel() < piece.numel():
            with torch.inference_mode(False):
                size = PIECE if is_usual else piece.numel()
                buffer = buffers[number] = torch.empty(size, dtype=torch.float32, device=piece.device)
        return buffer[: piece.numel()].view(piece.shape)


class _ThreadLocal(threading.local):
    def __init__(self) -> None:
        self.scratch: dict[int, Tensor] = {}


_THREAD_LOCAL = _ThreadLocal()


def make_steps(qparams: QParams, grid: Grid, *, fixed_zero: bool = False) -> Steps:
    """Precompute what `straight_through` needs from quantization parameters.

    Args:
        qparams: Scale, zero point and minval.
        grid: dtype, scheme and formulation.
        fixed_zero: The zero point is the middle of a symmetric grid.
    """
    scale, zero_point, minval = qparams
    if grid.format.is_float:
        return Steps(scale, None, grid.low, grid.high)
    if grid.formulation == QuantizationFormulation.MINVAL:
        return Steps(scale, minval, 0.0, grid.span)
    if zero_point is None or (fixed_zero and grid.is_symmetric):
        return Steps(scale, None, grid.low - grid.middle, grid.high - grid.middle)
    return Steps(scale, None, grid.low - zero_point.to(scale.dtype), grid.high - zero_point.to(scale.dtype))


def code_offset(qparams: QParams, grid: Grid) -> Tensor | float:
    """What is added to a centred code to make it a code."""
    if grid.format.is_float:
        return 0.0
    if grid.formulation == QuantizationFormulation.MINVAL or qparams.zero_point is None:
        return grid.low if grid.formulation == QuantizationFormulation.MINVAL else grid.middle
    return qparams.zero_point.to(qparams.scale.dtype)


def divide(x: Tensor, steps: Steps, fmt: Format, out: Tensor | None = None, *, in_place: bool = True) -> Tensor:
    """t of the steps: not yet clamped. The first operation makes a new tensor, or fills `out`; others reuse it."""
    if steps.shift is not None:
        x = torch.sub(x, steps.shift, out=out)
        out = x if in_place else None
    t = torch.div(x, steps.scale) if out is None else torch.div(x, steps.scale, out=out)
    if fmt.is_float:
        return t
    return t.round_() if in_place else t.round()


def clamp(t: Tensor, steps: Steps, out: Tensor | None = None) -> Tensor:
    """c of the steps, before a float format rounds it; into `out`, which may be t."""
    if isinstance(steps.low, Tensor) and isinstance(steps.high, Tensor):
        # Two vectorized passes: torch.clamp with broadcast tensor bounds runs a scalar loop.
        t = torch.maximum(t, steps.low, out=out)
        return torch.minimum(t, steps.high, out=out)
    low, high = float(steps.low), float(steps.high)
    return t.clamp_(low, high) if out is t else torch.clamp(t, low, high, out=out)


def restore(c: Tensor, steps: Steps, *, in_place: bool = False) -> Tensor:
    """y of the steps, from the centred code."""
    y = c.mul_(steps.scale) if in_place else c * steps.scale
    if steps.shift is not None:
        y = y.add_(steps.shift) if in_place else y + steps.shift
    return y


def cast_to_input_dtype(y: Tensor, dtype: torch.dtype) -> Tensor:
    """y in the input's dtype; rounding to a code near the end of float16 must not become infinity."""
    if y.dtype == dtype:
        return y
    return y.clamp(-HALF_MAX, HALF_MAX).to(dtype) if dtype == torch.float16 else y.to(dtype)


def compute_centred_code(x: Tensor, steps: Steps, fmt: Format) -> Tensor:
    """c of the steps as float32."""
    c = clamp(divide(x, steps, fmt, in_place=False), steps)
    return round_to_float(c, fmt) if fmt.is_float else c


def round_trip_traced(x: Tensor, steps: Steps, fmt: Format) -> tuple[Tensor, Tensor]:
    """(y, inside) with functional operations only, for export, compile, vmap and fake tensors."""
    t = divide(x, steps, fmt, in_place=False)
    c = clamp(t, steps)
    inside = t == c
    if fmt.is_float:
        c = round_to_float(c, fmt)
    return restore(c, steps), inside


class ClampRecorder:
    """Which values were clamped (or are NaN), as the pieces of a tensor pass: nothing where there is none, their places
    where they are few, else a mask of the others."""

    def __init__(self, x: Tensor) -> None:
        self._shape, self._device = x.shape, x.device
        self._seen = 0
        self._places: list[Tensor] = []
        self.inside: Tensor | None = None

    def add_piece(self, t: Tensor, steps: Steps) -> None:
        """At the next piece, with t of the steps as it is before the clamp."""
        start, self._seen = self._seen, self._seen + t.numel()
        has_limits = not isinstance(steps.low, Tensor) or steps.is_uniform
        outside = _find_outside(t.view(-1), float(steps.low), float(steps.high)) if has_limits else None
        if outside is not None and 64 * outside.numel() <= max(t.numel(), MANY):
            self._places.append(outside.add_(start))
            return
        if self.inside is None:
            self.inside = torch.ones(self._shape, dtype=torch.bool, device=self._device)
        torch.eq(t, clamp(t, steps), out=self.inside.view(-1)[start : self._seen].view(t.shape))

    @property
    def places(self) -> Tensor | None:
        """Of the flat tensor; None where the mask tells, or nothing was clamped."""
        places = [positions for positions in self._places if positions.numel()]
        if not places:
            return None
        together = torch.cat(places)
        if self.inside is None:
            return together
        self.inside.view(-1)[together] = False
        return None


def _find_outside(t: Tensor, low: float, high: float) -> Tensor | None:
    """Places in a piece, None for too many. The extremes say where to look; a mask of all takes far longer."""
    if float(t.amin()) >= low and float(t.amax()) <= high:
        return t.new_empty(0, dtype=torch.int64)
    end = len(t) - len(t) % LINE if len(t) >= MANY else 0
    lines = t[:end].view(LINE, -1)
    columns = is_outside(lines.amin(0), low, high).logical_or_(is_outside(lines.amax(0), low, high)).nonzero().view(-1)
    if 4 * len(columns) > lines.shape[1]:
        return None
    row, column = is_outside(lines[:, columns], low, high).nonzero().unbind(1)
    positions = row.mul_(lines.shape[1]).add_(columns[column])
    return (
        positions
        if end == len(t)
        else torch.cat((positions, is_outside(t[end:], low, high).nonzero().view(-1).add_(end)))
    )


def is_outside(t: Tensor, low: float, high: float) -> Tensor:
    """Where t is not within these limits."""
    return t.clamp(low, high).ne(t)


def round_trip(
    x: Tensor, steps: Steps, fmt: Format, *, out: Tensor | None = None, clamped: ClampRecorder | None = None
) -> Tensor:
    """y in the dtype of x; `clamped` is told what was.

    One output, in-place vector operations on it, in pieces that stay in cache when the tensor is large.
    """
    if x.numel() >= 2 * PIECE and x.device.type == "cpu" and x.is_contiguous():
        out = torch.empty_like(x) if out is None else out
        _round_trip_in_pieces(x, steps, fmt, out, clamped)
        return out
    return cast_to_input_dtype(_round_trip_whole(x, steps, fmt, out, clamped), x.dtype)


def _round_trip_whole(
    x: Tensor, steps: Steps, fmt: Format, out: Tensor | None, clamped: ClampRecorder | None
) -> Tensor:
    """All at once; the first step makes the output, in the memory format of x, and the others reuse it."""
    if out is None and not x.is_contiguous():
        out = torch.empty_like(x, dtype=torch.float32)
    work = out if out is None or out.dtype == torch.float32 else None
    t = divide(_as_float32(x), steps, fmt, work)
    if clamped is not None and (x.numel() < MANY or x.device.type != "cpu" or not t.is_contiguous()):
        clamped.inside = torch.eq(t, clamp(t, steps))
    elif clamped is not None:
        clamped.add_piece(t, steps)
    c = clamp(t, steps, t)
    if fmt.is_float:
        # For a few elements the cast's one slow kernel is still quicker than six fast ones; the values are the same.
        c = c.to(fmt.cast).to(torch.float32) if fmt.cast and c.numel() <= SMALL else round_to_float(c, fmt, out=c)
    y = restore(c, steps, in_place=True)
    return y if out is None or y is out else out.copy_(cast_to_input_dtype(y, out.dtype))


def _round_trip_in_pieces(x: Tensor, steps: Steps, fmt: Format, out: Tensor, clamped: ClampRecorder | None) -> None:
    """The same into `out`, piece by piece."""
    like = ScratchBuffers()
    for part, target, piece_steps in _pieces(x, out, steps):
        work = target if target.dtype == torch.float32 else like(part, 1)
        t = divide(_as_float32(part), piece_steps, fmt, work)
        if clamped is not None:
            clamped.add_piece(t, piece_steps)
        c = clamp(t, piece_steps, work)
        if fmt.is_float:
            round_to_float(c, fmt, out=c, scratch=like(part))
        restore(c, piece_steps, in_place=True)
        if c is not target:
            target.copy_(cast_to_input_dtype(c, target.dtype))


def quantize_in_pieces(x: Tensor, qparams: QParams, grid: Grid, dtype: torch.dtype) -> Tensor:
    """The codes of integers with one zero point for all, in `dtype`, piece by piece."""
    zero = None if qparams.zero_point is None else qparams.zero_point.reshape(-1)[:1]
    single = qparams._replace(zero_point=zero)
    steps, base = make_steps(single, grid), float(code_offset(single, grid))
    steps = steps._replace(low=float(steps.low), high=float(steps.high))
    out, like = torch.empty(x.shape, dtype=dtype, device=x.device), ScratchBuffers()
    for part, target, piece_steps in _pieces(x, out, steps):
        c = divide(_as_float32(part), piece_steps, grid.format, like(part))
        clamp(c, piece_steps, c).add_(base)
        target.copy_(torch.nan_to_num(c, nan=grid.low, out=c))
    return out


def _pieces(x: Tensor, out: Tensor, steps: Steps) -> Iterator[tuple[Tensor, Tensor, Steps]]:
    """Matching rows of the input, the output and the parameters, about PIECE elements a thread."""
    if steps.is_uniform:
        x, out, steps = x.view(-1), out.view(-1), steps.map(lambda value: value.reshape(1))
    else:
        steps = steps.map(lambda value: value.reshape((1,) * (x.ndim - value.ndim) + value.shape))
    while x.shape[0] == 1:
        x, out, steps = x[0], out[0], steps.map(lambda value: value[0])
    rows = max(1, PIECE * torch.get_num_threads() // (x.numel() // x.shape[0]))
    for start in range(0, x.shape[0], rows):
        stop = start + rows
        part = steps.map(lambda value: value if value.shape[0] == 1 else value[start:stop])  # noqa: B023  # used at once
        yield x[start:stop], out[start:stop], part


def _as_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float32 else x.to(torch.float32)
