"""The user's configuration: how tensors are quantized, and overrides for single operations.

    QuantConfig(activation=TensorQuantConfig(), weight=TensorQuantConfig(per_channel=True),
                overrides=(Override(name="head", weight="float", activation="float"),
                           Override(type=nn.Linear, weight=TensorQuantConfig(n_bits=4))))
    QuantConfig.weight_only("int4", block_size=32)

The most specific override applies: an exact name before a glob before a type. Among equals the last wins.
"""

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import (
    BeforeValidator,
    Field,
    PlainSerializer,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from torch import nn

from scalepoint.errors import ConfigError, did_you_mean, short_repr
from scalepoint.spec import (
    CompressionTargetTensor,
    ExtendedQuantizationSpec,
    PerBlockGranularity,
    PerChannelGranularity,
    PerTensorGranularity,
    QuantizationGranularity,
    QuantizationScheme,
    QuantizationSpec,
    palette_spec,
)
from scalepoint.spec.extended import choose_spec_class, get_sparsity, spec_from_dict
from scalepoint.spec.sparsity import SparsityField
from scalepoint.spec.spec import SchemaGenerator
from scalepoint.support.documents import dump_yaml, parse_json, parse_yaml
from scalepoint.support.plugins import entry_point_names
from scalepoint.support.validation_errors import CheckedModel, Config

BUILT_IN_MIGRATIONS = ("smooth", "equalize", "awq", "rotate")  # others are entry points
FLOAT = "float"  # used instead of a tensor's config: the tensor is not quantized


class CalibrationMethod(StrEnum):
    """How the range of a tensor is computed from the data."""

    MINMAX = "minmax"
    MOVING_AVERAGE_MINMAX = "moving_average_minmax"
    HISTOGRAM = "histogram"  # of all batches, clipped where the squared error is smallest: the same as MSE
    PERCENTILE = "percentile"
    ENTROPY = "entropy"
    MSE = "mse"


# calibration method -> (calculator of an activation, range calculator of a weight)
_CALCULATORS = {
    CalibrationMethod.MINMAX: ("global_minmax", "minmax"),
    CalibrationMethod.MOVING_AVERAGE_MINMAX: ("moving_average", "minmax"),
    CalibrationMethod.HISTOGRAM: ("histogram_mse", "mse"),
    CalibrationMethod.PERCENTILE: ("histogram_percentile", "percentile"),
    CalibrationMethod.ENTROPY: ("histogram_entropy", "entropy"),
    CalibrationMethod.MSE: ("histogram_mse", "mse"),
}


class TensorQuantConfig(Config):
    """The short form of a QuantizationSpec.

    Attributes:
        n_bits: Width of the codes.
        symmetric: True gives signed integers without a zero point, False unsigned ones with a zero point.
        per_channel: One scale per output channel instead of one for the tensor.
        calibration_method: How the range is computed from the data.
        block_size: One scale for this many weights along the input channels.
        sparsity: Prune the weight by magnitude first: a share (0.5), "2:4", or {"share": 0.5, "block": 4}.
    """

    n_bits: Annotated[int, Field(strict=True)] = 8
    symmetric: bool = True
    per_channel: bool = False
    calibration_method: CalibrationMethod = CalibrationMethod.MINMAX
    block_size: Annotated[int, Field(strict=True, gt=0)] | None = None
    sparsity: SparsityField = None

    WIDTHS: ClassVar[tuple[int, ...]] = (2, 3, 4, 5, 6, 7, 8, 16)  # the target decides which of them run

    @model_validator(mode="after")
    def _check_width(self) -> Self:
        if self.n_bits not in self.WIDTHS:
            widths = ", ".join(map(str, self.WIDTHS))
            raise ConfigError(
                f"n_bits must be one of {widths}, got {self.n_bits}: for fp8 and fp4 use a QuantizationSpec"
            )
        if self.per_channel and self.block_size:
            raise ConfigError(f"per_channel=True and block_size={self.block_size} cannot be used together")
        return self

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, f"{'int' if self.symmetric else 'uint'}{self.n_bits}")
        return dtype

    @property
    def quant_min(self) -> int:
        return -(1 << (self.n_bits - 1)) if self.symmetric else 0

    @property
    def quant_max(self) -> int:
        code_bits = self.n_bits - 1 if self.symmetric else self.n_bits  # symmetric codes are signed
        return (1 << code_bits) - 1

    def activation_spec(self) -> QuantizationSpec:
        """Return the spec for an activation. Raises ConfigError for settings that only weights can have."""
        if self.per_channel:
            raise ConfigError("per_channel=True can only be used for weights: no runtime has per-channel activations")
        if self.block_size:
            raise ConfigError(
                f"block_size={self.block_size} can only be used for weights: for MX activations use a QuantizationSpec"
            )
        if self.sparsity is not None:
            raise ConfigError(
                f"sparsity={str(self.sparsity)!r} can only be used for weights: activations are not pruned"
            )
        calculator, _ = _CALCULATORS[self.calibration_method]
        return choose_spec_class(self.dtype)(dtype=self.dtype, qscheme=self._scheme, qparam_calculator_cls=calculator)

    def weight_spec(self) -> QuantizationSpec:
        """Return the spec for a weight."""
        _, range_calculator = _CALCULATORS[self.calibration_method]
        extra_fields = {} if self.sparsity is None else {"sparsity": self.sparsity}
        return choose_spec_class(self.dtype, extra_fields)(
            dtype=self.dtype,
            qscheme=self._scheme,
            granularity=self._granularity,
            qparam_calculator_cls="static",
            range_calculator_cls=range_calculator,
            **extra_fields,
        )

    @property
    def _granularity(self) -> QuantizationGranularity:
        if self.block_size:
            return PerBlockGranularity(block_size=self.block_size)
        return PerChannelGranularity() if self.per_channel else PerTensorGranularity()

    @property
    def _scheme(self) -> str:
        return "symmetric" if self.symmetric else "asymmetric"


def to_short_form(spec: QuantizationSpec, target: CompressionTargetTensor) -> TensorQuantConfig | QuantizationSpec:
    """Return the TensorQuantConfig that stands for this spec, or the spec itself if there is none."""
    is_weight, granularity = target == CompressionTargetTensor.WEIGHT, spec.granularity
    per_channel = isinstance(granularity, PerChannelGranularity)
    block_size = granularity.block_size if isinstance(granularity, PerBlockGranularity) else None
    sparsity = get_sparsity(spec)
    has_short_dtype = isinstance(spec.dtype, torch.dtype) and spec.n_bits in TensorQuantConfig.WIDTHS
    if not has_short_dtype or not isinstance(block_size, int | None):
        return spec
    if not is_weight and (per_channel or block_size or sparsity):
        return spec
    # The short form has no axis: the layer chooses it.
    without_axis = spec.replace(granularity=PerChannelGranularity()) if per_channel else spec
    for method in CalibrationMethod:
        short = TensorQuantConfig(
            n_bits=spec.n_bits,
            symmetric=spec.qscheme == QuantizationScheme.SYMMETRIC,
            per_channel=per_channel,
            calibration_method=method,
            block_size=block_size,
            sparsity=sparsity,
        )
        if without_axis == (short.weight_spec() if is_weight else short.activation_spec()):
            return short
    return spec


_INTEGER_DTYPES = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in TensorQuantConfig.WIDTHS)


def _parse_tensor_setting(value: Any) -> Any:
    """Convert a setting of a tensor. A dict without fields that only a spec has is the short form."""
    if value is None or isinstance(value, TensorQuantConfig | QuantizationSpec):
        return value
    if isinstance(value, dict):
        spec_only_fields = set(ExtendedQuantizationSpec.model_fields) - set(TensorQuantConfig.model_fields)
        return spec_from_dict(value) if set(value) & spec_only_fields else TensorQuantConfig(**value)
    if value == FLOAT:
        return value
    raise ConfigError(
        f"a tensor's setting must be a TensorQuantConfig, a QuantizationSpec or 'float', got {short_repr(value)}"
    )


def _dump_tensor_setting(value: Any) -> Any:
    return value.model_dump(mode="json") if isinstance(value, CheckedModel) else value


def _to_class_name(value: Any) -> str:
    if isinstance(value, type) and issubclass(value, nn.Module):
        return value.__name__
    if isinstance(value, str) and value:
        return value
    raise ConfigError(f"must be a module class or its name, got {short_repr(value)}")


_TENSOR_SETTING_SCHEMA = {"anyOf": [{"type": "object"}, {"const": FLOAT}, {"type": "null"}]}
TensorSetting = Annotated[
    TensorQuantConfig | QuantizationSpec | Literal["float"] | None,
    BeforeValidator(_parse_tensor_setting),
    PlainSerializer(_dump_tensor_setting),
    WithJsonSchema(_TENSOR_SETTING_SCHEMA),
]
ClassName = Annotated[str, BeforeValidator(_to_class_name)]


class SmoothQuantConfig(Config):
    """Settings of SmoothQuant: each channel is divided by s = act_max^alpha / weight_max^(1 - alpha).

    Attributes:
        enabled: Whether to smooth.
        alpha: The exponent, or "search" to use the best of `alphas`.
        alphas: The candidates of "search".
        layers: An alpha for single norms, by name or glob.
    """

    enabled: bool = False
    alpha: float | Literal["search"] = 0.5
    alphas: tuple[float, ...] = (0.0, 0.25, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    layers: dict[str, float | Literal["search"]] = {}

    @model_validator(mode="after")
    def _check_alphas(self) -> Self:
        for alpha in (self.alpha, *self.alphas, *self.layers.values()):
            if alpha != "search" and not 0 <= alpha <= 1:
                raise ConfigError(f"alpha must be from 0 (weights only) to 1 (activations only), got {alpha}")
        if not self.alphas:
            raise ConfigError("alphas must not be empty: pass the values that a search tries")
        return self


class Override(Config):
    """Different settings for some operations.

    Attributes:
        name: Exact path of the operation, or a glob.
        type: A class, the name of a class, or a kind of operation.
        weight: Settings of the weight. "float" does not quantize it; None changes nothing.
        activation: Settings of all inputs and outputs.
        input: Settings of the inputs.
        output: Settings of the outputs.
    """

    name: str | None = None
    type: ClassName | None = None
    weight: TensorSetting = None
    activation: TensorSetting = None
    input: TensorSetting = None
    output: TensorSetting = None

    @model_validator(mode="after")
    def _check_override(self) -> Self:
        if (self.name is None) == (self.type is None):
            raise ConfigError("an override must have either a name (a path or a glob) or a type")
        if not any((self.weight, self.activation, self.input, self.output)):
            raise ConfigError(f"the override for {self.label} is empty: set weight, activation, input or output")
        return self

    @property
    def label(self) -> str:
        """Name of the override in messages."""
        return repr(self.name if self.type is None else self.type)

    @property
    def is_glob(self) -> bool:
        return self.name is not None and any(character in self.name for character in "*?[")

    @property
    def specificity(self) -> int:
        """0 for a type, 1 for a glob, 2 for an exact name."""
        if self.name is None:
            return 0
        return 1 if self.is_glob else 2

    def matches(self, names: Iterable[str], types: Iterable[str]) -> bool:
        """Return whether the override applies to an operation with these names and types."""
        if self.name is None:
            return self.type in tuple(types)
        if self.is_glob:
            return any(fnmatchcase(name, self.name) for name in names)
        return self.name in tuple(names)

    def setting_for(self, role: str) -> Any:
        """Return the setting for "weight", "input" or "output"; None if the override does not change it."""
        setting = getattr(self, role)
        return self.activation if setting is None and role != "weight" else setting


class QuantConfig(Config):
    """How the tensors of a model are quantized. A field that is None is decided by the target.

    Attributes:
        activation: Settings of all activations.
        weight: Settings of all weights.
        skip_weight_quant_for: Kinds of operations whose weights stay float.
        smooth_quant: SmoothQuant settings.
        migrate: Rewrites of the float weights before calibration that do not change what the model computes, in this
            order: "smooth", "equalize", "awq", "rotate".
        overrides: Different settings for some operations.
        speed_first: Leave operations in float that int8 would make slower, if the target knows the times of its
            kernels. True by default in deploy, False in the single steps.
        correct_bias: Let calibration shift biases by what rounded weights add to the means of outputs. True by default
            for frozen weights. Tuning chooses biases itself and removes this shift unless it is set to True.
        outliers: Scale down outlier channels of the inputs of linear layers before they are quantized, if the target
            can do this for free and the data shows a clear gain.

    Example:
        QuantConfig(weight={"n_bits": 8, "per_channel": True}, overrides=[{"name": "head", "weight": "float"}])
    """

    activation: TensorSetting = None
    weight: TensorSetting = None
    skip_weight_quant_for: tuple[ClassName, ...] = ()
    smooth_quant: SmoothQuantConfig = SmoothQuantConfig()
    migrate: tuple[str, ...] = ()
    overrides: tuple[Override, ...] = ()
    speed_first: bool | None = None
    correct_bias: bool | None = None
    outliers: bool = True

    @field_validator("migrate")
    @classmethod
    def _check_migrations(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        known = list(BUILT_IN_MIGRATIONS)
        if set(names) - set(known):
            known += entry_point_names("scalepoint.migrations")
        for name in names:
            if name not in known:
                raise ConfigError(f"no migration {short_repr(name)}: {did_you_mean(name, known)}")
        if len(set(names)) < len(names):
            raise ConfigError(f"migrate must name each migration once, got {list(names)}")
        return names

    @property
    def migrations(self) -> tuple[str, ...]:
        """Migrations to run, in order. `smooth_quant=` is a short form that puts "smooth" first."""
        is_short_form = self.smooth_quant.enabled and "smooth" not in self.migrate
        return ("smooth", *self.migrate) if is_short_form else self.migrate

    def spec_for(self, role: str, names: Iterable[str], types: Iterable[str]) -> QuantizationSpec | str | None:
        """Return the spec for a role of an operation.

        Args:
            role: "weight", "input" or "output".
            names: Names of the operation that an override can use.
            types: Its types that an override can use.

        Returns:
            A spec, "float", or None if the config leaves the choice to the target.
        """
        names, types = tuple(names), tuple(types)
        override = self.find_override(role, names, types)
        setting: Any
        if override is not None:
            setting = override.setting_for(role)
        elif role != "weight":
            setting = self.activation
        else:
            setting = FLOAT if set(types) & set(self.skip_weight_quant_for) else self.weight
        if isinstance(setting, TensorQuantConfig):
            return setting.weight_spec() if role == "weight" else setting.activation_spec()
        spec: QuantizationSpec | str | None = setting
        return spec

    def find_override(self, role: str, names: Iterable[str], types: Iterable[str]) -> Override | None:
        """Return the override that decides a role of an operation; None if none does."""
        names, types = tuple(names), tuple(types)
        overrides = [
            override
            for override in self.overrides
            if override.matches(names, types) and override.setting_for(role) is not None
        ]
        # reversed: among equally specific overrides the last one wins.
        return max(reversed(overrides), key=lambda override: override.specificity, default=None)

    @classmethod
    def weight_only(
        cls,
        dtype: str = "int4",
        block_size: int | None = 32,
        *,
        calibration_method: CalibrationMethod | str = CalibrationMethod.MINMAX,
        overrides: Sequence[Override] = (),
    ) -> Self:
        """Make a config that quantizes weights only; activations stay float and calibration needs no data.

        Args:
            dtype: Integer dtype of the weights.
            block_size: Number of weights along the input channels that share a scale; None for one scale per channel.
            calibration_method: "mse" searches every scale: smaller error, but slower.
            overrides: Different settings for some operations.
        """
        bits = dict(zip(_INTEGER_DTYPES, TensorQuantConfig.WIDTHS * 2, strict=True)).get(dtype)
        if bits is None:
            raise ConfigError(
                f"weight_only({dtype!r}): {did_you_mean(str(dtype), _INTEGER_DTYPES)}; for other formats use "
                "QuantConfig(activation='float', weight=QuantizationSpec(...))"
            )
        weight = TensorQuantConfig(
            n_bits=bits,
            symmetric=not dtype.startswith("u"),
            per_channel=block_size is None,
            calibration_method=CalibrationMethod(calibration_method),
            block_size=block_size,
        )
        return cls(activation=FLOAT, weight=weight, overrides=tuple(overrides))

    @classmethod
    def palettes(
        cls,
        n_bits: int = 4,
        group_size: int | None = None,
        *,
        cluster_dim: int = 1,
        table_dtype: str | None = None,
        sparsity: Any = None,
        overrides: Sequence[Override] = (),
    ) -> Self:
        """Make a config that stores weights as indices into tables of float values; activations stay float.

        Args:
            n_bits: A table has 2^n_bits values.
            group_size: Number of output channels that share a table; None for one table per weight.
            cluster_dim: Number of output channels that share an index: n_bits / cluster_dim bits per weight.
            table_dtype: "int8", "float8_e4m3fn" or "float8_e5m2" entries of the tables; None for float.
            sparsity: Which weights are pruned, for example 0.5 or "2:4"; the others share the tables.
            overrides: Different settings for some operations.
        """
        return cls(
            activation=FLOAT,
            weight=palette_spec(n_bits, group_size, cluster_dim, table_dtype, sparsity),
            overrides=tuple(overrides),
        )

    @classmethod
    def model_json_schema(cls, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the JSON Schema, for editors that complete config files."""
        return super().model_json_schema(*args, **{"schema_generator": SchemaGenerator, **kwargs})

    @classmethod
    def build(cls, value: object) -> Self:
        """Return a config as it is, build one from a mapping of its fields, or the default one from None."""
        if value is None or isinstance(value, cls):
            return value or cls()
        if isinstance(value, Mapping):
            try:
                return cls.from_dict(dict(value))
            except ConfigError as error:
                raise ConfigError(f"config: {error.args[0]}") from error
        raise ConfigError(f"config must be a {cls.__name__} or a mapping of its fields, got {short_repr(value)}")

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults."""
        return self.model_dump(mode="json", exclude_defaults=True)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        """Read a config from a mapping of its fields."""
        if not isinstance(fields, dict):
            raise ConfigError(f"a {cls.__name__} must be a mapping of its fields, got {type(fields).__name__}")
        return cls.model_validate(fields)

    def to_yaml(self) -> str:
        """Return the config as YAML, without fields that have their default."""
        return dump_yaml(self.to_dict())

    @classmethod
    def from_yaml(cls, text: str) -> Self:
        """Read a config from YAML."""
        return cls.from_dict(parse_yaml(text))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read a config from JSON."""
        return cls.from_dict(parse_json(text))
