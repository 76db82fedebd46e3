"""scalepoint: quantize a trained PyTorch model, write it for a target runtime, and verify it there.

Importing the package does not load torch. A submodule or function is imported when its name is first used.
"""

from importlib import import_module
from typing import Any

from scalepoint.version import __version__

_SUBMODULES = (
    "allocation",
    "analysis",
    "checking",
    "checkpoints",
    "errors",
    "formats",
    "graph",
    "numerics",
    "onnx_reader",
    "options",
    "patterns",
    "pipeline",
    "quantize",
    "report",
    "results",
    "runtimes",
    "spec",
    "targets",
    "tensorrt",
    "transformation",
    "tuning",
    "verification",
)
_FUNCTIONS = {
    "Budget": "allocation",
    "Deployment": "pipeline.result",
    "DeployConfig": "options",
    "apply_transformation_plan": "transformation",
    "benchmark": "verification",
    "calibrate": "quantize",
    "check": "checking",
    "compare": "analysis",
    "coverage": "quantize",
    "deploy": "pipeline.deploy",
    "deploy_checkpoint": "pipeline.deploy_checkpoint",
    "export": "formats",
    "gate": "report",
    "get_transformation_plan": "transformation",
    "insert_qdq": "quantize",
    "inspect": "analysis",
    "load": "quantize",
    "load_onnx": "onnx_reader",
    "perplexity": "pipeline.perplexity",
    "save": "quantize",
    "sensitivity": "analysis",
    "sign": "pipeline.signature",
    "sweep": "pipeline.sweep",
    "transform": "transformation",
    "tune": "tuning",
    "verify": "verification",
    "verify_signature": "pipeline.signature",
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
