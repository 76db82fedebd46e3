"""scalepoint: a trained PyTorch model in, a quantized one that is really deployed out.

Importing the package is cheap and silent: torch is loaded when a name that needs it is first used.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0.dev0"

_SUBMODULES = ("errors", "graph", "numerics", "patterns", "quantize", "spec", "targets", "tensorrt", "transformation")
_FUNCTIONS = {
    "apply_transformation_plan": "transformation",
    "calibrate": "quantize",
    "coverage": "quantize",
    "get_transformation_plan": "transformation",
    "insert_qdq": "quantize",
    "load": "quantize",
    "save": "quantize",
    "transform": "transformation",
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
