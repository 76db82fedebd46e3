"""The block types of GGUF, from the smallest to the largest, and the choice of a type for a weight.

A weight gets the smallest type that stores it exactly: packing never rounds. `round_to_block_type` moves scales to
values that a type can store, before codes are chosen.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor

from scalepoint.checkpoints import QuantizedWeight
from scalepoint.errors import ExportError
from scalepoint.formats.gguf import blocks, superblocks
from scalepoint.formats.gguf.block_codes import BlockCodes, Bytes, list_block_codes
from scalepoint.numerics import QuantizationFormulation, get_format
from scalepoint.spec import QuantizationSpec

FLOAT16_SIGNIFICANT_BITS = 11
SMALLEST_FLOAT16 = 2.0**-24


@dataclass(frozen=True)
class BlockType:
    """One block type of GGUF.

    Attributes:
        name: The name in the gguf package.
        columns: Columns of a block.
        columns_per_scale: Columns that share a scale.
        low: The lowest code.
        high: The highest code.
        has_minimum: Whether a minimum is stored next to each scale.
        pack: Packs codes; returns None if the scales cannot be stored exactly.
        max_factor: In super-blocks a scale is an integer up to `max_factor` times a float16; 0: a scale is a float16.
    """

    name: str
    columns: int
    columns_per_scale: int
    low: int
    high: int
    has_minimum: bool
    pack: Callable[[BlockCodes], Bytes | None]
    max_factor: int = 0

    @property
    def bits(self) -> int:
        """The bits of a code."""
        return (self.high - self.low).bit_length()

    def fits(self, low: int, high: int, columns: int, block_size: int) -> bool:
        """Whether codes of this range and shape can be stored, if their scales can."""
        if not (self.low <= low and high <= self.high) or columns % self.columns:
            return False
        if block_size % self.columns_per_scale:
            return False
        return self.columns % block_size == 0 or block_size % self.columns == 0

    def try_pack(self, codes: BlockCodes) -> Bytes | None:
        """Return the packed rows, or None if this type cannot store the weight exactly."""
        columns = codes.codes.shape[1]
        if self.has_minimum != (codes.minimum is not None):
            return None
        if not self.fits(codes.low, codes.high, columns, columns // codes.scale.shape[1]):
            return None
        split = codes.split_blocks(self.columns_per_scale)
        return None if split is None else self.pack(split)


# name, columns, columns_per_scale, low, high, has_minimum, pack, max_factor; the smallest types first
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
BLOCK_TYPES_WITH_MINIMUM = [block_type for block_type in BLOCK_TYPES if block_type.has_minimum]
BLOCK_TYPES_WITHOUT_MINIMUM = [block_type for block_type in BLOCK_TYPES if not block_type.has_minimum]


def choose_block_type(weights: Mapping[str, QuantizedWeight], names: Sequence[str]) -> BlockType:
    """Return the smallest type that stores all weights exactly; experts of a layer share one tensor and one type.

    Args:
        weights: Weights by name; one is in memory at a time.
        names: The names of the weights of the tensor.

    Raises:
        ExportError: No type stores all of them.
    """
    candidates = deque(BLOCK_TYPES)
    stored_in_a_row = 0  # weights that the first candidate stores
    for name in cycle(names):
        weight = weights[name]
        alternatives = list_block_codes(weight)
        while candidates and not any(candidates[0].try_pack(codes) is not None for codes in alternatives):
            candidates.popleft()
            stored_in_a_row = 0
        if not candidates:
            shape = f"blocks of {weight.block_size} of {weight.codes.shape[1]} columns"
            raise ExportError(
                f"{names[0]}: no block type of GGUF stores {weight.spec.dtype} in {shape}: columns must be a multiple "
                "of 32, blocks must have 16 or 32 columns, scales must be float16 (or rounded for super-blocks); leave "
                "it float, or use other blocks"
            )
        stored_in_a_row += 1
        if stored_in_a_row == len(names):
            break
    return candidates[0]


def pack_weight(weight: QuantizedWeight, block_type: BlockType) -> Bytes:
    """Pack a weight as bytes of shape (rows, bytes of a row)."""
    for codes in list_block_codes(weight):
        packed = block_type.try_pack(codes)
        if packed is not None:
            return packed
    raise ExportError(
        f"{block_type.name} cannot store a weight of {weight.spec.dtype} in blocks of {weight.block_size}"
    )


def plan_block_type(spec: QuantizationSpec, columns: int, block: int) -> BlockType | None:
    """Return the type that a weight will get once its scales are rounded for it.

    Args:
        spec: The spec of the weight.
        columns: The columns of the weight.
        block: The columns that share a scale.

    Returns:
        The block type, or None if no type fits.
    """
    number_format = get_format(spec.dtype)
    low, high = int(number_format.low), int(number_format.high)
    if number_format.is_float:
        return None
    if spec.qformulation == QuantizationFormulation.MINVAL:
        return _first_fitting_type(BLOCK_TYPES_WITH_MINIMUM, columns, block, 0, high - low)
    if low == 0:
        # Zero points. A super-block stores scale and minimum as integers, and their ratio is seldom a zero point.
        simple_types = [block_type for block_type in BLOCK_TYPES_WITH_MINIMUM if not block_type.max_factor]
        return _first_fitting_type(simple_types, columns, block, 0, high)
    block_type = None
    if (low, high) == (-2, 1):  # int2: no type without a minimum has 2 bits
        block_type = _first_fitting_type(BLOCK_TYPES_WITH_MINIMUM, columns, block, 0, 3)
    return block_type or _first_fitting_type(BLOCK_TYPES_WITHOUT_MINIMUM, columns, block, low, high)


def _first_fitting_type(
    block_types: Sequence[BlockType], columns: int, block_size: int, low: int, high: int
) -> BlockType | None:
    return next((block_type for block_type in block_types if block_type.fits(low, high, columns, block_size)), None)


def describe_wider_type(spec: QuantizationSpec, columns: int) -> str:
    """Say why the codes of a weight take more bits in the file than in the spec; "" if they do not."""
    block_size = getattr(spec.granularity, "block_size", None)
    if not isinstance(block_size, int):
        block_size = columns
    block_type, bits = plan_block_type(spec, columns, block_size), get_format(spec.dtype).bits
    if block_type is None or block_type.bits <= bits:
        return ""
    with_superblocks = plan_block_type(spec, superblocks.SUPERBLOCK_COLUMNS * block_size, block_size)
    if with_superblocks is not None and with_superblocks.bits < block_type.bits:
        reason = (
            f"their rows are not a multiple of {superblocks.SUPERBLOCK_COLUMNS} columns, which "
            f"{with_superblocks.name} needs"
        )
    else:
        reason = f"GGUF has no smaller type for blocks of {block_size}"
    return f"{block_type.name}, which has {block_type.bits} bits for each code: {reason}"


def round_to_block_type(
    spec: QuantizationSpec, columns: int, scale: Tensor, minval: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Round scales and minima to values that the planned block type can store.

    With zero points, scales keep so few bits that scale times zero point is a float16. In super-blocks a minimum above
    zero becomes zero, because they store its negative as an unsigned integer.

    Args:
        spec: The spec of the weight.
        columns: The columns of the weight.
        scale: Scales (rows, blocks).
        minval: Minima (rows, blocks), if the weight has them.

    Returns:
        The rounded scales and minima.

    Raises:
        ExportError: No block type fits.
    """
    block_size = columns // scale.shape[1]
    block_type = plan_block_type(spec, columns, block_size)
    if block_type is None:
        raise ExportError(f"no block type of GGUF stores {spec.dtype} in blocks of {block_size} of {columns} columns")
    if not block_type.max_factor:
        if block_type.has_minimum and minval is None:
            return _round_to_bits(scale, FLOAT16_SIGNIFICANT_BITS - get_format(spec.dtype).bits), None
        return _to_float16(scale), None if minval is None else _to_float16(minval)
    rounded_scale = _round_in_superblocks(scale, block_size, block_type.max_factor)
    if minval is None:
        return rounded_scale, None
    return rounded_scale, -_round_in_superblocks((-minval).clamp(min=0), block_size, block_type.max_factor)


def round_scales(spec: QuantizationSpec, columns: int, scale: Tensor) -> Tensor:
    """Round scales for the planned type; to float16 if no type fits, which raises an error when the file is written."""
    block_type = plan_block_type(spec, columns, columns // scale.shape[1])
    nonzero = scale.to(torch.float32).abs().clamp(min=SMALLEST_FLOAT16)
    if block_type is None or not (block_type.max_factor or block_type.has_minimum):
        # Only types without factors and minima can store negative scales.
        nonzero = torch.where(scale < 0, -nonzero, nonzero)
    if block_type is None:
        return _to_float16(nonzero)
    rounded_scale, _ = round_to_block_type(spec, columns, nonzero)
    return rounded_scale


def round_scales_and_minima(
    spec: QuantizationSpec, columns: int, scale: Tensor, minval: Tensor
) -> tuple[Tensor, Tensor]:
    """Round scales and minima for the planned type; to float16 if no type fits."""
    nonzero = scale.to(torch.float32).clamp(min=SMALLEST_FLOAT16)
    if plan_block_type(spec, columns, columns // scale.shape[1]) is None:
        return _to_float16(nonzero), _to_float16(minval)
    rounded_scale, rounded_minval = round_to_block_type(spec, columns, nonzero, minval)
    assert rounded_minval is not None  # noqa: S101  # minval was passed
    return rounded_scale, rounded_minval


def _round_in_superblocks(values: Tensor, block_size: int, max_factor: int) -> Tensor:
    blocks_per_superblock = max(1, superblocks.SUPERBLOCK_COLUMNS // block_size)
    parts = values.to(torch.float32).reshape(values.shape[0], -1, blocks_per_superblock)
    return superblocks.round_to_factors(parts, max_factor).reshape(values.shape)


def _to_float16(values: Tensor) -> Tensor:
    return values.to(torch.float16).to(torch.float32)


def _round_to_bits(values: Tensor, bits: int) -> Tensor:
    """Round to the nearest float16 with `bits` significant bits, at least the smallest positive one."""
    mantissa, exponent = torch.frexp(values.to(torch.float32))
    rounded = torch.ldexp((mantissa * 2**bits).round(), exponent - bits)
    return _to_float16(rounded.clamp(min=SMALLEST_FLOAT16))
