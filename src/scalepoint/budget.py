"""Budget: the limit of a deployment, as size, bits per weight or speed. Imports no torch."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from scalepoint.errors import ConfigError, short_repr
from scalepoint.support.validation_errors import Config

BudgetUnit = Literal["size", "bits", "speed"]
BUDGET_UNITS: tuple[BudgetUnit, ...] = ("size", "bits", "speed")


class Budget(Config):
    """The largest cost of a deployment. Exactly one field is set.

    Attributes:
        size: Largest size of the file, as a share of the float file's size.
        bits: Largest number of bits per weight, on average over all layers that have a choice.
        speed: Smallest speed relative to the float model, estimated by multiply-accumulates.
    """

    size: Annotated[float, Field(gt=0, le=1)] | None = None
    bits: Annotated[float, Field(gt=0, le=32)] | None = None
    speed: Annotated[float, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _check_one_field(self) -> Self:
        units = [unit for unit in BUDGET_UNITS if getattr(self, unit) is not None]
        if len(units) != 1:
            raise ConfigError(
                f"a budget must be one of size, bits and speed, got {' and '.join(units) or 'none of them'}: size=0.2 "
                "is a fifth of the float file, bits=4.5 the average per weight, speed=1.8 times the float model's speed"
            )
        return self

    @property
    def unit(self) -> BudgetUnit:
        return next(unit for unit in BUDGET_UNITS if getattr(self, unit) is not None)

    @property
    def limit(self) -> float:
        return float(getattr(self, self.unit))

    @classmethod
    def build(cls, value: Any) -> Self:
        """Convert a Budget, a mapping, or text such as "size=0.2" to a Budget."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str) and "=" in value:
            unit, _, number = value.partition("=")
            value = {unit.strip(): number.strip()}
        if isinstance(value, Mapping):
            return cls.model_validate(dict(value))
        raise ConfigError(f"a budget must be written as size=0.2, bits=4.5 or speed=1.8, got {short_repr(value)}")

    def __str__(self) -> str:
        return f"{self.unit}={self.limit:g}"
