"""QuantizationSpec: how one tensor is quantized, as frozen data."""

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
from scalepoint.spec.registry import ClassRegistry, parse_enum
from scalepoint.support.validation_errors import CheckedModel

DERIVED_FIELDS = ("n_bits", "target_dtype", "quant_min", "quant_max")


class FloatRange(tuple[float | None, float | None]):
    """(low, high): hashable, and equal to a list of the same two values."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, list | tuple) else NotImplemented

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = tuple.__hash__

    def __repr__(self) -> str:
        return repr(list(self))


def _parse_float_range(value: Any) -> FloatRange:
    prefix = f"float_range={short_repr(value)}"
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise SpecError(f"{prefix}: must be [low, high], each a number or None")
    for end in value:
        if isinstance(end, bool) or not (end is None or isinstance(end, int | float)):
            raise SpecError(f"{prefix}: {short_repr(end)} is not a number or None")
        if end is not None and not -HUGE <= end <= HUGE:
            raise SpecError(f"{prefix}: both ends must be finite float32 numbers")
    low, high = (None if end is None else float(end) for end in value)
    if low is not None and low > 0:
        raise SpecError(f"{prefix}: low must be at most 0, so that 0 can be represented")
    if high is not None and high < 0:
        raise SpecError(f"{prefix}: high must be at least 0, so that 0 can be represented")
    if low is not None and high is not None and low >= high:
        raise SpecError(f"{prefix}: low must be below high")
    return FloatRange((low, high))


def to_code_type(value: Any) -> CodeType:
    """Convert a dtype of codes, its name or its alias."""
    if isinstance(value, torch.dtype | Float6):
        return value
    name = _to_dtype_name(value) if isinstance(value, str) else ""
    dtype = _FLOAT6_BY_NAME.get(name) or (getattr(torch, name, None) if name else None)
    if not isinstance(dtype, torch.dtype | Float6):
        names = [*(row.name for row in FORMATS.values()), dtype_name(E8M0), *ALIASES]
        raise SpecError(
            f"Unsupported dtype: {short_repr(value)} is not the name of a dtype: {did_you_mean(name, names)}"
        )
    return dtype


def to_dtype(value: Any) -> torch.dtype:
    """Convert a torch.dtype, its name or its alias."""
    dtype = to_code_type(value)
    if not isinstance(dtype, torch.dtype):
        raise SpecError(f"Unsupported dtype: torch does not have {dtype}, it can be used for codes only")
    return dtype


_FLOAT6_BY_NAME = {kind.value: kind for kind in Float6}
_AS_DTYPE_NAME = (PlainSerializer(dtype_name), WithJsonSchema({"type": "string"}))
Dtype = Annotated[torch.dtype, BeforeValidator(to_dtype), *_AS_DTYPE_NAME]
CodeDtype = Annotated[CodeType, BeforeValidator(to_code_type), *_AS_DTYPE_NAME]


def _component_field(base: type[ClassRegistry]) -> Any:
    """Return the type of a field for a registered class: it accepts the class or its key, and dumps the key."""

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
    """JSON Schema whose defaults are written as in a config file."""

    def encode_default(self, dft: Any) -> Any:
        if isinstance(dft, torch.dtype | Float6):
            return dtype_name(dft)
        return super().encode_default(list(dft) if isinstance(dft, FloatRange) else dft)


class QuantizationSpec(CheckedModel):
    """How one tensor is quantized. Immutable and hashable. Unknown fields are an error.

    Attributes:
        dtype: dtype of the codes, such as torch.int8 or "int4".
        qscheme: How a scale is computed from a range: symmetric, symmetric with clipped limits, or affine.
        qformulation: Codes relative to an integer zero point, or to the float minimum (minval).
        granularity: Which elements share a scale: tensor, channel, block or token.
        fake_quantize_cls: Component that quantizes and dequantizes.
        qparam_calculator_cls: Component that computes scale and zero point, such as "static" or "moving_average".
        range_calculator_cls: Component that computes the range of a tensor, such as "minmax".
        float_range: Fixed lower and upper end of the range; None: the observed one.
        scale_dtype: dtype of the scales; None: float32.

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
            if name not in cls.model_fields and name not in DERIVED_FIELDS:
                raise SpecError(f"{cls.__name__} has no field {name!r}: {did_you_mean(str(name), cls.model_fields)}")
        spec = validate({name: value for name, value in data.items() if name not in DERIVED_FIELDS})
        for name in DERIVED_FIELDS:
            if name in data:
                spec._check_derived(name, data[name])
        return spec

    def _check_derived(self, name: str, value: Any) -> None:
        if name == "target_dtype":
            derived: Any = dtype_name(self.target_dtype)
            is_equal = _to_dtype_name(value) == derived
        else:
            derived = getattr(self, name)
            is_equal = value == derived and not isinstance(value, bool)
        if is_equal:
            return
        source = f"dtype={dtype_name(self.dtype)!r}"
        source += f" with qscheme={self.qscheme.value!r}" if name.startswith("quant_") else ""
        raise SpecError(
            f"{name}={short_repr(value)} contradicts {source}, from which {name}={short_repr(derived)} follows: "
            f"leave out {name}=" + (_suggest_dtype(self.dtype, value) if name == "n_bits" else "")
        )

    @field_validator("dtype")
    @classmethod
    def _supported(cls, dtype: CodeType) -> CodeType:
        if dtype not in cls.SUPPORTED_DTYPES:
            allowed = ", ".join(sorted(dtype_name(supported) for supported in cls.SUPPORTED_DTYPES))
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
            value = "None" if self.scale_dtype is None else dtype_name(self.scale_dtype)
            names = " or ".join("None" if dtype is None else dtype_name(dtype) for dtype in allowed)
            raise SpecError(f"scale_dtype={value}: must be {names} for {dtype_name(self.dtype)}")
        return self

    @model_validator(mode="before")
    @classmethod
    def _default_scale(cls, data: Any) -> Any:
        """Set scale_dtype to e8m0 for fp4 and fp6 if it is not given (MX formats)."""
        if isinstance(data, dict) and data.get("scale_dtype") is None:
            dtype = data.get("dtype", cls.model_fields["dtype"].default)
            if _to_dtype_name(dtype) in (dtype_name(FP4), *_FLOAT6_BY_NAME):
                return {**data, "scale_dtype": E8M0}
        return data

    @computed_field  # type: ignore[prop-decorator]  # pydantic documents this order
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
        """Return the number of bits of a dtype."""
        return get_format(to_code_type(dtype)).bits

    @classmethod
    def get_target_dtype(cls, dtype: CodeType | str) -> torch.dtype:
        """Return the torch dtype that stores the codes of a dtype."""
        return get_format(to_code_type(dtype)).storage

    @classmethod
    def get_quant_range(
        cls, dtype: CodeType | str, qscheme: QuantizationScheme | str = QuantizationScheme.SYMMETRIC
    ) -> tuple[float, float]:
        """Return the smallest and the largest code of a dtype under a scheme."""
        return get_format(to_code_type(dtype)).limits(parse_enum(QuantizationScheme, qscheme))

    def get_extra_args(self) -> dict[str, Any]:
        """Return the fields that a subclass adds. They are passed to the constructors of the components."""
        fields = type(self).model_fields
        return {name: getattr(self, name) for name in fields if name not in QuantizationSpec.model_fields}

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed, and validate it."""
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        if "dtype" in changes and "scale_dtype" not in changes:
            fields["scale_dtype"] = None
        return type(self)(**{**fields, **changes})

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Copy the spec. `update` is validated like in `replace`; pydantic's method would accept any value."""
        return self.replace(**update) if update else super().model_copy(deep=deep)

    @classmethod
    def model_json_schema(cls, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return a JSON Schema, for editors that complete config files."""
        return super().model_json_schema(*args, **{"schema_generator": SchemaGenerator, **kwargs})

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as strings, numbers, lists and dicts."""
        return self.model_dump(mode="json")

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        """Read a spec from a mapping of its fields."""
        if not isinstance(fields, dict):
            raise DocumentError(f"a {cls.__name__} must be a mapping of its fields, got {type(fields).__name__}")
        return cls.model_validate(fields)

    def to_json(self) -> str:
        """Return the spec as JSON."""
        return self.model_dump_json(indent=2)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read a spec from JSON."""
        from scalepoint.support.documents import parse_json  # noqa: PLC0415  # imports yaml

        return cls.from_dict(parse_json(text))

    def to_yaml(self) -> str:
        """Return the spec as YAML."""
        from scalepoint.support.documents import dump_yaml  # noqa: PLC0415  # imports yaml

        return dump_yaml(self.to_dict())

    @classmethod
    def from_yaml(cls, text: str) -> Self:
        """Read a spec from YAML."""
        from scalepoint.support.documents import parse_yaml  # noqa: PLC0415  # imports yaml

        return cls.from_dict(parse_yaml(text))


def _suggest_dtype(dtype: CodeType, bits: Any) -> str:
    """Return a hint to use the dtype of the same kind with another number of bits, if there is one."""
    name = dtype_name(dtype).rstrip("0123456789") + str(bits)
    return f", or pass dtype={name!r}" if any(row.name == name for row in FORMATS.values()) else ""


def _to_dtype_name(dtype: Any) -> str:
    """Return the name of a dtype, of a name or of an alias."""
    name = str(dtype).removeprefix("torch.")
    return ALIASES.get(name, name)


def _allowed_scale_dtypes(dtype: CodeType) -> tuple[torch.dtype | None, ...]:
    if not get_format(dtype).is_float:
        return (None,)
    if isinstance(dtype, Float6):
        return (E8M0,)
    return (E8M0, E4M3) if dtype == FP4 else (None, E8M0)


def default_weight_quantization_spec() -> QuantizationSpec:
    """Return the default for weights: int8, symmetric, per channel along axis 0, from the current weight."""
    return QuantizationSpec(granularity=PerChannelGranularity(axis=0), qparam_calculator_cls="static")


def default_activation_quantization_spec() -> QuantizationSpec:
    """Return the default for activations: int8, symmetric, per tensor, moving average of the range."""
    return QuantizationSpec(qparam_calculator_cls="moving_average")
