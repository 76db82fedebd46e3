"""The schemes of compressed-tensors: how the specs of a weight and its input are written in `quantization_config`.

    weight               input                   format                scales of weights
    int1 .. int8         float                   pack-quantized        per block or per row, with or without zero points
    int8                 int8                    int-quantized         per row or per tensor
    float8_e4m3fn        float, float8_e4m3fn    float-quantized       per row or per tensor
    float4, e4m3 scales  float, the same         nvfp4-pack-quantized  per block of 16, and per tensor
    float4, e8m0 scales  float                   mxfp4-pack-quantized  per block of 32

An input has one scale per token, computed at run time, or one stored scale.
"""

from dataclasses import dataclass, replace
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
class TensorScheme:
    """How weights or inputs are quantized; the fields have the names of the config."""

    num_bits: int
    type: str  # "int" or "float"
    symmetric: bool
    strategy: str  # which values share a scale
    dynamic: bool | str = False  # whether scales are computed at run time; "local": only those of blocks
    group_size: int | None = None
    scale_dtype: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in sorted(vars(self).items()) if value is not None}


@dataclass(frozen=True)
class Scheme:
    """Format and settings of a layer; layers with equal schemes form one group of the config."""

    format: str
    weights: TensorScheme
    inputs: TensorScheme | None = None

    def to_group(self, targets: list[str]) -> dict[str, Any]:
        """Return the group of the config for these layers."""
        return {
            "targets": targets,
            "weights": self.weights.to_dict(),
            "input_activations": None if self.inputs is None else self.inputs.to_dict(),
            "output_activations": None,
            "format": self.format,
        }


def choose_scheme(weight: QuantizationSpec, activation: QuantizationSpec | None) -> Scheme:
    """Return the scheme for the specs of a weight and its input; raise TargetError if there is none."""
    for spec in (weight, activation):
        if spec is not None and spec.qformulation != QuantizationFormulation.ZP:
            raise TargetError(f"{NAME} does not support qformulation={spec.qformulation}: use qformulation='zp'")
    if weight.dtype == FP4:
        return _float4_scheme(weight, activation)
    if weight.dtype == E4M3:
        return _float8_scheme(weight, activation)
    if get_format(weight.dtype).is_float or get_format(weight.dtype).bits > 8:
        raise TargetError(
            f"{NAME} has no {dtype_name(weight.dtype)} weights: use integers of 1 to 8 bits, float8_e4m3fn or "
            "float4_e2m1fn_x2"
        )
    return _integer_scheme(weight) if activation is None else _int8_scheme(weight, activation)


def _integer_scheme(weight: QuantizationSpec) -> Scheme:
    if isinstance(weight.granularity, PerTensorGranularity):
        raise TargetError(
            "pack-quantized has scales per block or per row, not per tensor: use PerChannelGranularity(0)"
        )
    return Scheme("pack-quantized", _weight_scheme(weight))


def _int8_scheme(weight: QuantizationSpec, activation: QuantizationSpec) -> Scheme:
    activation_format = get_format(activation.dtype)
    if get_format(weight.dtype).bits != 8 or activation_format.bits != 8 or activation_format.is_float:
        raise TargetError(
            f"{dtype_name(weight.dtype)} weights with {dtype_name(activation.dtype)} activations are not supported: "
            "int-quantized has int8 weights with int8 activations; weights of fewer bits need float activations"
        )
    if isinstance(weight.granularity, PerBlockGranularity):
        raise TargetError("int-quantized has scales per row or per tensor, no blocks: use PerChannelGranularity(0)")
    if weight.qscheme == QuantizationScheme.ASYMMETRIC:
        raise TargetError("int-quantized weights have no zero points: use qscheme='symmetric' for weights")
    return Scheme("int-quantized", _weight_scheme(weight), _input_scheme(activation))


def _float8_scheme(weight: QuantizationSpec, activation: QuantizationSpec | None) -> Scheme:
    if activation is not None and activation.dtype != E4M3:
        raise TargetError(
            f"float8_e4m3fn weights with {dtype_name(activation.dtype)} activations are not supported: float-quantized "
            "has float8_e4m3fn for both, or float activations"
        )
    if isinstance(weight.granularity, PerBlockGranularity) or weight.scale_dtype is not None:
        raise TargetError("float-quantized has float scales per row or per tensor: use PerChannelGranularity(0)")
    return Scheme("float-quantized", _weight_scheme(weight), None if activation is None else _input_scheme(activation))


def _float4_scheme(weight: QuantizationSpec, activation: QuantizationSpec | None) -> Scheme:
    is_mx = weight.scale_dtype == E8M0
    block_size, name = (MXFP4_BLOCK, "mxfp4") if is_mx else (NVFP4_BLOCK, "nvfp4")
    if read_block_size(weight) != block_size:
        raise TargetError(
            f"{name}-pack-quantized has blocks of {block_size} along the inputs, not {weight.granularity}: use "
            f"PerBlockGranularity(axis=1, block_size={block_size})"
        )
    weights = TensorScheme(4, "float", symmetric=True, strategy="group", group_size=block_size)
    if is_mx:
        if activation is not None:
            raise TargetError("mxfp4-pack-quantized needs float activations: omit activation=")
        return Scheme("mxfp4-pack-quantized", replace(weights, scale_dtype="torch.uint8"))
    weights = replace(weights, strategy="tensor_group", scale_dtype="torch.float8_e4m3fn")
    if activation is None:
        return Scheme("nvfp4-pack-quantized", weights)
    granularity = activation.granularity
    if not (
        activation.dtype == FP4
        and activation.scale_dtype == E4M3
        and isinstance(granularity, PerTokenBlockGranularity)
        and granularity.block_size == NVFP4_BLOCK
    ):
        raise TargetError("nvfp4 activations must be float, or float4 with e4m3 scales per token in blocks of 16")
    return Scheme("nvfp4-pack-quantized", weights, replace(weights, dynamic="local"))


def _weight_scheme(spec: QuantizationSpec) -> TensorScheme:
    granularity = spec.granularity
    block_size = read_block_size(spec)
    if block_size is not None:
        return TensorScheme(*_describe_numbers(spec), strategy="group", group_size=block_size)
    if isinstance(granularity, PerChannelGranularity) and granularity.axis in (None, 0, -2):
        return TensorScheme(*_describe_numbers(spec), strategy="channel")
    if isinstance(granularity, PerTensorGranularity):
        return TensorScheme(*_describe_numbers(spec), strategy="tensor")
    raise TargetError(
        f"{NAME} needs weights with scales per block along the inputs, per row or per tensor, got {granularity}"
    )


def _input_scheme(spec: QuantizationSpec) -> TensorScheme:
    if isinstance(spec.granularity, PerTokenGranularity):
        return TensorScheme(*_describe_numbers(spec), strategy="token", dynamic=True)
    if not isinstance(spec.granularity, PerTensorGranularity):
        raise TargetError(f"{NAME} needs activations with one scale per token or per tensor, got {spec.granularity}")
    is_dynamic = issubclass(spec.qparam_calculator_cls, DynamicQParamsCalculator)
    scheme = TensorScheme(*_describe_numbers(spec), strategy="tensor", dynamic=is_dynamic)
    if not is_dynamic and not scheme.symmetric:
        raise TargetError(
            "static activations are stored without zero points: use qscheme='symmetric', or dynamic activations"
        )
    return scheme


def _describe_numbers(spec: QuantizationSpec) -> tuple[int, str, bool]:
    """Return num_bits, type and symmetric of a TensorScheme."""
    number_format = get_format(spec.dtype)
    is_symmetric = spec.qscheme != QuantizationScheme.ASYMMETRIC
    return number_format.bits, "float" if number_format.is_float else "int", is_symmetric
