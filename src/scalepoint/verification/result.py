"""What verification finds, as data."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from rich.table import Table

from scalepoint.errors import VerificationError
from scalepoint.runtimes import Status
from scalepoint.support.formatting import decibel, plural, printed, ratio, share_of, size_of
from scalepoint.support.jsonable import to_jsonable
from scalepoint.verification.agreement import Agreement, worst_sqnr
from scalepoint.verification.layer_times import LayerTime, describe_slower_layers

BOUND_DB = 20.0
SUSPICIOUS_DB = 10.0  # how much better the file may agree with the runtime's optimisations off
SURE_DB = 40.0
ROUNDED_DB = 10.0  # what floats that the runtime itself rounds may leave of the agreement
MAX_NAMED = 3  # differences
MAX_SHOWN = 12  # layers in float


@dataclass(frozen=True)
class Departure:
    """The first tensor whose codes differ from the simulation."""

    where: str
    equal: float
    largest: int
    cause: str
    way_out: str


@dataclass(frozen=True)
class Choice:
    """A top-k, sort or argmax where the runtime chose differently from the simulation, between nearly equal scores."""

    where: str  # the node
    sqnr: float  # of its scores with the simulation's
    gap: float  # the largest difference between a score that was chosen here and one that was chosen there

    def __str__(self) -> str:
        scores = f"scores at most {self.gap:.3g} apart" if self.gap else "equal scores"
        agree = "exactly" if self.sqnr == inf else f"to {decibel(self.sqnr)} dB"
        return f"{self.where} ({scores}, which agree with the simulation's {agree})"


@dataclass(frozen=True)
class Resized:
    """The file with other sizes on its free axes, against the simulation at these."""

    sizes: Mapping[str, int]  # by the names of the axes
    agreed: tuple[Agreement, ...] = ()
    message: str = ""  # why it did not run
    steps: Mapping[str, int] = field(default_factory=dict)  # in which a size may differ from the example's

    @property
    def sqnr(self) -> float:
        return worst_sqnr(self.agreed)

    @property
    def at(self) -> str:
        return ", ".join(f"{name} {size}" for name, size in self.sizes.items())

    def __str__(self) -> str:
        steps = [f"{name} in steps of {step}" for name, step in self.steps.items() if step > 1]
        told = f"{self.at} ({', '.join(steps)})" if steps else self.at
        return f"{told}: {self.message or '; '.join(map(str, self.agreed))}"


SAME_SPEED_TOLERANCE = 0.03  # two files with the same kernels differ by as much in speed
OWN_BASELINE, PLAIN_BASELINE = "the float file", "the plain export"


@dataclass(frozen=True)
class Benchmark:
    """Files in one process, in turns: the fastest float one against the quantized one.

    `baseline_file` is the name of that float file. It is "" where the file was not kept.
    """

    ratio: float  # float time / quantized time: above 1 is faster
    seconds: tuple[float, float]  # medians
    threads: int
    repeats: int
    runtime: str
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # of the inputs
    spread: tuple[float, float] = (0.0, 0.0)  # from the first to the third quartile, as a part of the median
    baseline: str = OWN_BASELINE  # which float file was the faster: ours, or that of torch.onnx.export
    baseline_file: str = ""

    @property
    def is_slower(self) -> bool:
        """By more than two runs of the same kernels would be."""
        return self.ratio < 1 - SAME_SPEED_TOLERANCE

    @property
    def batch(self) -> int | None:
        """The first axis of the first input that has one."""
        return next((shape[0] for shape in self.shapes.values() if shape), None)

    @property
    def per_second(self) -> tuple[float, float]:
        """Samples, by the one and by the other."""
        first, second = self.seconds
        return (self.batch or 1) / first, (self.batch or 1) / second

    @property
    def against(self) -> str:
        """Which float file the speed is compared with."""
        if not self.baseline_file:
            return f"{self.baseline}, the fastest float file"
        how = ", which torch.onnx.export writes" if self.baseline == PLAIN_BASELINE else ""
        return f"the fastest float file, {self.baseline_file}{how}"

    @property
    def how(self) -> str:
        """The circumstances, without which the numbers say nothing."""
        threads = plural(self.threads, "thread")
        inputs = [f"{name} {'x'.join(map(str, shape)) or 'scalar'}" for name, shape in self.shapes.items()]
        spread = f", quartiles within {max(self.spread):.0%} of them" if any(self.spread) else ""
        runs = f"medians of {self.repeats} interleaved runs{spread}"
        return ", ".join((self.runtime, threads, *inputs, runs))

    def __str__(self) -> str:
        return f"{ratio(self.ratio)} of {self.baseline}'s speed ({self.how})"


@dataclass(frozen=True)
class Verification:
    """What the runtime did with a file: status, agreement with the simulation, size and speed."""

    path: str
    runtime: str
    status: Status
    message: str = ""
    optimized: tuple[Agreement, ...] = ()
    unoptimized: tuple[Agreement, ...] = ()
    executed: Mapping[str, int] = field(default_factory=dict)
    low_precision: int = 0
    fallbacks: tuple[str, ...] = ()
    departure: Departure | None = None
    size: int = 0
    float_size: int | None = None
    latency: Benchmark | None = None
    bound: float = BOUND_DB
    exact: tuple[Agreement, ...] = ()  # with floats that the runtime does not round
    rounded: str = ""  # what it rounds otherwise, and the setting that it hangs on
    made_for: Mapping[str, str] = field(default_factory=dict)  # target and its options, as the file says
    warning: str = ""
    times: tuple[LayerTime, ...] = ()  # by layer, the slowest first, beside the float file
    is_run: bool = True  # False: not in the runtime, but evaluated from the file read back
    differences: tuple[str, ...] = ()  # what the file holds that the model does not, bit by bit
    resized: Resized | None = None  # where axes are free by name
    choices: tuple[Choice, ...] = ()  # of the runtime, which the simulation took over for the comparison
    machine_cpu: str = ""  # of the machine that ran it: "vnni" or "avx2"

    @property
    def origin(self) -> str:
        """The target and options of the file, and the kind of CPU that verified it if that is another one."""
        made = ", ".join(f"{key} {each}" for key, each in self.made_for.items())
        is_elsewhere = self.machine_cpu and self.made_for.get("cpu", self.machine_cpu) != self.machine_cpu
        return f"{made}; verified on another CPU, {self.machine_cpu}" if is_elsewhere else made

    @property
    def sqnr(self) -> float:
        """The worst output, with the runtime's optimisations on."""
        return worst_sqnr(self.optimized)

    @property
    def chosen(self) -> str:
        """Where the runtime chose others among equal scores, and what the outputs were compared with; "" if nowhere."""
        if not self.choices:
            return ""
        return (
            f"{self.runtime} chose others than the simulation among equal or nearly equal scores at "
            f"{', '.join(map(str, self.choices))}; the outputs are compared with the simulation given the same choice"
        )

    @property
    def exact_sqnr(self) -> float:
        """The worst output where the runtime leaves floats float."""
        return worst_sqnr(self.exact or self.optimized)

    @property
    def holds(self) -> bool:
        """Near the simulation, also at other sizes, and not much nearer without the runtime's optimisations."""
        best = self.exact_sqnr
        is_changed = worst_sqnr(self.unoptimized) > best + SUSPICIOUS_DB and best < SURE_DB
        is_equal = not self.differences and (self.resized is None or self.resized.sqnr >= self.rounded_bound)
        is_near = best >= self.bound and self.sqnr >= self.rounded_bound
        return self.status == Status.OK and is_near and not is_changed and is_equal

    @property
    def rounded_bound(self) -> float:
        """What is asked of the file as the runtime runs it: less where it rounds floats by itself, and the file without
        that is as near as asked."""
        return min(self.bound, ROUNDED_DB) if self.exact else self.bound

    @property
    def is_refuted(self) -> bool:
        """Whether something is wrong: False where the file agrees, and where it could not be verified here."""
        return not self.holds and (self.status != Status.NOT_VERIFIED or bool(self.differences))

    def check(self) -> None:
        """Raise VerificationError when the file does not run as the simulation says.

        A file that could not be verified here is not an error: `status` and `message` say why.
        """
        if not self.is_refuted:
            return
        if self.status not in (Status.OK, Status.NOT_VERIFIED):
            raise VerificationError(f"{self.path} in {self.runtime}: {self.status.value}: {self.message}")
        if self.differences:
            named = "; ".join(self.differences[:MAX_NAMED])
            more = f"; and {len(self.differences) - MAX_NAMED} more" if len(self.differences) > MAX_NAMED else ""
            raise VerificationError(f"{self.path} does not hold what the model does: {named}{more}")
        if self.resized is not None and self.resized.sqnr < self.rounded_bound <= self.sqnr:
            said = self.resized.message or f"it agrees with the simulation to {decibel(self.resized.sqnr)} dB"
            raise VerificationError(
                f"{self.path} in {self.runtime} is not free in the sizes of dynamic_axes: at {self.resized.at} {said}; "
                f"at the example's to {decibel(self.sqnr)} dB, and {self.rounded_bound:.0f} are asked for. Leave out "
                "the axes that it fails for"
            )
        cause = (
            ""
            if self.departure is None
            else (f"; first at {self.departure.where}: {self.departure.cause}. {self.departure.way_out}")
        )
        exact = f"; with floats left float to {decibel(self.exact_sqnr)} dB: {self.rounded}" if self.exact else ""
        raise VerificationError(
            f"{self.path} in {self.runtime} agrees with the simulation to {decibel(self.sqnr)} dB; {self.bound:.0f} "
            f"are asked for, and about as many with its optimisations on as off{cause}{exact}"
        )

    def table(self) -> Table:
        table = Table(title=f"{Path(self.path).name} in {self.runtime}: {self.status.value}", show_header=False)
        table.add_column(overflow="fold")
        table.add_column(overflow="fold")
        for name, value in self.rows():
            table.add_row(name, value)
        return table

    def rows(self) -> list[tuple[str, str]]:
        rows = [("message", self.message)] if self.message else []
        rows += [("warning", self.warning)] if self.warning else []
        rows += [("made for", self.origin)] if self.made_for else []
        rows += [("not as the model", each) for each in self.differences]
        rows += [("agreement", str(each)) for each in self.optimized]
        rows += [("chosen among equals", self.chosen)] if self.choices else []
        rows += [("at other sizes", str(self.resized))] if self.resized else []
        rows += [("with floats left float", str(each)) for each in self.exact]
        rows += [("what is rounded", self.rounded)] if self.exact else []
        rows += [("optimisations off", str(each)) for each in self.unoptimized]
        if self.executed:
            rows.append(("in low precision", plural(self.low_precision, "weighted operation")))
            rows.append(("left in float", _list_fallbacks(self.fallbacks) or "none"))
        if self.departure:
            rows.append(("first departs", f"{self.departure.where}: {self.departure.cause}"))
            rows.append(("way out", self.departure.way_out))
        if self.float_size:
            rows.append(("size", f"{size_of(self.size)}, {share_of(self.size / self.float_size)} of the float file"))
        if self.latency:
            rows.append(("speed", str(self.latency)))
            rows.append(("compared with", self.latency.against))
        if why := describe_slower_layers(self.times):
            is_slower = self.latency is not None and self.latency.is_slower
            rows.append(("slower because of" if is_slower else "loses time in", why))
        return rows

    def __str__(self) -> str:
        return printed(self.table())

    def to_dict(self) -> dict[str, Any]:
        return {**to_jsonable(self), **to_jsonable({"sqnr": self.sqnr, "holds": self.holds})}


def _list_fallbacks(fallbacks: Sequence[str]) -> str:
    """Each once, as a step of a recurrent layer is there many times; the first of many."""
    counts = Counter(fallbacks)
    shown = [each if count == 1 else f"{each}, {count} times" for each, count in counts.items()]
    more = len(shown) - MAX_SHOWN
    return ", ".join(shown) if more <= 0 else f"{', '.join(shown[:MAX_SHOWN])} and {more} more"
