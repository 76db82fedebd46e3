"""Runtimes, one room each: a file is run in a child process, whose crash or hang is a finding of ours."""

from scalepoint.runtimes.process import Status
from scalepoint.runtimes.registry import find_runtime, list_runtimes
from scalepoint.runtimes.runtime import Runtime, Variant

__all__ = ["Runtime", "Status", "Variant", "find_runtime", "list_runtimes"]
