"""Results of verification as plain data: agreement, departure, speed, and what `print` shows of them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from rich.table import Table

from scalepoint.errors import VerificationError
from scalepoint.runtimes import Status
from scalepoint.support.formatting import (
    format_decibels,
    format_plural,
    format_ratio,
    format_share,
    format_size,
    format_time,
    render_as_text,
)
from scalepoint.support.jsonable import to_jsonable
from scalepoint.verification.agreement import Agreement, worst_sqnr
from scalepoint.verification.layer_times import LayerTime, describe_slower_layers

BOUND_DB = 20.0  # smallest SQNR that counts as agreement
SUSPICIOUS_DB = 10.0  # the optimisations of the runtime may not lower the SQNR by more than this,
SURE_DB = 40.0  # unless it still is this high
MIN_FREE_SIZES_COST = 0.05  # share of the time; less is not worth a line
ROUNDED_DB = 10.0  # smallest SQNR if the runtime rounds floats by itself, for example to bfloat16
SAME_SPEED_TOLERANCE = 0.03  # the speed of two files with the same kernels differs by up to 3 %
OWN_BASELINE, PLAIN_BASELINE = "the float file", "the plain export"
MAX_NAMED_DIFFERENCES = 3
MAX_SHOWN_FALLBACKS = 12


@dataclass(frozen=True)
class Departure:
    """The first tensor whose codes differ from the simulation."""

    where: str  # name of the stub
    equal: float  # share of equal codes
    largest: int  # largest difference in codes
    cause: str
    way_out: str  # what to do about it


@dataclass(frozen=True)
class Choice:
    """A top-k, sort or argmax where the runtime chose differently from the simulation, between nearly equal scores."""

    where: str  # name of the node
    sqnr: float  # agreement of its scores with the scores of the simulation, in dB
    gap: float  # largest difference between a score chosen by the runtime and one chosen by the simulation

    def __str__(self) -> str:
        scores = f"scores at most {self.gap:.3g} apart" if self.gap else "equal scores"
        agreement = "exactly" if self.sqnr == inf else f"to {format_decibels(self.sqnr)} dB"
        return f"{self.where} ({scores}, which agree with the simulation {agreement})"


@dataclass(frozen=True)
class Resized:
    """Agreement of a file with the simulation at sizes of the free axes that differ from the example inputs."""

    sizes: Mapping[str, int]  # by name of the axis
    agreed: tuple[Agreement, ...] = ()
    message: str = ""  # why the file did not run
    steps: Mapping[str, int] = field(default_factory=dict)  # by name: sizes must differ by a multiple of this

    @property
    def sqnr(self) -> float:
        """SQNR of the worst output in dB."""
        return worst_sqnr(self.agreed)

    @property
    def sizes_text(self) -> str:
        """The sizes as text, for example "height 256, width 192"."""
        return ", ".join(f"{name} {size}" for name, size in self.sizes.items())

    def __str__(self) -> str:
        steps = [f"{name} in steps of {step}" for name, step in self.steps.items() if step > 1]
        sizes = f"{self.sizes_text} ({', '.join(steps)})" if steps else self.sizes_text
        return f"{sizes}: {self.message or '; '.join(map(str, self.agreed))}"


@dataclass(frozen=True)
class Benchmark:
    """Speed of a quantized file relative to the fastest float file, measured in one process with interleaved runs."""

    ratio: float  # float time / quantized time: above 1 the quantized file is faster
    seconds: tuple[float, float]  # medians of both files in the calmer half of the rounds: float, quantized
    threads: int
    repeats: int
    runtime: str
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # of the inputs
    spread: tuple[float, float] = (0.0, 0.0)  # interquartile range / median, of the two files
    baseline: str = OWN_BASELINE  # which float file it is compared with: "the plain export" is by torch.onnx.export
    baseline_file: str = ""  # name of that file; "" if it was temporary
    fixed_seconds: float | None = None  # median of the quantized file with fixed sizes, if that was measured
    float_seconds: Mapping[str, float] = field(default_factory=dict)  # medians of all float files that were timed

    @property
    def ratio_to_fastest(self) -> float:
        """Float time / quantized time, of the fastest float file: with a fixed baseline another one may be faster."""
        return min(self.float_seconds.values(), default=self.seconds[0]) / self.seconds[1]

    @property
    def is_same(self) -> bool:
        """Whether both files are equally fast: the difference is within the quartiles of the measurement, or 3 %."""
        tolerance = max(SAME_SPEED_TOLERANCE, sum(self.spread) / 2)
        return abs(self.ratio - 1) <= tolerance

    def reaches(self, speed: float) -> bool:
        """Whether the quantized file has at least this speed, relative to the float file.

        A file that is as fast as the float file within the noise reaches 1, even if the measured ratio is 0.99.
        """
        return self.ratio >= speed or (self.is_same and speed <= 1)

    @property
    def is_slower(self) -> bool:
        """Whether the quantized file is slower by more than measurement noise."""
        return self.ratio < 1 and not self.is_same

    @property
    def free_sizes_text(self) -> str:
        """The time of the quantized file with and without free sizes, if they differ by more than noise; else ""."""
        seconds = self.seconds[1]
        min_cost = max(MIN_FREE_SIZES_COST, self.spread[1] / 2)
        if self.fixed_seconds is None or seconds <= (1 + min_cost) * self.fixed_seconds:
            return ""
        return (
            f"{format_time(seconds)}, but {format_time(self.fixed_seconds)} with all sizes fixed to those of the "
            "example (fixed_sizes=True, --fixed-sizes)"
        )

    @property
    def batch(self) -> int | None:
        """Size of the first axis of the first input that has axes."""
        return next((shape[0] for shape in self.shapes.values() if shape), None)

    @property
    def per_second(self) -> tuple[float, float]:
        """Samples per second in the float file and in the quantized file."""
        float_seconds, quantized_seconds = self.seconds
        return (self.batch or 1) / float_seconds, (self.batch or 1) / quantized_seconds

    @property
    def baseline_text(self) -> str:
        """The float file that the speed is compared with."""
        if not self.baseline_file:
            return f"{self.baseline}, the fastest float file"
        is_original = Path(self.baseline_file).stem == "original"  # a copy of the .onnx file that was given
        exporter = ", which torch.onnx.export writes" if self.baseline == PLAIN_BASELINE and not is_original else ""
        if is_original:
            return f"the given file, {self.baseline_file}"
        return f"the fastest float file, {self.baseline_file}{exporter}"

    @property
    def conditions(self) -> str:
        """Conditions of the measurement: runtime, threads, input shapes, number of runs, spread."""
        threads = format_plural(self.threads, "thread")
        inputs = [f"{name} {'x'.join(map(str, shape)) or 'scalar'}" for name, shape in self.shapes.items()]
        spread = f", quartiles within {max(self.spread):.0%} of them" if any(self.spread) else ""
        runs = f"medians of {self.repeats} interleaved runs{spread}"
        return ", ".join((self.runtime, threads, *inputs, runs))

    def __str__(self) -> str:
        return f"{format_ratio(self.ratio)} of {self.baseline}'s speed ({self.conditions})"


@dataclass(frozen=True)
class Verification:
    """Result of running a file in its runtime: status, agreement with the simulation, precision, size and speed."""

    path: str
    runtime: str
    status: Status
    message: str = ""  # why the status is not OK
    optimized: tuple[Agreement, ...] = ()  # per output, with the runtime's optimisations on
    unoptimized: tuple[Agreement, ...] = ()  # the same with the optimisations off
    executed: Mapping[str, int] = field(default_factory=dict)  # number of nodes of the compiled graph by operator
    low_precision: int = 0  # number of layers with weights that run in low precision
    fallbacks: tuple[str, ...] = ()  # layers with weights that run in float, with the reason
    departure: Departure | None = None  # the first tensor that differs from the simulation
    size: int = 0  # bytes
    float_size: int | None = None  # bytes of the float file
    latency: Benchmark | None = None  # speed compared with the float file
    bound: float = BOUND_DB  # smallest SQNR in dB that counts as agreement
    exact: tuple[Agreement, ...] = ()  # per output, with a setting that stops the runtime from rounding floats
    rounded: str = ""  # what the runtime rounds by itself, and the setting that stops it
    made_for: Mapping[str, str] = field(default_factory=dict)  # target and its options, from the file's metadata
    warning: str = ""
    times: tuple[LayerTime, ...] = ()  # per layer, the slowest first, next to the float file
    is_run: bool = True  # False: the runtime does not exist on this machine; the file was read back and evaluated
    differences: tuple[str, ...] = ()  # codes, scales and tables of the file that differ from the model
    resized: Resized | None = None  # agreement at other sizes, if the model has named free axes
    choices: tuple[Choice, ...] = ()  # choices of the runtime that the simulation took over for the comparison
    machine_cpu: str = ""  # instruction set of the machine that ran the file: "vnni", "avx2" or "arm"

    @property
    def origin(self) -> str:
        """The target and options of the file, and the kind of CPU that verified it if that is another one."""
        options = ", ".join(f"{key} {value}" for key, value in self.made_for.items())
        is_other_cpu = self.machine_cpu and self.made_for.get("cpu", self.machine_cpu) != self.machine_cpu
        return f"{options}; verified on another CPU, {self.machine_cpu}" if is_other_cpu else options

    @property
    def sqnr(self) -> float:
        """SQNR of the worst output in dB, with the runtime's optimisations on."""
        return worst_sqnr(self.optimized)

    @property
    def choices_text(self) -> str:
        """Where the runtime chose differently among equal scores; "" if it did not."""
        if not self.choices:
            return ""
        return (
            f"{self.runtime} chose differently from the simulation among equal or nearly equal scores at "
            f"{', '.join(map(str, self.choices))}; the outputs are compared with a simulation with the same choice"
        )

    @property
    def exact_sqnr(self) -> float:
        """SQNR of the worst output in dB, with a setting that stops the runtime from rounding floats."""
        return worst_sqnr(self.exact or self.optimized)

    @property
    def holds(self) -> bool:
        """Whether the file agrees with the simulation.

        It must agree at the example's sizes and at other sizes, and must not agree much better with the runtime's
        optimisations off.
        """
        sqnr = self.exact_sqnr
        is_changed_by_optimization = worst_sqnr(self.unoptimized) > sqnr + SUSPICIOUS_DB and sqnr < SURE_DB
        agrees = sqnr >= self.bound and self.sqnr >= self.rounded_bound
        agrees_at_other_sizes = self.resized is None or self.resized.sqnr >= self.rounded_bound
        return (
            self.status == Status.OK
            and agrees
            and not is_changed_by_optimization
            and not self.differences
            and agrees_at_other_sizes
        )

    @property
    def rounded_bound(self) -> float:
        """Smallest SQNR in dB for a run with the runtime's default settings: lower if these round floats."""
        return min(self.bound, ROUNDED_DB) if self.exact else self.bound

    @property
    def is_refuted(self) -> bool:
        """Whether the file is wrong. False if it agrees, and if it could not be verified on this machine."""
        return not self.holds and (self.status != Status.NOT_VERIFIED or bool(self.differences))

    def check(self) -> None:
        """Raise VerificationError if the file does not run, or does not agree with the simulation.

        A file that could not be verified on this machine is not an error: `status` and `message` say why.
        """
        if self.is_refuted:
            raise VerificationError(self._describe_failure())

    def _describe_failure(self) -> str:
        where = f"{self.path} in {self.runtime}"
        if self.status not in (Status.OK, Status.NOT_VERIFIED):
            return f"{where}: {self.status.value}: {self.message}"
        if self.differences:
            differences = "; ".join(self.differences[:MAX_NAMED_DIFFERENCES])
            extra = len(self.differences) - MAX_NAMED_DIFFERENCES
            more = f"; and {extra} more" if extra > 0 else ""
            return f"{self.path} differs from the model: {differences}{more}"
        if self.resized is not None and self.resized.sqnr < self.rounded_bound <= self.sqnr:
            agreement = f"it agrees with the simulation to {format_decibels(self.resized.sqnr)} dB"
            return (
                f"{where} fails at other sizes of dynamic_axes: at {self.resized.sizes_text} "
                f"{self.resized.message or agreement}; at the sizes of the example it agrees to "
                f"{format_decibels(self.sqnr)} dB (at least {self.rounded_bound:.0f} dB required). Remove the failing "
                "axes from dynamic_axes"
            )
        details = ""
        unoptimized_sqnr = worst_sqnr(self.unoptimized)
        if unoptimized_sqnr > self.exact_sqnr + SUSPICIOUS_DB:
            details += (
                f"; with the runtime's optimisations off to {format_decibels(unoptimized_sqnr)} dB "
                f"(at most {SUSPICIOUS_DB:.0f} dB better allowed)"
            )
        if self.departure is not None:
            details += f"; first at {self.departure.where}: {self.departure.cause}. {self.departure.way_out}"
        if self.exact:
            details += f"; with exact floats to {format_decibels(self.exact_sqnr)} dB: {self.rounded}"
        return (
            f"{where} agrees with the simulation to {format_decibels(self.sqnr)} dB "
            f"(at least {self.bound:.0f} dB required){details}"
        )

    def table(self) -> Table:
        """Return the rows as a rich table."""
        table = Table(title=f"{Path(self.path).name} in {self.runtime}: {self.status.value}", show_header=False)
        table.add_column(overflow="fold")
        table.add_column(overflow="fold")
        for name, value in self.rows():
            table.add_row(name, value)
        return table

    def rows(self) -> list[tuple[str, str]]:
        """Return what a person wants to see, as (label, text)."""
        rows = [("message", self.message)] if self.message else []
        rows += [("warning", self.warning)] if self.warning else []
        rows += [("made for", self.origin)] if self.made_for else []
        rows += [("not as the model", difference) for difference in self.differences]
        rows += [("agreement", str(agreement)) for agreement in self.optimized]
        rows += [("equal scores", self.choices_text)] if self.choices else []
        rows += [("at other sizes", str(self.resized))] if self.resized else []
        rows += [("with exact floats", str(agreement)) for agreement in self.exact]
        rows += [("rounded by default", self.rounded)] if self.exact else []
        if not self.holds:  # says whether an optimised kernel is the cause
            rows += [("optimisations off", str(agreement)) for agreement in self.unoptimized]
        if self.executed:
            rows.append(("in low precision", format_plural(self.low_precision, "weighted operation")))
            rows.append(("left in float", _list_fallbacks(self.fallbacks) or "none"))
        if self.departure:
            rows.append(("first departs", f"{self.departure.where}: {self.departure.cause}"))
            rows.append(("what to do", self.departure.way_out))
        if self.float_size:
            rows.append(
                ("size", f"{format_size(self.size)}, {format_share(self.size / self.float_size)} of the float file")
            )
        if self.latency:
            rows.append(("speed", str(self.latency)))
            rows.append(("compared with", self.latency.baseline_text))
            if self.latency.free_sizes_text:
                rows.append(("free sizes", self.latency.free_sizes_text))
        if slower_layers := describe_slower_layers(self.times):
            is_slower = self.latency is not None and self.latency.is_slower
            rows.append(("slower because of" if is_slower else "loses time in", slower_layers))
        return rows

    def __str__(self) -> str:
        return render_as_text(self.table())

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, with `sqnr` and `holds`, as JSON types."""
        return {**to_jsonable(self), **to_jsonable({"sqnr": self.sqnr, "holds": self.holds})}


def _list_fallbacks(fallbacks: Sequence[str]) -> str:
    """List the fallbacks, each once with its count: a recurrent layer has a node for every step."""
    counts = Counter(fallbacks)
    texts = [fallback if count == 1 else f"{fallback}, {count} times" for fallback, count in counts.items()]
    extra = len(texts) - MAX_SHOWN_FALLBACKS
    return ", ".join(texts) if extra <= 0 else f"{', '.join(texts[:MAX_SHOWN_FALLBACKS])} and {extra} more"
