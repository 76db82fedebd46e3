"""Gradient steps on a piece: variables of its quantized layers move until its exits are close to the float ones.

    loss = sum over exits |piece(x~) - exact|^2 / |exact|^2      x~: some elements exact (QDrop)
           (the mean over its rows for an exit that a norm reads)

The loop is the same for all steps. A step decides what the variables are and how they move. A few times on the way the
variables are hardened (rounded to what a file can hold) and the error of the piece is measured on held-out samples; the
modules end with the best result, or unchanged. Piece, entry and exit are explained in tune.py; x~ are its entries.
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
from scalepoint.spec.palette import is_palette
from scalepoint.tuning.grouped_layer import GroupedLayer
from scalepoint.tuning.piece_evaluation import PieceEvaluator, select_samples
from scalepoint.tuning.pieces import Piece
from scalepoint.tuning.problem import Solution, expand_scale
from scalepoint.tuning.row_weights import feeds_norm, row_weights
from scalepoint.tuning.rows import get_geometry, hash_to_uniform
from scalepoint.tuning.sample_subsets import SampleSubset, choose_subset
from scalepoint.tuning.state import copy_states, restore_states
from scalepoint.tuning.walk import LayerUse, StreamWalk

MAX_INITIAL_SHIFT = 0.25  # in steps of the grid: how far the start may be from the present codes
EVALUATION_COUNT = 4  # how often variables are hardened and measured


@dataclass
class PieceTask:
    """The argument of a step: a piece, and all that the step may use.

    Attributes:
        walk: Both streams.
        evaluator: Measures the error of the piece.
        piece: The piece.
        uses: The layers whose codes may change.
        modules: All modules that may change, by path.
        iterations: Number of gradient steps.
        drop: Share of the elements of the inputs that are replaced by exact ones.
        notes: What the step reports; `reconstruct` adds "gain".
    """

    walk: StreamWalk
    evaluator: PieceEvaluator
    piece: Piece
    uses: Sequence[LayerUse]
    modules: Mapping[str, torch.nn.Module]
    iterations: int
    drop: float = 0.5
    notes: dict[str, Any] = field(default_factory=dict)

    def layers(self) -> list[GroupedLayer]:
        """Return the layers, one for each weight."""
        layers: dict[int, GroupedLayer] = {}
        for use in self.uses:
            # Gradient steps move codes between neighbouring integers; the entries of a palette are not.
            geometry = None if is_palette(use.layer.weight_quant.spec) else get_geometry(use.layer)
            if geometry is not None:
                layers.setdefault(id(use.layer.weight_quant), GroupedLayer(use.layer, geometry))
        return list(layers.values())

    def stubs(self) -> list[QuantStub]:
        """Return the activation quantizers with one static scale that are used in this piece only."""
        modules = self.modules.values()
        stubs = [module for module in modules if isinstance(module, QuantStub) and has_static_scale(module)]
        inside = set(self.piece.nodes)
        return [stub for stub in stubs if inside.issuperset(self.walk.stub_nodes[stub])]


def has_static_scale(stub: QuantStub) -> bool:
    """Whether an activation quantizer has integer codes and one scale, stored in the file, that steps may change."""
    if not stub.enabled or stub.quantizer.is_disabled() or stub.fixed_calibration is not None:
        return False
    has_integer_codes = not stub.quantizer.grid.format.is_float and stub.spec.qformulation == "zp"
    return has_integer_codes and stub.scale.numel() == 1 and not stub.calculator.always_called


class TrainableVariables(ABC):
    """The variables of a step."""

    @abstractmethod
    def parameters(self) -> list[Tensor]:
        """Return the tensors that get gradients."""

    @abstractmethod
    def installed(self) -> Any:
        """A context in which the modules compute with the variables."""

    @abstractmethod
    def update(self, gradients: Sequence[Tensor | None], progress: float) -> None:
        """Move the parameters. `progress` grows from 0 to 1 over the iterations."""

    @abstractmethod
    def harden(self) -> None:
        """Round the variables and let the modules use the result."""


def reconstruct(task: PieceTask, variables: TrainableVariables) -> None:
    """Run the gradient steps. The modules end with the best hardened variables, or as they were."""
    first_error = task.evaluator.stored_error(task.piece)
    best_states, best_error = copy_states(task.modules), first_error
    subset = choose_subset(task.walk, task.evaluator, task.piece)
    evaluated_steps = {round((number + 1) * task.iterations / EVALUATION_COUNT) for number in range(EVALUATION_COUNT)}
    for step in range(task.iterations):
        progress = step / task.iterations
        gradients = _compute_gradients(task, subset, variables, step)
        with torch.no_grad():
            variables.update(gradients, progress)
        if step + 1 in evaluated_steps:
            unhardened = copy_states(task.modules)
            variables.harden()
            error = task.evaluator.error_if_rerun(task.piece)
            if error < best_error:
                best_states, best_error = copy_states(task.modules), error
            restore_states(task.modules, unhardened)
    restore_states(task.modules, best_states)
    task.notes["gain"] = f"{first_error:.3g} -> {best_error:.3g}"


def _compute_gradients(
    task: PieceTask, subset: SampleSubset, variables: TrainableVariables, step: int
) -> list[Tensor | None]:
    """Compute the gradients of one batch, or of some samples of it.

    The rank that has the batch computes them and sends them to the others: all ranks make the same steps on the same
    gradients, so their variables stay equal.
    """
    owner, index = task.walk.batch_owners[_draw_batch(step, len(task.walk.batch_owners))]
    gradients: list[Tensor | None] = [None] * len(variables.parameters())
    with distributed.phase("gradients") as phase:
        if owner == distributed.rank():
            with torch.enable_grad(), variables.installed():
                loss = _compute_loss(task, subset, index, step)
                gradients = list(torch.autograd.grad(loss, variables.parameters(), allow_unused=True))
            phase.value = [gradient is not None for gradient in gradients]
    if distributed.world_size() == 1:
        return gradients
    for position, is_used in enumerate(phase.values[owner]):
        if is_used and owner != distributed.rank():
            gradients[position] = torch.zeros_like(variables.parameters()[position])
    # The other ranks add zeros, so the sum is a broadcast.
    distributed.all_reduce_sum([gradient for gradient in gradients if gradient is not None], "gradients")
    return gradients


def _draw_batch(step: int, count: int) -> int:
    """Return the number of a batch, the same on every machine."""
    return int(hash_to_uniform(torch.tensor([step]), salt=7)[0] * count)


def _compute_loss(task: PieceTask, subset: SampleSubset, index: int, step: int) -> Tensor:
    """Return the loss of one batch, or of the samples that the subset draws from it."""
    walk, positions = task.walk, subset.draw(index, step)
    entries = subset.select(walk.get_entries(task.piece, index, noisy=True), index, positions)
    if task.drop:
        exact_entries = subset.select(walk.get_entries(task.piece, index, noisy=False), index, positions)
        entries = _mix_in_exact(entries, exact_entries, task.drop, step)
    values = walk.run_piece(task.piece, entries)
    loss = torch.zeros((), dtype=torch.float32)
    for node, value in zip(task.piece.exits, values, strict=True):
        if node in walk.same_nodes or not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        exact = walk.get_value(node, index, noisy=False)
        if positions is None:  # the whole batch ran: leave the held-out samples out
            noisy = task.evaluator.select_part(value, index, is_holdout=False)
            exact = task.evaluator.select_part(exact, index, is_holdout=False)
        else:
            noisy, exact = value, select_samples(exact, walk.samples_per_batch[index], positions)
        if noisy.shape != exact.shape:  # rows that the data selects may differ between the streams
            continue
        difference = noisy - exact
        if feeds_norm(walk, node):
            loss = loss + (difference.square() * row_weights(exact)).mean()
        else:
            loss = loss + difference.square().sum() / exact.square().sum().clamp(min=1e-30)
    return loss


def _mix_in_exact(
    noisy: Mapping[fx.Node, Any], exact: Mapping[fx.Node, Any], share: float, step: int
) -> dict[fx.Node, Any]:
    """Replace a share of the elements by those of the float stream, so that the solution does not fit the noise."""
    generator = torch.Generator().manual_seed(step)
    mixed = dict(noisy)
    for node, value in noisy.items():
        is_pair = isinstance(value, Tensor) and value.is_floating_point() and exact[node] is not value
        if is_pair and exact[node].shape == value.shape:
            mask = torch.rand(value.shape, generator=generator, dtype=torch.float32) < share
            mixed[node] = torch.where(mask, exact[node], value)
    return mixed


@dataclass
class TrainableWeight:
    """The weight of a layer in gradient steps.

    Attributes:
        grouped: The layer.
        start: Its present codes and scales, in float32.
        shift: The shift of its bias, a variable.
    """

    grouped: GroupedLayer
    start: Solution = field(init=False)
    shift: Tensor = field(init=False)

    def __post_init__(self) -> None:
        layer, weight = self.grouped.layer, self.grouped.weight()
        current = self.grouped.current_solution(weight)
        self.start = Solution(
            current.target.to(torch.float32), current.codes.to(torch.float32), current.scale.to(torch.float32)
        )
        shift = layer.bias_shift
        shift = torch.zeros(layer.out_channels, dtype=torch.float32) if shift is None else shift.clone()
        self.shift = shift.requires_grad_()

    @property
    def initial_codes(self) -> Tensor:
        """The present codes, moved up to a quarter of a step towards the float weight.

        Codes whose weight lies near the middle between two codes are then the first to change.
        """
        unrounded = self.start.target / self.start.scale_per_code
        return self.start.codes + (unrounded - self.start.codes).clamp(-MAX_INITIAL_SHIFT, MAX_INITIAL_SHIFT)

    @contextmanager
    def installed(self, codes: Callable[[], Tensor], scale: Callable[[], Tensor]) -> Iterator[None]:
        """A context in which the layer multiplies by these codes times these scales, and adds the shift."""
        layer = self.grouped.layer
        quant, bias_shift = layer.weight_quant, layer.bias_shift
        like = layer.to_output_first(layer.weight)

        def dequantize(weight: Tensor) -> Tensor:
            values = codes() * expand_scale(scale(), self.start.codes.shape[-1])
            return self.grouped.geometry.from_groups(values, like).to(weight.dtype)

        # An attribute of the instance hides the method of the class, until it is deleted below.
        quant.forward = dequantize  # type: ignore[method-assign]
        layer._buffers["bias_shift"] = self.shift
        try:
            yield
        finally:
            del quant.forward
            layer._buffers["bias_shift"] = bias_shift

    def harden(self, codes: Tensor, scale: Tensor) -> None:
        """Let the layer use the nearest codes to `codes`, and the shift."""
        nearest = self.grouped.code_grid().nearest_codes(codes.detach().to(torch.float64))
        self.grouped.apply(Solution(self.start.target, nearest, scale.detach().to(torch.float64)))
        self.grouped.layer.set_bias_shift(self.shift)


def enter_all(contexts: Sequence[Any]) -> ExitStack:
    """Enter several contexts, which the returned stack leaves again."""
    stack = ExitStack()
    for context in contexts:
        stack.enter_context(context)
    return stack
