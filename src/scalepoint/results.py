"""Results of analysis, allocation, tuning and a run, which a Report holds.

Plain data without torch: these classes are defined here and not next to the code that makes them, because reading a
report.json must not load torch.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import TypeAdapter
from rich import box
from rich.table import Table
from rich.text import Text

from scalepoint.errors import VerificationError
from scalepoint.support.formatting import change_of, level_of, one_line, printed
from scalepoint.support.jsonable import to_jsonable

RELATIVE_ROUNDING = 2e-7  # relative; a metric computed in float32 may differ by this much
MIN_ROWS_PER_UNKNOWN = 4  # rows per unknown: with fewer, tuning fits noise
FAILED, DEPARTS = "failed", "departs"  # values of LanguageModelResult.status


def is_within(before: float, after: float, max_drop: float) -> bool:
    """Whether a score fell by at most `max_drop`, apart from float32 rounding."""
    return before - after <= max_drop + RELATIVE_ROUNDING * abs(before)


@dataclass(frozen=True)
class Score:
    """A metric of the quantized model and of the float model.

    Attributes:
        name: "score" for the user's metric, "perplexity" for a checkpoint.
        value: Of the quantized model.
        float_value: Of the float model.
        where: Where `value` was measured: on the file in its runtime, or on the simulation.
        higher_is_better: False for perplexity and other errors.
        simulated_value: Of the simulation, if `value` is from the runtime and both were measured.
    """

    name: str
    value: float
    float_value: float
    where: Literal["simulation", "runtime"] = "simulation"
    higher_is_better: bool = True
    simulated_value: float | None = None

    @property
    def change(self) -> float:
        return self.value - self.float_value

    @property
    def drop(self) -> float:
        """How much worse the value is than the float model's; negative if it is better."""
        return -self.change if self.higher_is_better else self.change

    @property
    def change_text(self) -> str:
        """The signed change; says so if lower is better."""
        return change_of(self.change) if self.higher_is_better else f"{change_of(self.change)}, lower is better"

    def is_within(self, max_drop: float) -> bool:
        """Whether the value is at most `max_drop` worse than the float model's."""
        sign = 1 if self.higher_is_better else -1
        return is_within(sign * self.float_value, sign * self.value, max_drop)


@dataclass(frozen=True)
class PrecisionChange:
    """More precision for one layer.

    Attributes:
        layer: Name of the layer; "" for all layers.
        to: The new precision.
        gain: Estimated noise to signal that goes from the output; None if only the metric can tell.
        cost: Added size plus added time, as shares of the float model's.
    """

    layer: str
    to: str
    gain: float | None = None
    cost: float = 0.0


@dataclass(frozen=True)
class TrialSummary:
    """One file of a search for accuracy or speed.

    Attributes:
        score: The user's metric of the file.
        precision_changes: How its config differs from that of trial `start`.
        start: Index of the trial that it starts from; None for the first.
        is_best: Whether this is the file that the run wrote.
        speed: Times the speed of the float file.
    """

    score: float | None
    precision_changes: tuple[PrecisionChange, ...] = ()
    start: int | None = None
    is_best: bool = False
    speed: float | None = None


@dataclass(frozen=True)
class LayerError:
    """The error of one layer. A field is None if it was not measured or does not apply (no weight, a fixed range).

    Attributes:
        name: Name of the layer.
        kind: Kind of operation.
        precision: How the layer is quantized.
        sqnr_db: Signal-to-noise ratio of its output against float, in dB, with all layers before it quantized.
        cosine: Cosine similarity of its output with float.
        local_sqnr_db: The same ratio with float inputs: the error that the layer adds by itself.
        weight_sqnr_db: Signal-to-noise ratio of its weight.
        saturation: Share of input values that are clipped.
        end_share: Share of input values on the first or the last code.
        used_range: Share of the codes' range that the values cover.
        macs: Multiply-accumulates of one forward.
        parameters: Number of weights.
    """

    name: str
    kind: str
    precision: str
    sqnr_db: float
    cosine: float | None = None
    local_sqnr_db: float | None = None
    weight_sqnr_db: float | None = None
    saturation: float | None = None
    end_share: float | None = None
    used_range: float | None = None
    macs: int | None = None
    parameters: int = 0

    @property
    def badness(self) -> float:
        """Sort key, larger is worse: the layer's own error if it was measured; NaN is worst."""
        value = self.sqnr_db if self.local_sqnr_db is None else self.local_sqnr_db
        return math.inf if math.isnan(value) else -value


@dataclass(frozen=True)
class TensorHistogram:
    """Histogram of one tensor.

    Attributes:
        name: Name of the layer.
        role: "weight" or the input.
        stub: Name of the quantizer.
        edges: Edges of the bins; `counts[i]` values lie in [edges[i], edges[i + 1]).
        counts: Values per bin.
        low, high: Range that the codes cover; None if every channel or block has its own.
    """

    name: str
    role: str
    stub: str
    edges: tuple[float, ...]
    counts: tuple[int, ...]
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        if len(self.edges) != len(self.counts) + 1:
            raise ValueError(f"{len(self.counts)} counts need {len(self.counts) + 1} edges, not {len(self.edges)}")

    @property
    def code_range(self) -> tuple[float, float]:
        """Low and high; NaN if there is no fixed range."""
        return math.nan if self.low is None else self.low, math.nan if self.high is None else self.high

    @property
    def kind(self) -> str:
        return "weight" if self.role == "weight" else "activation"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**vars(self), "edges": list(self.edges), "counts": list(self.counts)}


@dataclass(frozen=True)
class LayerPrecision:
    """The precision of one layer.

    Attributes:
        name: Path of the layer.
        kind: Its operation.
        weights: Number of weights.
        chosen: Its precision.
        errors: Precision -> noise to signal that it is expected to put on the output.
        refused: Precision -> why the target does not run it.
    """

    name: str
    kind: str
    weights: int
    chosen: str
    errors: Mapping[str, float]
    refused: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class FrontPoint:
    """The least error for a cost, and the number of layers in each precision."""

    cost: float
    error: float
    counts: Mapping[str, int]


@dataclass(frozen=True)
class PrecisionAllocation:
    """A precision for every layer.

    Attributes:
        unit: Unit of `limit`, `reached` and all costs. "size": share of the float file. "bits": per weight, on average.
            "speed": times the float model's, by MACs. "cost": share of size plus share of time.
        reached: Cost of the whole.
        error: Expected noise to signal at the output.
        layers: One row per layer.
        front: Error against cost.
        uniform: Precision -> cost and error if all layers have it.
        limit: The budget; None for max_drop.
    """

    unit: str
    reached: float
    error: float
    layers: tuple[LayerPrecision, ...]
    front: tuple[FrontPoint, ...]
    uniform: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    limit: float | None = None

    @property
    def counts(self) -> dict[str, int]:
        """Number of layers per precision, the most frequent first."""
        counts = Counter(layer.chosen for layer in self.layers)
        return dict(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))


@dataclass(frozen=True)
class TunedLayer:
    """One tuned layer. Errors are the squared error of its output over the output's energy.

    Attributes:
        name: Path of the layer.
        kind: Its operation.
        rows: Rows of data that were fitted.
        unknowns: Unknowns per output channel.
        before, after: Error on held-out rows with the nearest codes, and with the chosen ones.
        fitted_before, fitted_after: The same on the rows that were fitted; of some outputs if there are many.
        moved: Share of the codes that are not the nearest.
        step: The step whose solution was best on held-out rows; "" if none was better than the nearest codes.
        notes: What the steps reported.
        seconds: Time.
    """

    name: str
    kind: str
    rows: int
    unknowns: int
    before: float
    after: float
    fitted_before: float
    fitted_after: float
    moved: float
    step: str
    notes: str
    seconds: float

    @property
    def gain_db(self) -> float:
        """Improvement of the error on held-out rows; 0 if it is not a finite number."""
        if not (0 < self.after < math.inf and 0 < self.before < math.inf):
            return 0.0
        return 10 * math.log10(self.before / self.after)


@dataclass(frozen=True)
class TunedPiece:
    """Layers that are compared at the end of their block, by its squared error over its energy on held-out samples.

    Attributes:
        layers: Paths of the layers.
        before, after: Error with the nearest codes, and at the end.
        how: Which of the layers' solutions are used.
        notes: What the steps reported.
        seconds: Time.
    """

    layers: tuple[str, ...]
    before: float
    after: float
    how: str
    notes: str
    seconds: float


@dataclass(frozen=True)
class TuneReport:
    """All quantized layers in graph order.

    Attributes:
        layers: The tuned layers.
        left: Layers that were not tuned -> the reason.
        batches, samples: Data that was used.
        seconds: Time.
        pieces: Blocks whose layers were compared together.
    """

    layers: tuple[TunedLayer, ...]
    left: dict[str, str]
    batches: int
    samples: int
    seconds: float
    pieces: tuple[TunedPiece, ...] = ()

    @property
    def moved_layers(self) -> int:
        """Number of layers with codes other than the nearest."""
        return sum(layer.moved > 0 for layer in self.layers)

    @property
    def advice(self) -> str:
        """Whether more data would help, and how much; "" when there is enough."""
        few = [each for each in self.layers if each.rows < MIN_ROWS_PER_UNKNOWN * each.unknowns]
        if not few:
            return ""
        worst = max(few, key=lambda each: each.unknowns / max(each.rows, 1))
        times = math.ceil(MIN_ROWS_PER_UNKNOWN * worst.unknowns / max(worst.rows, 1))
        return (
            f"{len(few)} of {len(self.layers)} layers saw fewer than {MIN_ROWS_PER_UNKNOWN} rows an unknown (fewest: "
            f"{one_line(worst.name)}, {worst.rows} rows for {worst.unknowns}): {times} times the {self.samples} "
            "samples would help more than any other step"
        )

    def table(self) -> Table:
        title = f"{len(self.layers)} layers tuned, {len(self.left)} left, {self.samples} samples, {self.seconds:.1f} s"
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("layer", overflow="fold")
        for column in ("dB before", "after", "moved", "rows", "n"):
            table.add_column(column, justify="right", no_wrap=True)
        table.add_column("how", overflow="fold")
        for each in self.layers:
            how = f"{each.step or 'nearest'}; {each.notes}"
            cells = (
                level_of(each.before),
                level_of(each.after),
                f"{each.moved:.0%}",
                str(each.rows),
                str(each.unknowns),
            )
            table.add_row(Text(one_line(each.name)), *cells, Text(one_line(how)))
        for name, why in self.left.items():
            table.add_row(Text(one_line(name)), "", "", "", "", "", Text(one_line(f"left: {why}")))
        if self.advice:
            table.caption = Text(self.advice)
        return table

    def __str__(self) -> str:
        return printed(self.table())

    def to_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = to_jsonable(self)
        return found

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "TuneReport | None":
        """As to_dict gave it; None of nothing."""
        return TypeAdapter(cls).validate_python(saved) if saved else None


@dataclass(frozen=True)
class LanguageModelResult:
    """Sizes of a deployed language model, and what the runtime did with it. None: not measured.

    Attributes:
        bits: Bits per weight, with scales and float tensors counted.
        size: Bytes of what was written.
        float_size: Bytes of the checkpoint.
        float_dtype: Data type of most of the checkpoint.
        tokens: Number of tokens that perplexity was measured on.
        logits_db: Logits of the simulation against the float model's.
        runtime: Name of the runtime.
        status: "ok", "failed", "departs" or "unavailable"; "" if the file was not run.
        message: Why the status is not "ok".
        agreement_db: Logits of the runtime against the simulation's.
        prefill: Tokens per second while the runtime reads the prompt.
        decode: Tokens per second while it generates.
        prompt: Text that the model continued.
        continuation: How it continued.
        float_runtime: Where the float checkpoint ran; "" if it did not.
        float_prefill, float_decode, float_continuation: The same of the float checkpoint.
    """

    bits: float
    size: int
    float_size: int
    float_dtype: str = ""
    tokens: int = 0
    logits_db: float | None = None
    runtime: str = ""
    status: str = ""
    message: str = ""
    agreement_db: float | None = None
    prefill: float | None = None
    decode: float | None = None
    prompt: str = ""
    continuation: str = ""
    float_runtime: str = ""
    float_prefill: float | None = None
    float_decode: float | None = None
    float_continuation: str = ""

    @property
    def smaller(self) -> float:
        return self.float_size / max(self.size, 1)

    def check(self, path: str) -> None:
        """Raise VerificationError if the runtime failed on the file or computed something else."""
        if self.status == FAILED:
            raise VerificationError(self.message)  # it names the file and the runtime
        if self.status == DEPARTS:
            raise VerificationError(
                f"{path} in {self.runtime}: {self.status}: {self.message}; allow_departure=True accepts it"
            )
