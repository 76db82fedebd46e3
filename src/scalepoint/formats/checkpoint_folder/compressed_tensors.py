"""Write compressed-tensors folders, which vLLM and transformers load. Layers may have different schemes (schemes.py).

    pack-quantized         weight_packed int32 (out, in bits / 32)   weight_scale (out, blocks)   weight_shape
                           weight_zero_point int32 (out bits / 32, blocks)
    int-, float-quantized  weight int8 / float8 (out, in)   weight_scale (out, 1) or (1)   input_scale (1) if static
    nvfp4, mxfp4           weight_packed uint8 (out, in / 2), the first in the low half   weight_scale e4m3 / e8m0
                           nvfp4: weight_global_scale, input_global_scale: divisors, exact for powers of two

Scales have the dtype of the source's weight, because loaders cast them to it; those of 4-bit floats do not.
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
    CONV1D_MODELS,
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
# Families whose _init_weights in transformers 5.22 reads layer.weight of linear layers while a folder is loaded
NEEDS_WEIGHT_TENSOR = ("falcon", "falcon_mamba", "gpt_bigcode", "mamba", "mamba2", "nanochat", "recurrent_gemma")
E8M0_BIAS = 127
KV_CACHE_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
FLOAT4_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def check(source: Source, weight: QuantizationSpec | None, activation: QuantizationSpec | None) -> None:
    """Raise TargetError if the format cannot store this model or precision."""
    check_source(source, NAME)
    if weight is None:
        raise TargetError(f"{NAME} stores quantized weights: pass a spec for weights")
    if source.model_type in CONV1D_MODELS:
        raise TargetError(
            f"{source.model_type} has Conv1D layers, which loaders of compressed-tensors do not support: use the "
            "target gptq or gguf"
        )
    scheme = choose_scheme(weight, activation)
    if source.model_type in NEEDS_WEIGHT_TENSOR and scheme.format not in ("int-quantized", "float-quantized"):
        raise TargetError(
            f"transformers cannot load {source.model_type} with packed weights, because it initializes a tensor "
            "'weight', which packed layers do not have: use float8_e4m3fn weights, int8 weights with int8 activations, "
            "or the target gptq"
        )
    check_blocks(source, read_block_size(weight))
    _check_experts(source, scheme)
    if weight.dtype == FP4:
        _check_bfloat16(source)
    if scheme.format == "pack-quantized":
        check_words(source, 1, scheme.weights.num_bits, scheme.format)
        if not scheme.weights.symmetric:
            check_words(source, 0, scheme.weights.num_bits, f"{scheme.format} with zero points")


def _check_experts(source: Source, scheme: Scheme) -> None:
    """Raise TargetError for schemes that transformers cannot load for experts, because it stacks their weights."""
    if not any(EXPERTS in name for name in source.tensors):
        return
    is_symmetric_integer = scheme.format == "pack-quantized" and scheme.weights.symmetric
    has_supported_format = (
        is_symmetric_integer or scheme.format == "float-quantized" or scheme.format.startswith("mxfp4")
    )
    if not has_supported_format or scheme.inputs is not None:
        raise TargetError(
            f"{source.folder} has experts, for which transformers loads quantized weights with float activations only: "
            "use symmetric integers, float8_e4m3fn or mxfp4, and omit activation="
        )


def _check_bfloat16(source: Source) -> None:
    for name, stored in source.tensors.items():
        if name.endswith(WEIGHT) and stored.dtype != torch.bfloat16:
            raise TargetError(
                f"{name} is not bfloat16: compressed-tensors unpacks 4-bit floats only to bfloat16. Save the "
                "checkpoint as bfloat16 first"
            )


def write(checkpoint: QuantizedCheckpoint, path: Path) -> None:
    """Write the weights one by one, then the config."""
    source, schemes = checkpoint.source, dict[str, Scheme]()
    cache_scales = _cache_scales(checkpoint)
    checkpoint = replace(checkpoint, changed={**checkpoint.changed, **cache_scales})

    def convert_layer(layer: str, weight: QuantizedWeight) -> dict[str, Tensor]:
        scheme = schemes[layer] = choose_scheme(weight.spec, weight.activation)
        return _convert_weight(layer, weight, scheme, source.tensors[layer + WEIGHT].dtype)

    def write_configs(folder: Path) -> None:
        write_config(folder, source, build_config(source, schemes, has_cache=bool(cache_scales)))

    write_folder(checkpoint, path, convert_layer, write_configs)


def _cache_scales(checkpoint: QuantizedCheckpoint) -> dict[str, Tensor]:
    """Return the scales of keys and values of each block, by tensor name, if the cache is quantized."""
    if checkpoint.cache is None:
        return {}
    tensors = {}
    for layer, scales in zip(attention_layers(checkpoint.source), checkpoint.cache.scales, strict=True):
        key_scale, value_scale = scales
        tensors[f"{layer}.k_scale"] = key_scale.reshape(1)
        tensors[f"{layer}.v_scale"] = value_scale.reshape(1)
    return tensors


def build_config(source: Source, schemes: dict[str, Scheme], *, has_cache: bool = False) -> dict[str, Any]:
    """Build quantization_config: the most common scheme for "Linear", other schemes with their layers.

    Layers that stay float are in `ignore`.
    """
    by_frequency = [scheme for scheme, _ in Counter(schemes.values()).most_common()]
    expert_scheme = _find_expert_scheme(source, schemes)
    groups = {}
    for number, scheme in enumerate(by_frequency):
        targets = ["Linear"]
        if number:
            targets = [r"re:.*\.experts\.\d+\..*"] if scheme == expert_scheme else []
            targets += [layer for layer in schemes if schemes[layer] == scheme and EXPERTS not in layer]
        groups[f"group_{number}"] = scheme.to_group(targets)
    formats = {scheme.format for scheme in by_frequency}
    return {
        "quant_method": NAME,
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list_float_layers(source, schemes),
        "kv_cache_scheme": KV_CACHE_SCHEME if has_cache else None,
        "global_compression_ratio": None,
    }


def _find_expert_scheme(source: Source, schemes: dict[str, Scheme]) -> Scheme | None:
    """Return the scheme of all experts; raise ExportError if they differ, because loaders stack their weights."""
    layers = [name.removesuffix(WEIGHT) for name in source.tensors if EXPERTS in name and name.endswith(WEIGHT)]
    first_layers: dict[Scheme | None, str] = {}  # the first layer with each scheme
    for layer in layers:
        first_layers.setdefault(schemes.get(layer), layer)
    if len(first_layers) > 1:
        raise ExportError(
            f"{' and '.join(list(first_layers.values())[:2])} are quantized in different ways: loaders of {NAME} stack "
            "experts, so quantize all of them in the same way, or use gptq"
        )
    return next(iter(first_layers), None)


def _convert_weight(layer: str, weight: QuantizedWeight, scheme: Scheme, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the stored tensors of a layer; `dtype` is that of the scales."""
    if scheme.format == "pack-quantized":
        return _pack_integers(layer, weight, scheme, dtype)
    if weight.spec.dtype == FP4:
        return _pack_floats(layer, weight, scheme)
    scale = weight.scale
    if scheme.weights.strategy == "tensor":
        if not torch.equal(scale, scale[:1, :1].expand_as(scale)):
            raise ExportError(f"{layer}: its spec has one scale per tensor, but its rows have different scales")
        scale = scale[0, :1]
    codes = weight.codes.to(E4M3) if weight.is_float else _to_signed(layer, weight)
    tensors = {"weight": codes, "weight_scale": to_stored_scales(scale, dtype, layer)}
    if scheme.inputs is not None and scheme.inputs.dynamic is False:
        tensors["input_scale"] = _input_scale(layer, weight).to(torch.float32)
    return tensors


def _pack_integers(layer: str, weight: QuantizedWeight, scheme: Scheme, dtype: torch.dtype) -> dict[str, Tensor]:
    codes, zero_point = weight.to_unsigned()
    tensors = {
        "weight_packed": pack_bits(codes, weight.bits),
        "weight_scale": to_stored_scales(weight.scale, dtype, layer),
        "weight_shape": torch.tensor(weight.codes.shape, dtype=torch.int64),
    }
    if not scheme.weights.symmetric:
        tensors["weight_zero_point"] = pack_bits(zero_point.T, weight.bits).T.contiguous()
    else:
        _check_is_symmetric(layer, weight, zero_point)
    return tensors


def _to_signed(layer: str, weight: QuantizedWeight) -> Tensor:
    """Return int8 codes whose zero point is 0."""
    codes, zero_point = weight.to_unsigned()
    _check_is_symmetric(layer, weight, zero_point)
    return (codes - (1 << weight.bits - 1)).to(torch.int8)


def _check_is_symmetric(layer: str, weight: QuantizedWeight, zero_point: Tensor) -> None:
    if not bool((zero_point == 1 << weight.bits - 1).all()):
        raise ExportError(f"{layer}: its spec is symmetric, but its zero points are not in the middle of the range")


def _pack_floats(layer: str, weight: QuantizedWeight, scheme: Scheme) -> dict[str, Tensor]:
    """Pack 4-bit floats: a sign bit and the index of the magnitude; the first of two columns is in the low half."""
    values = weight.codes.to(torch.float32)
    codes = torch.bucketize(values.abs(), torch.tensor(FLOAT4_MAGNITUDES)).to(torch.uint8)
    codes |= values.signbit().to(torch.uint8) << 3
    tensors = {"weight_packed": codes[:, 0::2] | (codes[:, 1::2] << 4)}
    if scheme.format.startswith("mxfp4"):
        to_stored_scales(weight.scale, torch.float8_e8m0fnu, layer)  # checks that the scales are powers of two
        exponent = weight.scale.log2().round()
        tensors["weight_scale"] = (exponent + E8M0_BIAS).to(torch.uint8)
        return tensors
    if weight.outer_scale is None:
        raise ExportError(f"{layer}: an nvfp4 weight must have an outer_scale, the scale of the whole tensor")
    tensors["weight_scale"] = (weight.scale / weight.outer_scale).to(E4M3)
    tensors["weight_global_scale"] = weight.outer_scale.reshape(1).to(torch.float32).reciprocal()
    if scheme.inputs is not None:
        tensors["input_global_scale"] = _input_scale(layer, weight).to(torch.float32).reciprocal()
    return tensors


def _input_scale(layer: str, weight: QuantizedWeight) -> Tensor:
    if weight.activation_scale is None:
        raise ExportError(f"{layer}: its input is quantized with a stored scale, so activation_scale must not be None")
    return weight.activation_scale.reshape(1)


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
