"""Keep what was measured on this machine for the next deploy, in the user's cache folder.

    kernel-times/<CPU>-<runtime>-<version>-<threads>-threads.json
        layers       layer key -> the latest samples of (float seconds, int8 seconds)
        conversions  kind -> the latest samples of seconds per element
        networks     fingerprint -> which layers were float in the fastest file, its speeds, and its last day

A network that was deployed before gets the placement of its fastest file. Its speed was measured with the float file
in turns, so that other programs slow down both. The times of layers serve other networks with the same layers; a layer
whose samples disagree, because the machine was busy in one of them, counts as unknown.
"""

import json
import os
import re
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from scalepoint.errors import ScalepointError
from scalepoint.support.cpu import describe_cpu
from scalepoint.support.files import folder_locked, replace_text
from scalepoint.support.untrusted import read_json
from scalepoint.targets.local_times import LocalTimes, Seconds

CACHE_VARIABLE = "SCALEPOINT_CACHE"
FOLDER = "kernel-times"
FILE_FORMAT = 3
MAX_SAMPLES = 5  # the latest ones of each layer
MAX_LAYERS, MAX_NETWORKS = 10_000, 200  # the oldest are dropped beyond
MAX_FILE_BYTES = 10_000_000  # a larger file is not read; these numbers of layers and networks take about 3 MB
MAX_DISAGREEMENT = 1.5  # of the ratio of int8 to float between the samples of a layer
MIN_SECONDS = 5e-6  # of a kernel: profiles count whole microseconds, so that ratios of shorter times are noise
# An older placement is measured again: drivers, firmware and cooling change.
MAX_AGE_DAYS = 30
MAX_DISTURBED_AGE_DAYS = 1  # if other programs disturbed the measurement, so that the choice may be wrong
SECONDS_PER_DAY = 86_400
LOCK_SECONDS = 5.0

Sample = tuple[Seconds, Seconds]  # in float, in int8
Value = TypeVar("Value")
# The limits are checked when a file is read.
SampleCount = Field(min_length=1, max_length=MAX_SAMPLES)
LayerSamples = Annotated[tuple[Sample, ...], SampleCount]
ConversionSamples = Annotated[tuple[Seconds, ...], SampleCount]
Speeds = Annotated[tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...], SampleCount]
Position = Annotated[int, Field(ge=0)]
NO_OTHER_FIELDS = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class NetworkPlacement:
    """The fastest file of a network.

    Attributes:
        float_layers: Positions of its float layers among the layers of the network.
        speeds: Its speed relative to the float file in each deploy, the latest last.
        last_day: Last day on which the placement is used, counted from 1970.
    """

    __pydantic_config__ = NO_OTHER_FIELDS

    float_layers: tuple[Position, ...]
    speeds: Speeds
    last_day: int

    @property
    def speed(self) -> float:
        return median(self.speeds)

    @property
    def is_recent(self) -> bool:
        return 0 <= self.last_day - today() <= MAX_AGE_DAYS


@dataclass(frozen=True)
class Measurements:
    """All that was measured with one runtime on this machine. See the module's docstring."""

    __pydantic_config__ = NO_OTHER_FIELDS

    layers: Mapping[str, LayerSamples] = field(default_factory=dict)
    conversions: Mapping[str, ConversionSamples] = field(default_factory=dict)
    networks: Mapping[str, NetworkPlacement] = field(default_factory=dict)

    def times(self) -> LocalTimes:
        """Return the medians of all samples."""
        layers: dict[str, tuple[float, float]] = {}
        for key, samples in self.layers.items():
            float_seconds, int8_seconds = ([sample[i] for sample in samples] for i in (0, 1))
            layers[key] = (median(float_seconds), median(int8_seconds))
        return LocalTimes(layers, {kind: median(samples) for kind, samples in self.conversions.items()})

    def are_known(self, keys: Collection[str]) -> bool:
        """Whether all these layers have samples that agree."""
        return all(key in self.layers and _agree(self.layers[key]) for key in keys)

    def restricted(self, keys: Collection[str], network: str) -> "Measurements":
        """Return what concerns these layers and this network."""
        layers = {key: self.layers[key] for key in sorted(keys) if key in self.layers}
        networks = {network: self.networks[network]} if network in self.networks else {}
        return Measurements(layers, self.conversions, networks)

    def with_times(self, times: LocalTimes) -> "Measurements":
        """Return these measurements with one more sample of each layer."""
        layers, conversions = dict(self.layers), dict(self.conversions)
        for key, sample in times.layers.items():
            layers[key] = (*layers.pop(key, ()), sample)[-MAX_SAMPLES:]  # to the end, which holds the latest
        for kind, seconds in times.conversions.items():
            conversions[kind] = (*conversions.get(kind, ()), seconds)[-MAX_SAMPLES:]
        return replace(self, layers=_keep_latest(layers, MAX_LAYERS), conversions=conversions)

    def with_network(
        self, name: str, float_layers: tuple[int, ...], speed: float, *, was_disturbed: bool = False
    ) -> "Measurements":
        """Return these measurements with the speed of one more file of a network.

        If the file has another placement than the recorded one, it replaces the record. A placement that a disturbed
        measurement chose is used for one day.
        """
        networks = dict(self.networks)
        old = networks.pop(name, None)
        if old is not None and old.float_layers == float_layers and old.is_recent:
            networks[name] = replace(old, speeds=(*old.speeds, speed)[-MAX_SAMPLES:])
        else:
            last_day = today() + (MAX_DISTURBED_AGE_DAYS if was_disturbed else MAX_AGE_DAYS)
            networks[name] = NetworkPlacement(float_layers, (speed,), last_day)
        return replace(self, networks=_keep_latest(networks, MAX_NETWORKS))

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON data."""
        data: dict[str, Any] = _SCHEMA.dump_python(self, mode="json")
        return data

    @classmethod
    def from_dict(cls, data: Any) -> "Measurements":
        """Convert what `to_dict` returned. Raises ValueError for other data; missing fields are empty."""
        return _SCHEMA.validate_python(data)


_SCHEMA = TypeAdapter(Measurements)


def _agree(samples: tuple[Sample, ...]) -> bool:
    """Whether at most half of the samples of a layer differ from their median by more than noise."""
    ratios = [max(sample[1], MIN_SECONDS) / max(sample[0], MIN_SECONDS) for sample in samples]
    middle = median(ratios)
    close = [ratio for ratio in ratios if 1 / MAX_DISAGREEMENT < ratio / middle < MAX_DISAGREEMENT]
    return len(close) > len(samples) / 2


def _keep_latest(values: dict[str, Value], count: int) -> dict[str, Value]:
    return dict(list(values.items())[-count:])


class _File(BaseModel):
    """Head of a file of measurements."""

    model_config = NO_OTHER_FIELDS

    format: int
    cpu: str
    measurements: dict[str, Any]  # another FILE_FORMAT may have other ones


def today() -> int:
    """Return the number of days since 1970."""
    return int(time.time() // SECONDS_PER_DAY)


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


def measurements_path(runtime: str, version: str, threads: int) -> Path:
    """Return the file that holds what was measured with this CPU, runtime and number of threads."""
    name = f"{describe_cpu()}-{runtime}-{version}-{threads}-threads"
    return user_cache_folder() / FOLDER / f"{re.sub(r'[^A-Za-z0-9.]+', '-', name)}.json"


def list_measurement_files() -> list[Path]:
    """Return all files of measurements in the user's cache folder."""
    return sorted((user_cache_folder() / FOLDER).glob("*.json"))


def clear_measurements() -> int:
    """Delete all files of measurements. Returns their number."""
    paths = list_measurement_files()
    for path in paths:
        path.unlink(missing_ok=True)
    return len(paths)


def load_measurements(path: Path) -> Measurements:
    """Read a file. A missing or damaged file gives no measurements: everything in it can be measured again."""
    try:
        content = _File.model_validate(read_json(path, MAX_FILE_BYTES))
        if content.format != FILE_FORMAT or content.cpu != describe_cpu():
            return Measurements()
        return Measurements.from_dict(content.measurements)
    except (OSError, ScalepointError, ValidationError):
        return Measurements()


def add_measurements(
    path: Path,
    times: LocalTimes,
    network: tuple[str, tuple[int, ...], float] | None = None,
    *,
    was_disturbed: bool = False,
) -> bool:
    """Add the samples of one run to a file: times, and the name, float layers and speed of its network.

    Args:
        path: The file.
        times: Times of layers and of conversions.
        network: Name, float layers and speed of the network; None if they are not known.
        was_disturbed: Whether other programs disturbed a measurement that chose the float layers.

    Returns:
        False if the file cannot be written, which loses nothing else.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with folder_locked(path.parent, wait_seconds=LOCK_SECONDS):
            measurements = load_measurements(path).with_times(times)
            if network is not None:
                measurements = measurements.with_network(*network, was_disturbed=was_disturbed)
            content = {"format": FILE_FORMAT, "cpu": describe_cpu(), "measurements": measurements.to_dict()}
            replace_text(path, json.dumps(content, separators=(",", ":")))
    except (OSError, ScalepointError):
        return False
    return True
