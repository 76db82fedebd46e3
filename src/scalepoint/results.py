"""Results of analysis, allocation, tuning and a run: the parts of a Report.

Plain data without torch. The classes are here and not next to the code that creates them, because reading a
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
from scalepoint.support.formatting import format_change, format_noise_level, render_as_text, to_one_line
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
        value: The metric of the quantized model.
        float_value: The metric of the float model.
        where: Where `value` was measured: on the file in its runtime, or on the simulation.
        higher_is_better: False for perplexity and other errors.
        simulated_value: The metric of the simulation, if `value` is from the runtime and both were measured.
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
        """Difference to the float model in the worse direction; negative if the quantized model is better."""
        return -self.change if self.higher_is_better else self.change

    @property
    def change_text(self) -> str:
        """The signed change; says so if lower is better."""
        return format_change(self.change) if self.higher_is_better else f"{format_change(self.change)}, lower is better"

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
        gain: Estimated noise-to-signal ratio that disappears from the output; None if it cannot be estimated.
        cost: Added size plus added time, as shares of the float model's size and time.
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
        speed: Speed relative to the float file.
    """

    score: float | None
    precision_changes: tuple[PrecisionChange, ...] = ()
    start: int | None = None
    is_best: bool = False
    speed: float | None = None


@dataclass(frozen=True)
class LayerError:
    """The error of one layer. A field is None if it was not measured or does not apply, such as a missing weight.

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
            raise ValueError(f"{len(self.counts)} counts need {len(self.counts) + 1} edges, got {len(self.edges)}")

    @property
    def code_range(self) -> tuple[float, float]:
        """`low` and `high`; NaN where there is no fixed range."""
        return math.nan if self.low is None else self.low, math.nan if self.high is None else self.high

    @property
    def kind(self) -> str:
        return "weight" if self.role == "weight" else "activation"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**vars(self), "edges": list(self.edges), "counts": list(self.counts)}


@dataclass(frozen=True)
class LayerPrecision:
    """The precision of one layer.

    Attributes:
        name: Path of the layer.
        kind: Its operation.
        weights: Number of weights.
        chosen: Its precision.
        errors: Precision -> expected noise-to-signal ratio that this layer alone causes at the output.
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
    """One point of the Pareto front: the smallest error for a cost, and the number of layers in each precision."""

    cost: float
    error: float
    counts: Mapping[str, int]


@dataclass(frozen=True)
class PrecisionAllocation:
    """A precision for every layer.

    Attributes:
        unit: Unit of `limit`, `reached` and all costs. "size": share of the float file. "bits": per weight, on average.
            "speed": relative to the float model, by MACs. "cost": share of size plus share of time.
        reached: Cost of the whole model.
        error: Expected noise-to-signal ratio at the output.
        layers: One row per layer.
        front: Pareto front of error against cost.
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
    """One tuned layer. An error is the squared error of its output divided by the output's energy.

    Attributes:
        name: Path of the layer.
        kind: Its operation.
        rows: Rows of data that were fitted.
        unknowns: Unknowns per output channel.
        before, after: Error on held-out rows with the nearest codes, and with the tuned codes.
        fitted_before, fitted_after: The same on the rows that were fitted; with many outputs, of a sample of them.
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
        """Improvement of the error on held-out rows, in dB; 0 if an error is zero or not finite."""
        if not (0 < self.after < math.inf and 0 < self.before < math.inf):
            return 0.0
        return 10 * math.log10(self.before / self.after)


@dataclass(frozen=True)
class TunedPiece:
    """Layers that are judged together, at the output of their block.

    An error is the squared error of the block's output divided by its energy, on held-out samples.

    Attributes:
        layers: Paths of the layers.
        before, after: Error with the nearest codes, and with the tuned codes.
        how: Which solutions of the layers are used.
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
    """The result of tune.

    Attributes:
        layers: The tuned layers, in graph order.
        left: Path of each layer that was not tuned -> the reason.
        batches, samples: Amount of data that was used.
        seconds: Time.
        pieces: Blocks whose layers were judged together.
    """

    layers: tuple[TunedLayer, ...]
    left: dict[str, str]
    batches: int
    samples: int
    seconds: float
    pieces: tuple[TunedPiece, ...] = ()

    @property
    def moved_layers(self) -> int:
        """Number of layers that have at least one code that is not the nearest."""
        return sum(layer.moved > 0 for layer in self.layers)

    @property
    def advice(self) -> str:
        """How many times more data would help; "" if there is enough."""
        short_of_data = [layer for layer in self.layers if layer.rows < MIN_ROWS_PER_UNKNOWN * layer.unknowns]
        if not short_of_data:
            return ""
        worst = max(short_of_data, key=lambda layer: layer.unknowns / max(layer.rows, 1))
        factor = math.ceil(MIN_ROWS_PER_UNKNOWN * worst.unknowns / max(worst.rows, 1))
        fewest = f"{to_one_line(worst.name)}, {worst.rows} rows for {worst.unknowns} unknowns"
        return (
            f"{len(short_of_data)} of {len(self.layers)} layers have fewer than {MIN_ROWS_PER_UNKNOWN} rows of data "
            f"per unknown (fewest: {fewest}): {factor} times the {self.samples} "
            "samples would help more than any other step"
        )

    def table(self) -> Table:
        """Return a rich table with one line per tuned layer."""
        title = (
            f"{len(self.layers)} layers tuned, {len(self.left)} not tuned, {self.samples} samples, {self.seconds:.1f} s"
        )
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("layer", overflow="fold")
        for column in ("dB before", "after", "moved", "rows", "unknowns"):
            table.add_column(column, justify="right", no_wrap=True)
        table.add_column("best step", overflow="fold")
        for layer in self.layers:
            numbers = (
                format_noise_level(layer.before),
                format_noise_level(layer.after),
                f"{layer.moved:.0%}",
                str(layer.rows),
                str(layer.unknowns),
            )
            step = f"{layer.step or 'nearest'}; {layer.notes}"
            table.add_row(Text(to_one_line(layer.name)), *numbers, Text(to_one_line(step)))
        for name, reason in self.left.items():
            table.add_row(Text(to_one_line(name)), "", "", "", "", "", Text(to_one_line(f"not tuned: {reason}")))
        if self.advice:
            table.caption = Text(self.advice)
        return table

    def __str__(self) -> str:
        return render_as_text(self.table())

    def to_dict(self) -> dict[str, Any]:
        """Return the report as values that JSON can store."""
        values: dict[str, Any] = to_jsonable(self)
        return values

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "TuneReport | None":
        """Read what `to_dict` returned; None for an empty mapping."""
        return TypeAdapter(cls).validate_python(saved) if saved else None


@dataclass(frozen=True)
class LanguageModelResult:
    """Sizes of a deployed language model, and its results in the runtime. None: not measured.

    Attributes:
        bits: Bits per weight, including scales and float tensors.
        size: Bytes of the file or folder that was written.
        float_size: Bytes of the checkpoint.
        float_dtype: Data type of most of the checkpoint.
        tokens: Number of tokens that perplexity was measured on.
        logits_db: Agreement of the simulation's logits with the float model's, in dB.
        runtime: Name of the runtime.
        status: "ok", "failed", "departs" or "unavailable"; "" if the file was not run.
        message: Why the status is not "ok".
        agreement_db: Agreement of the runtime's logits with the simulation's, in dB.
        prefill: Tokens per second while the runtime reads the prompt.
        decode: Tokens per second while it generates.
        prompt: Text that the model was asked to continue.
        continuation: The generated text.
        float_runtime: Where the float checkpoint ran; "" if it did not.
        float_prefill, float_decode, float_continuation: The same for the float checkpoint.
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
