"""scalepoint: a trained PyTorch model in, a quantized one that is really deployed out.

Importing the package is cheap and silent: torch is loaded when a name that needs it is first used.
"""

from importlib import import_module
from types import ModuleType

__version__ = "0.1.0.dev0"

__all__ = ["__version__", "errors", "numerics", "spec"]

_SUBMODULES = ("errors", "numerics", "spec")


def __getattr__(name: str) -> ModuleType:
    if name in _SUBMODULES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
