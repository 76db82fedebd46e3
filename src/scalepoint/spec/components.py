"""Builds the modules of a spec: range calculator -> qparams calculator -> fake quantizer."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from scalepoint.errors import SpecError
from scalepoint.numerics import QuantizationScheme
from scalepoint.spec.fake_quantize import FakeQuantizeImplBase, PartialConstructor
from scalepoint.spec.granularity import CompressionTargetTensor, PerChannelGranularity, PerTensorGranularity
from scalepoint.spec.qparams_calculator import (
    DefaultQParamsCalculator,
    QParamsCalculatorBase,
)
from scalepoint.spec.range_calculator import RangeCalculatorBase
from scalepoint.spec.registry import constructor_parameters, parse_enum, to_scheme
from scalepoint.spec.spec import QuantizationSpec, to_code_type

TargetTensor = CompressionTargetTensor | str


class QuantizationComponentFactory:
    """Builds the components of a spec. Every call builds new ones that share nothing."""

    @staticmethod
    def create_range_calculator(
        spec: QuantizationSpec, quantization_target: TargetTensor = CompressionTargetTensor.WEIGHT
    ) -> RangeCalculatorBase:
        """Build the range calculator of a spec. It gets the fields of the spec that its constructor takes."""
        kind, target = spec.range_calculator_cls, parse_enum(CompressionTargetTensor, quantization_target)
        parameters = constructor_parameters(kind)
        fields = _grid_fields(spec) | {"quantization_target": target}
        fields = {name: value for name, value in fields.items() if name in parameters}
        calculator: RangeCalculatorBase = kind(granularity=spec.granularity, **{**fields, **spec.get_extra_args()})
        calculator.quantization_target = target
        return calculator

    @staticmethod
    def create_qparams_calculator(
        spec: QuantizationSpec, target: TargetTensor | None = None, *, quantization_target: TargetTensor | None = None
    ) -> QParamsCalculatorBase:
        """Build the qparams calculator of a spec, for a weight, an activation or a table.

        Args:
            spec: How the tensor is quantized.
            target: What the tensor is.
            quantization_target: Another name of `target`.
        """
        return _create_qparams_calculator(spec, _get_target(target, quantization_target), {})

    @staticmethod
    def create_fake_quantizer(
        spec: QuantizationSpec,
        target: TargetTensor | None = None,
        *,
        quantization_target: TargetTensor | None = None,
        **overrides: Any,
    ) -> FakeQuantizeImplBase:
        """Build the quantizer of a spec.

        Args:
            spec: How the tensor is quantized.
            target: Whether it is a weight, an activation or a table.
            quantization_target: Another name of `target`.
            overrides: Arguments of the quantizer's constructor. torchao's prepare_pt2e also passes fields of its own
                QuantizationSpec: `dtype`, `qscheme` (may be a torch.qscheme), `quant_min`, `quant_max`, `ch_axis` and
                `is_dynamic`. They change the spec unless they are None.
        """
        tensor = _get_target(target, quantization_target)
        spec, limits = _with_torchao_fields(spec, overrides)
        fields = _grid_fields(spec) | limits
        del fields["scale_dtype"]
        quantizer: FakeQuantizeImplBase = spec.fake_quantize_cls(
            granularity=spec.granularity,
            qformulation=spec.qformulation,
            qparams_calculator=_create_qparams_calculator(spec, tensor, limits),
            **{
                "quantization_target": tensor,
                "n_bits": spec.n_bits,
                **fields,
                **spec.get_extra_args(),
                **overrides,
            },
        )
        return quantizer

    @staticmethod
    def create_fake_quantizer_partial(
        spec: QuantizationSpec, target: TargetTensor | None = None, *, quantization_target: TargetTensor | None = None
    ) -> PartialConstructor:
        """Build a constructor without arguments, as PT2E expects one."""
        tensor = _get_target(target, quantization_target)
        constructor = PartialConstructor(partial(QuantizationComponentFactory.create_fake_quantizer, spec, tensor))
        if isinstance(spec.granularity, PerChannelGranularity):
            # torchao 0.18 passes ch_axis only to constructors with "PerChannel" in their name.
            constructor.__name__ = "PerChannelFakeQuantize"
        return constructor

    @staticmethod
    def construct(spec: QuantizationSpec | None, target: TargetTensor) -> FakeQuantizeImplBase | None:
        """Build the quantizer of a spec; None for None."""
        return None if spec is None else QuantizationComponentFactory.create_fake_quantizer(spec, target)

    @staticmethod
    def construct_partial(spec: QuantizationSpec | None, target: TargetTensor) -> PartialConstructor | None:
        """Build a constructor without arguments; None for None."""
        return None if spec is None else QuantizationComponentFactory.create_fake_quantizer_partial(spec, target)

    @staticmethod
    def reconstruct_partial_qparams_calculator(partial_ctr: PartialConstructor, **kwargs: Any) -> PartialConstructor:
        """Return a constructor whose quantizers have a calculator with other attributes.

        Args:
            partial_ctr: A constructor of quantizers.
            kwargs: Attributes of the calculator, such as float_range, qscheme, quant_min or granularity.

        Raises:
            AttributeError: When called, if the calculator has no such attribute.
        """
        constructor = PartialConstructor(partial(_create_with_attributes, partial_ctr, kwargs))
        constructor.__name__ = partial_ctr.__name__
        return constructor


def _get_target(target: TargetTensor | None, quantization_target: TargetTensor | None) -> CompressionTargetTensor:
    if (target is None) == (quantization_target is None):
        raise SpecError("pass either target= or quantization_target=: 'weight', 'activation' or 'lut'")
    return parse_enum(CompressionTargetTensor, quantization_target if target is None else target)


def _create_with_attributes(
    constructor: PartialConstructor, attributes: Mapping[str, Any], **overrides: Any
) -> FakeQuantizeImplBase:
    """Build a quantizer and set attributes of its calculator. The grid of the quantizer follows."""
    quantizer: FakeQuantizeImplBase = constructor(**overrides)
    calculator = quantizer.qparams_calculator
    for name, value in attributes.items():
        if not hasattr(calculator, name):
            raise AttributeError(f"{type(calculator).__name__} has no attribute {name!r}")
        setattr(calculator, name, value)
    quantizer.grid = replace(
        quantizer.grid, scheme=calculator.qscheme, low=calculator.quant_min, high=calculator.quant_max
    )
    return quantizer


def _create_qparams_calculator(
    spec: QuantizationSpec, target: CompressionTargetTensor, limits: Mapping[str, float]
) -> QParamsCalculatorBase:
    kind = spec.qparam_calculator_cls
    if kind is DefaultQParamsCalculator:
        is_activation = target == CompressionTargetTensor.ACTIVATION
        kind = QParamsCalculatorBase.get_class("moving_average" if is_activation else "static")
    calculator: QParamsCalculatorBase = kind(
        granularity=spec.granularity,
        range_calculator=QuantizationComponentFactory.create_range_calculator(spec, target),
        float_range=spec.float_range,
        qformulation=spec.qformulation,
        **{**_grid_fields(spec), **limits, **spec.get_extra_args()},
    )
    return calculator


def _with_torchao_fields(spec: QuantizationSpec, overrides: dict[str, Any]) -> tuple[QuantizationSpec, dict[str, Any]]:
    """Remove the fields of a torchao QuantizationSpec from `overrides` and apply them.

    Returns the changed spec, and the limits of the codes, which a spec cannot contain.
    """
    fields = {name: overrides.pop(name, None) for name in ("dtype", "qscheme", "ch_axis", "is_dynamic")}
    limits = {name: overrides.pop(name, None) for name in ("quant_min", "quant_max")}
    dtype, qscheme = fields["dtype"], fields["qscheme"]
    if dtype is not None and to_code_type(dtype) not in (spec.dtype, spec.target_dtype):
        spec = spec.replace(dtype=dtype)
    if qscheme is not None:
        scheme = to_scheme(qscheme)
        if (scheme == QuantizationScheme.ASYMMETRIC) != (spec.qscheme == QuantizationScheme.ASYMMETRIC):
            spec = spec.replace(qscheme=scheme)
        if isinstance(qscheme, torch.qscheme):
            _check_granularity(spec, qscheme)
    if fields["ch_axis"] is not None and isinstance(spec.granularity, PerChannelGranularity):
        spec = spec.replace(granularity=PerChannelGranularity(axis=fields["ch_axis"]))
    if fields["is_dynamic"] and not spec.qparam_calculator_cls.always_called:
        raise SpecError("is_dynamic=True needs a spec with qparam_calculator_cls='dynamic'")
    return spec, {name: value for name, value in limits.items() if value is not None}


def _check_granularity(spec: QuantizationSpec, qscheme: torch.qscheme) -> None:
    """Raise SpecError if the granularity of a torch.qscheme contradicts the spec. Blocks have no torch.qscheme."""
    is_per_channel = qscheme in (torch.per_channel_affine, torch.per_channel_symmetric)
    opposite = PerTensorGranularity if is_per_channel else PerChannelGranularity
    if isinstance(spec.granularity, opposite):
        needed = "PerChannelGranularity(axis)" if is_per_channel else "PerTensorGranularity()"
        raise SpecError(f"qscheme={qscheme} contradicts {spec.granularity!r}: give the spec granularity={needed}")


def _grid_fields(spec: QuantizationSpec) -> dict[str, Any]:
    names = ("dtype", "qscheme", "target_dtype", "quant_min", "quant_max", "scale_dtype")
    return {name: getattr(spec, name) for name in names}
