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
from scalepoint.quantize.placement import Decision, QuantizationSite
from scalepoint.quantize.quantizers import QuantStub
from scalepoint.quantize.smooth import find_shared_parameters, get_linear_weight, has_computed_weight
from scalepoint.spec import PerTensorGranularity

MAX_ROWS = 512  # of each half of the data, by which thresholds are compared
THRESHOLD_STEPS = tuple(
    step / 2 for step in range(13)
)  # thresholds: the largest value / 2^step; the first leaves all as it is
MAX_ERROR_RATIO = 0.7  # of the error before: what is less of a gain is not worth another factor
MAX_EXPONENT = 8.0  # exponent of a factor
MIGRATION_NAME = "outliers"
TOKEN_AXES = 3  # of tokens: with four, and of some vectors, OpenVINO computed other values than the simulation
INTEGER_OUTPUT_KINDS = ("conv", "adaptive_avg_pool", "avg_pool", "cat")


class ChannelFactors(nn.Module):
    """x * weight, one value a channel of the last axis; ones until calibration has looked at the data."""

    def __init__(self, channels: int, readers: Sequence[nn.Module], like: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(channels, dtype=like.dtype, device=like.device))
        self.register_buffer("is_settled", torch.tensor(False))
        self.module_refs: dict[str, Any] = {"readers": list(readers)}  # they stay where they live in the model
        self.name = ""

    weight: Tensor
    is_settled: Tensor

    @property
    def readers(self) -> list[nn.Module]:
        readers: list[nn.Module] = self.module_refs["readers"]
        return readers

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight

    @torch.no_grad()
    def set_factors(self, factors: Tensor) -> None:
        """Divide by these from now on, and multiply the columns of the readers by them."""
        self.weight.copy_(1 / factors)
        for reader in self.readers:
            weight = get_linear_weight(reader)
            weight.mul_(factors.to(weight))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        for name, own in self._buffers.items():  # a model that was saved before there were factors has none
            if own is not None:
                state_dict.setdefault(prefix + name, own)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        return f"{self.name}, {self.weight.numel()} channels, {int((self.weight != 1).sum())} of them scaled"


def insert_channel_factors(model: fx.GraphModule, tree: ModuleTree, decisions: Sequence[Decision]) -> None:
    """Before each stub that quantized linear layers alone read, whose columns can take the inverse."""
    by_node = {decision.site.node: decision for decision in decisions}
    shared = find_shared_parameters([decision.site for decision in decisions])
    calls = [node for node in model.graph.nodes if get_kind(node) == "quant"]
    targets = [str(node.target) for node in calls]
    for stub in calls:
        module = model.get_submodule(str(stub.target))
        readers = _find_linear_readers(stub, by_node, shared)
        value = get_fake_tensor(stub)
        if not readers or targets.count(str(stub.target)) > 1 or not _has_one_calibrated_scale(module):
            continue
        if value is None or value.ndim != TOKEN_AXES:
            continue
        if _comes_from_integer_kernel(stub, by_node):
            continue
        parts = [site.part for site in readers if site.part is not None]
        factors = ChannelFactors(get_linear_weight(parts[0]).shape[1], parts, get_linear_weight(parts[0]))
        name = tree.add(f"{str(stub.target).removesuffix('_quant')}_factors", factors)
        factors.name = str(stub.target)
        with model.graph.inserting_before(stub):
            node = model.graph.call_module(name, (stub.args[0],))
        inherit_meta(node, stub, kind="factors")
        stub.replace_input_with(stub.args[0], node)


def _find_linear_readers(
    stub: fx.Node, by_node: Mapping[fx.Node, Decision], shared: set[int]
) -> list[QuantizationSite]:
    """The linear layers, where nothing else reads the stub and all of their columns can be scaled; else nothing."""
    found = []
    for user in stub.users:
        decision = by_node.get(user)
        if decision is None or decision.state != OperationState.QUANTIZED or decision.weight is None:
            return []
        site = decision.site
        if site.kind != "linear" or site.part is None or [arg for arg in user.args if arg is stub] != [user.args[0]]:
            return []
        if has_computed_weight(site.part) or get_linear_weight(site.part).data_ptr() in shared:
            return []
        found.append(site)
    return found


def _has_one_calibrated_scale(module: nn.Module) -> bool:
    """Whether calibration finds one scale for the tensor."""
    is_plain = isinstance(module, QuantStub) and isinstance(module.spec.granularity, PerTensorGranularity)
    return is_plain and not module.is_fixed and not module.quantizer.grid.format.is_float  # type: ignore[union-attr]


def _comes_from_integer_kernel(stub: fx.Node, by_node: Mapping[fx.Node, Decision]) -> bool:
    """Whether an integer kernel gives the tensor, as it is or moved: then it takes the quantizer itself."""
    source = stub.all_input_nodes[0]
    while source.all_input_nodes and source not in by_node and get_kind(source) not in INTEGER_OUTPUT_KINDS:
        if len(source.all_input_nodes) > 1:
            return False
        source = source.all_input_nodes[0]
    decision = by_node.get(source)
    return get_kind(source) in INTEGER_OUTPUT_KINDS or (
        decision is not None and decision.site.kind in INTEGER_OUTPUT_KINDS
    )


def find_unset_factors(model: nn.Module) -> list[ChannelFactors]:
    """Those that no data has been looked at for."""
    return [module for module in model.modules() if isinstance(module, ChannelFactors) and not bool(module.is_settled)]


class DataHalf:
    """One half of the data: the extremes of every channel, and some of its rows."""

    def __init__(self) -> None:
        self.low = self.high = torch.zeros((), dtype=torch.float32)
        self.kept: list[Tensor] = []
        self.step = 1

    def take(self, rows: Tensor) -> None:
        self.low, self.high = torch.minimum(self.low, rows.amin(0)), torch.maximum(self.high, rows.amax(0))
        self.kept.append(rows[:: self.step].clone())
        while sum(map(len, self.kept)) > MAX_ROWS:
            self.kept, self.step = [torch.cat(self.kept)[::2]], self.step * 2

    @property
    def largest(self) -> Tensor:
        return torch.maximum(self.high, -self.low)


class ChannelStatistics:
    """What passed one place: batches go to one half and to the other in turns, a single one is split."""

    def __init__(self) -> None:
        self.halves = (DataHalf(), DataHalf())
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

    def split(self) -> tuple[DataHalf, DataHalf] | None:
        """Both halves; None where all of the data was one row."""
        if self.count > 1:
            return self.halves
        if self.first is None:
            return None
        halves = (DataHalf(), DataHalf())
        for half, part in zip(halves, self.first.tensor_split(2), strict=True):
            half.take(part.reshape(-1, part.shape[-1]))
        return halves


def scale_outlier_channels(open_ones: Sequence[ChannelFactors], run: Callable[[str], Any]) -> MigrationReport:
    """Look at the data once, and scale what stands out where that makes the error on the other half clearly smaller."""
    seen = {id(each): ChannelStatistics() for each in open_ones}
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
        found = (
            None if halves is None else choose_factors(halves, [get_linear_weight(reader) for reader in each.readers])
        )
        if found is None:
            continue
        factors, gain = found
        each.set_factors(factors.to(each.weight.device))
        count = int((factors > 1).sum())
        note = (
            f"{count} of {len(factors)} channels divided by up to {float(factors.max()):g}, error {gain:.2f} of before"
        )
        rows.append(MigrationRow(MIGRATION_NAME, each.name, True, note))
    return MigrationReport(tuple(rows))


@torch.no_grad()
def choose_factors(halves: tuple[DataHalf, DataHalf], weights: Sequence[Tensor]) -> tuple[Tensor, float] | None:
    """The factors with the least error, and that against the error without; None where nothing is clearly better."""
    stacked = torch.cat([weight.detach().float().cpu() for weight in weights])
    errors = {
        step: sum(compute_held_out_error(halves[i], halves[1 - i], stacked, step) for i in (0, 1))
        for step in THRESHOLD_STEPS
    }
    best = min(THRESHOLD_STEPS, key=lambda step: errors[step])
    if errors[best] >= MAX_ERROR_RATIO * errors[0.0]:
        return None
    largest = torch.maximum(halves[0].largest, halves[1].largest)
    return compute_factors(largest, best), errors[best] / errors[0.0]


def compute_factors(largest: Tensor, step: float) -> Tensor:
    threshold = (largest.amax() * 2.0**-step).clamp(min=torch.finfo(torch.float32).tiny)
    factors: Tensor = (largest / threshold).clamp(min=1).log2().ceil().clamp(max=MAX_EXPONENT).exp2()
    return factors


def compute_held_out_error(fitted: DataHalf, other: DataHalf, weight: Tensor, step: float) -> float:
    """Of the outputs for the rows of the other half: rounding and clipping of x, with what one column counts, plus
    rounding of W diag(f)."""
    factors = compute_factors(fitted.largest, step).cpu()
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
