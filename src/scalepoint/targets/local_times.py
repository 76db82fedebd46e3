"""Times of layers measured on this machine. They decide which layers run in int8, and are kept for the next deploy.

    profile of the float and the int8 file --> {layer key: (float seconds, int8 seconds)} --> user's cache folder

A layer key names everything that a kernel's time depends on: the kinds of operations and all shapes. One JSON file
holds the times of one CPU model, runtime, runtime version and number of threads. A layer that was never measured here
gets its price from the target's shipped table (`kernel_times.py`).
"""

import json
import os
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from scalepoint.errors import ScalepointError
from scalepoint.support.cpu import describe_cpu
from scalepoint.support.files import folder_locked, replace_text
from scalepoint.support.untrusted import read_json

CACHE_VARIABLE = "SCALEPOINT_CACHE"
FILE_FORMAT = 1
MAX_LAYERS = 20_000  # oldest measurements are dropped beyond: about 3 MB

Seconds = Annotated[float, Field(ge=0, lt=1e4, allow_inf_nan=False)]


@dataclass(frozen=True)
class LocalTimes:
    """Measured times of layers and of conversions between float and int8.

    Attributes:
        layers: Layer key -> (float seconds, int8 seconds), the latest measurements last.
        conversions: "quantize" or "dequantize" -> seconds per element.
    """

    layers: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    conversions: Mapping[str, float] = field(default_factory=dict)

    def get(self, key: str | None) -> tuple[float, float] | None:
        """Return the seconds in float and in int8; None if the layer was not measured here."""
        return None if key is None else self.layers.get(key)

    def updated(self, newer: "LocalTimes") -> "LocalTimes":
        """Return these times with newer ones added, which replace those of the same layers."""
        older = {key: seconds for key, seconds in self.layers.items() if key not in newer.layers}
        return LocalTimes({**older, **newer.layers}, {**self.conversions, **newer.conversions})

    def restricted(self, keys: Collection[str]) -> "LocalTimes":
        """Return the times of these layers only."""
        return LocalTimes({key: self.layers[key] for key in sorted(keys) if key in self.layers}, self.conversions)

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON data."""
        layers = {key: list(seconds) for key, seconds in self.layers.items()}
        return {"layers": layers, "conversions": dict(self.conversions)}

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """Convert from JSON data. Raises ValueError if it is not what `to_dict` writes."""
        parsed = _TimesData.model_validate(data)
        return cls(parsed.layers, parsed.conversions)


class _TimesData(BaseModel):
    """Times as JSON."""

    model_config = ConfigDict(extra="forbid")

    layers: dict[str, tuple[Seconds, Seconds]]
    conversions: dict[str, Seconds]


class _File(BaseModel):
    """Content of a file of times."""

    model_config = ConfigDict(extra="forbid")

    format: int
    cpu: str
    times: _TimesData


def user_cache_folder() -> Path:
    """Return the folder for measurements: SCALEPOINT_CACHE, or `scalepoint` in the user's cache folder."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen)
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "scalepoint"


def local_times_path(runtime: str, version: str, threads: int) -> Path:
    """Return the file that holds the times of this CPU, runtime and number of threads."""
    name = f"{describe_cpu()}-{runtime}-{version}-{threads}-threads"
    return user_cache_folder() / "kernel-times" / f"{re.sub(r'[^A-Za-z0-9.]+', '-', name)}.json"


def load_local_times(path: Path) -> LocalTimes:
    """Read a file of times. A missing or damaged file gives no times: everything in it can be measured again."""
    try:
        content = _File.model_validate(read_json(path))
    except (OSError, ScalepointError, ValidationError):
        return LocalTimes()
    is_readable = content.format == FILE_FORMAT and content.cpu == describe_cpu()
    return LocalTimes(content.times.layers, content.times.conversions) if is_readable else LocalTimes()


def save_local_times(path: Path, newer: LocalTimes) -> bool:
    """Add measurements to a file of times. Returns False if the folder cannot be written, which loses nothing else."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with folder_locked(path.parent):
            times = load_local_times(path).updated(newer)
            latest = LocalTimes(dict(list(times.layers.items())[-MAX_LAYERS:]), times.conversions)
            content = {"format": FILE_FORMAT, "cpu": describe_cpu(), "times": latest.to_dict()}
            replace_text(path, json.dumps(content, indent=0))
    except (OSError, ScalepointError):
        return False
    return True
