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


@dataclass(frozen=True)
class LayerSite:
    """A node of the graph under the name that coverage, overrides and reports use; `row` is its place in the coverage,
    None for what has no weights and multiplies nothing."""

    node: str
    name: str
    coverage_index: int | None


@dataclass(frozen=True)
class Record:
    """What insert_qdq knew."""

    origin: Origin
    target: Target | None
    config: QuantConfig
    plan: tuple[tuple[str, str], ...]  # the applied matches: name, pattern
    sites: tuple[LayerSite, ...]  # in graph order
    coverage: Coverage
    fingerprint: Mapping[str, str]  # of the float model
    unsmoothed: Mapping[str, str]  # norm -> why its activations are not smoothed
    is_norm_frozen: bool = False
    migrated: MigrationReport | None = None  # what calibrate did of config.migrate; None before
    calibrated: tuple[int, int] | None = None  # how many batches and samples; None before
    tuned_threads: int | None = None  # torch threads that tune ran with; None where it did not
    constant: str = ""  # a warning that calibration data never changed; "" where it did

    @property
    def names(self) -> dict[str, str]:
        """Node -> layer."""
        return {site.node: site.name for site in self.sites}


def has_record(model: nn.Module) -> bool:
    """Whether insert_qdq made the model."""
    return get_state(model, Record) is not None


def record_of(model: nn.Module) -> Record:
    """Return what `insert_qdq` decided for a model: matches, config, target and coverage.

    Args:
        model: A model with quantizers.
    """
    record = get_state(model, Record)
    if record is None:
        raise UsageError("this model has no record of its quantizers: it was not made by insert_qdq")
    return record


def update_record(model: nn.Module, **changes: Any) -> None:
    """Another record with some fields changed, where there is one."""
    if isinstance(model, fx.GraphModule) and has_record(model):
        set_state(model, replace(record_of(model), **changes))


def coverage(model: nn.Module) -> Coverage:
    """Tell which operations of a model are quantized, and why the others are not.

    Args:
        model: A model that `insert_qdq` returned.

    Returns:
        One row per operation. A quantizer that was switched off later is listed as float.
    """
    found = record_of(model).coverage
    gave_up: dict[str, list[tuple[str, str]]] = {}
    for module in model.modules():
        why = _get_disabled_reason(module) if isinstance(module, QuantizerBase) else ""
        if why:
            for name in module.consumers:  # type: ignore[union-attr]  # it is Quantizing
                gave_up.setdefault(name, []).append(("w" if isinstance(module, WeightFakeQuantize) else "x", why))
    return Coverage(tuple(_remove_disabled(row, gave_up.get(row.name, [])) for row in found.operations))


def _get_disabled_reason(module: QuantizerBase) -> str:
    skipped = module.skip_reason if isinstance(module, QuantStub) else ""
    return module.quantizer.reason if module.quantizer.is_disabled() else skipped


def _remove_disabled(row: CoverageRow, faults: Sequence[tuple[str, str]]) -> CoverageRow:
    """What a quantizer that is off was to do, the operation does not."""
    if not faults:
        return row
    off = {kind for kind, _ in faults}
    how = ", ".join(part for part in row.how.split(", ") if part.split(" ")[0] not in off)
    state = OperationState.QUANTIZED if how else OperationState.REFUSED
    return replace(row, state=state, how=how, reason="; ".join(dict.fromkeys(why for _, why in faults)))
