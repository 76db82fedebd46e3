"""The targets by name: our own, and those that other packages bring through the entry point "scalepoint.targets"."""

from scalepoint.errors import TargetError
from scalepoint.extensions import Extensions
from scalepoint.targets.coreml import COREML
from scalepoint.targets.executorch import EXECUTORCH
from scalepoint.targets.language import LANGUAGE
from scalepoint.targets.litert import LITERT
from scalepoint.targets.onnxruntime import onnxruntime_target
from scalepoint.targets.openvino import openvino_target
from scalepoint.targets.reference import REFERENCE
from scalepoint.targets.target import Target
from scalepoint.targets.tensorrt import TENSORRT

_OWN = (onnxruntime_target(), openvino_target(), TENSORRT, EXECUTORCH, LITERT, COREML, REFERENCE, *LANGUAGE)
_ALL = Extensions(Target, "scalepoint.targets", _OWN, TargetError)


def list_targets(*, language: bool = False) -> list[str]:
    """All names, ours first; nothing of another package is imported. `language` asks for those that are made from the
    checkpoint of a language model."""
    own = {each.name for each in LANGUAGE}
    return [name for name in _ALL.names() if (name in own) == language]


def find_target(target: str | Target) -> Target:
    """A target from itself or from its name."""
    return _ALL.find(target)
