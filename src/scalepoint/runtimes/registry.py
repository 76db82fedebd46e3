"""Runtimes by name. Other packages add runtimes through the entry point "scalepoint.runtimes"."""

from scalepoint.errors import UsageError
from scalepoint.runtimes.runtime import Runtime
from scalepoint.support.plugins import PluginRegistry

_RUNTIMES = PluginRegistry(
    Runtime,
    "scalepoint.runtimes",
    {
        "onnxruntime": "scalepoint.runtimes.onnxruntime:ONNXRUNTIME",
        "openvino": "scalepoint.runtimes.openvino:OPENVINO",
        "executorch": "scalepoint.runtimes.executorch:EXECUTORCH",
        "litert": "scalepoint.runtimes.litert:LITERT",
        "coreml": "scalepoint.runtimes.coreml:COREML",
        "coreai": "scalepoint.runtimes.coreai:COREAI",
        "ort-genai": "scalepoint.runtimes.genai:ORT_GENAI",
        "llamacpp": "scalepoint.runtimes.llamacpp:LLAMACPP",
        "transformers": "scalepoint.runtimes.transformers:TRANSFORMERS",
    },
    UsageError,
)


def list_runtimes() -> list[str]:
    """Return the names of the runtimes, the built-in ones first. No runtime is imported."""
    return _RUNTIMES.names()


def find_runtime(runtime: str | Runtime) -> Runtime:
    """Return a runtime by its name.

    Args:
        runtime: The name, or the runtime itself.
    """
    return _RUNTIMES.find(runtime)
