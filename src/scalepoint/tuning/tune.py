"""tune: codes, scales and bias shifts of the quantized weights, so that the quantized net computes what the float does.

    walk both streams to a layer -> moments of its rows -> steps, judged on held-out rows -> choose -> walk on
    where a piece ends: judged against the nearest codes by what the rest of the net gets; then the steps over pieces

One walk over the graph, node after node: no prefix is run twice. The float parameters are never written.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field
from torch import fx, nn

from scalepoint import distributed
from scalepoint.errors import CalibrationError, ConfigError
from scalepoint.numerics import QParams
from scalepoint.quantize.calibrate import OnNan, freeze
from scalepoint.quantize.feeding import Data
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
from scalepoint.tuning.checkpoint import Checkpoint, PieceResult, compute_fingerprint
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
MAX_ERROR_RATIO = 0.9  # what the error of a piece must fall to before a range of 8 bits leaves min-max
RangeProposal = tuple[str, QuantStub, QParams]  # an activation quantizer under its name, and other parameters
_BYTES_PER_UNIT = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def _parse_bytes(value: Any) -> Any:
    """2_000_000_000, or "2GB"."""
    text = str(value).strip().upper().replace(" ", "")
    for unit, size in _BYTES_PER_UNIT.items():
        if text.endswith(unit):
            return int(float(text.removesuffix(unit)) * size)
    return value


class TuneConfig(Config):
    """Settings of `tune`.

    Attributes:
        steps: Names of the steps, in order.
        unit: What is judged and reconstructed together: a layer or a block.
        rows: Rows of data used per layer.
        ridge: Regularization of the target, as a share of the mean diagonal.
        holdout: Share of the samples that only judge the result.
        iterations: Iterations of the gradient steps.
        memory: Memory for activations between layers; more goes to disk.
    """

    steps: tuple[str, ...] = (INTERCEPT, "target", "scale", "gptq", "descend")
    unit: Unit = "block"
    rows: Annotated[int, Field(ge=64)] = 16_384
    ridge: Annotated[float, Field(ge=0)] | Literal["auto"] = "auto"
    holdout: Annotated[float, Field(gt=0, lt=0.5)] = 0.1
    iterations: Annotated[int, Field(ge=1)] = 200
    memory: Annotated[int, BeforeValidator(_parse_bytes), Field(ge=1_000_000)] = 2_000_000_000

    def check(self, *, is_lent: bool = False) -> None:
        """Of lent weights nearest codes alone are work enough."""
        for name in self.steps:
            if name != INTERCEPT:
                find_step(name)
        if not self.steps and not is_lent:
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
        folder: Keep every finished piece here, so that an interrupted run can be resumed.
        resume: Continue after the last finished piece in `folder`.
        max_batches: Use at most this many batches.
        on_nan: What to do with batches that contain NaN or infinity.
        progress: Show a progress bar. None shows it on a terminal only.
        lender: Loads the weights of one piece at a time, for models that do not fit into memory. Ranges are then
            observed on the way, and the codes are only in `folder`.

    Returns:
        What was done to each layer.
    """
    config = TuneConfig() if config is None else config if isinstance(config, TuneConfig) else TuneConfig(**config)
    config.check(is_lent=weight_provider is not None)
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
        mark = (
            ""
            if folder is None
            else compute_fingerprint(_fingerprint_model(model, weight_provider), walk, config.model_dump_json())
        )
        checkpoint = Checkpoint(None if folder is None else Path(folder), mark, resume=resume)
        run = _TuningRun(model, walk, config, checkpoint, names, weight_provider)
        run.run(progress)
    finally:
        walk.activation_store.close()
    layers, pieces = tuple(run.rows), tuple(run.pieces)
    update_record(model, tuned_threads=torch.get_num_threads())
    return TuneReport(layers, run.left, len(walk.batch_owners), walk.sample_count, time.perf_counter() - start, pieces)


def _remove_bias_correction(model: fx.GraphModule) -> None:
    """Drop the bias shifts of calibration: tuning compares with the nearest codes alone, and chooses its own shifts."""
    for layer in model.modules():
        if isinstance(layer, QuantizedLayer) and layer.has_bias_correction:
            layer.set_bias_shift(None)


def _needs_range(walk: StreamWalk, node: fx.Node) -> bool:
    """Whether the range of an activation quantizer is still to be found from data.

    Dynamic quantizers are fixed, except those of two-level formats (NVFP4): the scale of the whole tensor is stored.
    """
    stub = walk.get_stub(node)
    return stub is not None and not stub.is_fixed and not stub.calculator.is_initialized


def _check_has_data(data: Data, config: TuneConfig) -> None:
    """Of lent weights data may have been left out, where rounding is all there is to do."""
    if not config.steps and isinstance(data, Sequence) and not data:
        raise CalibrationError(
            "no calibration data: activations with stored scales have their ranges from it. Give data=, or choose a "
            "scale a token, which needs none"
        )


@dataclass
class _TuningRun:
    """One run of tune."""

    model: fx.GraphModule
    walk: StreamWalk
    config: TuneConfig
    checkpoint: Checkpoint
    names: dict[str, str]
    lender: WeightProvider | None = None
    rows: list[TunedLayer] = field(default_factory=list)
    pieces: list[TunedPiece] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    passed: set[fx.Node] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.collector = RowCollector(self.walk, self.config.rows, self.config.holdout, self.names)
        if self.lender is not None:
            self.collector.nan_hint = PROVIDED_WEIGHTS_NAN_HINT
        self.judge = PieceEvaluator(self.walk, self.collector)
        self.solver = LayerSolver(self.collector, self.config.steps, self.config.ridge)
        found = [find_step(name) for name in self.config.steps if name != INTERCEPT]
        self.piece_steps = [step for step in found if isinstance(step, PieceStep)]
        self.stub_steps = [step for step in found if isinstance(step, StubStep)]
        self.uses = {use.node: use for use in self.collector.uses}

    def _name(self, node: fx.Node) -> str:
        return self.names.get(node.name, str(node.target))

    def run(self, progress: bool | None) -> None:
        """All pieces; then the whole net at once, where a step asks for that."""
        at_end = [step for step in self.piece_steps if step.over == "model"]
        if at_end:
            self.walk.pin(self.walk.placeholders)
        pieces = cut_into_pieces(self.walk.graph, self.walk.same_nodes, self.uses.__contains__, self.config.unit)
        is_read = self.lender is not None or bool(self.uses.keys() & set(pieces[-1].nodes))
        tail = [] if is_read else [pieces.pop()]  # nothing that is tuned reads it
        with phase("tuning", total=len(self.uses), unit="layers", show=progress) as running:
            for index, piece in enumerate(pieces):
                self._finish(f"{index:04}", piece, [step for step in self.piece_steps if step.over == "piece"])
                running.advance(len(self.uses.keys() & set(piece.nodes)))
        if at_end:
            for piece in tail:
                self._pass(piece)
            with phase("tuning the whole net", show=progress):
                (whole,) = cut_into_pieces(self.walk.graph, self.walk.same_nodes, self.uses.__contains__, "model")
                self._finish("all", whole, at_end, is_solved=True)

    def _finish(self, name: str, piece: Piece, steps: list[PieceStep], *, is_solved: bool = False) -> None:
        """One piece: found in the folder, or chosen."""
        modules = self._modules(piece)
        if self.lender is not None:
            load_weights(self.walk, piece, self.lender)
            for layer in (layer for node in piece.nodes for layer in self.walk.get_quantized_layers(node)):
                layer.freeze()
        found = self.checkpoint.load_piece(name)
        if found is not None:
            states, done = found
            restore_states(modules, states)
            if not is_solved:
                self._pass(piece)
        else:
            done = self._again(piece, modules, steps) if is_solved else self._chosen(piece, modules, steps)
            if self.lender is not None:
                _choose_nearest(modules)
            states = copy_states(modules)
            self.checkpoint.store_piece(name, states, done)
        if self.lender is None:
            restore_states({place: self.model.get_submodule(place) for place in modules}, states)
        else:
            release_weights(self.walk, piece, self.lender)
        self.rows += done.rows
        self.left |= done.left
        self.pieces += [done.piece] if done.piece is not None else []

    def _observe(self, node: fx.Node) -> dict[str, nn.Module]:
        """Find the range of an activation quantizer from the float stream; the one that has its range now, by name."""
        stub = self.walk.get_stub(node)
        if self.lender is None or stub is None or not _needs_range(self.walk, node):
            return {}
        set_batch_recording([stub], True)
        with distributed.phase("observing"):
            for where in self.walk.stub_nodes[id(stub)]:
                for index in range(self.walk.batch_count if self.walk.has_value(where.all_input_nodes[0]) else 0):
                    value = self.walk.get_value(where.all_input_nodes[0], index, noisy=False)
                    self.collector.check_finite(self._name(node), [value])
                    stub.quantizer(value)
        if distributed.world_size() > 1:
            merge_ranges([stub])
        set_batch_recording([stub], False)
        stub.compute_parameters()
        return {str(node.target): stub}

    def _pass(self, piece: Piece) -> None:
        """Go past a piece that is finished; what layers after it share with it is seen again."""
        inside = set(piece.nodes)
        for node in piece.nodes:
            if node in self.uses and self.collector.is_awaited(self.uses[node], inside):
                self.solver.look(self.uses[node])
            self._advance(node)

    def _advance(self, node: fx.Node) -> None:
        self.walk.advance(node)
        self.passed.add(node)

    def _chosen(self, piece: Piece, modules: Mapping[str, nn.Module], steps: list[PieceStep]) -> PieceResult:
        start, first = time.perf_counter(), copy_states(modules)
        entries = [node for node in piece.entries if node not in self.walk.pinned]
        self.walk.pin(entries)
        rows: list[tuple[LayerUse, TunedLayer]] = []
        wider: list[RangeProposal] = []
        self.solver.left = {}
        for node in piece.nodes:
            first |= copy_states(self._observe(node))  # nearest codes are judged with ranges, too
            wider += self._ranged(node)
            if node in self.uses and self.config.steps:
                row = self.solver.solve(self.uses[node], self._name(node))
                rows += [] if row is None else [(self.uses[node], row)]
            self._advance(node)
        layers = tuple(row.name for _, row in rows)
        done = PieceResult(None, tuple(row for _, row in rows), self.solver.left)
        if rows:
            before, after, how = self._judged(piece, modules, first)
            done = (
                done if how == "as solved" else replace(done, rows=tuple(_reverted_row(row, how) for row in done.rows))
            )
            notes = self._reconstructed(piece, modules, [use for use, _ in rows], steps, wider, after)
            after = self.judge.now(piece)
            seconds = time.perf_counter() - start
            done = replace(done, piece=TunedPiece(layers, before, after, how, notes, seconds))
        self.walk.unpin(entries, self.passed)
        return done

    def _again(self, piece: Piece, modules: Mapping[str, nn.Module], steps: list[PieceStep]) -> PieceResult:
        """Steps over the whole net, after all its pieces."""
        start, before = time.perf_counter(), self.judge.now(piece)
        names = {row.name for row in self.rows}
        uses = [use for use in self.collector.uses if self._name(use.node) in names]
        notes = self._reconstructed(piece, modules, uses, steps, [], before)
        after = self.judge.now(piece)
        seconds = time.perf_counter() - start
        return PieceResult(TunedPiece(("the whole net",), before, after, "as solved", notes, seconds), (), {})

    def _modules(self, piece: Piece) -> dict[str, nn.Module]:
        """What may change in a piece, by its name in the model."""
        found: dict[str, nn.Module] = {}
        for node in piece.nodes:
            stub = self.walk.get_stub(node)
            if stub is not None:
                found[str(node.target)] = stub
            for layer in self.walk.get_quantized_layers(node):
                if layer.kind != EMBEDDING or self.lender is not None:
                    found |= {self.walk.names[id(each)]: each for each in layer.sharing_layers}
        return found

    def _ranged(self, node: fx.Node) -> list[RangeProposal]:
        """Another range for the activation quantizer of a node: taken below 8 bits, else proposed."""
        stub = self.walk.get_stub(node)
        if stub is None or len(self.walk.stub_nodes[id(stub)]) > 1 or not has_static_scale(stub):
            return []
        found: list[RangeProposal] = []
        for step in self.stub_steps:
            qparams = step.run(self.walk, node, stub)
            if qparams is not None and stub.spec.n_bits < 8:
                stub.set_parameters(qparams)
            elif qparams is not None:
                found.append((self._name(node), stub, qparams))
        return found

    def _judged(self, piece: Piece, modules: Mapping[str, nn.Module], first: States) -> tuple[float, float, str]:
        """The error with the nearest codes and with the best of: as solved, without shifts of biases, nearest."""
        chosen, after = copy_states(modules), self.judge.now(piece)
        restore_states(modules, first)
        before = self.judge.tried(piece)
        if after <= before:
            restore_states(modules, chosen)
            return before, after, "as solved"
        plain: States = {
            place: {key: value for key, value in state.items() if key != "bias_shift"}
            for place, state in chosen.items()
        }
        restore_states(modules, plain)
        without = self.judge.tried(piece)
        how = "without bias shifts" if without < before else "nearest"
        restore_states(modules, plain if how == "without bias shifts" else first)
        self.walk.rerun_piece(piece)
        return before, min(without, before), how

    def _reconstructed(
        self,
        piece: Piece,
        modules: Mapping[str, nn.Module],
        uses: list[LayerUse],
        steps: list[PieceStep],
        wider: list[RangeProposal],
        error: float,
    ) -> str:
        """The steps over a piece, each kept only when it ends better."""
        said: list[str] = []
        inside = set(piece.nodes)
        own = [use for use in uses if all(node in inside for node in self.collector.uses_of(use.layer))]
        for name, stub, qparams in wider:
            start = copy_states(modules)
            stub.set_parameters(qparams)
            tried = self.judge.tried(piece)
            if tried < MAX_ERROR_RATIO * error:
                error = tried
                said.append(f"range of {name}")
                self.walk.rerun_piece(piece)
            else:
                restore_states(modules, start)
        for step in steps:
            work = PieceTask(self.walk, self.judge, piece, own, modules, self.config.iterations)
            step.run(work)
            self.walk.rerun_piece(piece)
            said.append(f"{step.name} {work.notes.get('gain', '')}".strip())
        return "; ".join(said)


def _fingerprint_model(model: fx.GraphModule, lender: WeightProvider | None) -> object:
    """Fingerprint of the model and its quantizers. Only rank 0 computes it, as only rank 0 reads the folder."""
    if not distributed.is_main():
        return None
    if lender is None:
        return fingerprint_model(model)
    known = record_of(model)
    return [lender.mark, known.config.to_dict(), None if known.target is None else known.target.labels]


def _choose_nearest(modules: Mapping[str, nn.Module]) -> None:
    """Codes that nobody chose are the nearest: they are kept too."""
    for layer in modules.values():
        if isinstance(layer, QuantizedLayer) and layer.weight_quant.chosen is None:
            layer.set_codes(layer.get_deployed().codes)


def _reverted_row(row: TunedLayer, how: str) -> TunedLayer:
    """A row of a layer whose block was better otherwise."""
    notes = f"{row.notes}; block: {how}".strip("; ")
    if how != "nearest":
        return replace(row, notes=notes)
    return replace(row, after=row.before, fitted_after=row.fitted_before, moved=0.0, step="", notes=notes)
