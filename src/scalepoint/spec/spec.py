"""QuantizationSpec: how one tensor is quantized, as plain frozen data."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

import torch
from pydantic import (
    BeforeValidator,
    ConfigDict,
    ModelWrapValidatorHandler,
    PlainSerializer,
    SerializeAsAny,
    WithJsonSchema,
    computed_field,
    field_validator,
    model_validator,
)
from pydantic.json_schema import GenerateJsonSchema

from scalepoint.errors import DocumentError, SpecError, did_you_mean, short_repr
from scalepoint.numerics import (
    ALIASES,
    E4M3,
    E8M0,
    FORMATS,
    FP4,
    CodeType,
    Float6,
    QuantizationFormulation,
    QuantizationScheme,
    dtype_name,
    get_format,
)
from scalepoint.numerics.qparams import HUGE
from scalepoint.spec.fake_quantize import FakeQuantizeImplBase
from scalepoint.spec.granularity import PerChannelGranularity, PerTensorGranularity, QuantizationGranularity
from scalepoint.spec.qparams_calculator import (
    QParamsCalculatorBase,
)
from scalepoint.spec.range_calculator import RangeCalculatorBase
from scalepoint.spec.registry import Registry, parse_enum
from scalepoint.support.validation_errors import CheckedModel

DERIVED = ("n_bits", "target_dtype", "quant_min", "quant_max")


class FloatRange(tuple[float | None, float | None]):
    """(low, high), hashable; equal to the list of the same two."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, list | tuple) else NotImplemented

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = tuple.__hash__

    def __repr__(self) -> str:
        return repr(list(self))


def _parse_float_range(value: Any) -> FloatRange:
    got = f"float_range={short_repr(value)}"
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise SpecError(f"{got}: give [low, high], each a number or None")
    for end in value:
        if isinstance(end, bool) or not (end is None or isinstance(end, int | float)):
            raise SpecError(f"{got}: {short_repr(end)} is not a number or None")
        if end is not None and not -HUGE <= end <= HUGE:
            raise SpecError(f"{got}: both ends are finite float32 numbers")
    low, high = (None if end is None else float(end) for end in value)
    if low is not None and low > 0:
        raise SpecError(f"{got}: low is at most 0, so that zero is representable")
    if high is not None and high < 0:
        raise SpecError(f"{got}: high is at least 0, so that zero is representable")
    if low is not None and high is not None and low >= high:
        raise SpecError(f"{got}: low must be below high")
    return FloatRange((low, high))


def to_code_type(value: Any) -> CodeType:
    """What codes can be, from itself or from its name or alias."""
    if isinstance(value, torch.dtype | Float6):
        return value
    name = _to_dtype_name(value) if isinstance(value, str) else ""
    dtype = _FLOAT6_BY_NAME.get(name) or (getattr(torch, name, None) if name else None)
    if not isinstance(dtype, torch.dtype | Float6):
        known = [*(row.name for row in FORMATS.values()), dtype_name(E8M0), *ALIASES]
        raise SpecError(
            f"Unsupported dtype: {short_repr(value)} is not a dtype that can be meant: {did_you_mean(name, known)}"
        )
    return dtype


def to_dtype(value: Any) -> torch.dtype:
    """A torch.dtype from itself or from its name or alias."""
    dtype = to_code_type(value)
    if not isinstance(dtype, torch.dtype):
        raise SpecError(f"Unsupported dtype: torch has no {dtype}, it is only for codes")
    return dtype


_FLOAT6_BY_NAME = {kind.value: kind for kind in Float6}
_AS_DTYPE_NAME = (PlainSerializer(dtype_name), WithJsonSchema({"type": "string"}))
Dtype = Annotated[torch.dtype, BeforeValidator(to_dtype), *_AS_DTYPE_NAME]
CodeDtype = Annotated[CodeType, BeforeValidator(to_code_type), *_AS_DTYPE_NAME]


def _component_field(base: type[Registry]) -> Any:
    """A field that holds a registered class, given by key or as the class, and dumps to its key."""

    def resolve(value: Any) -> Any:
        if isinstance(value, str):
            return base.get_class(value)
        if isinstance(value, type) and issubclass(value, base):
            base.key_of(value)
            return value
        keys = ", ".join(base.list_registry_keys())
        raise SpecError(f"{short_repr(value)} is not a {base.__name__}: give a registered class or a key ({keys})")

    schema = {"type": "string", "description": f"a key of the {base.__name__} registry"}
    return Annotated[type[base], BeforeValidator(resolve), PlainSerializer(base.key_of), WithJsonSchema(schema)]


class SchemaGenerator(GenerateJsonSchema):
    """JSON Schema whose defaults are the names a file would hold."""

    def encode_default(self, dft: Any) -> Any:
        if isinstance(dft, torch.dtype | Float6):
            return dtype_name(dft)
        return super().encode_default(list(dft) if isinstance(dft, FloatRange) else dft)


class QuantizationSpec(CheckedModel):
    """How one tensor is quantized. Immutable and hashable; unknown fields are refused by name.

    Attributes:
        dtype: dtype of the codes, such as torch.int8 or "int4".
        qscheme: How a range becomes a scale: symmetric, symmetric with clipped limits, or affine.
        qformulation: Codes relative to an integer zero point, or to the float minimum (minval).
        granularity: What shares a scale: tensor, channel, block, token.
        fake_quantize_cls: Component that quantizes and dequantizes.
        qparam_calculator_cls: Component that computes scale and zero point, such as "static" or "moving_average".
        range_calculator_cls: Component that computes the range of a tensor, such as "minmax".
        float_range: Fixed lower and upper end of the range; None is observed.
        scale_dtype: dtype of the scales; None is float32.

    `n_bits`, `target_dtype`, `quant_min` and `quant_max` follow from the fields. They are part of a dump and may be
    given, but must agree.

    Example:
        QuantizationSpec(dtype=torch.int8, qscheme="symmetric", granularity=PerChannelGranularity(axis=0))
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, validate_default=True)
    error_class = SpecError

    SUPPORTED_DTYPES: ClassVar[set[CodeType]] = {
        dtype for dtype, row in FORMATS.items() if row.is_float or row.bits in (2, 4, 8)
    }

    dtype: CodeDtype = torch.int8
    qscheme: QuantizationScheme = QuantizationScheme.SYMMETRIC
    qformulation: QuantizationFormulation = QuantizationFormulation.ZP
    granularity: Annotated[
        SerializeAsAny[QuantizationGranularity],
        BeforeValidator(QuantizationGranularity.build),
        WithJsonSchema({"type": "object", "required": ["type"], "properties": {"type": {"type": "string"}}}),
    ] = PerTensorGranularity()
    fake_quantize_cls: _component_field(FakeQuantizeImplBase) = "default"  # type: ignore[valid-type]
    qparam_calculator_cls: _component_field(QParamsCalculatorBase) = "default"  # type: ignore[valid-type]
    range_calculator_cls: _component_field(RangeCalculatorBase) = "minmax"  # type: ignore[valid-type]
    float_range: Annotated[
        FloatRange,
        BeforeValidator(_parse_float_range),
        PlainSerializer(list),
        WithJsonSchema({"type": "array", "items": {"type": ["number", "null"]}, "minItems": 2, "maxItems": 2}),
    ] = FloatRange((None, None))
    scale_dtype: Dtype | None = None

    @model_validator(mode="wrap")
    @classmethod
    def _known_fields(cls, data: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(data, dict):
            return validate(data)
        for name in data:
            if name not in cls.model_fields and name not in DERIVED:
                raise SpecError(f"{cls.__name__} has no field {name!r}: {did_you_mean(str(name), cls.model_fields)}")
        spec = validate({name: value for name, value in data.items() if name not in DERIVED})
        for name in DERIVED:
            if name in data:
                spec._check_derived(name, data[name])
        return spec

    def _check_derived(self, name: str, given: Any) -> None:
        derived = getattr(self, name)
        agrees = _to_dtype_name(given) == dtype_name(derived) if name == "target_dtype" else given == derived
        if agrees and not isinstance(given, bool):
            return
        derived = dtype_name(derived) if name == "target_dtype" else derived
        source = f"dtype={dtype_name(self.dtype)!r}"
        source += f" with qscheme={self.qscheme.value!r}" if name.startswith("quant_") else ""
        raise SpecError(
            f"{name}={short_repr(given)} contradicts {source}, from which {name}={short_repr(derived)} follows: leave "
            f"{name} away" + (_dtype_of_width(self.dtype, given) if name == "n_bits" else "")
        )

    @field_validator("dtype")
    @classmethod
    def _supported(cls, dtype: CodeType) -> CodeType:
        if dtype not in cls.SUPPORTED_DTYPES:
            allowed = ", ".join(sorted(dtype_name(known) for known in cls.SUPPORTED_DTYPES))
            raise SpecError(f"Unsupported dtype: {dtype_name(dtype)!r}. Allowed dtypes: {allowed}")
        get_format(dtype)
        return dtype

    @model_validator(mode="after")
    def _scheme_rules(self) -> Self:
        fmt = get_format(self.dtype)
        fmt.limits(self.qscheme)
        if not fmt.is_float:
            return self
        if self.qscheme != QuantizationScheme.SYMMETRIC:
            raise SpecError(
                f"FP quantization ({fmt.name}) requires symmetric quantization scheme: "
                f"{fmt.name} cannot be {self.qscheme}, use qscheme='symmetric'"
            )
        if self.qformulation != QuantizationFormulation.ZP:
            raise SpecError(
                f"FP quantization ({fmt.name}) requires zero-point quantization formulation: "
                f"{fmt.name} cannot be {self.qformulation}, use qformulation='zp'"
            )
        return self

    @model_validator(mode="after")
    def _scale_rules(self) -> Self:
        allowed = _allowed_scale_dtypes(self.dtype)
        if self.scale_dtype not in allowed:
            got = "None" if self.scale_dtype is None else dtype_name(self.scale_dtype)
            names = " or ".join("None" if kind is None else dtype_name(kind) for kind in allowed)
            raise SpecError(f"scale_dtype={got}: the scale of {dtype_name(self.dtype)} may be {names}")
        return self

    @model_validator(mode="before")
    @classmethod
    def _default_scale(cls, data: Any) -> Any:
        """fp4 and fp6 without a scale type have e8m0 scales (MX)."""
        if isinstance(data, dict) and data.get("scale_dtype") is None:
            dtype = data.get("dtype", cls.model_fields["dtype"].default)
            if _to_dtype_name(dtype) in (dtype_name(FP4), *_FLOAT6_BY_NAME):
                return {**data, "scale_dtype": E8M0}
        return data

    @computed_field  # type: ignore[prop-decorator]  # pydantic's own way
    @property
    def n_bits(self) -> int:
        """Width of a code."""
        return get_format(self.dtype).bits

    @computed_field  # type: ignore[prop-decorator]
    @property
    def target_dtype(self) -> Dtype:
        """Storage type of the codes."""
        return get_format(self.dtype).storage

    @computed_field  # type: ignore[prop-decorator]
    @property
    def quant_min(self) -> int | float:
        """Lowest code."""
        return self.get_quant_range(self.dtype, self.qscheme)[0]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def quant_max(self) -> int | float:
        """Highest code."""
        return self.get_quant_range(self.dtype, self.qscheme)[1]

    @classmethod
    def get_n_bits_from_dtype(cls, dtype: CodeType | str) -> int:
        return get_format(to_code_type(dtype)).bits

    @classmethod
    def get_target_dtype(cls, dtype: CodeType | str) -> torch.dtype:
        return get_format(to_code_type(dtype)).storage

    @classmethod
    def get_quant_range(
        cls, dtype: CodeType | str, qscheme: QuantizationScheme | str = QuantizationScheme.SYMMETRIC
    ) -> tuple[float, float]:
        return get_format(to_code_type(dtype)).limits(parse_enum(QuantizationScheme, qscheme))

    def get_extra_args(self) -> dict[str, Any]:
        """The fields a subclass adds; they reach every component's constructor."""
        fields = type(self).model_fields
        return {name: getattr(self, name) for name in fields if name not in QuantizationSpec.model_fields}

    def replace(self, **changes: Any) -> Self:
        """The same spec with some fields changed, checked anew."""
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        if "dtype" in changes and "scale_dtype" not in changes:
            fields["scale_dtype"] = None
        return type(self)(**{**fields, **changes})

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Copy the spec; `update` is checked as `replace` checks it. Pydantic's own method would take any value."""
        return self.replace(**update) if update else super().model_copy(deep=deep)

    @classmethod
    def model_json_schema(cls, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """JSON Schema, for editors that complete config files."""
        return super().model_json_schema(*args, **{"schema_generator": SchemaGenerator, **kwargs})

    def to_dict(self) -> dict[str, Any]:
        """Plain values: names and keys, ready for any file format."""
        return self.model_dump(mode="json")

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        if not isinstance(fields, dict):
            raise DocumentError(f"a {cls.__name__} is a mapping of its fields, not {type(fields).__name__}")
        return cls.model_validate(fields)

    def to_json(self) -> str:
        return self.model_dump_json(indent=2)

    @classmethod
    def from_json(cls, text: str) -> Self:
        from scalepoint.support.documents import parse_json  # noqa: PLC0415  # reads YAML, which most who import a spec do not need

        return cls.from_dict(parse_json(text))

    def to_yaml(self) -> str:
        from scalepoint.support.documents import dump_yaml  # noqa: PLC0415  # reads YAML, which most who import a spec do not need

        return dump_yaml(self.to_dict())

    @classmethod
    def from_yaml(cls, text: str) -> Self:
        from scalepoint.support.documents import parse_yaml  # noqa: PLC0415  # reads YAML, which most who import a spec do not need

        return cls.from_dict(parse_yaml(text))


def _dtype_of_width(dtype: CodeType, bits: Any) -> str:
    """What to write instead for another width of the same kind of number."""
    kind = dtype_name(dtype).rstrip("0123456789")
    named = next((row.name for row in FORMATS.values() if row.name == f"{kind}{bits}"), None)
    return f", or give dtype={named!r}" if named else ""


def _to_dtype_name(dtype: Any) -> str:
    """The name of a dtype, given as itself, by name or by alias."""
    name = str(dtype).removeprefix("torch.")
    return ALIASES.get(name, name)


def _allowed_scale_dtypes(dtype: CodeType) -> tuple[torch.dtype | None, ...]:
    if not get_format(dtype).is_float:
        return (None,)
    if isinstance(dtype, Float6):
        return (E8M0,)
    return (E8M0, E4M3) if dtype == FP4 else (None, E8M0)


def default_weight_quantization_spec() -> QuantizationSpec:
    """int8, symmetric, per channel along axis 0, from the live weight."""
    return QuantizationSpec(granularity=PerChannelGranularity(axis=0), qparam_calculator_cls="static")


def default_activation_quantization_spec() -> QuantizationSpec:
    """int8, symmetric, per tensor, moving average of the range."""
    return QuantizationSpec(qparam_calculator_cls="moving_average")
