"""Times of layers measured on this machine. They decide which layers run in int8.

    profile of the float and the int8 file --> {layer key: (float seconds, int8 seconds)}

A layer key names everything that a kernel's time depends on: the kinds of operations and all shapes. A layer that was
never measured here gets its price from the target's shipped table (`kernel_times.py`). `measurement_cache.py` keeps
the times for the next deploy.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field

Seconds = Annotated[float, Field(ge=0, lt=1e4, allow_inf_nan=False)]


@dataclass(frozen=True)
class LocalTimes:
    """Measured times of layers and of conversions between float and int8.

    Attributes:
        layers: Layer key -> (float seconds, int8 seconds), the latest measurements last.
        conversions: "quantize" or "dequantize" -> seconds per element.
        float_layers: Names of the layers that were float in the fastest file of this network; None if the times decide.
    """

    layers: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    conversions: Mapping[str, float] = field(default_factory=dict)
    float_layers: tuple[str, ...] | None = None

    def get(self, key: str | None) -> tuple[float, float] | None:
        """Return the seconds in float and in int8; None if the layer was not measured here."""
        return None if key is None else self.layers.get(key)

    def updated(self, newer: "LocalTimes") -> "LocalTimes":
        """Return these times with newer ones added, which replace those of the same layers."""
        older = {key: seconds for key, seconds in self.layers.items() if key not in newer.layers}
        return LocalTimes({**older, **newer.layers}, {**self.conversions, **newer.conversions}, newer.float_layers)

    def restricted(self, keys: Collection[str]) -> "LocalTimes":
        """Return the times of these layers only."""
        layers = {key: self.layers[key] for key in sorted(keys) if key in self.layers}
        return LocalTimes(layers, self.conversions, self.float_layers)

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON data."""
        layers = {key: list(seconds) for key, seconds in self.layers.items()}
        data: dict[str, Any] = {"layers": layers, "conversions": dict(self.conversions)}
        return data if self.float_layers is None else {**data, "float_layers": list(self.float_layers)}

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """Convert from JSON data. Raises ValueError if it is not what `to_dict` writes."""
        parsed = _TimesData.model_validate(data)
        return cls(parsed.layers, parsed.conversions, parsed.float_layers)


class _TimesData(BaseModel):
    """Times as JSON."""

    model_config = ConfigDict(extra="forbid")

    layers: dict[str, tuple[Seconds, Seconds]]
    conversions: dict[str, Seconds]
    float_layers: tuple[str, ...] | None = None
