"""Channels that stand out: a factor before the quantizer of an input, its inverse in the columns that read it.

    f_c = 2^ceil(log2(max(1, max|x_c| / t)))        y = (W diag(f)) fq(x / f)

Only a threshold t is chosen, and that with ranges of one half of the calibration data and the error of the other: where
few rows were seen, channels that are brought to one height are clipped in the next batch, and nothing is changed.
Powers of two leave the float output as it is, bit by bit. A runtime that takes a multiplication into the quantizer
behind it has this for nothing (`Target.scales_inputs`); smoothing (`smooth.py`) needs a norm that nothing else reads.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from scalepoint.graph.nodes import get_fake_tensor, get_kind, inherit_meta
from scalepoint.graph.tree import ModuleTree
from scalepoint.migration_report import MigrationReport, MigrationRow
from scalepoint.operation_coverage import OperationState
from scalepoint.quantize.placement import Decision, Site
from scalepoint.quantize.smooth import is_computed, shared_parameters, weight_of
from scalepoint.quantize.stubs import QuantStub
from scalepoint.spec import PerTensorGranularity

ROWS = 512  # of each half of the data, by which thresholds are compared
STEPS = tuple(step / 2 for step in range(13))  # thresholds: the largest value / 2^step; the first leaves all as it is
CLEAR = 0.7  # of the error before: what is less of a gain is not worth another factor
LARGEST = 8.0  # exponent of a factor
NAME = "outliers"
AXES = 3  # of tokens: with four, and of some vectors, OpenVINO computed other values than the simulation
FROM_INTEGERS = ("conv", "adaptive_avg_pool", "avg_pool", "cat")


class Factors(nn.Module):
    """x * weight, one value a channel of the last axis; ones until calibration has looked at the data."""

    def __init__(self, channels: int, readers: Sequence[nn.Module], like: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(channels, dtype=like.dtype, device=like.device))
        self.register_buffer("is_settled", torch.tensor(False))
        self.refers: dict[str, Any] = {"readers": list(readers)}  # they stay where they live in the model
        self.name = ""

    weight: Tensor
    is_settled: Tensor

    @property
    def readers(self) -> list[nn.Module]:
        readers: list[nn.Module] = self.refers["readers"]
        return readers

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight

    @torch.no_grad()
    def take(self, factors: Tensor) -> None:
        """Divide by these from now on, and multiply the columns of the readers by them."""
        self.weight.copy_(1 / factors)
        for reader in self.readers:
            weight = weight_of(reader)
            weight.mul_(factors.to(weight))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        for name, own in self._buffers.items():  # a model that was saved before there were factors has none
            if own is not None:
                state_dict.setdefault(prefix + name, own)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        return f"{self.name}, {self.weight.numel()} channels, {int((self.weight != 1).sum())} of them scaled"


def add_factors(model: fx.GraphModule, tree: ModuleTree, decisions: Sequence[Decision]) -> None:
    """Before each stub that quantized linear layers alone read, whose columns can take the inverse."""
    by_node = {decision.site.node: decision for decision in decisions}
    shared = shared_parameters([decision.site for decision in decisions])
    calls = [node for node in model.graph.nodes if get_kind(node) == "quant"]
    targets = [str(node.target) for node in calls]
    for stub in calls:
        module = model.get_submodule(str(stub.target))
        readers = _readers(stub, by_node, shared)
        value = get_fake_tensor(stub)
        if not readers or targets.count(str(stub.target)) > 1 or not _is_free(module):
            continue
        if value is None or value.ndim != AXES:
            continue
        if _comes_from_integers(stub, by_node):
            continue
        parts = [site.part for site in readers if site.part is not None]
        factors = Factors(weight_of(parts[0]).shape[1], parts, weight_of(parts[0]))
        name = tree.add(f"{str(stub.target).removesuffix('_quant')}_factors", factors)
        factors.name = str(stub.target)
        with model.graph.inserting_before(stub):
            node = model.graph.call_module(name, (stub.args[0],))
        inherit_meta(node, stub, kind="factors")
        stub.replace_input_with(stub.args[0], node)


def _readers(stub: fx.Node, by_node: Mapping[fx.Node, Decision], shared: set[int]) -> list[Site]:
    """The linear layers, where nothing else reads the stub and all of their columns can be scaled; else nothing."""
    found = []
    for user in stub.users:
        decision = by_node.get(user)
        if decision is None or decision.state != OperationState.QUANTIZED or decision.weight is None:
            return []
        site = decision.site
        if site.kind != "linear" or site.part is None or [arg for arg in user.args if arg is stub] != [user.args[0]]:
            return []
        if is_computed(site.part) or weight_of(site.part).data_ptr() in shared:
            return []
        found.append(site)
    return found


def _is_free(module: nn.Module) -> bool:
    """Whether calibration finds one scale for the tensor."""
    is_plain = isinstance(module, QuantStub) and isinstance(module.spec.granularity, PerTensorGranularity)
    return is_plain and not module.is_fixed and not module.quantizer.grid.format.is_float  # type: ignore[union-attr]


def _comes_from_integers(stub: fx.Node, by_node: Mapping[fx.Node, Decision]) -> bool:
    """Whether an integer kernel gives the tensor, as it is or moved: then it takes the quantizer itself."""
    source = stub.all_input_nodes[0]
    while source.all_input_nodes and source not in by_node and get_kind(source) not in FROM_INTEGERS:
        if len(source.all_input_nodes) > 1:
            return False
        source = source.all_input_nodes[0]
    decision = by_node.get(source)
    return get_kind(source) in FROM_INTEGERS or (decision is not None and decision.site.kind in FROM_INTEGERS)


def open_factors(model: nn.Module) -> list[Factors]:
    """Those that no data has been looked at for."""
    return [module for module in model.modules() if isinstance(module, Factors) and not bool(module.is_settled)]


class Half:
    """One half of the data: the extremes of every channel, and some of its rows."""

    def __init__(self) -> None:
        self.low = self.high = torch.zeros((), dtype=torch.float32)
        self.kept: list[Tensor] = []
        self.step = 1

    def take(self, rows: Tensor) -> None:
        self.low, self.high = torch.minimum(self.low, rows.amin(0)), torch.maximum(self.high, rows.amax(0))
        self.kept.append(rows[:: self.step].clone())
        while sum(map(len, self.kept)) > ROWS:
            self.kept, self.step = [torch.cat(self.kept)[::2]], self.step * 2

    @property
    def largest(self) -> Tensor:
        return torch.maximum(self.high, -self.low)


class Seen:
    """What passed one place: batches go to one half and to the other in turns, a single one is split."""

    def __init__(self) -> None:
        self.halves = (Half(), Half())
        self.first: Tensor | None = None
        self.count = 0

    @torch.no_grad()
    def observe(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        value = output.detach().float()
        if not value.numel() or not bool(torch.isfinite(value).all()):
            return
        if not self.count:
            self.first = value.clone() if value.ndim > 1 and len(value) > 1 else None
        elif self.count == 1:
            self.first = None
        self.halves[self.count % 2].take(value.reshape(-1, value.shape[-1]))
        self.count += 1

    def split(self) -> tuple[Half, Half] | None:
        """Both halves; None where all of the data was one row."""
        if self.count > 1:
            return self.halves
        if self.first is None:
            return None
        halves = (Half(), Half())
        for half, part in zip(halves, self.first.tensor_split(2), strict=True):
            half.take(part.reshape(-1, part.shape[-1]))
        return halves


def even_out(open_ones: Sequence[Factors], run: Callable[[str], Any]) -> MigrationReport:
    """Look at the data once, and scale what stands out where that makes the error on the other half clearly smaller."""
    seen = {id(each): Seen() for each in open_ones}
    handles = [each.register_forward_hook(seen[id(each)].observe) for each in open_ones]
    try:
        run("looking for outliers")
    finally:
        for handle in handles:
            handle.remove()
    rows = []
    for each in open_ones:
        halves = seen.pop(id(each)).split()
        each.is_settled.fill_(True)
        found = None if halves is None else chosen(halves, [weight_of(reader) for reader in each.readers])
        if found is None:
            continue
        factors, gain = found
        each.take(factors.to(each.weight.device))
        count = int((factors > 1).sum())
        note = (
            f"{count} of {len(factors)} channels divided by up to {float(factors.max()):g}, error {gain:.2f} of before"
        )
        rows.append(MigrationRow(NAME, each.name, True, note))
    return MigrationReport(tuple(rows))


@torch.no_grad()
def chosen(halves: tuple[Half, Half], weights: Sequence[Tensor]) -> tuple[Tensor, float] | None:
    """The factors with the least error, and that against the error without; None where nothing is clearly better."""
    stacked = torch.cat([weight.detach().float().cpu() for weight in weights])
    errors = {step: sum(held_out_error(halves[i], halves[1 - i], stacked, step) for i in (0, 1)) for step in STEPS}
    best = min(STEPS, key=lambda step: errors[step])
    if errors[best] >= CLEAR * errors[0.0]:
        return None
    largest = torch.maximum(halves[0].largest, halves[1].largest)
    return factors_of(largest, best), errors[best] / errors[0.0]


def factors_of(largest: Tensor, step: float) -> Tensor:
    threshold = (largest.amax() * 2.0**-step).clamp(min=torch.finfo(torch.float32).tiny)
    factors: Tensor = (largest / threshold).clamp(min=1).log2().ceil().clamp(max=LARGEST).exp2()
    return factors


def held_out_error(fitted: Half, other: Half, weight: Tensor, step: float) -> float:
    """Of the outputs for the rows of the other half: rounding and clipping of x, with what one column counts, plus
    rounding of W diag(f)."""
    factors = factors_of(fitted.largest, step).cpu()
    low, high = float((fitted.low.cpu() / factors).amin()), float((fitted.high.cpu() / factors).amax())
    width = max((high - low) / 255, torch.finfo(torch.float32).tiny)
    rows = torch.cat(other.kept).cpu()
    scaled = rows / factors
    off = (scaled.clamp(low, high) / width).round() * width - scaled
    wide = weight * factors
    from_x = (off.square().mean(0) * wide.square().sum(0)).sum()
    steps = wide.abs().amax(1) / 127
    from_w = (steps.square() / 12).sum() * scaled.square().mean(0).sum()
    return float(from_x + from_w)
