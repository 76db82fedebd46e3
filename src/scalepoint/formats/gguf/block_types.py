"""The block types as a table, from the smallest to the largest, and which one a weight takes: the first that holds it.

Nothing is rounded here. `snapped` moves scales to where a type can hold them, for those who choose codes after it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from scalepoint.checkpoints import Packed
from scalepoint.errors import ExportError
from scalepoint.formats.gguf import blocks, superblocks
from scalepoint.formats.gguf.layer_types import Bytes, Form, forms_of
from scalepoint.numerics import QuantizationFormulation, get_format
from scalepoint.spec import QuantizationSpec

HALF = 11  # significant bits of a float16


@dataclass(frozen=True)
class Kind:
    """One block type."""

    name: str  # as the gguf package has it
    columns: int  # that a block has
    size: int  # columns that share a scale
    low: int
    high: int
    has_least: bool
    pack: Callable[[Form], Bytes | None]
    steps: int = 0  # of the integer that a scale is in a super-block; 0: a scale is a float16

    @property
    def bits(self) -> int:
        """Of a code."""
        return (self.high - self.low).bit_length()

    def takes(self, low: int, high: int, columns: int, block: int) -> bool:
        """By its type and shape, whatever the scales are."""
        fits = self.low <= low and high <= self.high and columns % self.columns == 0
        return fits and block % self.size == 0 and (self.columns % block == 0 or block % self.columns == 0)

    def bytes_of(self, form: Form) -> Bytes | None:
        """None where this type cannot hold the weight."""
        columns = form.codes.shape[1]
        if self.has_least != (form.least is not None):
            return None
        if not self.takes(form.low, form.high, columns, columns // form.scale.shape[1]):
            return None
        cut = form.per(self.size)
        return None if cut is None else self.pack(cut)


KINDS = (
    Kind("Q2_K", 256, 16, 0, 3, True, superblocks.q2_k, 15),
    Kind("Q3_K", 256, 16, -4, 3, False, superblocks.q3_k, 31),
    Kind("Q4_0", 32, 32, -8, 7, False, blocks.q4_0),
    Kind("Q4_K", 256, 32, 0, 15, True, superblocks.q4_k, 63),
    Kind("Q4_1", 32, 32, 0, 15, True, blocks.q4_1),
    Kind("Q5_0", 32, 32, -16, 15, False, blocks.q5_0),
    Kind("Q5_K", 256, 32, 0, 31, True, superblocks.q5_k, 63),
    Kind("Q5_1", 32, 32, 0, 31, True, blocks.q5_1),
    Kind("Q6_K", 256, 16, -32, 31, False, superblocks.q6_k, 127),
    Kind("Q8_0", 32, 32, -128, 127, False, blocks.q8_0),
)


def kind_of(weights: Iterable[Packed], name: str) -> Kind:
    """The smallest type that holds all of them exactly, read one at a time; experts of one layer share theirs."""
    left, seen = list(KINDS), ""
    for packed in weights:
        forms = forms_of(packed)
        left = [kind for kind in left if any(kind.bytes_of(form) is not None for form in forms)]
        seen = f"{packed.spec.dtype} in blocks of {packed.block} of {packed.codes.shape[1]} columns"
    if left:
        return left[0]
    raise ExportError(
        f"{name}: no block type of GGUF holds {seen}: columns must be a multiple of 32, blocks of 16 or 32, scales "
        "float16 (or, of super-blocks, snapped); leave it float, or give it other blocks"
    )


def bytes_of(packed: Packed, kind: Kind) -> Bytes:
    """(rows, bytes of a row)."""
    found = next((data for form in forms_of(packed) if (data := kind.bytes_of(form)) is not None), None)
    if found is None:
        raise ExportError(f"{kind.name} cannot hold a weight of {packed.spec.dtype} in blocks of {packed.block}")
    return found


def planned(spec: QuantizationSpec, columns: int, block: int) -> Kind | None:
    """The type that a weight takes once its scales are `snapped`; None: there is none."""
    row = get_format(spec.dtype)
    low, high = int(row.low), int(row.high)
    if row.is_float:
        return None
    if spec.qformulation == QuantizationFormulation.MINVAL:
        return _first(columns, block, low=0, high=high - low, has_least=True)
    if low == 0:  # zero points: of super-blocks only those of 2 bits could be held, and not all
        tries = (kind for kind in KINDS if not kind.steps and kind.has_least)
        return next((kind for kind in tries if kind.takes(0, high, columns, block)), None)
    if (low, high) == (-2, 1) and (found := _first(columns, block, low=0, high=3, has_least=True)):
        return found
    return _first(columns, block, low=low, high=high, has_least=False)


def wider(spec: QuantizationSpec, columns: int) -> str:
    """Why the codes of a weight take more bits in the file than their type has; "": they do not."""
    block = getattr(spec.granularity, "block_size", None)
    block = block if isinstance(block, int) else columns
    kind, bits = planned(spec, columns, block), get_format(spec.dtype).bits
    if kind is None or kind.bits <= bits:
        return ""
    whole = planned(spec, superblocks.SIZE * block, block)
    if whole is not None and whole.bits < kind.bits:
        why = f"their rows are not a multiple of {superblocks.SIZE} columns, which {whole.name} needs"
    else:
        why = f"GGUF has no smaller type for blocks of {block}"
    return f"{kind.name}, which has {kind.bits} bits for each code: {why}"


def _first(columns: int, block: int, *, low: int, high: int, has_least: bool) -> Kind | None:
    tries = (kind for kind in KINDS if kind.has_least == has_least)
    return next((kind for kind in tries if kind.takes(low, high, columns, block)), None)


def snapped(
    spec: QuantizationSpec, columns: int, scale: Tensor, minval: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Scales (rows, blocks), and least values where there are any, moved to what the planned type can hold.

    Zero points: scales keep so few bits that their product with a zero point is a float16. Least values above zero
    become zero in super-blocks, which cannot hold them.
    """
    block = columns // scale.shape[1]
    kind = planned(spec, columns, block)
    if kind is None:
        raise ExportError(f"no block type of GGUF holds {spec.dtype} in blocks of {block} of {columns} columns")
    if not kind.steps:
        if kind.has_least and minval is None:
            return _few_bits(scale, HALF - get_format(spec.dtype).bits), None
        return _half(scale), None if minval is None else _half(minval)
    found = _in_super_blocks(scale, block, kind.steps)
    return found, None if minval is None else -_in_super_blocks((-minval).clamp(min=0), block, kind.steps)


def snap(spec: QuantizationSpec, columns: int, scale: Tensor) -> Tensor:
    """Scales as `snapped` has them; as float16 where no type holds the weight, which is told when it is written."""
    block = columns // scale.shape[1]
    kind = planned(spec, columns, block)
    small = scale.to(torch.float32).abs().clamp(min=2.0**-24)
    if kind is None or not (kind.steps or kind.has_least):
        small = torch.where(scale < 0, -small, small)  # a float16 of its own may be negative
    return _half(small) if kind is None else snapped(spec, columns, small)[0]


def snap_minima(spec: QuantizationSpec, columns: int, scale: Tensor, minval: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima as `snapped` has them; as float16 where no type holds the weight."""
    small = scale.to(torch.float32).clamp(min=2.0**-24)
    if planned(spec, columns, columns // scale.shape[1]) is None:
        return _half(small), _half(minval)
    found, least = snapped(spec, columns, small, minval)
    assert least is not None  # noqa: S101  # given
    return found, least


def _in_super_blocks(values: Tensor, block: int, steps: int) -> Tensor:
    each = superblocks.SIZE // block if block < superblocks.SIZE else 1
    parts = values.to(torch.float32).reshape(values.shape[0], -1, each)
    return superblocks.nearest(parts, steps).reshape(values.shape)


def _half(values: Tensor) -> Tensor:
    return values.to(torch.float16).to(torch.float32)


def _few_bits(values: Tensor, bits: int) -> Tensor:
    """The nearest float16 of so many significant bits, above zero."""
    mantissa, exponent = torch.frexp(values.to(torch.float32))
    few = torch.ldexp((mantissa * 2**bits).round(), exponent - bits)
    return _half(few.clamp(min=2.0**-24))
