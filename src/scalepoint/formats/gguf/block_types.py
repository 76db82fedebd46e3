"""The block types as a table, from the smallest to the largest, and which one a weight takes: the first that holds it.

Nothing is rounded here. `snapped` moves scales to where a type can hold them, for those who choose codes after it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from scalepoint.checkpoints import QuantizedWeight
from scalepoint.errors import ExportError
from scalepoint.formats.gguf import blocks, superblocks
from scalepoint.formats.gguf.layer_types import BlockCodes, Bytes, list_block_codes
from scalepoint.numerics import QuantizationFormulation, get_format
from scalepoint.spec import QuantizationSpec

FLOAT16_DIGITS = 11  # significant bits of a float16


@dataclass(frozen=True)
class BlockType:
    """One block type."""

    name: str  # as the gguf package has it
    columns: int  # that a block has
    size: int  # columns that share a scale
    low: int
    high: int
    has_least: bool
    pack: Callable[[BlockCodes], Bytes | None]
    steps: int = 0  # of the integer that a scale is in a super-block; 0: a scale is a float16

    @property
    def bits(self) -> int:
        """Of a code."""
        return (self.high - self.low).bit_length()

    def takes(self, low: int, high: int, columns: int, block: int) -> bool:
        """By its type and shape, whatever the scales are."""
        fits = self.low <= low and high <= self.high and columns % self.columns == 0
        return fits and block % self.size == 0 and (self.columns % block == 0 or block % self.columns == 0)

    def bytes_of(self, form: BlockCodes) -> Bytes | None:
        """None where this type cannot hold the weight."""
        columns = form.codes.shape[1]
        if self.has_least != (form.least is not None):
            return None
        if not self.takes(form.low, form.high, columns, columns // form.scale.shape[1]):
            return None
        cut = form.per(self.size)
        return None if cut is None else self.pack(cut)


BLOCK_TYPES = (
    BlockType("Q2_K", 256, 16, 0, 3, True, superblocks.pack_q2_k, 15),
    BlockType("Q3_K", 256, 16, -4, 3, False, superblocks.pack_q3_k, 31),
    BlockType("Q4_0", 32, 32, -8, 7, False, blocks.pack_q4_0),
    BlockType("Q4_K", 256, 32, 0, 15, True, superblocks.pack_q4_k, 63),
    BlockType("Q4_1", 32, 32, 0, 15, True, blocks.pack_q4_1),
    BlockType("Q5_0", 32, 32, -16, 15, False, blocks.pack_q5_0),
    BlockType("Q5_K", 256, 32, 0, 31, True, superblocks.pack_q5_k, 63),
    BlockType("Q5_1", 32, 32, 0, 31, True, blocks.pack_q5_1),
    BlockType("Q6_K", 256, 16, -32, 31, False, superblocks.pack_q6_k, 127),
    BlockType("Q8_0", 32, 32, -128, 127, False, blocks.pack_q8_0),
)


def choose_block_type(weights: Iterable[QuantizedWeight], name: str) -> BlockType:
    """The smallest type that holds all of them exactly, read one at a time; experts of one layer share theirs."""
    left, seen = list(BLOCK_TYPES), ""
    for packed in weights:
        forms = list_block_codes(packed)
        left = [kind for kind in left if any(kind.bytes_of(form) is not None for form in forms)]
        seen = f"{packed.spec.dtype} in blocks of {packed.block_size} of {packed.codes.shape[1]} columns"
    if left:
        return left[0]
    raise ExportError(
        f"{name}: no block type of GGUF holds {seen}: columns must be a multiple of 32, blocks of 16 or 32, scales "
        "float16 (or, of super-blocks, snapped); leave it float, or give it other blocks"
    )


def pack_weight(packed: QuantizedWeight, kind: BlockType) -> Bytes:
    """(rows, bytes of a row)."""
    found = next((data for form in list_block_codes(packed) if (data := kind.bytes_of(form)) is not None), None)
    if found is None:
        raise ExportError(f"{kind.name} cannot hold a weight of {packed.spec.dtype} in blocks of {packed.block_size}")
    return found


def plan_block_type(spec: QuantizationSpec, columns: int, block: int) -> BlockType | None:
    """The type that a weight takes once its scales are `snapped`; None: there is none."""
    row = get_format(spec.dtype)
    low, high = int(row.low), int(row.high)
    if row.is_float:
        return None
    if spec.qformulation == QuantizationFormulation.MINVAL:
        return _first_fitting_type(columns, block, low=0, high=high - low, has_least=True)
    if low == 0:  # zero points: of super-blocks only those of 2 bits could be held, and not all
        tries = (kind for kind in BLOCK_TYPES if not kind.steps and kind.has_least)
        return next((kind for kind in tries if kind.takes(0, high, columns, block)), None)
    if (low, high) == (-2, 1) and (found := _first_fitting_type(columns, block, low=0, high=3, has_least=True)):
        return found
    return _first_fitting_type(columns, block, low=low, high=high, has_least=False)


def describe_wider_type(spec: QuantizationSpec, columns: int) -> str:
    """Why the codes of a weight take more bits in the file than their type has; "": they do not."""
    block = getattr(spec.granularity, "block_size", None)
    block = block if isinstance(block, int) else columns
    kind, bits = plan_block_type(spec, columns, block), get_format(spec.dtype).bits
    if kind is None or kind.bits <= bits:
        return ""
    whole = plan_block_type(spec, superblocks.SUPERBLOCK_COLUMNS * block, block)
    if whole is not None and whole.bits < kind.bits:
        why = f"their rows are not a multiple of {superblocks.SUPERBLOCK_COLUMNS} columns, which {whole.name} needs"
    else:
        why = f"GGUF has no smaller type for blocks of {block}"
    return f"{kind.name}, which has {kind.bits} bits for each code: {why}"


def _first_fitting_type(columns: int, block: int, *, low: int, high: int, has_least: bool) -> BlockType | None:
    tries = (kind for kind in BLOCK_TYPES if kind.has_least == has_least)
    return next((kind for kind in tries if kind.takes(low, high, columns, block)), None)


def round_to_block_type(
    spec: QuantizationSpec, columns: int, scale: Tensor, minval: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Scales (rows, blocks), and least values where there are any, moved to what the planned type can hold.

    Zero points: scales keep so few bits that their product with a zero point is a float16. Least values above zero
    become zero in super-blocks, which cannot hold them.
    """
    block = columns // scale.shape[1]
    kind = plan_block_type(spec, columns, block)
    if kind is None:
        raise ExportError(f"no block type of GGUF holds {spec.dtype} in blocks of {block} of {columns} columns")
    if not kind.steps:
        if kind.has_least and minval is None:
            return _round_to_bits(scale, FLOAT16_DIGITS - get_format(spec.dtype).bits), None
        return _to_float16(scale), None if minval is None else _to_float16(minval)
    found = _round_in_super_blocks(scale, block, kind.steps)
    return found, None if minval is None else -_round_in_super_blocks((-minval).clamp(min=0), block, kind.steps)


def round_scales(spec: QuantizationSpec, columns: int, scale: Tensor) -> Tensor:
    """Scales as `snapped` has them; as float16 where no type holds the weight, which is told when it is written."""
    block = columns // scale.shape[1]
    kind = plan_block_type(spec, columns, block)
    small = scale.to(torch.float32).abs().clamp(min=2.0**-24)
    if kind is None or not (kind.steps or kind.has_least):
        small = torch.where(scale < 0, -small, small)  # a float16 of its own may be negative
    return _to_float16(small) if kind is None else round_to_block_type(spec, columns, small)[0]


def round_scales_and_minima(
    spec: QuantizationSpec, columns: int, scale: Tensor, minval: Tensor
) -> tuple[Tensor, Tensor]:
    """Scales and minima as `snapped` has them; as float16 where no type holds the weight."""
    small = scale.to(torch.float32).clamp(min=2.0**-24)
    if plan_block_type(spec, columns, columns // scale.shape[1]) is None:
        return _to_float16(small), _to_float16(minval)
    found, least = round_to_block_type(spec, columns, small, minval)
    assert least is not None  # noqa: S101  # given
    return found, least


def _round_in_super_blocks(values: Tensor, block: int, steps: int) -> Tensor:
    each = superblocks.SUPERBLOCK_COLUMNS // block if block < superblocks.SUPERBLOCK_COLUMNS else 1
    parts = values.to(torch.float32).reshape(values.shape[0], -1, each)
    return superblocks.round_to_factors(parts, steps).reshape(values.shape)


def _to_float16(values: Tensor) -> Tensor:
    return values.to(torch.float16).to(torch.float32)


def _round_to_bits(values: Tensor, bits: int) -> Tensor:
    """The nearest float16 of so many significant bits, above zero."""
    mantissa, exponent = torch.frexp(values.to(torch.float32))
    few = torch.ldexp((mantissa * 2**bits).round(), exponent - bits)
    return _to_float16(few.clamp(min=2.0**-24))
