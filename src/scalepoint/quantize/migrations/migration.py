"""A migration rewrites float weights so that the model computes the same and is easier to quantize.

    find -> sites to rewrite, and refused ones with the reason
    apply all -> is the float output on data the same within rounding?  if not: one by one, and undo what changes it

Parameters are rewritten before calibration, so everything after it works on an ordinary model.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn

from scalepoint.compat.torch_names import pytree
from scalepoint.errors import CalibrationError
from scalepoint.migration_report import MigrationReport, MigrationRow
from scalepoint.quantize.feeding import FeedResult
from scalepoint.quantize.migrations.recorded_graph import RecordedGraph
from scalepoint.quantize.shadow_models import wrap_with_signature

MAX_PROBE_BATCHES = 4  # batches on which the float output is compared
MAX_COMPARED_VALUES = 2**25  # values of the outputs that are kept; the first batch is always kept
ROUNDING_TOLERANCE = 512  # times the machine epsilon of the model's dtype, relative to the norm of the output


class RewriteSite(Protocol):
    """A place that a migration rewrites: its name for reports, and all tensors that are written."""

    @property
    def name(self) -> str: ...
    def tensors(self) -> Sequence[Tensor]:
        """Return the tensors that the rewrite changes."""


@dataclass
class MigrationSites:
    """The sites that a migration can rewrite, and those that it cannot, with the reason."""

    sites: list[Any] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)

    def refuse(self, name: str, reason: str) -> None:
        """Record why a site cannot be rewritten. The first reason stays."""
        self.refused.setdefault(name, reason)


RunData = Callable[[str], FeedResult]


@dataclass
class MigrationContext:
    """What a migration works with.

    Attributes:
        model: The model with its quantizers off.
        run: Runs the calibration data through the model; takes the title of the progress bar.
        probes: Flat inputs of the batches on which the output is compared.
        on_nan: What to do with batches that contain NaN or infinity.
        added: Names of parameters that replace shared ones.
    """

    model: fx.GraphModule
    run: RunData
    probes: Sequence[Sequence[Any]]
    on_nan: str = "error"
    added: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.graph = RecordedGraph(self.model, self.probes[0])
        self.expected = self.run_probes()

    def run_probes(self) -> list[list[Tensor]]:
        """Return the float outputs of the probes, up to a limit of values."""
        outputs: list[list[Tensor]] = []
        remaining = MAX_COMPARED_VALUES
        for inputs in self.probes:
            leaves = pytree.tree_leaves(fx.Interpreter(self.model).run(*inputs, enable_io_processing=False))
            outputs.append([leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()])
            remaining -= sum(leaf.numel() for leaf in outputs[-1])
            if remaining <= 0:
                break
        return outputs

    def output_change(self) -> float:
        """Return how far the float output is now from the output before all migrations, relative to its norm."""
        return relative_difference(self.expected, self.run_probes())

    @property
    def max_change(self) -> float:
        """The largest change that counts as rounding in the model's dtype."""
        dtypes = [leaf.dtype for leaves in self.expected for leaf in leaves]
        epsilon = max((torch.finfo(dtype).eps for dtype in dtypes), default=torch.finfo(torch.float32).eps)
        return ROUNDING_TOLERANCE * epsilon

    @contextmanager
    def observed(self, observers: Mapping[nn.Module, Callable[[Tensor, Tensor], None]]) -> Iterator[None]:
        """A context in which every forward of a module calls its observer with the input and the output."""

        def make_hook(observer: Callable[[Tensor, Tensor], None]) -> Any:
            return lambda module, inputs, output: observer(inputs[0].detach(), output.detach())

        handles = [module.register_forward_hook(make_hook(observer)) for module, observer in observers.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def observe(self, title: str, observers: Mapping[nn.Module, Callable[[Tensor, Tensor], None]]) -> None:
        """Run the data through the model with these observers. Without observers nothing runs."""
        if observers:
            with self.observed(observers):
                self.run(title)


@dataclass(frozen=True)
class Migration:
    """A migration.

    Attributes:
        name: Its name in the config.
        find: Finds the sites in the graph.
        apply: Writes to the tensors of some sites, and returns a note for each. May be called again after the tensors
            were restored.
    """

    name: str
    find: Callable[[MigrationContext], MigrationSites]
    apply: Callable[[MigrationContext, Sequence[Any]], Sequence[str]]


def migrate(context: MigrationContext, migrations: Sequence[Migration]) -> MigrationReport:
    """Apply migrations one after the other. Sites that change the float output are undone and listed."""
    report = MigrationReport()
    names_before = set(context.model.state_dict())
    for migration in migrations:
        context.graph = RecordedGraph(context.model, context.probes[0])
        rows, change = _apply_migration(context, migration)
        report = replace(report, rows=(*report.rows, *rows), change=max(report.change, change))
    new_names = [name for name in context.model.state_dict() if name not in names_before]
    return replace(report, added=(*context.added, *new_names))


def _apply_migration(context: MigrationContext, migration: Migration) -> tuple[list[MigrationRow], float]:
    """Apply one migration. Returns its rows, and the change of the float output."""
    result = migration.find(context)
    sites, backup = result.sites, _TensorBackup(result.sites)
    notes = list(migration.apply(context, sites)) if sites else []
    change = context.output_change() if sites else 0.0
    if change > context.max_change:
        sites, notes, change = _apply_one_by_one(context, migration, result, backup)
    rows = [
        MigrationRow(migration.name, site.name, done=True, note=note) for site, note in zip(sites, notes, strict=True)
    ]
    rows += [MigrationRow(migration.name, name, done=False, note=reason) for name, reason in result.refused.items()]
    return rows, change


def _apply_one_by_one(
    context: MigrationContext, migration: Migration, result: MigrationSites, backup: "_TensorBackup"
) -> tuple[list[Any], list[str], float]:
    """Refuse the sites that change the output, and apply the others together.

    Returns the applied sites, their notes, and the change of the output.
    """
    harmless = []
    for site in result.sites:
        backup.restore()
        migration.apply(context, [site])
        change = context.output_change()
        if change > context.max_change:
            result.refuse(site.name, f"the float output changes by {change:.1e} on the data")
        else:
            harmless.append(site)
    backup.restore()
    notes = list(migration.apply(context, harmless)) if harmless else []
    change = context.output_change()
    if change <= context.max_change:
        return harmless, notes, change
    backup.restore()
    for site in harmless:
        result.refuse(site.name, f"the float output changes by {change:.1e} on the data, together with other sites")
    return [], [], 0.0


class _TensorBackup:
    """Copies of all tensors of some sites."""

    def __init__(self, sites: Sequence[RewriteSite]) -> None:
        tensors = {tensor.data_ptr(): tensor for site in sites for tensor in site.tensors()}
        self.copies = [(tensor, tensor.clone()) for tensor in tensors.values()]

    def restore(self) -> None:
        for tensor, copy in self.copies:
            tensor.copy_(copy)


def relative_difference(expected: Sequence[Sequence[Tensor]], outputs: Sequence[Sequence[Tensor]]) -> float:
    """Return |output - expected| / |expected| of the worst output. Outputs that were not finite before are left out."""
    worst = 0.0
    for expected_batch, batch in zip(expected, outputs, strict=True):
        for before, after in zip(expected_batch, batch, strict=True):
            if before.numel() and bool(torch.isfinite(before).all()):
                difference = (after.double() - before.double()).norm() / before.double().norm().clamp(min=1e-30)
                worst = max(worst, float(difference.nan_to_num(nan=float("inf"))))
    return worst


class _InputCollector(nn.Module):
    """Stores the flat inputs of every call."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[tuple[Any, ...]] = []

    def forward(self, *inputs: Any) -> Any:
        self.batches.append(inputs)


def collect_probes(model: fx.GraphModule, run: RunData) -> list[tuple[Any, ...]]:
    """Return the flat inputs of the batches that `run` feeds."""
    collector = _InputCollector()
    receiver = wrap_with_signature(model, collector, gives_outputs=False)

    def receive(module: nn.Module, args: Any, kwargs: Any) -> None:
        receiver(*args, **kwargs)

    handle = model.register_forward_pre_hook(receive, with_kwargs=True)
    try:
        run("looking at the data")
    finally:
        handle.remove()
    if not collector.batches:
        raise CalibrationError("migrations are checked on data, but the data is empty: pass at least one batch")
    return collector.batches
