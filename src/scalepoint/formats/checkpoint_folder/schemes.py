"""The schemes of compressed-tensors: what a weight and its input become, as `quantization_config` says it.

    weight               input                   format
    int1 .. int8         float                   pack-quantized        blocks or a scale a row; zero points or none
    int8                 int8                    int-quantized         a scale a row, or one
    float8_e4m3fn        float, float8_e4m3fn    float-quantized       a scale a row, or one
    float4, e4m3 scales  float, the same         nvfp4-pack-quantized  blocks of 16, and a scale for all
    float4, e8m0 scales  float                   mxfp4-pack-quantized  blocks of 32

An input has a scale a token, made at every run, or one for all, stored.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scalepoint.errors import TargetError
from scalepoint.formats.checkpoint_folder.folder import read_block_size
from scalepoint.numerics import E4M3, E8M0, FP4, QuantizationFormulation, QuantizationScheme, dtype_name, get_format
from scalepoint.spec import (
    PerBlockGranularity,
    PerChannelGranularity,
    PerTensorGranularity,
    PerTokenBlockGranularity,
    PerTokenGranularity,
    QuantizationSpec,
)
from scalepoint.spec.dynamic import DynamicQParamsCalculator

NAME = "compressed-tensors"
NVFP4_BLOCK = 16
MXFP4_BLOCK = 32


@dataclass(frozen=True)
class Scheme:
    """One group of the config: equal schemes are one group."""

    format: str
    weights: tuple[tuple[str, Any], ...]
    inputs: tuple[tuple[str, Any], ...] | None = None

    def group(self, targets: list[str]) -> dict[str, Any]:
        return {
            "targets": targets,
            "weights": dict(self.weights),
            "input_activations": None if self.inputs is None else dict(self.inputs),
            "output_activations": None,
            "format": self.format,
        }

    @property
    def is_symmetric(self) -> bool:
        return bool(dict(self.weights)["symmetric"])

    @property
    def strategy(self) -> str:
        return str(dict(self.weights)["strategy"])


def choose_scheme(weight: QuantizationSpec, activation: QuantizationSpec | None) -> Scheme:
    """The scheme that holds both; TargetError with what is allowed where there is none."""
    for spec in (weight, activation):
        if spec is not None and spec.qformulation != QuantizationFormulation.ZP:
            raise TargetError(f"{NAME} has zero points, not {spec.qformulation}: use qformulation='zp'")
    if weight.dtype == FP4:
        return _float4_scheme(weight, activation)
    if weight.dtype == E4M3:
        return _float8_scheme(weight, activation)
    if get_format(weight.dtype).is_float or get_format(weight.dtype).bits > 8:
        raise TargetError(
            f"{NAME} has no {dtype_name(weight.dtype)} weights: integers of 1 to 8 bits, float8_e4m3fn and "
            "float4_e2m1fn_x2 it has"
        )
    return _integer_scheme(weight) if activation is None else _int8_scheme(weight, activation)


def _integer_scheme(weight: QuantizationSpec) -> Scheme:
    if isinstance(weight.granularity, PerTensorGranularity):
        raise TargetError("pack-quantized has blocks or a scale a row, not one for all: use PerChannelGranularity(0)")
    return Scheme("pack-quantized", _weight_fields(weight))


def _int8_scheme(weight: QuantizationSpec, activation: QuantizationSpec) -> Scheme:
    given = get_format(activation.dtype)
    if get_format(weight.dtype).bits != 8 or given.bits != 8 or given.is_float:
        raise TargetError(
            f"{dtype_name(weight.dtype)} weights with {dtype_name(activation.dtype)} activations: int-quantized has "
            "int8 weights with int8 activations; fewer bits for weights alone (no activations)"
        )
    if isinstance(weight.granularity, PerBlockGranularity):
        raise TargetError("int-quantized has a scale a row or one for all, no blocks: use PerChannelGranularity(0)")
    if weight.qscheme == QuantizationScheme.ASYMMETRIC:
        raise TargetError("int-quantized weights have no zero points: use qscheme='symmetric' for weights")
    return Scheme("int-quantized", _weight_fields(weight), _input_fields(activation))


def _float8_scheme(weight: QuantizationSpec, activation: QuantizationSpec | None) -> Scheme:
    if activation is not None and activation.dtype != E4M3:
        raise TargetError(
            f"float8_e4m3fn weights with {dtype_name(activation.dtype)} activations: float-quantized has "
            "float8_e4m3fn for both, or weights alone"
        )
    if isinstance(weight.granularity, PerBlockGranularity) or weight.scale_dtype is not None:
        raise TargetError("float-quantized has float scales, one a row or one for all: use PerChannelGranularity(0)")
    return Scheme("float-quantized", _weight_fields(weight), None if activation is None else _input_fields(activation))


def _float4_scheme(weight: QuantizationSpec, activation: QuantizationSpec | None) -> Scheme:
    is_mx = weight.scale_dtype == E8M0
    expected, name = (MXFP4_BLOCK, "mxfp4") if is_mx else (NVFP4_BLOCK, "nvfp4")
    if read_block_size(weight) != expected:
        raise TargetError(
            f"{name}-pack-quantized has blocks of {expected} along the inputs, not {weight.granularity}: "
            f"PerBlockGranularity(axis=1, block_size={expected})"
        )
    fields = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": expected, "dynamic": False}
    if is_mx:
        if activation is not None:
            raise TargetError("mxfp4-pack-quantized is written with float activations: leave them away")
        return Scheme(
            f"{name}-pack-quantized", _freeze_fields(fields | {"strategy": "group", "scale_dtype": "torch.uint8"})
        )
    fields |= {"strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"}
    if activation is None:
        return Scheme(f"{name}-pack-quantized", _freeze_fields(fields))
    granularity = activation.granularity
    if not (
        activation.dtype == FP4
        and activation.scale_dtype == E4M3
        and isinstance(granularity, PerTokenBlockGranularity)
        and granularity.block_size == NVFP4_BLOCK
    ):
        raise TargetError("nvfp4 activations are float4 with e4m3 scales in blocks of 16 of a token, or float")
    return Scheme(f"{name}-pack-quantized", _freeze_fields(fields), _freeze_fields(fields | {"dynamic": "local"}))


def _weight_fields(spec: QuantizationSpec) -> tuple[tuple[str, Any], ...]:
    fields = _number_fields(spec) | {"dynamic": False}
    granularity = spec.granularity
    if (size := read_block_size(spec)) is not None:
        return _freeze_fields(fields | {"strategy": "group", "group_size": size})
    if isinstance(granularity, PerChannelGranularity) and granularity.axis in (None, 0, -2):
        return _freeze_fields(fields | {"strategy": "channel"})
    if isinstance(granularity, PerTensorGranularity):
        return _freeze_fields(fields | {"strategy": "tensor"})
    raise TargetError(f"{NAME} has weights with blocks along the inputs, a scale a row, or one for all: {granularity}")


def _input_fields(spec: QuantizationSpec) -> tuple[tuple[str, Any], ...]:
    fields = _number_fields(spec)
    if isinstance(spec.granularity, PerTokenGranularity):
        return _freeze_fields(fields | {"strategy": "token", "dynamic": True})
    if not isinstance(spec.granularity, PerTensorGranularity):
        raise TargetError(f"{NAME} has activations with a scale a token, or one for all: not {spec.granularity}")
    is_dynamic = issubclass(spec.qparam_calculator_cls, DynamicQParamsCalculator)
    if not is_dynamic and not fields["symmetric"]:
        raise TargetError(
            "static activations are written without zero points: use qscheme='symmetric', or dynamic ones"
        )
    return _freeze_fields(fields | {"strategy": "tensor", "dynamic": is_dynamic})


def _number_fields(spec: QuantizationSpec) -> dict[str, Any]:
    row = get_format(spec.dtype)
    return {
        "num_bits": row.bits,
        "type": "float" if row.is_float else "int",
        "symmetric": spec.qscheme != QuantizationScheme.ASYMMETRIC,
    }


def _freeze_fields(fields: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(fields.items()))
