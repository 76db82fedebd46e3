"""Tunes the pieces of a model one after the other: solves the layers of a piece, and keeps what makes the piece better.

    each layer:  its moments -> steps, compared on held-out rows -> apply the best            (solve.py)
    the piece:   compare its exits with those of the nearest codes -> run the steps that work on pieces

The words are explained in tune.py. Errors of a piece are measured in two ways: `stored_error` of the stored values of
the exits, and `error_if_rerun` of the values that the present codes would give, which stores nothing; `store_rerun`
then stores them.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import fx, nn

from scalepoint import distributed
from scalepoint.numerics import QParams
from scalepoint.quantize.merge_ranks import merge_ranges, set_batch_recording
from scalepoint.quantize.quantizers import QuantStub
from scalepoint.results import TunedLayer, TunedPiece
from scalepoint.tuning.checkpoint import PieceResult
from scalepoint.tuning.collect import RowCollector
from scalepoint.tuning.config import TuneConfig
from scalepoint.tuning.piece_evaluation import PieceEvaluator
from scalepoint.tuning.pieces import Piece
from scalepoint.tuning.reconstruct import PieceTask, has_static_scale
from scalepoint.tuning.solve import LayerSolver
from scalepoint.tuning.state import States, copy_states, restore_states
from scalepoint.tuning.steps import INTERCEPT, PieceStep, StubStep, find_step
from scalepoint.tuning.walk import LayerUse, StreamWalk

# With 8 bits, a proposed range replaces the calibrated one only if the error of the piece falls below this share of the
# present error: rare large values may carry the signal, and the held-out samples may have too few of them to show it.
MAX_ERROR_RATIO = 0.9


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


@dataclass
class PieceTuner:
    """Tunes the pieces of one walk, in the order of the graph.

    Attributes:
        walk: The two streams.
        collector: Collects rows of the layers.
        config: The settings.
        names: Name of every node.
        observes_ranges: Whether activation quantizers may have no range yet. Then it is observed in the float stream.
        uses: The quantized layer of every node that has one.
        passed: Nodes that the walk has passed.
    """

    walk: StreamWalk
    collector: RowCollector
    config: TuneConfig
    names: dict[str, str]
    observes_ranges: bool
    uses: dict[fx.Node, LayerUse] = field(init=False)
    passed: set[fx.Node] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.uses = {use.node: use for use in self.collector.uses}
        self.evaluator = PieceEvaluator(self.walk, self.collector)
        self.solver = LayerSolver(self.collector, self.config.steps, self.config.ridge)
        steps = [find_step(name) for name in self.config.steps if name != INTERCEPT]
        self.stub_steps = [step for step in steps if isinstance(step, StubStep)]
        piece_steps = [step for step in steps if isinstance(step, PieceStep)]
        self.piece_steps = [step for step in piece_steps if step.over == "piece"]
        self.model_steps = [step for step in piece_steps if step.over == "model"]

    def tune_piece(self, piece: Piece, modules: Mapping[str, nn.Module]) -> PieceResult:
        """Solve the layers of a piece one by one, compare the piece with the nearest codes, and run the piece steps.

        After each of these three, the stored values of the exits match the states of the modules.

        Args:
            piece: The piece. The walk passes it.
            modules: The modules of the piece that may change, by path.
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
                row = self.solver.solve(self.uses[node], self.name_of(node))
                if row is not None:
                    tuned.append((self.uses[node], row))
            self._advance(node)
        rows = tuple(row for _, row in tuned)
        summary = None
        if tuned:
            variant = self._choose_variant(piece, modules, nearest)
            if variant.name != "as solved":
                rows = tuple(_reverted_row(row, variant.name) for row in rows)
            uses = [use for use, _ in tuned]
            notes = self._try_ranges(piece, modules, proposals, variant.error)
            notes += self._run_piece_steps(piece, modules, uses, self.piece_steps)
            summary = TunedPiece(
                layers=tuple(row.name for row in rows),
                before=variant.nearest_error,
                after=self.evaluator.stored_error(piece),
                how=variant.name,
                notes="; ".join(notes),
                seconds=time.perf_counter() - start,
            )
        self.walk.unpin(entries, self.passed)
        return PieceResult(piece=summary, rows=rows, skipped=self.solver.skipped)

    def tune_whole_model(self, piece: Piece, modules: Mapping[str, nn.Module], uses: list[LayerUse]) -> PieceResult:
        """Run the steps that work on the whole model, after all its pieces.

        Args:
            piece: The whole graph as one piece.
            modules: The modules that may change, by path.
            uses: The layers that were tuned.
        """
        start, before = time.perf_counter(), self.evaluator.stored_error(piece)
        notes = self._run_piece_steps(piece, modules, uses, self.model_steps)
        summary = TunedPiece(
            layers=("the whole model",),
            before=before,
            after=self.evaluator.stored_error(piece),
            how="as solved",
            notes="; ".join(notes),
            seconds=time.perf_counter() - start,
        )
        return PieceResult(piece=summary, rows=(), skipped={})

    def pass_piece(self, piece: Piece) -> None:
        """Walk past a finished piece. Rows that later layers share with its layers are collected again."""
        inside = set(piece.nodes)
        for node in piece.nodes:
            if node in self.uses and self.collector.is_needed_later(self.uses[node], inside):
                self.solver.collect_only(self.uses[node])
            self._advance(node)

    def name_of(self, node: fx.Node) -> str:
        return self.names.get(node.name, str(node.target))

    def _advance(self, node: fx.Node) -> None:
        self.walk.advance(node)
        self.passed.add(node)

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
        self, piece: Piece, modules: Mapping[str, nn.Module], uses: list[LayerUse], steps: Sequence[PieceStep]
    ) -> list[str]:
        """Run steps over a piece. A step undoes itself if the piece does not become better (see reconstruct.py).

        Returns what was done, for the report.
        """
        inside = set(piece.nodes)
        # A weight that another piece uses too is not changed: the error of this piece does not include those uses.
        own_uses = [use for use in uses if all(node in inside for node in self.collector.uses_of(use.layer))]
        notes = []
        for step in steps:
            task = PieceTask(self.walk, self.evaluator, piece, own_uses, modules, self.config.iterations)
            step.run(task)
            self.walk.store_rerun(piece)
            notes.append(f"{step.name} {task.notes.get('gain', '')}".strip())
        return notes

    # -- ranges of activation quantizers ------------------------------------------------------------------------------

    def _observe_range(self, node: fx.Node) -> dict[str, nn.Module]:
        """Observe the range of an activation quantizer in the float stream, if it has none.

        Returns the quantizer by its path; {} if no range was observed.
        """
        stub = self.walk.get_stub(node)
        if not self.observes_ranges or stub is None or not needs_range(stub):
            return {}
        set_batch_recording([stub], enabled=True)
        with distributed.phase("observing"):
            for stub_node in self.walk.stub_nodes[stub]:
                source = stub_node.all_input_nodes[0]
                if not self.walk.has_value(source):
                    continue
                for index in range(self.walk.batch_count):
                    value = self.walk.get_value(source, index, noisy=False)
                    self.collector.check_finite(self.name_of(node), [value])
                    stub.quantizer(value)
        if distributed.world_size() > 1:
            merge_ranges([stub])
        set_batch_recording([stub], enabled=False)
        stub.compute_parameters()
        return {str(node.target): stub}

    def _propose_ranges(self, node: fx.Node) -> list[RangeProposal]:
        """Run the steps for activation quantizers. Below 8 bits their range is applied at once, otherwise returned."""
        stub = self.walk.get_stub(node)
        if stub is None or len(self.walk.stub_nodes[stub]) > 1 or not has_static_scale(stub):
            return []
        proposals: list[RangeProposal] = []
        for step in self.stub_steps:
            qparams = step.run(self.walk, node, stub)
            if qparams is not None and stub.spec.n_bits < 8:
                stub.set_parameters(qparams)
            elif qparams is not None:
                proposals.append(RangeProposal(self.name_of(node), stub, qparams))
        return proposals

    def _try_ranges(
        self, piece: Piece, modules: Mapping[str, nn.Module], proposals: list[RangeProposal], error: float
    ) -> list[str]:
        """Apply the proposed ranges that make the piece clearly better than its present error. Returns their names."""
        notes = []
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
        return notes


def needs_range(stub: QuantStub) -> bool:
    """Whether an activation quantizer has no range.

    Dynamic quantizers are fixed, except those of two-level formats (NVFP4): the scale of the whole tensor is stored.
    """
    return not stub.is_fixed and not stub.calculator.is_initialized


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
