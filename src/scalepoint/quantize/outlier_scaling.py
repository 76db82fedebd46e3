"""Scales outlier channels of an activation down before its quantizer, and the weight columns that read them up.

    f_c = 2^ceil(log2(max(1, max|x_c| / t)))        y = (W diag(f)) fq(x / f)

Only the threshold t is chosen, with the ranges of one half of the calibration data and the error on the other half:
with few rows, channels scaled to the same maximum would be clipped in the next batch. Powers of two do not change the
float output. On targets that fold a multiplication into the following quantizer this costs no time
(`Target.folds_input_scaling`). SmoothQuant (`smooth.py`) needs a norm that nothing else reads; this does not.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from scalepoint.graph.nodes import get_fake_tensor, get_kind, inherit_meta
from scalepoint.graph.tree import ModuleTree
from scalepoint.migration_report import MigrationReport, MigrationRow
from scalepoint.operation_coverage import OperationState
from scalepoint.quantize.placement import Decision
from scalepoint.quantize.quantizers import QuantStub
from scalepoint.quantize.sites import QuantizationSite
from scalepoint.quantize.smooth import find_shared_parameters, get_linear_weight, has_computed_weight
from scalepoint.spec import PerTensorGranularity

MAX_ROWS = 512  # rows of each half of the data on which thresholds are compared
# A threshold is the largest value of the tensor / 2^step. Step 0 changes nothing.
THRESHOLD_STEPS = tuple(step / 2 for step in range(13))
MAX_ERROR_RATIO = 0.7  # of the error without factors; a smaller gain is not worth another operation
MAX_EXPONENT = 8.0  # of a factor
MIGRATION_NAME = "outliers"
# Axes of (batch, tokens, channels). With four axes, and for some vectors, OpenVINO computes different values.
TOKEN_AXES = 3
INTEGER_OUTPUT_KINDS = ("conv", "adaptive_avg_pool", "avg_pool", "cat")


class ChannelFactors(nn.Module):
    """x * weight, with one value per channel of the last axis. All values are 1 until calibration."""

    def __init__(self, channels: int, readers: Sequence[nn.Module], like: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(channels, dtype=like.dtype, device=like.device))
        self.register_buffer("is_settled", torch.tensor(False))
        self.module_refs: dict[str, Any] = {"readers": list(readers)}  # a plain dict: not registered a second time
        self.name = ""

    weight: Tensor
    is_settled: Tensor  # whether calibration has computed the factors

    @property
    def readers(self) -> list[nn.Module]:
        readers: list[nn.Module] = self.module_refs["readers"]
        return readers

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight

    @torch.no_grad()
    def set_factors(self, factors: Tensor) -> None:
        """Divide the input by these factors, and multiply the weight columns of the readers by them."""
        self.weight.copy_(1 / factors)
        for reader in self.readers:
            weight = get_linear_weight(reader)
            weight.mul_(factors.to(weight))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        for name, buffer in self._buffers.items():  # models saved by versions without factors do not contain them
            if buffer is not None:
                state_dict.setdefault(prefix + name, buffer)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        return f"{self.name}, {self.weight.numel()} channels, {int((self.weight != 1).sum())} of them scaled"


def insert_channel_factors(model: fx.GraphModule, tree: ModuleTree, decisions: Sequence[Decision]) -> None:
    """Insert factors before each stub that is read by quantized linear layers only, whose columns can be scaled."""
    decisions_by_node = {decision.site.node: decision for decision in decisions}
    shared_weights = find_shared_parameters([decision.site for decision in decisions])
    stub_nodes = [node for node in model.graph.nodes if get_kind(node) == "quant"]
    stub_names = [str(node.target) for node in stub_nodes]
    for stub_node in stub_nodes:
        stub_name = str(stub_node.target)
        readers = _find_linear_readers(stub_node, decisions_by_node, shared_weights)
        is_called_once = stub_names.count(stub_name) == 1
        if not readers or not is_called_once or not _has_one_calibrated_scale(model.get_submodule(stub_name)):
            continue
        value = get_fake_tensor(stub_node)
        if value is None or value.ndim != TOKEN_AXES:
            continue
        if _comes_from_integer_kernel(stub_node, decisions_by_node):
            continue
        linears = [site.part for site in readers if site.part is not None]
        weight = get_linear_weight(linears[0])
        factors = ChannelFactors(weight.shape[1], linears, weight)
        name = tree.add(f"{stub_name.removesuffix('_quant')}_factors", factors)
        factors.name = stub_name
        with model.graph.inserting_before(stub_node):
            node = model.graph.call_module(name, (stub_node.args[0],))
        inherit_meta(node, stub_node, kind="factors")
        stub_node.replace_input_with(stub_node.args[0], node)


def _find_linear_readers(
    stub_node: fx.Node, decisions_by_node: Mapping[fx.Node, Decision], shared_weights: set[int]
) -> list[QuantizationSite]:
    """Return the linear layers that read a stub; none if another operation reads it or a weight cannot be scaled."""
    readers = []
    for user in stub_node.users:
        decision = decisions_by_node.get(user)
        if decision is None or decision.state != OperationState.QUANTIZED or decision.weight is None:
            return []
        site = decision.site
        is_only_input = [arg for arg in user.args if arg is stub_node] == [user.args[0]]
        if site.kind != "linear" or site.part is None or not is_only_input:
            return []
        if has_computed_weight(site.part) or get_linear_weight(site.part).data_ptr() in shared_weights:
            return []
        readers.append(site)
    return readers


def _has_one_calibrated_scale(module: nn.Module) -> bool:
    """Return whether calibration computes a single integer scale for the tensor."""
    is_per_tensor = isinstance(module, QuantStub) and isinstance(module.spec.granularity, PerTensorGranularity)
    return is_per_tensor and not module.is_fixed and not module.quantizer.grid.format.is_float  # type: ignore[union-attr]


def _comes_from_integer_kernel(stub_node: fx.Node, decisions_by_node: Mapping[fx.Node, Decision]) -> bool:
    """Return whether an integer kernel writes the tensor. It contains the quantizer, which cannot contain factors."""
    source = stub_node.all_input_nodes[0]
    while source.all_input_nodes and source not in decisions_by_node and get_kind(source) not in INTEGER_OUTPUT_KINDS:
        if len(source.all_input_nodes) > 1:
            return False
        source = source.all_input_nodes[0]
    decision = decisions_by_node.get(source)
    kinds = {get_kind(source)} if decision is None else {get_kind(source), decision.site.kind}
    return not kinds.isdisjoint(INTEGER_OUTPUT_KINDS)


def find_unset_factors(model: nn.Module) -> list[ChannelFactors]:
    """Return the factors that are still to be computed."""
    return [module for module in model.modules() if isinstance(module, ChannelFactors) and not bool(module.is_settled)]


class DataHalf:
    """Extremes of every channel in one half of the data, and a sample of its rows."""

    def __init__(self) -> None:
        self.low = self.high = torch.zeros((), dtype=torch.float32)
        self.samples: list[Tensor] = []
        self.row_stride = 1

    def add_rows(self, rows: Tensor) -> None:
        self.low, self.high = torch.minimum(self.low, rows.amin(0)), torch.maximum(self.high, rows.amax(0))
        self.samples.append(rows[:: self.row_stride].clone())
        while sum(map(len, self.samples)) > MAX_ROWS:
            # Keep every second row, and add only every second row from now on.
            self.samples, self.row_stride = [torch.cat(self.samples)[::2]], self.row_stride * 2

    @property
    def largest(self) -> Tensor:
        """Largest magnitude of every channel."""
        return torch.maximum(self.high, -self.low)


class ChannelStatistics:
    """Statistics of one tensor in two halves. Batches alternate between the halves; a single batch is split."""

    def __init__(self) -> None:
        self.halves = (DataHalf(), DataHalf())
        self.first_batch: Tensor | None = None  # None once there is a second batch
        self.batch_count = 0

    @torch.no_grad()
    def observe(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        value = output.detach().float()
        if not value.numel() or not bool(torch.isfinite(value).all()):
            return
        if not self.batch_count:
            self.first_batch = value.clone() if value.ndim > 1 and len(value) > 1 else None
        elif self.batch_count == 1:
            self.first_batch = None
        self.halves[self.batch_count % 2].add_rows(value.reshape(-1, value.shape[-1]))
        self.batch_count += 1

    def get_halves(self) -> tuple[DataHalf, DataHalf] | None:
        """Return both halves; None if the data was a single row."""
        if self.batch_count > 1:
            return self.halves
        if self.first_batch is None:
            return None
        halves = (DataHalf(), DataHalf())
        for half, part in zip(halves, self.first_batch.tensor_split(2), strict=True):
            half.add_rows(part.reshape(-1, part.shape[-1]))
        return halves


def scale_outlier_channels(factors: Sequence[ChannelFactors], run: Callable[[str], Any]) -> MigrationReport:
    """Run the data once, and set the factors that make the error on the other half of the data clearly smaller."""
    statistics = [ChannelStatistics() for _ in factors]
    pairs = zip(factors, statistics, strict=True)
    handles = [module.register_forward_hook(channels.observe) for module, channels in pairs]
    try:
        run("looking for outliers")
    finally:
        for handle in handles:
            handle.remove()
    rows = []
    for module in factors:
        halves = statistics.pop(0).get_halves()  # pop: frees the sampled rows
        module.is_settled.fill_(True)
        if halves is None:
            continue
        choice = choose_factors(halves, [get_linear_weight(reader) for reader in module.readers])
        if choice is None:
            continue
        values, error_ratio = choice
        module.set_factors(values.to(module.weight.device))
        note = (
            f"{int((values > 1).sum())} of {len(values)} channels divided by up to {float(values.max()):g}, "
            f"error {error_ratio:.2f} of before"
        )
        rows.append(MigrationRow(MIGRATION_NAME, module.name, done=True, note=note))
    return MigrationReport(tuple(rows))


@torch.no_grad()
def choose_factors(halves: tuple[DataHalf, DataHalf], weights: Sequence[Tensor]) -> tuple[Tensor, float] | None:
    """Return the factors with the smallest error, and its ratio to the error without factors.

    None if no factors are clearly better.
    """
    stacked = torch.cat([weight.detach().float().cpu() for weight in weights])
    first, second = halves
    errors: dict[float, float] = {}
    for step in THRESHOLD_STEPS:
        error_of_second = compute_held_out_error(first, second, stacked, step)
        error_of_first = compute_held_out_error(second, first, stacked, step)
        errors[step] = error_of_second + error_of_first
    best = min(THRESHOLD_STEPS, key=lambda step: errors[step])
    if errors[best] >= MAX_ERROR_RATIO * errors[0.0]:
        return None
    largest = torch.maximum(first.largest, second.largest)
    return compute_factors(largest, best), errors[best] / errors[0.0]


def compute_factors(largest: Tensor, step: float) -> Tensor:
    """Compute the factor of each channel from the largest magnitudes, for the threshold max / 2^step."""
    threshold = (largest.amax() * 2.0**-step).clamp(min=torch.finfo(torch.float32).tiny)
    factors: Tensor = (largest / threshold).clamp(min=1).log2().ceil().clamp(max=MAX_EXPONENT).exp2()
    return factors


def compute_held_out_error(fitted: DataHalf, other: DataHalf, weight: Tensor, step: float) -> float:
    """Estimate the squared error of the outputs for one half of the data, with the ranges of the other half.

    It is the rounding and clipping error of x, weighted by the columns of the weight, plus the rounding error of
    W diag(f), weighted by the mean square of x.
    """
    factors = compute_factors(fitted.largest, step).cpu()
    low, high = float((fitted.low.cpu() / factors).amin()), float((fitted.high.cpu() / factors).amax())
    input_scale = max((high - low) / 255, torch.finfo(torch.float32).tiny)
    x = torch.cat(other.samples).cpu() / factors
    x_error = (x.clamp(low, high) / input_scale).round() * input_scale - x
    scaled_weight = weight * factors
    error_from_x = (x_error.square().mean(0) * scaled_weight.square().sum(0)).sum()
    weight_scales = scaled_weight.abs().amax(1) / 127
    # Rounding errors are uniform within a step: their mean square is step^2 / 12.
    error_from_weight = (weight_scales.square() / 12).sum() * x.square().mean(0).sum()
    return float(error_from_x + error_from_weight)
