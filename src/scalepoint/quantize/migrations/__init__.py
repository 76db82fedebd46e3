"""Migrations by name: ours, and those that other packages bring through the entry point `scalepoint.migrations`."""

from scalepoint.errors import ConfigError
from scalepoint.extensions import Extensions
from scalepoint.quantize.migrations.absorb import ABSORB
from scalepoint.quantize.migrations.awq import AWQ
from scalepoint.quantize.migrations.equalize import EQUALIZE
from scalepoint.quantize.migrations.migration import PROBES, Found, Migration, Scene, Site, migrate, probes_of
from scalepoint.quantize.migrations.rotate import ROTATE
from scalepoint.quantize.migrations.smooth import SMOOTH

MIGRATIONS = Extensions(Migration, "scalepoint.migrations", (SMOOTH, EQUALIZE, ABSORB, AWQ, ROTATE), ConfigError)

__all__ = [
    "MIGRATIONS",
    "PROBES",
    "Found",
    "Migration",
    "Scene",
    "Site",
    "migrate",
    "probes_of",
]
