"""Chooses codes, scales and bias shifts of the quantized weights, so that the model computes what the float model does.

    each layer:  walk both streams to it -> moments of its rows -> steps, compared on held-out rows -> apply the best
    each piece:  compare its exits with those of the nearest codes -> run the steps that work on pieces

The float parameters are never written. Words of this module:

stream        all values of the float model ("exact"), or of the quantized model with the codes chosen so far ("noisy")
walk, pass    run a node on all batches in both streams, and store its outputs; every node is passed once
piece         a layer or a block; its entries are the nodes outside that it reads, its exits the nodes that others read
nearest       codes rounded to nearest: those of a piece before it is tuned
error         of the exits, on held-out samples: of their stored values (`stored_error`), or of the values that the
              present codes would give (`error_if_rerun`, stores nothing; `store_rerun` then stores them)
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import BeforeValidator, Field
from torch import fx, nn

from scalepoint import distributed
from scalepoint.errors import CalibrationError, ConfigError
from scalepoint.numerics import QParams
from scalepoint.quantize.batches import Data
from scalepoint.quantize.calibrate import OnNan, freeze
from scalepoint.quantize.fingerprint import fingerprint_model
from scalepoint.quantize.merge_ranks import merge_ranges, set_batch_recording
from scalepoint.quantize.operations import EMBEDDING
from scalepoint.quantize.quantized_layers import QuantizedLayer
from scalepoint.quantize.quantizers import QuantStub
from scalepoint.quantize.record import record_of, update_record
from scalepoint.results import TunedLayer, TunedPiece, TuneReport
from scalepoint.support.output_folder import check_path
from scalepoint.support.progress import phase
from scalepoint.support.torch_state import serialized
from scalepoint.support.validation_errors import Config
from scalepoint.tuning.checkpoint import Checkpoint, PieceResult, StoredPiece, compute_fingerprint
from scalepoint.tuning.collect import LayerUse, RowCollector
from scalepoint.tuning.piece_evaluation import PieceEvaluator
from scalepoint.tuning.pieces import Piece, Unit, cut_into_pieces
from scalepoint.tuning.reconstruct import PieceTask, has_static_scale
from scalepoint.tuning.solve import LayerSolver
from scalepoint.tuning.state import States, copy_states, restore_states
from scalepoint.tuning.steps import INTERCEPT, PieceStep, StubStep, find_step, step_names
from scalepoint.tuning.walk import StreamWalk
from scalepoint.tuning.weight_provider import WeightProvider, load_weights, release_weights

PROVIDED_WEIGHTS_NAN_HINT = (
    "Its weights are finite, so values overflow before it: check the checkpoint and its config.json by running it in "
    "transformers"
)
# With 8 bits, a proposed range replaces the calibrated one only if the error of the piece falls below this share of the
# present error: rare large values may carry the signal, and the held-out samples may have too few of them to show it.
MAX_ERROR_RATIO = 0.9
WHOLE_MODEL = "all"  # name of the whole model in the checkpoint, where pieces are numbered
_BYTES_PER_UNIT = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


class RangeProposal(NamedTuple):
    """Other parameters for an activation quantizer. `name` is the name of its node."""

    name: str
    stub: QuantStub
    qparams: QParams


class ChosenVariant(NamedTuple):
    """Which codes and bias shifts of a solved piece are applied.

    Attributes:
        name: "as solved", "without bias shifts" or "nearest".
        error: Error of the piece with this variant.
        nearest_error: Error of the piece with the nearest codes.
    """

    name: str
    error: float
    nearest_error: float


def _parse_bytes(value: Any) -> Any:
    """Convert a size with a unit, such as "2GB", to bytes; anything else is left to pydantic."""
    text = str(value).strip().upper().replace(" ", "")
    for unit, size in _BYTES_PER_UNIT.items():
        if text.endswith(unit):
            count = float(text.removesuffix(unit)) * size
            return int(count) if math.isfinite(count) else value
    return value


class TuneConfig(Config):
    """Settings of `tune`.

    Attributes:
        steps: Names of the steps, in order.
        unit: The size of a piece, which is compared and reconstructed as one: a layer or a block.
        rows: Rows of data used per layer.
        ridge: Regularization of the target, as a share of the mean diagonal of H, the covariance of a layer's inputs.
            "auto" compares several on held-out rows.
        holdout: Share of the samples that are only used to compare results.
        iterations: Iterations of the gradient steps.
        memory: Bytes of memory for activations between layers, or a text such as "2GB"; more goes to disk.
    """

    steps: tuple[str, ...] = (INTERCEPT, "target", "scale", "gptq", "descend")
    unit: Unit = "block"
    rows: Annotated[int, Field(ge=64)] = 16_384
    ridge: Annotated[float, Field(ge=0)] | Literal["auto"] = "auto"
    holdout: Annotated[float, Field(gt=0, lt=0.5)] = 0.1
    iterations: Annotated[int, Field(ge=1)] = 200
    memory: Annotated[int, BeforeValidator(_parse_bytes), Field(ge=1_000_000)] = 2_000_000_000

    def check(self, *, has_weight_provider: bool = False) -> None:
        """Check the names of the steps. With a weight provider there may be none: codes are rounded to nearest."""
        for name in self.steps:
            if name != INTERCEPT:
                find_step(name)
        if not self.steps and not has_weight_provider:
            raise ConfigError(f"steps=() tunes nothing: choose from {', '.join(step_names())}")


@serialized
@distributed.participating()
def tune(
    model: fx.GraphModule,
    data: Data,
    config: TuneConfig | Mapping[str, Any] | None = None,
    *,
    folder: str | Path | None = None,
    resume: bool = False,
    max_batches: int | None = None,
    on_nan: OnNan = "error",
    progress: bool | None = None,
    weight_provider: WeightProvider | None = None,
) -> TuneReport:
    """Choose better codes for the quantized weights of a calibrated model than rounding to nearest gives.

    The model is changed in place and its weights stay frozen. No layer ends worse than with rounding to nearest on
    held-out rows, and no block on held-out samples.

    Args:
        model: A calibrated model with frozen weights.
        data: As for `calibrate`.
        config: Which steps to run, and their settings.
        folder: Store every finished piece here, so that an interrupted run can be resumed.
        resume: Continue after the last finished piece in `folder`.
        max_batches: Use at most this many batches.
        on_nan: What to do with batches that contain NaN or infinity.
        progress: Show a progress bar. None shows it on a terminal only.
        weight_provider: Loads the weights of one piece at a time, for models that do not fit into memory. Ranges of
            activations are then observed during the walk, and the codes are only in `folder`.

    Returns:
        What was done to each layer.

    Example:
        >>> report = tune(model, batches, TuneConfig(steps=("intercept", "gptq")))  # doctest: +SKIP
    """
    if not isinstance(config, TuneConfig):
        config = TuneConfig(**(config or {}))
    config.check(has_weight_provider=weight_provider is not None)
    if folder is not None:
        check_path(Path(folder), "folder")
    names = record_of(model).names
    if weight_provider is None:
        freeze(model)
        if record_of(model).config.correct_bias is None:
            _remove_bias_correction(model)
    start = time.perf_counter()
    walk = StreamWalk(model, memory=config.memory, keeps_outputs=weight_provider is None)
    try:
        if config.steps or any(_needs_range(walk, nodes[0]) for nodes in walk.stub_nodes.values()):
            _check_has_data(data, config)
            walk.read_data(model, data, max_batches=max_batches, skip_nan=on_nan == "skip", progress=progress)
        inputs_fingerprint = ""
        if folder is not None:
            model_fingerprint = _fingerprint_model(model, weight_provider)
            inputs_fingerprint = compute_fingerprint(model_fingerprint, walk, config.model_dump_json())
        checkpoint = Checkpoint(None if folder is None else Path(folder), inputs_fingerprint, resume=resume)
        run = _TuningRun(model, walk, config, checkpoint, names, weight_provider)
        run.run(progress)
    finally:
        walk.activation_store.close()
    update_record(model, tuned_threads=torch.get_num_threads())
    return TuneReport(
        layers=tuple(run.rows),
        left=run.skipped,
        batches=len(walk.batch_owners),  # batches of all ranks; walk.batch_count has those of this rank
        samples=walk.sample_count,
        seconds=time.perf_counter() - start,
        pieces=tuple(run.pieces),
    )


def _remove_bias_correction(model: fx.GraphModule) -> None:
    """Drop the bias shifts of calibration: tuning compares with the nearest codes alone, and chooses its own shifts."""
    for layer in model.modules():
        if isinstance(layer, QuantizedLayer) and layer.has_bias_correction:
            layer.set_bias_shift(None)


def _needs_range(walk: StreamWalk, node: fx.Node) -> bool:
    """Whether a node is an activation quantizer without a range.

    Dynamic quantizers are fixed, except those of two-level formats (NVFP4): the scale of the whole tensor is stored.
    """
    stub = walk.get_stub(node)
    return stub is not None and not stub.is_fixed and not stub.calculator.is_initialized


def _check_has_data(data: Data, config: TuneConfig) -> None:
    """Raise CalibrationError if ranges must be observed and the data is empty. (Without steps it may be empty.)"""
    if not config.steps and isinstance(data, Sequence) and not data:
        raise CalibrationError(
            "no calibration data: it is needed for the ranges of activations with stored scales. Pass data=, or choose "
            "one scale per token, which needs none"
        )


@dataclass
class _TuningRun:
    """One run of `tune`.

    Attributes:
        model: The calibrated model.
        walk: Its two streams.
        config: The settings.
        checkpoint: Stores the finished pieces.
        names: Name of every node.
        weight_provider: Loads weights piece by piece; None if they are in memory.
        rows, pieces: Rows of the report.
        skipped: Layers that were not tuned -> the reason.
        passed: Nodes that the walk has passed.
    """

    model: fx.GraphModule
    walk: StreamWalk
    config: TuneConfig
    checkpoint: Checkpoint
    names: dict[str, str]
    weight_provider: WeightProvider | None = None
    rows: list[TunedLayer] = field(default_factory=list)
    pieces: list[TunedPiece] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    passed: set[fx.Node] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.collector = RowCollector(self.walk, self.config.rows, self.config.holdout, self.names)
        if self.weight_provider is not None:
            self.collector.nan_hint = PROVIDED_WEIGHTS_NAN_HINT
        self.evaluator = PieceEvaluator(self.walk, self.collector)
        self.solver = LayerSolver(self.collector, self.config.steps, self.config.ridge)
        steps = [find_step(name) for name in self.config.steps if name != INTERCEPT]
        self.piece_steps = [step for step in steps if isinstance(step, PieceStep)]
        self.stub_steps = [step for step in steps if isinstance(step, StubStep)]
        self.uses = {use.node: use for use in self.collector.uses}

    def _name(self, node: fx.Node) -> str:
        return self.names.get(node.name, str(node.target))

    def run(self, progress: bool | None) -> None:
        """Tune all pieces; then the whole model at once, if a step asks for that."""
        model_steps = [step for step in self.piece_steps if step.over == "model"]
        if model_steps:
            self.walk.pin(self.walk.placeholders)  # read again at the end
        pieces = self._cut(self.config.unit)
        # The last piece often has no layer. Then it runs only if a step needs the outputs of the whole model. With a
        # weight provider it is always finished: it may have embedding tables and quantizers, which must be stored.
        last_has_work = self.weight_provider is not None or bool(self.uses.keys() & set(pieces[-1].nodes))
        with phase("tuning", total=len(self.uses), unit="layers", show=progress) as running:
            for index, piece in enumerate(pieces if last_has_work else pieces[:-1]):
                self._finish_piece(f"{index:04}", piece)
                running.advance(len(self.uses.keys() & set(piece.nodes)))
        if model_steps:
            if not last_has_work:
                self._pass_piece(pieces[-1])
            with phase("tuning the whole model", show=progress):
                self._finish_model(model_steps)

    def _cut(self, unit: Unit) -> list[Piece]:
        return cut_into_pieces(self.walk.graph, self.walk.same_nodes, self.uses.__contains__, unit)

    def _finish_piece(self, name: str, piece: Piece) -> None:
        """Tune one piece, or load its result from the checkpoint. Either way the walk passes it."""
        modules = self._load_modules(piece)
        stored = self.checkpoint.load_piece(name)
        if stored is None:
            stored = self._store_result(name, modules, self._tune_piece(piece, modules))
        else:
            restore_states(modules, stored.states)
            self._pass_piece(piece)
        self._add_result(piece, modules, stored)

    def _finish_model(self, steps: list[PieceStep]) -> None:
        """Run steps over the whole model, whose pieces are finished, or load their result from the checkpoint."""
        (whole_model,) = self._cut("model")
        modules = self._load_modules(whole_model)
        stored = self.checkpoint.load_piece(WHOLE_MODEL)
        if stored is None:
            result = self._tune_whole_model(whole_model, modules, steps)
            stored = self._store_result(WHOLE_MODEL, modules, result)
        else:
            restore_states(modules, stored.states)
        self._add_result(whole_model, modules, stored)

    def _load_modules(self, piece: Piece) -> dict[str, nn.Module]:
        """Return the modules of a piece that may change, by path, with the weights of a provider loaded."""
        modules = self._changeable_modules(piece)
        if self.weight_provider is not None:
            load_weights(self.walk, piece, self.weight_provider)
            for layer in (layer for node in piece.nodes for layer in self.walk.get_quantized_layers(node)):
                layer.freeze()
        return modules

    def _store_result(self, name: str, modules: Mapping[str, nn.Module], result: PieceResult) -> StoredPiece:
        """Store the result and the states of the modules in the checkpoint. Returns both."""
        if self.weight_provider is not None:
            _choose_nearest(modules)
        states = copy_states(modules)
        self.checkpoint.store_piece(name, states, result)
        return StoredPiece(states, result)

    def _add_result(self, piece: Piece, modules: Mapping[str, nn.Module], stored: StoredPiece) -> None:
        """Set the states in the user's model, or release the weights of a provider; and add the rows of the report."""
        if self.weight_provider is None:
            # The walk works on a copy of the model, so the user's model gets the result here.
            restore_states({path: self.model.get_submodule(path) for path in modules}, stored.states)
        else:
            release_weights(self.walk, piece, self.weight_provider)
        result = stored.result
        self.rows += result.rows
        self.skipped |= result.skipped
        self.pieces += [result.piece] if result.piece is not None else []

    def _observe_range(self, node: fx.Node) -> dict[str, nn.Module]:
        """Observe the range of an activation quantizer in the float stream, if it has none.

        Returns the quantizer by its path; {} if no range was observed.
        """
        stub = self.walk.get_stub(node)
        if self.weight_provider is None or stub is None or not _needs_range(self.walk, node):
            return {}
        set_batch_recording([stub], enabled=True)
        with distributed.phase("observing"):
            for stub_node in self.walk.stub_nodes[id(stub)]:
                source = stub_node.all_input_nodes[0]
                if not self.walk.has_value(source):
                    continue
                for index in range(self.walk.batch_count):
                    value = self.walk.get_value(source, index, noisy=False)
                    self.collector.check_finite(self._name(node), [value])
                    stub.quantizer(value)
        if distributed.world_size() > 1:
            merge_ranges([stub])
        set_batch_recording([stub], enabled=False)
        stub.compute_parameters()
        return {str(node.target): stub}

    def _pass_piece(self, piece: Piece) -> None:
        """Walk past a finished piece. Rows that later layers share with its layers are collected again."""
        inside = set(piece.nodes)
        for node in piece.nodes:
            if node in self.uses and self.collector.is_needed_later(self.uses[node], inside):
                self.solver.collect_only(self.uses[node])
            self._advance(node)

    def _advance(self, node: fx.Node) -> None:
        self.walk.advance(node)
        self.passed.add(node)

    def _tune_piece(self, piece: Piece, modules: Mapping[str, nn.Module]) -> PieceResult:
        """Solve the layers of a piece one by one, compare the piece with the nearest codes, and run the piece steps.

        After each of these three, the stored values of the exits match the states of the modules.
        """
        start = time.perf_counter()
        nearest = copy_states(modules)
        entries = [node for node in piece.entries if node not in self.walk.pinned]
        self.walk.pin(entries)  # the piece is run again below
        tuned: list[tuple[LayerUse, TunedLayer]] = []
        proposals: list[RangeProposal] = []
        self.solver.skipped = {}
        for node in piece.nodes:
            nearest |= copy_states(self._observe_range(node))  # the nearest codes are compared with the same ranges
            proposals += self._propose_ranges(node)
            if node in self.uses and self.config.steps:
                row = self.solver.solve(self.uses[node], self._name(node))
                if row is not None:
                    tuned.append((self.uses[node], row))
            self._advance(node)
        rows = tuple(row for _, row in tuned)
        result = PieceResult(piece=None, rows=rows, skipped=self.solver.skipped)
        if tuned:
            variant = self._choose_variant(piece, modules, nearest)
            if variant.name != "as solved":
                rows = tuple(_reverted_row(row, variant.name) for row in rows)
            steps = [step for step in self.piece_steps if step.over == "piece"]
            uses = [use for use, _ in tuned]
            notes = self._run_piece_steps(piece, modules, uses, steps, proposals, error=variant.error)
            summary = TunedPiece(
                layers=tuple(row.name for row in rows),
                before=variant.nearest_error,
                after=self.evaluator.stored_error(piece),
                how=variant.name,
                notes=notes,
                seconds=time.perf_counter() - start,
            )
            result = PieceResult(piece=summary, rows=rows, skipped=self.solver.skipped)
        self.walk.unpin(entries, self.passed)
        return result

    def _tune_whole_model(self, piece: Piece, modules: Mapping[str, nn.Module], steps: list[PieceStep]) -> PieceResult:
        """Run the steps over the whole model, after all its pieces."""
        start, before = time.perf_counter(), self.evaluator.stored_error(piece)
        names = {row.name for row in self.rows}
        uses = [use for use in self.collector.uses if self._name(use.node) in names]
        notes = self._run_piece_steps(piece, modules, uses, steps, proposals=[], error=before)
        after = self.evaluator.stored_error(piece)
        seconds = time.perf_counter() - start
        summary = TunedPiece(
            layers=("the whole model",), before=before, after=after, how="as solved", notes=notes, seconds=seconds
        )
        return PieceResult(piece=summary, rows=(), skipped={})

    def _changeable_modules(self, piece: Piece) -> dict[str, nn.Module]:
        """Return the quantized layers and activation quantizers of a piece, by path.

        Embedding tables are not tuned. With a weight provider they are included, because their codes must be stored.
        """
        modules: dict[str, nn.Module] = {}
        for node in piece.nodes:
            stub = self.walk.get_stub(node)
            if stub is not None:
                modules[str(node.target)] = stub
            for layer in self.walk.get_quantized_layers(node):
                if layer.kind != EMBEDDING or self.weight_provider is not None:
                    modules |= {self.walk.names[id(sharing)]: sharing for sharing in layer.sharing_layers}
        return modules

    def _propose_ranges(self, node: fx.Node) -> list[RangeProposal]:
        """Run the steps for activation quantizers. Below 8 bits their range is applied at once, otherwise returned."""
        stub = self.walk.get_stub(node)
        if stub is None or len(self.walk.stub_nodes[id(stub)]) > 1 or not has_static_scale(stub):
            return []
        proposals: list[RangeProposal] = []
        for step in self.stub_steps:
            qparams = step.run(self.walk, node, stub)
            if qparams is not None and stub.spec.n_bits < 8:
                stub.set_parameters(qparams)
            elif qparams is not None:
                proposals.append(RangeProposal(self._name(node), stub, qparams))
        return proposals

    def _choose_variant(self, piece: Piece, modules: Mapping[str, nn.Module], nearest: States) -> ChosenVariant:
        """Compare the solved layers with the nearest codes at the exits of the piece, and apply the better ones."""
        solved = copy_states(modules)
        solved_error = self.evaluator.stored_error(piece)
        restore_states(modules, nearest)
        nearest_error = self.evaluator.error_if_rerun(piece)
        if solved_error <= nearest_error:
            restore_states(modules, solved)
            return ChosenVariant("as solved", solved_error, nearest_error)
        restore_states(modules, _without_bias_shifts(solved))
        variant = ChosenVariant("without bias shifts", self.evaluator.error_if_rerun(piece), nearest_error)
        if variant.error >= nearest_error:
            restore_states(modules, nearest)
            variant = ChosenVariant("nearest", nearest_error, nearest_error)
        self.walk.store_rerun(piece)  # the stored values were those of the solved layers
        return variant

    def _run_piece_steps(
        self,
        piece: Piece,
        modules: Mapping[str, nn.Module],
        uses: list[LayerUse],
        steps: list[PieceStep],
        proposals: list[RangeProposal],
        error: float,
    ) -> str:
        """Try the proposed ranges, then run the steps over the piece.

        A range is undone here unless it is clearly better. A step undoes itself if it is not better (see reconstruct).

        Args:
            piece: The piece.
            modules: The modules that may change, by path.
            uses: The tuned layers of the piece.
            steps: The steps.
            proposals: Ranges of activation quantizers.
            error: The present error of the piece.

        Returns:
            What was done, for the report.
        """
        notes: list[str] = []
        inside = set(piece.nodes)
        # A weight that another piece uses too is not changed: the error of this piece does not include those uses.
        own_uses = [use for use in uses if all(node in inside for node in self.collector.uses_of(use.layer))]
        for name, stub, qparams in proposals:
            current = copy_states(modules)
            stub.set_parameters(qparams)
            new_error = self.evaluator.error_if_rerun(piece)
            if new_error < MAX_ERROR_RATIO * error:
                error = new_error
                notes.append(f"range of {name}")
                self.walk.store_rerun(piece)
            else:
                restore_states(modules, current)
        for step in steps:
            task = PieceTask(self.walk, self.evaluator, piece, own_uses, modules, self.config.iterations)
            step.run(task)
            self.walk.store_rerun(piece)
            notes.append(f"{step.name} {task.notes.get('gain', '')}".strip())
        return "; ".join(notes)


def _fingerprint_model(model: fx.GraphModule, weight_provider: WeightProvider | None) -> object:
    """Return a fingerprint of the model and its quantizers. Only rank 0, which reads the folder, computes it."""
    if not distributed.is_main():
        return None
    if weight_provider is None:
        return fingerprint_model(model)
    metadata = record_of(model)
    return [
        weight_provider.fingerprint,
        metadata.config.to_dict(),
        None if metadata.target is None else metadata.target.file_metadata,
    ]


def _choose_nearest(modules: Mapping[str, nn.Module]) -> None:
    """Set the nearest codes in layers without codes: they cannot be computed after the weights are released."""
    for layer in modules.values():
        if isinstance(layer, QuantizedLayer) and layer.weight_quant.chosen is None:
            layer.set_codes(layer.get_deployed().codes)


def _without_bias_shifts(states: States) -> States:
    unshifted: States = {}
    for path, state in states.items():
        unshifted[path] = {key: value for key, value in state.items() if key != "bias_shift"}
    return unshifted


def _reverted_row(row: TunedLayer, variant: str) -> TunedLayer:
    """Return the row of a layer whose piece was better without its bias shift, or with the nearest codes."""
    notes = f"{row.notes}; block: {variant}".strip("; ")
    if variant != "nearest":
        return replace(row, notes=notes)
    return replace(row, after=row.before, fitted_after=row.fitted_before, moved=0.0, step="", notes=notes)
