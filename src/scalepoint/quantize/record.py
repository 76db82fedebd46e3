"""Metadata of a quantized model: target, config, layer names, coverage. Stored once, as a frozen value on the graph."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx, nn

from scalepoint.errors import UsageError
from scalepoint.graph.nodes import get_state, set_state
from scalepoint.graph.origin import Origin
from scalepoint.migration_report import MigrationReport
from scalepoint.operation_coverage import Coverage, CoverageRow, OperationState
from scalepoint.quantize.config import QuantConfig
from scalepoint.quantize.quantizers import QuantizerBase, QuantStub, WeightFakeQuantize
from scalepoint.targets import Target
from scalepoint.targets.local_times import LocalTimes


@dataclass(frozen=True)
class LayerSite:
    """A node of the graph, with the name that coverage, overrides and reports use for it.

    Attributes:
        node: Name of the node.
        name: Name of the layer.
        coverage_index: Index of its row in the coverage; None for an operation without weights and products.
    """

    node: str
    name: str
    coverage_index: int | None


@dataclass(frozen=True)
class Record:
    """What insert_qdq, calibrate and tune did with a model.

    Attributes:
        origin: Where the graph was captured from.
        target: The target, if any.
        config: The user's config.
        plan: Name and pattern of each applied match.
        sites: All layers, in graph order.
        coverage: Coverage as insert_qdq decided it.
        fingerprint: Fingerprint of each tensor of the float model, by name.
        unsmoothed: Norm -> why its activations are not smoothed.
        is_norm_frozen: Whether freeze_bn_stats was called.
        migrated: Result of the migrations; None before calibration.
        calibrated: Number of batches and samples; None before calibration.
        tuned_threads: Number of torch threads while tuning; None without tuning.
        constant: Warning that the calibration data never changed; "" if it did.
        local_times: Measured times that decided what stays float for speed; None if shipped tables did.
    """

    origin: Origin
    target: Target | None
    config: QuantConfig
    plan: tuple[tuple[str, str], ...]
    sites: tuple[LayerSite, ...]
    coverage: Coverage
    fingerprint: Mapping[str, str]
    unsmoothed: Mapping[str, str]
    is_norm_frozen: bool = False
    migrated: MigrationReport | None = None
    calibrated: tuple[int, int] | None = None
    tuned_threads: int | None = None
    constant: str = ""
    local_times: LocalTimes | None = None

    @property
    def names(self) -> dict[str, str]:
        """Layer names by node name."""
        return {site.node: site.name for site in self.sites}


def has_record(model: nn.Module) -> bool:
    """Return whether insert_qdq made the model."""
    return get_state(model, Record) is not None


def is_float_for_speed(model: nn.Module) -> bool:
    """Return whether insert_qdq left all layers float because int8 is slower: the model needs no quantizers."""
    return has_record(model) and record_of(model).coverage.is_float_for_speed


def record_of(model: nn.Module) -> Record:
    """Return what `insert_qdq` decided for a model: matches, config, target and coverage.

    Args:
        model: A model with quantizers.
    """
    record = get_state(model, Record)
    if record is None:
        raise UsageError("this model has no record of its quantizers: pass a model that insert_qdq returned")
    return record


def update_record(model: nn.Module, **changes: Any) -> None:
    """Replace fields of the record; models without a record are left unchanged."""
    if isinstance(model, fx.GraphModule) and has_record(model):
        set_state(model, replace(record_of(model), **changes))


def coverage(model: nn.Module) -> Coverage:
    """Tell which operations of a model are quantized, and why the others are not.

    Args:
        model: A model that `insert_qdq` returned.

    Returns:
        One row per operation. A quantizer that was disabled later is listed as float.
    """
    inserted = record_of(model).coverage
    disabled: dict[str, list[tuple[str, str]]] = {}  # layer -> "w" or "x", and the reason
    for module in model.modules():
        if not isinstance(module, QuantizerBase):
            continue
        reason = _get_disabled_reason(module)
        if reason:
            tensor = "w" if isinstance(module, WeightFakeQuantize) else "x"
            for name in module.consumers:
                disabled.setdefault(name, []).append((tensor, reason))
    return Coverage(tuple(_remove_disabled(row, disabled.get(row.name, [])) for row in inserted.operations))


def _get_disabled_reason(quantizer: QuantizerBase) -> str:
    if quantizer.quantizer.is_disabled():
        reason: str = quantizer.quantizer.reason
        return reason
    return quantizer.skip_reason if isinstance(quantizer, QuantStub) else ""


def _remove_disabled(row: CoverageRow, disabled: Sequence[tuple[str, str]]) -> CoverageRow:
    """Remove the precisions of disabled quantizers from a row, such as "x int8" from "w int8, x int8"."""
    if not disabled:
        return row
    disabled_tensors = {tensor for tensor, _ in disabled}
    how = ", ".join(part for part in row.how.split(", ") if part.split(" ")[0] not in disabled_tensors)
    state = OperationState.QUANTIZED if how else OperationState.REFUSED
    return replace(row, state=state, how=how, reason="; ".join(dict.fromkeys(reason for _, reason in disabled)))
