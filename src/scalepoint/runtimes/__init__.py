"""Runtimes that run exported files, one package each.

A file always runs in a child process (process.py, serving.py), so a crash or a hang of the runtime is a result and does
not end the caller. `child_loop.py` is the program of that process; `child.py` of each package runs one kind of file.
"""

from scalepoint.runtimes.process import Status
from scalepoint.runtimes.registry import find_runtime, list_runtimes
from scalepoint.runtimes.runtime import Runtime, Variant

__all__ = ["Runtime", "Status", "Variant", "find_runtime", "list_runtimes"]
