"""Migrations by name: built-in ones, and those of other packages from the entry point `scalepoint.migrations`."""

from scalepoint.errors import ConfigError
from scalepoint.quantize.migrations.awq import AWQ
from scalepoint.quantize.migrations.equalize import EQUALIZE
from scalepoint.quantize.migrations.migration import (
    MAX_PROBE_BATCHES,
    Migration,
    MigrationContext,
    MigrationSites,
    RewriteSite,
    collect_probes,
    migrate,
)
from scalepoint.quantize.migrations.rotate import ROTATE
from scalepoint.quantize.migrations.smooth import SMOOTH
from scalepoint.support.plugins import PluginRegistry

_BUILT_IN = {migration.name: migration for migration in (SMOOTH, EQUALIZE, AWQ, ROTATE)}
MIGRATIONS = PluginRegistry(Migration, "scalepoint.migrations", _BUILT_IN, ConfigError)

__all__ = [
    "MAX_PROBE_BATCHES",
    "MIGRATIONS",
    "Migration",
    "MigrationContext",
    "MigrationSites",
    "RewriteSite",
    "collect_probes",
    "migrate",
]
