"""compressed-tensors: what vLLM and transformers load, codes as `schemes.py` tells, several schemes in one folder.

    pack-quantized         weight_packed int32 (out, in bits / 32)   weight_scale (out, blocks)   weight_shape
                           weight_zero_point int32 (out bits / 32, blocks)
    int-, float-quantized  weight int8 / float8 (out, in)   weight_scale (out, 1) or (1)   input_scale (1) if static
    nvfp4, mxfp4           weight_packed uint8 (out, in / 2), the first in the low half   weight_scale e4m3 / e8m0
                           nvfp4: weight_global_scale, input_global_scale: divisors, exact for powers of two

Scales of all but the 4-bit floats are of the type of the source's weight: loaders cast them to it.
"""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scalepoint.checkpoints import QuantizedCheckpoint, QuantizedWeight, Source
from scalepoint.errors import ExportError, TargetError
from scalepoint.formats.checkpoint import CheckpointFormat
from scalepoint.formats.checkpoint_folder.bit_packing import pack_bits
from scalepoint.formats.checkpoint_folder.folder import (
    CONV1D,
    WEIGHT,
    attention_layers,
    can_quantize,
    check_blocks,
    check_source,
    check_words,
    choose_block_size,
    list_float_layers,
    read_block_size,
    tensor_bytes,
    to_stored_scales,
    write_config,
    write_folder,
)
from scalepoint.formats.checkpoint_folder.schemes import NAME, Scheme, choose_scheme
from scalepoint.numerics import E4M3, FP4
from scalepoint.spec import QuantizationSpec

EXPERTS = ".experts."
# Families whose _init_weights in transformers (5.22) reads layer.weight of linear layers while a folder is loaded.
NEEDS_WEIGHT = ("falcon", "falcon_mamba", "gpt_bigcode", "mamba", "mamba2", "nanochat", "recurrent_gemma")
E8M0_BIAS = 127
KV_CACHE_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def check(source: Source, weight: QuantizationSpec | None, activation: QuantizationSpec | None) -> None:
    """Refuse what the format cannot hold."""
    check_source(source, NAME)
    if weight is None:
        raise TargetError(f"{NAME} stores quantized weights: give a spec for them")
    if source.model_type in CONV1D:
        raise TargetError(
            f"{source.model_type} keeps its matrices in Conv1D layers, which compressed-tensors does not load: use the "
            "target gptq or gguf"
        )
    scheme = choose_scheme(weight, activation)
    if source.model_type in NEEDS_WEIGHT and scheme.format not in ("int-quantized", "float-quantized"):
        raise TargetError(
            f"transformers does not load {source.model_type} with packed weights: it initializes a tensor 'weight', "
            "which packed layers do not have. Use float8_e4m3fn weights, int8 weights with int8 activations, or the "
            "target gptq"
        )
    check_blocks(source, read_block_size(weight))
    _check_experts(source, scheme)
    if weight.dtype == FP4 and (others := _tensors_not_of(source, torch.bfloat16)):
        raise TargetError(
            f"{others[0]} is not bfloat16: compressed-tensors unpacks 4-bit floats to bfloat16 alone. Save the "
            "checkpoint as bfloat16 first"
        )
    if scheme.format == "pack-quantized":
        bits = int(dict(scheme.weights)["num_bits"])
        check_words(source, 1, bits, scheme.format)
        if not scheme.is_symmetric:
            check_words(source, 0, bits, f"{scheme.format} with zero points")


def _check_experts(source: Source, scheme: Scheme) -> None:
    """Loaders stack experts, and have no zero points, tensor scales or quantized inputs for them then."""
    is_plain = scheme.format == "float-quantized" or scheme.format.startswith("mxfp4")
    if any(EXPERTS in name for name in source.tensors) and not (
        (is_plain or (scheme.format == "pack-quantized" and scheme.is_symmetric)) and scheme.inputs is None
    ):
        raise TargetError(
            f"{source.folder} has experts, for which transformers loads weights alone: symmetric integers, "
            "float8_e4m3fn or mxfp4, without activations"
        )


def _tensors_not_of(source: Source, dtype: torch.dtype) -> list[str]:
    return [name for name, each in source.tensors.items() if name.endswith(WEIGHT) and each.dtype != dtype]


def write(checkpoint: QuantizedCheckpoint, path: Path) -> None:
    """Weights as they come, then the config with what was seen."""
    source, schemes = checkpoint.source, dict[str, Scheme]()
    cached = _cache_scales(checkpoint)
    checkpoint = replace(checkpoint, changed={**checkpoint.changed, **cached})

    def parts(layer: str, packed: QuantizedWeight) -> dict[str, Tensor]:
        scheme = schemes[layer] = choose_scheme(packed.spec, packed.activation)
        return _stored_tensors(layer, packed, scheme, source.tensors[layer + WEIGHT].dtype)

    def finish(folder: Path) -> None:
        write_config(folder, source, build_config(source, schemes, has_cache=bool(cached)))

    write_folder(checkpoint, path, parts, finish)


def _cache_scales(checkpoint: QuantizedCheckpoint) -> dict[str, Tensor]:
    """The scales of the keys and of the values of each block, where they are kept in float8_e4m3fn."""
    if checkpoint.cache is None:
        return {}
    pairs = zip(attention_layers(checkpoint.source), checkpoint.cache.scales, strict=True)
    return {
        f"{layer}.{part}_scale": scale.reshape(1)
        for layer, each in pairs
        for part, scale in zip("kv", each, strict=True)
    }


def build_config(source: Source, schemes: dict[str, Scheme], *, has_cache: bool = False) -> dict[str, Any]:
    """The commonest scheme is that of every Linear; others name their layers, what stays float is ignored."""
    counted = [scheme for scheme, _ in Counter(schemes.values()).most_common()]
    experts = _scheme_of_experts(source, schemes)
    groups = {}
    for number, scheme in enumerate(counted):
        named = [layer for layer, each in schemes.items() if each == scheme and EXPERTS not in layer]
        if number and scheme == experts:
            named = [r"re:.*\.experts\.\d+\..*", *named]
        groups[f"group_{number}"] = scheme.group(named if number else ["Linear"])
    formats = {scheme.format for scheme in counted}
    return {
        "quant_method": NAME,
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list_float_layers(source, schemes),
        "kv_cache_scheme": KV_CACHE_SCHEME if has_cache else None,
        "global_compression_ratio": None,
    }


def _scheme_of_experts(source: Source, schemes: dict[str, Scheme]) -> Scheme | None:
    """Loaders stack experts, so that all of a model must be alike."""
    layers = [name.removesuffix(WEIGHT) for name in source.tensors if EXPERTS in name and name.endswith(WEIGHT)]
    found: dict[Scheme | None, str] = {}
    for layer in layers:
        found.setdefault(schemes.get(layer), layer)
    if len(found) > 1:
        raise ExportError(
            f"{' and '.join(list(found.values())[:2])} are quantized in different ways: loaders of {NAME} stack "
            "experts, so give all of them the same (gptq can tell them apart)"
        )
    return next(iter(found), None)


def _stored_tensors(layer: str, packed: QuantizedWeight, scheme: Scheme, dtype: torch.dtype) -> dict[str, Tensor]:
    if scheme.format == "pack-quantized":
        return _pack_integers(layer, packed, scheme, dtype)
    if packed.spec.dtype == FP4:
        return _pack_floats(layer, packed, scheme)
    scale = packed.scale
    if scheme.strategy == "tensor":
        if not torch.equal(scale, scale[:1, :1].expand_as(scale)):
            raise ExportError(f"{layer}: one scale for all was asked for, and it has several")
        scale = scale[0, :1]
    codes = packed.codes.to(E4M3) if packed.is_float else _to_signed(layer, packed)
    found = {"weight": codes, "weight_scale": to_stored_scales(scale, dtype, layer)}
    if scheme.inputs is not None and dict(scheme.inputs)["dynamic"] is False:
        found["input_scale"] = _input_scale(layer, packed).to(torch.float32)
    return found


def _pack_integers(layer: str, packed: QuantizedWeight, scheme: Scheme, dtype: torch.dtype) -> dict[str, Tensor]:
    codes, zero = packed.to_unsigned()
    found = {
        "weight_packed": pack_bits(codes, packed.bits),
        "weight_scale": to_stored_scales(packed.scale, dtype, layer),
        "weight_shape": torch.tensor(packed.codes.shape, dtype=torch.int64),
    }
    if not scheme.is_symmetric:
        found["weight_zero_point"] = pack_bits(zero.T, packed.bits).T.contiguous()
    else:
        _check_middle(layer, packed, zero)
    return found


def _to_signed(layer: str, packed: QuantizedWeight) -> Tensor:
    """int8 codes around 0."""
    codes, zero = packed.to_unsigned()
    _check_middle(layer, packed, zero)
    return (codes - (1 << packed.bits - 1)).to(torch.int8)


def _check_middle(layer: str, packed: QuantizedWeight, zero: Tensor) -> None:
    if not bool((zero == 1 << packed.bits - 1).all()):
        raise ExportError(f"{layer}: its spec is symmetric, but its zero points are not in the middle")


def _pack_floats(layer: str, packed: QuantizedWeight, scheme: Scheme) -> dict[str, Tensor]:
    values = packed.codes.to(torch.float32)
    index = torch.bucketize(values.abs(), torch.tensor(FLOAT4)).to(torch.uint8)
    index |= values.signbit().to(torch.uint8) << 3
    found = {"weight_packed": index[:, 0::2] | (index[:, 1::2] << 4)}
    if scheme.format.startswith("mxfp4"):
        exponent = packed.scale.log2().round()
        found["weight_scale"] = (exponent + E8M0_BIAS).to(torch.uint8)
        to_stored_scales(packed.scale, torch.float8_e8m0fnu, layer)
        return found
    if packed.outer_scale is None:
        raise ExportError(f"{layer}: nvfp4 has a scale for the whole tensor (outer_scale)")
    found["weight_scale"] = (packed.scale / packed.outer_scale).to(E4M3)
    found["weight_global_scale"] = packed.outer_scale.reshape(1).to(torch.float32).reciprocal()
    if scheme.inputs is not None:
        found["input_global_scale"] = _input_scale(layer, packed).to(torch.float32).reciprocal()
    return found


def _input_scale(layer: str, packed: QuantizedWeight) -> Tensor:
    if packed.activation_scale is None:
        raise ExportError(f"{layer}: its input has a scale for all that is stored, and none was given")
    return packed.activation_scale.reshape(1)


COMPRESSED_TENSORS = CheckpointFormat(
    name=NAME,
    suffix="",
    write=write,
    check=check,
    scale_dtype=None,
    summary="a folder for vLLM and transformers: int2 to int8, int8 with int8 activations, fp8, NVFP4, MXFP4",
    choose_block_size=choose_block_size,
    can_quantize=can_quantize,
    tensor_bytes=tensor_bytes,
)
