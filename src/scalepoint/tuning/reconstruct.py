"""Blocks by gradients: variables of the quantized layers of a piece, so that it ends where the float piece ends.

    loss = sum over exits |piece(x~) - exact|^2 / |exact|^2 + penalty      x~ with a share of its elements exact (QDrop)
           (of an exit that a norm reads: the mean over its rows)

One loop for all: what the variables are, and how they move, is the step's business. A few times on the way they are
hardened and judged on held-out samples; the best of them stay.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from scalepoint import distributed
from scalepoint.quantize.quantizers import QuantStub
from scalepoint.tuning.collect import LayerUse
from scalepoint.tuning.piece_evaluation import PieceEvaluator, select_samples
from scalepoint.tuning.pieces import Piece
from scalepoint.tuning.problem import GroupedLayer, Solution, expand_scale
from scalepoint.tuning.row_weights import feeds_norm, row_weights
from scalepoint.tuning.rows import get_geometry, hash_to_uniform
from scalepoint.tuning.sample_subsets import SampleSubset, choose_subset
from scalepoint.tuning.state import copy_states, restore_states
from scalepoint.tuning.walk import StreamWalk

MAX_INITIAL_SHIFT = 0.25  # of a step
EVALUATION_COUNT = 4  # how often hardened variables are judged


@dataclass
class PieceTask:
    """A piece, and all that a step may use of it; `uses` are the layers whose codes may move."""

    walk: StreamWalk
    judge: PieceEvaluator
    piece: Piece
    uses: Sequence[LayerUse]
    modules: Mapping[str, torch.nn.Module]  # what may change, by name
    iterations: int
    drop: float = 0.5
    notes: dict[str, Any] = field(default_factory=dict)

    def layers(self) -> list[GroupedLayer]:
        """One for each weight."""
        found: dict[int, GroupedLayer] = {}
        for use in self.uses:
            geometry = get_geometry(use.layer)
            if geometry is not None:
                found.setdefault(id(use.layer.weight_quant), GroupedLayer(use.layer, geometry))
        return list(found.values())

    def stubs(self) -> list[QuantStub]:
        """The activation quantizers with one scale that stays, and that stand nowhere else."""
        found = [
            module for module in self.modules.values() if isinstance(module, QuantStub) and has_static_scale(module)
        ]
        inside = set(self.piece.nodes)
        return [stub for stub in found if inside.issuperset(self.walk.stub_nodes[id(stub)])]


def has_static_scale(stub: QuantStub) -> bool:
    """Whether its scale is one number that holds for every tensor."""
    if not stub.enabled or stub.quantizer.is_disabled() or stub.fixed_calibration is not None:
        return False
    is_whole = not stub.quantizer.grid.format.is_float and stub.spec.qformulation == "zp"
    return is_whole and stub.scale.numel() == 1 and not stub.calculator.always_called


class TrainableVariables(ABC):
    """What moves."""

    @abstractmethod
    def parameters(self) -> list[Tensor]: ...

    @abstractmethod
    def installed(self) -> Any:
        """A context in which the modules compute with the variables."""

    @abstractmethod
    def move(self, gradients: Sequence[Tensor | None], progress: float) -> None: ...

    @abstractmethod
    def harden(self) -> None:
        """Make them what the layers deploy."""

    def penalty(self, progress: float) -> Tensor | float:
        return 0.0


class AdamVariables(TrainableVariables):
    """Variables that an optimizer moves."""

    optimizer: torch.optim.Optimizer

    def move(self, gradients: Sequence[Tensor | None], progress: float) -> None:
        for value, gradient in zip(self.parameters(), gradients, strict=True):
            value.grad = gradient
        self.optimizer.step()


def reconstruct(work: PieceTask, variables: TrainableVariables) -> None:
    """Move the variables; the modules end with the best hardened ones, or as they were."""
    best, least = copy_states(work.modules), work.judge.now(work.piece)
    before, few = least, choose_subset(work.walk, work.judge, work.piece)
    stops = {round((look + 1) * work.iterations / EVALUATION_COUNT) for look in range(EVALUATION_COUNT)}
    for step in range(work.iterations):
        progress = step / work.iterations
        gradients = _compute_gradients(work, few, variables, step, progress)
        with torch.no_grad():
            variables.move(gradients, progress)
        if step + 1 in stops:
            start = copy_states(work.modules)
            variables.harden()
            error = work.judge.tried(work.piece)
            if error < least:
                best, least = copy_states(work.modules), error
            restore_states(work.modules, start)
    restore_states(work.modules, best)
    work.notes["gain"] = f"{before:.3g} -> {least:.3g}"


def _compute_gradients(
    work: PieceTask, few: SampleSubset, variables: TrainableVariables, step: int, progress: float
) -> list[Tensor | None]:
    """Gradients of one batch, or of some of its samples: computed on the rank that has it, and sent to the others."""
    owner, index = work.walk.batch_owners[_draw_batch(step, len(work.walk.batch_owners))]
    found: list[Tensor | None] = [None] * len(variables.parameters())
    with distributed.phase("gradients") as step_phase:
        if owner == distributed.rank():
            with torch.enable_grad(), variables.installed():
                loss = _compute_loss(work, few, index, step) + variables.penalty(progress)
                found = list(torch.autograd.grad(loss, variables.parameters(), allow_unused=True))
            step_phase.value = [each is not None for each in found]
    if distributed.world_size() == 1:
        return found
    for at, is_used in enumerate(step_phase.values[owner]):
        if is_used and owner != distributed.rank():
            found[at] = torch.zeros_like(variables.parameters()[at])
    distributed.all_reduce_sum([each for each in found if each is not None], "gradients")
    return found


def _draw_batch(step: int, count: int) -> int:
    """A batch, the same on every machine."""
    return int(hash_to_uniform(torch.tensor([step]), salt=7)[0] * count)


def _compute_loss(work: PieceTask, few: SampleSubset, index: int, step: int) -> Tensor:
    walk, chosen = work.walk, few.of(index, step)
    entries = few.taken(walk.get_entries(work.piece, index, noisy=True), index, chosen)
    if work.drop:
        exact_entries = few.taken(walk.get_entries(work.piece, index, noisy=False), index, chosen)
        entries = _mix_in_exact(entries, exact_entries, work.drop, step)
    found = walk.run_piece(work.piece, entries)
    loss = torch.zeros((), dtype=torch.float32)
    for node, value in zip(work.piece.exits, found, strict=True):
        if node in walk.same_nodes or not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        exact = walk.get_value(node, index, noisy=False)
        if chosen is None:
            own, exact = (work.judge.part(each, index, held=False) for each in (value, exact))
        else:
            own, exact = value, select_samples(exact, walk.samples_per_batch[index], chosen)
        if own.shape != exact.shape:  # rows that the data picks
            continue
        apart = own - exact
        if feeds_norm(walk, node):
            loss = loss + (apart.square() * row_weights(exact)).mean()
        else:
            loss = loss + apart.square().sum() / exact.square().sum().clamp(min=1e-30)
    return loss


def _mix_in_exact(
    noisy: Mapping[fx.Node, Any], exact: Mapping[fx.Node, Any], share: float, step: int
) -> dict[fx.Node, Any]:
    """Inputs of which a share of the elements is exact: the solution must not lean on the noise."""
    generator = torch.Generator().manual_seed(step)
    found = dict(noisy)
    for node, value in noisy.items():
        is_pair = isinstance(value, Tensor) and value.is_floating_point() and exact[node] is not value
        if is_pair and exact[node].shape == value.shape:
            found[node] = torch.where(
                torch.rand(value.shape, generator=generator, dtype=torch.float32) < share, exact[node], value
            )
    return found


@dataclass
class TrainableWeight:
    """A layer's weight in variables: codes and scales as (groups, outputs, n), the shift of its bias."""

    shape: GroupedLayer
    start: Solution = field(init=False)
    shift: Tensor = field(init=False)

    def __post_init__(self) -> None:
        layer, weight = self.shape.layer, self.shape.weight()
        found = self.shape.start(weight)
        self.start = Solution(*(each.to(torch.float32) for each in (found.target, found.codes, found.scale)))
        own = layer.bias_shift
        self.shift = (
            torch.zeros(layer.out_channels, dtype=torch.float32) if own is None else own.clone()
        ).requires_grad_()

    @property
    def place(self) -> Tensor:
        """The chosen code, moved a little to where the float weight lies: what is undecided moves first."""
        wanted = self.start.target / self.start.steps
        return self.start.codes + (wanted - self.start.codes).clamp(-MAX_INITIAL_SHIFT, MAX_INITIAL_SHIFT)

    @contextmanager
    def computing(self, codes: Callable[[], Tensor], scale: Callable[[], Tensor]) -> Iterator[None]:
        """The layer multiplies by these codes times these scales; its bias has the shift."""
        layer = self.shape.layer
        quant, kept = layer.weight_quant, layer.bias_shift
        like = layer.to_output_first(layer.weight)

        def values(weight: Tensor) -> Tensor:
            found = codes() * expand_scale(scale(), self.start.codes.shape[-1])
            return self.shape.geometry.as_stored(found, like).to(weight.dtype)

        quant.forward = values  # type: ignore[method-assign]  # taken back below
        layer._buffers["bias_shift"] = self.shift
        try:
            yield
        finally:
            del quant.forward
            layer._buffers["bias_shift"] = kept

    def harden(self, codes: Tensor, scale: Tensor) -> None:
        limits = self.shape.codes()
        whole = limits.nearest(codes.detach().to(torch.float64))
        self.shape.apply(Solution(self.start.target, whole, scale.detach().to(torch.float64)))
        self.shape.layer.set_bias_shift(self.shift)


def enter_all(contexts: Sequence[Any]) -> ExitStack:
    """All of them at once."""
    stack = ExitStack()
    for each in contexts:
        stack.enter_context(each)
    return stack
