"""scalepoint: a trained PyTorch model in, a quantized one that is really deployed out.

Importing the package is cheap and silent: torch is loaded when a name that needs it is first used.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0.dev0"

_SUBMODULES = ("errors", "graph", "numerics", "patterns", "spec", "tensorrt")
_FUNCTIONS = {
    "apply_transformation_plan": "patterns",
    "get_transformation_plan": "patterns",
    "transform": "patterns",
}

__all__ = ["__version__", *_SUBMODULES, *_FUNCTIONS]  # noqa: PLE0604  # names, loaded on first use


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return import_module(f"{__name__}.{name}")
    if name in _FUNCTIONS:
        return getattr(import_module(f"{__name__}.{_FUNCTIONS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
