"""Keeps torch.export from importing networkx.

Two modules of torch's partitioner (2.13) import networkx, which takes 0.2 s of CPU time. They use it only if somebody
sets a memory budget for activations. Here they get a module that imports networkx when one of its names is read.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from scalepoint.compat import patches_enabled

PACKAGE = "torch._functorch._activation_checkpointing"
USERS = (f"{PACKAGE}.graph_info_provider", f"{PACKAGE}.knapsack_evaluator")


class _LateModule(ModuleType):
    """Looks like a module, and imports it when one of its names is read."""

    is_being_bound = True  # while its users are imported, they read names only in annotations

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Any if self.is_being_bound else getattr(import_module(self.__name__), name)


def bind_networkx_late() -> None:
    """Import the modules of torch that use networkx, without networkx. Does nothing if one of them is imported."""
    if not patches_enabled() or any(name in sys.modules for name in ("networkx", *USERS)):
        return
    late_module = _LateModule("networkx")
    sys.modules["networkx"] = late_module
    try:
        for name in USERS:
            import_module(name)
    except ImportError:  # another version of torch: it imports networkx itself
        pass
    finally:
        late_module.is_being_bound = False
        del sys.modules["networkx"]
