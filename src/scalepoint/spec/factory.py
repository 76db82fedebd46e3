"""From a spec to its modules: range calculator -> qparams calculator -> fake quantizer."""

from functools import partial
from typing import Any

from scalepoint.spec.fake_quantize import CompressionTargetTensor, FakeQuantizeImplBase, PartialConstructor
from scalepoint.spec.qparams_calculator import (
    DefaultQParamsCalculator,
    QParamsCalculatorBase,
)
from scalepoint.spec.range_calculator import RangeCalculatorBase
from scalepoint.spec.registry import constructor_parameters, member
from scalepoint.spec.spec import QuantizationSpec


class QuantizationComponentFactory:
    """Builds the components of a spec; every call builds new ones that share nothing."""

    @staticmethod
    def create_range_calculator(spec: QuantizationSpec) -> RangeCalculatorBase:
        kind = spec.range_calculator_cls
        taken = constructor_parameters(kind)
        fields = {name: value for name, value in _grid_fields(spec).items() if name in taken}
        calculator: RangeCalculatorBase = kind(granularity=spec.granularity, **{**fields, **spec.get_extra_args()})
        return calculator

    @staticmethod
    def create_qparams_calculator(
        spec: QuantizationSpec, target: CompressionTargetTensor | str
    ) -> QParamsCalculatorBase:
        kind = spec.qparam_calculator_cls
        if kind is DefaultQParamsCalculator:
            is_weight = member(CompressionTargetTensor, target) == CompressionTargetTensor.WEIGHT
            kind = QParamsCalculatorBase.get_class("static" if is_weight else "moving_average")
        calculator: QParamsCalculatorBase = kind(
            granularity=spec.granularity,
            range_calculator=QuantizationComponentFactory.create_range_calculator(spec),
            float_range=spec.float_range,
            qformulation=spec.qformulation,
            **{**_grid_fields(spec), **spec.get_extra_args()},
        )
        return calculator

    @staticmethod
    def create_fake_quantizer(
        spec: QuantizationSpec, target: CompressionTargetTensor | str, **overrides: Any
    ) -> FakeQuantizeImplBase:
        """The quantizer of a spec; `overrides` go to its own constructor."""
        fields = _grid_fields(spec)
        del fields["scale_dtype"]
        quantizer: FakeQuantizeImplBase = spec.fake_quantize_cls(
            granularity=spec.granularity,
            qformulation=spec.qformulation,
            qparams_calculator=QuantizationComponentFactory.create_qparams_calculator(spec, target),
            **{
                "quantization_target": member(CompressionTargetTensor, target),
                "n_bits": spec.n_bits,
                **fields,
                **spec.get_extra_args(),
                **overrides,
            },
        )
        return quantizer

    @staticmethod
    def create_fake_quantizer_partial(
        spec: QuantizationSpec, target: CompressionTargetTensor | str
    ) -> PartialConstructor:
        """A constructor without arguments, as PT2E wants one."""
        return PartialConstructor(partial(QuantizationComponentFactory.create_fake_quantizer, spec, target))


def _grid_fields(spec: QuantizationSpec) -> dict[str, Any]:
    names = ("dtype", "qscheme", "target_dtype", "quant_min", "quant_max", "scale_dtype")
    return {name: getattr(spec, name) for name in names}
