"""What `min_speed` tries: layers that lose time in the runtime go to float, file after file, as long as it helps.

    0      the config as it was given, what int8 makes slower by the table left float
    1 ..   what the runtime's own profiler found slower than in the float file; then, where only conversions are left to
           win, the layers that win less than those take

The files are timed against the float one; the first that is fast enough is kept, or the fastest.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from scalepoint.deployment.trials import Step, Trial
from scalepoint.errors import UsageError
from scalepoint.quantize import Override, coverage, record_of
from scalepoint.quantize.config import FLOAT
from scalepoint.report import Raised
from scalepoint.runtimes import find_runtime
from scalepoint.targets import Target
from scalepoint.verification.times import LayerTime, losers


def check_pace(min_speed: float | None, data: Any, target: Target, others: Sequence[object], *, smoke: bool) -> None:
    """What is wrong with a `min_speed`, before anything is made."""
    if min_speed is None:
        return
    if min_speed <= 0:
        raise UsageError(f"min_speed={min_speed:g}: times the speed of the float file, so more than 0")
    if any(each is not None for each in others):
        raise UsageError(
            "min_speed= makes float what loses time, max_drop= and budget= choose by error: give one of them"
        )
    if isinstance(data, Iterator):
        raise UsageError(
            "min_speed= calibrates several times, an iterator gives its data once: pass a list or a function"
        )
    if target.runtime is None or not find_runtime(target.runtime).profiles or smoke:
        why = (
            "smoke=True times nothing"
            if smoke
            else f"{target.name} has no runtime here that tells the time of its nodes"
        )
        raise UsageError(f"min_speed= is measured in the runtime, and {why}")


def next_float(trials: Sequence[Trial]) -> Step | None:
    """The next file: the last one with more layers in float; None where nothing is left to win."""
    last = trials[-1]
    found = last.verification
    if found is None or not found.times:
        return None
    known = {site.name for site in record_of(last.model).sites} - set(last.left_float)
    rows = [row for row in found.times if row.name in known and row.seconds is not None]
    moved = [row.name for row in losers(found.times) if row.name in known] or _cheap(rows, found.times)
    moved = _but_one(last, moved)
    if not moved:
        return None
    more = tuple(Override(name=name, weight=FLOAT, activation=FLOAT) for name in moved)
    config = last.config.model_copy(update={"overrides": (*last.config.overrides, *more)})
    return Step(config, tuple(Raised(name, FLOAT) for name in moved), len(trials) - 1)


def _cheap(rows: Sequence[LayerTime], times: Sequence[LayerTime]) -> list[str]:
    """Layers whose gains together are less than what conversions take: without them some of those go."""
    converting = sum(row.seconds or 0.0 for row in times if row.is_conversion)
    found: list[str] = []
    for row in sorted((row for row in rows if row.float_seconds is not None), key=lambda row: -row.loss):
        converting += row.loss
        if converting <= 0:
            break
        found.append(row.name)
    return found


def _but_one(last: Trial, moved: Sequence[str]) -> list[str]:
    """Without the largest weight where nothing would be quantized any more; none where nothing is quantized now."""
    rows = [row for row in coverage(last.model).operations if row.precision != FLOAT]
    if not rows:
        return []
    if not {row.name for row in rows} <= set(moved):
        return list(moved)
    largest = max(rows, key=lambda row: row.parameters).name
    return [name for name in moved if name != largest]
