"""Budget: what a deployment may cost, as size, bits per weight or speed. Imports no torch."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from scalepoint.errors import ConfigError, short_repr
from scalepoint.support.validation_errors import Config

BudgetUnit = Literal["size", "bits", "speed"]
BUDGET_UNITS: tuple[BudgetUnit, ...] = ("size", "bits", "speed")


class Budget(Config):
    """What a deployment may cost; exactly one of the fields is set.

    Attributes:
        size: Size of the file, as a share of the float file's.
        bits: Bits per weight, on average over all layers that have a choice.
        speed: Speed relative to the float model, estimated by multiply-accumulates.
    """

    size: Annotated[float, Field(gt=0, le=1)] | None = None
    bits: Annotated[float, Field(gt=0, le=32)] | None = None
    speed: Annotated[float, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _check_one_field(self) -> Self:
        given = [unit for unit in BUDGET_UNITS if getattr(self, unit) is not None]
        if len(given) != 1:
            raise ConfigError(
                f"a budget is one of size, bits and speed, not {' and '.join(given) or 'nothing'}: size=0.2 is a fifth "
                "of the float file, bits=4.5 the average of the weights, speed=1.8 so many times the float model's"
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
        """Make a budget of itself, of a mapping, or of text as a flag has it: size=0.2."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str) and "=" in value:
            unit, _, number = value.partition("=")
            value = {unit.strip(): number.strip()}
        if isinstance(value, Mapping):
            return cls.model_validate(dict(value))
        raise ConfigError(f"a budget is written size=0.2, bits=4.5 or speed=1.8, not {short_repr(value)}")

    def __str__(self) -> str:
        return f"{self.unit}={self.limit:g}"
