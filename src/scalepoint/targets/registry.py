"""The targets by name: our own, and those that other packages bring through the entry point "scalepoint.targets"."""

from scalepoint.errors import TargetError
from scalepoint.extensions import Extensions
from scalepoint.targets.onnxruntime import onnxruntime_target
from scalepoint.targets.openvino import openvino_target
from scalepoint.targets.reference import REFERENCE
from scalepoint.targets.target import Target
from scalepoint.targets.tensorrt import TENSORRT

_OWN = (onnxruntime_target(), openvino_target(), TENSORRT, REFERENCE)
_ALL = Extensions(Target, "scalepoint.targets", _OWN, TargetError)


def list_targets() -> list[str]:
    """All names, ours first; nothing of another package is imported."""
    return _ALL.names()


def find_target(target: str | Target) -> Target:
    """A target from itself or from its name."""
    return _ALL.find(target)
