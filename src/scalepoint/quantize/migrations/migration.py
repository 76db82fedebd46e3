"""A migration: a rewrite of float weights that leaves what the model computes, and makes it easier to quantize.

    find -> sites, and what is refused with the reason
    apply all -> the float output on data is as before, within rounding?  else one by one, and what changes it is undone

The parameters are written before calibration, so that everything after it sees an ordinary model.
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

MAX_PROBE_BATCHES = 4  # batches on which the float output is compared, at most
MAX_COMPARED_VALUES = 2**25  # values of their outputs that are kept, at most but for the first batch
ROUNDING_TOLERANCE = 512  # times the machine precision of the model's type, against the norm of the output


class RewriteSite(Protocol):
    """A place that a migration rewrites: a name for people, and all tensors that it writes."""

    @property
    def name(self) -> str: ...
    def tensors(self) -> Sequence[Tensor]: ...


@dataclass
class MigrationSites:
    """What a migration can rewrite, and what it cannot with the reason."""

    sites: list[Any] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)

    def refuse(self, name: str, why: str) -> None:
        self.refused.setdefault(name, why)


RunData = Callable[[str], FeedResult]


@dataclass
class MigrationContext:
    """What a migration works with: the model with its quantizers off, its operations, and the calibration data."""

    model: fx.GraphModule
    run: RunData
    probes: Sequence[Sequence[Any]]
    on_nan: str = "error"
    added: list[str] = field(default_factory=list)  # parameters that were given in the place of shared ones

    def __post_init__(self) -> None:
        self.flow = RecordedGraph(self.model, self.probes[0])
        self.expected = self.outputs()

    def outputs(self) -> list[list[Tensor]]:
        """What the model gives for the probes."""
        found: list[list[Tensor]] = []
        room = MAX_COMPARED_VALUES
        for inputs in self.probes:
            leaves = pytree.tree_leaves(fx.Interpreter(self.model).run(*inputs, enable_io_processing=False))
            found.append([leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()])
            room -= sum(leaf.numel() for leaf in found[-1])
            if room <= 0:
                break
        return found

    def change(self) -> float:
        """How far the float output is now from what it was at first, against its norm."""
        return relative_difference(self.expected, self.outputs())

    @property
    def limit(self) -> float:
        """What counts as rounding in the model's type."""
        kinds = [leaf.dtype for leaves in self.expected for leaf in leaves]
        return ROUNDING_TOLERANCE * max(
            (torch.finfo(kind).eps for kind in kinds), default=torch.finfo(torch.float32).eps
        )

    @contextmanager
    def watching(self, seen: Mapping[nn.Module, Callable[[Tensor, Tensor], None]]) -> Iterator[None]:
        """While data passes, each function is given what goes into its module and what comes out."""

        def hook(take: Callable[[Tensor, Tensor], None]) -> Any:
            return lambda module, inputs, output: take(inputs[0].detach(), output.detach())

        handles = [module.register_forward_hook(hook(take)) for module, take in seen.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def watch(self, what: str, seen: Mapping[nn.Module, Callable[[Tensor, Tensor], None]]) -> None:
        """Run the data through the model and look at what passes."""
        if seen:
            with self.watching(seen):
                self.run(what)


@dataclass(frozen=True)
class Migration:
    """`find` looks at the graph; `apply` writes to the tensors of some sites and says of each what it did. It may be
    called again after the tensors were put back."""

    name: str
    find: Callable[[MigrationContext], MigrationSites]
    apply: Callable[[MigrationContext, Sequence[Any]], Sequence[str]]


def migrate(scene: MigrationContext, migrations: Sequence[Migration]) -> MigrationReport:
    """Apply one after the other; what changes the float output is undone and listed."""
    report = MigrationReport()
    before = set(scene.model.state_dict())
    for migration in migrations:
        scene.flow = RecordedGraph(scene.model, scene.probes[0])
        rows, change = _apply_migration(scene, migration)
        report = replace(report, rows=(*report.rows, *rows), change=max(report.change, change))
    new = [name for name in scene.model.state_dict() if name not in before]
    return replace(report, added=(*scene.added, *new))


def _apply_migration(scene: MigrationContext, migration: Migration) -> tuple[list[MigrationRow], float]:
    found = migration.find(scene)
    sites, kept = found.sites, _TensorBackup(found.sites)
    notes = list(migration.apply(scene, sites)) if sites else []
    change = scene.change() if sites else 0.0
    if change > scene.limit:
        sites, notes, change = _apply_one_by_one(scene, migration, found, kept)
    rows = [MigrationRow(migration.name, site.name, True, note) for site, note in zip(sites, notes, strict=True)]
    return [*rows, *(MigrationRow(migration.name, name, False, why) for name, why in found.refused.items())], change


def _apply_one_by_one(
    scene: MigrationContext, migration: Migration, found: MigrationSites, kept: "_TensorBackup"
) -> tuple[list[Any], list[str], float]:
    """Refuse the sites that change the output, and apply the others together."""
    good = []
    for site in found.sites:
        kept.restore()
        migration.apply(scene, [site])
        change = scene.change()
        if change > scene.limit:
            found.refuse(site.name, f"the float output changes by {change:.1e} on the data")
        else:
            good.append(site)
    kept.restore()
    notes = list(migration.apply(scene, good)) if good else []
    change = scene.change()
    if change <= scene.limit:
        return good, notes, change
    kept.restore()
    for site in good:
        found.refuse(site.name, f"the float output changes by {change:.1e} on the data, with the others")
    return [], [], 0.0


class _TensorBackup:
    """The tensors of sites as they were."""

    def __init__(self, sites: Sequence[RewriteSite]) -> None:
        written = {each.data_ptr(): each for site in sites for each in site.tensors()}
        self.values = [(each, each.clone()) for each in written.values()]

    def restore(self) -> None:
        for tensor, value in self.values:
            tensor.copy_(value)


def relative_difference(expected: Sequence[Sequence[Tensor]], found: Sequence[Sequence[Tensor]]) -> float:
    """|found - expected| / |expected|, of the worst output; batches that were not finite before say nothing."""
    worst = 0.0
    for before, after in zip(expected, found, strict=True):
        for one, other in zip(before, after, strict=True):
            if one.numel() and bool(torch.isfinite(one).all()):
                off = (other.double() - one.double()).norm() / one.double().norm().clamp(min=1e-30)
                worst = max(worst, float(off.nan_to_num(nan=float("inf"))))
    return worst


class _InputCollector(nn.Module):
    """Takes flat inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[tuple[Any, ...]] = []

    def forward(self, *inputs: Any) -> Any:
        self.taken.append(inputs)


def collect_probes(model: fx.GraphModule, run: RunData) -> list[tuple[Any, ...]]:
    """The flat inputs of the first batches."""
    inner = _InputCollector()
    taker = wrap_with_signature(model, inner, gives_outputs=False)

    def take(module: nn.Module, args: Any, kwargs: Any) -> None:
        taker(*args, **kwargs)

    handle = model.register_forward_pre_hook(take, with_kwargs=True)
    try:
        run("looking at the data")
    finally:
        handle.remove()
    if not inner.taken:
        raise CalibrationError("migrations are checked on data: there was none")
    return inner.taken
