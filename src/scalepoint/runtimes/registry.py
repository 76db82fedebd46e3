"""The runtimes by name: our own, and those that other packages bring through the entry point "scalepoint.runtimes"."""

from scalepoint.errors import UsageError
from scalepoint.extensions import Extensions
from scalepoint.runtimes.coreml import COREML
from scalepoint.runtimes.executorch import EXECUTORCH
from scalepoint.runtimes.genai import ORT_GENAI
from scalepoint.runtimes.litert import LITERT
from scalepoint.runtimes.llamacpp import LLAMACPP
from scalepoint.runtimes.onnxruntime import ONNXRUNTIME
from scalepoint.runtimes.openvino import OPENVINO
from scalepoint.runtimes.runtime import Runtime
from scalepoint.runtimes.transformers import TRANSFORMERS

_OWN = (ONNXRUNTIME, OPENVINO, EXECUTORCH, LITERT, COREML, ORT_GENAI, LLAMACPP, TRANSFORMERS)
_ALL = Extensions(Runtime, "scalepoint.runtimes", _OWN, UsageError)


def list_runtimes() -> list[str]:
    """All names, ours first; nothing of another package is imported."""
    return _ALL.names()


def find_runtime(runtime: str | Runtime) -> Runtime:
    """A runtime from itself or from its name."""
    return _ALL.find(runtime)
