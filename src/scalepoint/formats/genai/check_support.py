"""Reject models and precisions that the format does not support, before any work starts."""

from scalepoint.checkpoints import Source
from scalepoint.errors import TargetError, did_you_mean
from scalepoint.formats.genai.decoder import Decoder
from scalepoint.formats.genai.families import describe_decoder
from scalepoint.formats.genai.graph import find_tensor_name
from scalepoint.formats.genai.layout import BLOCK_SIZES
from scalepoint.numerics import get_format
from scalepoint.spec import PerBlockGranularity, QuantizationSpec

MAX_BITS = 8
ROTARY_MULTIPLE = 16  # channels; GroupQueryAttention rotates only multiples of it


def check(source: Source, weight: QuantizationSpec | None, activation: QuantizationSpec | None) -> None:
    """Raise TargetError, with what to do instead, if this model or precision is not supported."""
    decoder = describe_decoder(source.config)
    if activation is not None:
        raise TargetError(
            "ort-genai does not take quantized activations: its kernels round them to int8 themselves, with one scale "
            "per block; omit activation="
        )
    if weight is not None:
        _check_weight(weight)
    _check_blocks(decoder)
    _check_tensors(source, decoder)


def _check_weight(weight: QuantizationSpec) -> None:
    number_format = get_format(weight.dtype)
    if number_format.is_float or number_format.bits > MAX_BITS:
        raise TargetError(f"ort-genai stores integers of up to 8 bits, got {weight.dtype}: use int4 or int8")
    granularity = weight.granularity
    if isinstance(granularity, PerBlockGranularity):
        sizes = granularity.block_size
        size = sizes if isinstance(sizes, int) else sizes[-1]
        if size != -1 and size % BLOCK_SIZES[0]:
            raise TargetError(
                f"ort-genai supports blocks of {', '.join(map(str, BLOCK_SIZES))} columns and multiples of "
                f"{BLOCK_SIZES[0]}, got {size}"
            )


def _check_blocks(decoder: Decoder) -> None:
    for block in decoder.blocks:
        if block.rotary is not None and block.rotary.channels % ROTARY_MULTIPLE:
            raise TargetError(
                f"ort-genai rotates heads in steps of {ROTARY_MULTIPLE} channels (GroupQueryAttention): this model "
                f"rotates {block.rotary.channels} of {decoder.head_size}"
            )
    if any(block.has_experts for block in decoder.blocks) and decoder.activation != "silu":
        raise TargetError(
            f"ort-genai supports experts with the activation silu only (QMoE), this model has {decoder.activation}"
        )


def _check_tensors(source: Source, decoder: Decoder) -> None:
    """Raise TargetError if the checkpoint lacks a matrix that the graph multiplies with."""
    layers = [layer for block in range(len(decoder.blocks)) for layer in decoder.layers(block)]
    head = [] if decoder.has_tied_head else [decoder.names.head]
    positions = [decoder.names.positions] if decoder.names.positions else []
    for layer in [decoder.names.embedding, *positions, *layers, *head]:
        if find_tensor_name(f"{layer}.weight", source.tensors.__contains__) is None:
            raise TargetError(
                f"{source.folder} has no tensor {layer}.weight, which {source.model_type} models need: "
                f"{did_you_mean(f'{layer}.weight', source.tensors)}"
            )
