"""ExtendedQuantizationSpec: more dtypes, scale roundings, and the options of scalepoint's components.

Users can do the same: subclass QuantizationSpec, and the added fields are passed to the components.
"""

from collections.abc import Iterable
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from scalepoint.errors import SpecError
from scalepoint.numerics import E8M0, FORMATS, CodeType, QuantizationFormulation, ScaleRounding
from scalepoint.spec.qparams_calculator import DefaultQParamsCalculator, OnNan
from scalepoint.spec.registry import constructor_parameters
from scalepoint.spec.running import MovingAverageQParamsCalculator
from scalepoint.spec.sparsity import Sparsity, SparsityField
from scalepoint.spec.spec import QuantizationSpec, to_code_type


class ExtendedQuantizationSpec(QuantizationSpec):
    """QuantizationSpec with every dtype that has arithmetic (int3, int7, uint16, ...) and the options below.

    An option that none of the chosen components takes is an error, because it would have no effect.

    Attributes:
        scale_rounding: How float8_e8m0fnu scales are rounded to powers of two.
        exact_zero: With qformulation="minval", round minval to a multiple of the scale, so that 0 is exact.
        on_nan: What a range calculation does with NaN or infinity.
        strict: Raise an error if blocks do not divide a tensor. Otherwise its quantizer is disabled, with a warning.
        cache_weights: Keep the quantized weight until the weight changes.
        averaging_constant: Weight of the newest batch in a moving average.
        percentile: Percentile at which a range is cut off.
        search_steps: Number of ranges that a search tries.
        bins: Bins of a histogram.
        sparsity: Which weights are pruned; None prunes nothing.
        cluster_dim: Neighbouring output channels of a palettized weight that share an index; the entries of its tables
            are vectors of this length.
        table_dtype: Dtype of the entries of a palette's tables: int8 or an fp8 dtype; None for float.
    """

    SUPPORTED_DTYPES: ClassVar[set[CodeType]] = set(FORMATS)

    scale_rounding: ScaleRounding = ScaleRounding.FLOOR
    exact_zero: bool = False
    on_nan: OnNan = "error"
    strict: bool = False
    cache_weights: bool = True
    averaging_constant: float = Field(0.01, gt=0, le=1)
    percentile: float = Field(99.99, gt=50, le=100)
    search_steps: int = Field(80, ge=2)
    bins: int = Field(4096, ge=16, multiple_of=2)
    sparsity: SparsityField = None  # read by the quantizer of a weight
    cluster_dim: int = Field(1, ge=1)
    table_dtype: Literal["int8", "float8_e4m3fn", "float8_e5m2"] | None = None

    @model_validator(mode="after")
    def _check_fields_take_effect(self) -> Self:
        calculator = self.qparam_calculator_cls
        # The factory replaces the default by `static` (weights) or `moving_average` (activations). Here the target is
        # not known, so an option is accepted if moving_average takes it, which takes more.
        if calculator is DefaultQParamsCalculator:
            calculator = MovingAverageQParamsCalculator
        components = (self.fake_quantize_cls, calculator, self.range_calculator_cls)
        # A component takes an option if its constructor, or a base's that gets **extra, has a parameter of this name.
        used = {"sparsity"}.union(*map(constructor_parameters, components))
        options = set(ExtendedQuantizationSpec.model_fields) - set(QuantizationSpec.model_fields)
        for name in self.model_fields_set & (options - used):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise SpecError(
                    f"{name}={getattr(self, name)!r} has no effect: no chosen component takes it, leave it out"
                )
        if self.scale_rounding != ScaleRounding.FLOOR and self.scale_dtype != E8M0:
            raise SpecError(
                f"scale_rounding={self.scale_rounding} is for float8_e8m0fnu scales: set scale_dtype='float8_e8m0fnu'"
            )
        if self.sparsity is not None and self.qformulation == QuantizationFormulation.MINVAL and not self.exact_zero:
            raise SpecError("sparsity needs a code for zero: use qformulation='zp', or exact_zero=True")
        if self.exact_zero and self.qformulation != QuantizationFormulation.MINVAL:
            raise SpecError("exact_zero is for qformulation='minval': leave it out, a zero point represents 0 exactly")
        return self


def choose_spec_class(dtype: CodeType, names: Iterable[str] = ()) -> type[QuantizationSpec]:
    """Return QuantizationSpec, or ExtendedQuantizationSpec if the dtype or one of the fields needs it."""
    extra_fields = set(ExtendedQuantizationSpec.model_fields) - set(QuantizationSpec.model_fields)
    # A dtype that neither class supports does not need the extended class: QuantizationSpec raises the error.
    extended_dtypes = ExtendedQuantizationSpec.SUPPORTED_DTYPES - QuantizationSpec.SUPPORTED_DTYPES
    needs_dtype, needs_fields = dtype in extended_dtypes, bool(extra_fields & set(names))
    return ExtendedQuantizationSpec if needs_dtype or needs_fields else QuantizationSpec


def get_sparsity(spec: QuantizationSpec) -> Sparsity | None:
    """Return the sparsity of a spec; None if the weight is not pruned."""
    return spec.sparsity if isinstance(spec, ExtendedQuantizationSpec) else None


def spec_from_dict(fields: dict[str, Any]) -> QuantizationSpec:
    """Build a spec from a dump or a file, of the class that has its dtype and fields."""
    dtype = to_code_type(fields.get("dtype", QuantizationSpec.model_fields["dtype"].default))
    return choose_spec_class(dtype, fields).from_dict(fields)
