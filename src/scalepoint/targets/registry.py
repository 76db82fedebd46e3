"""The targets by name: our own, and those that other packages bring through the entry point "scalepoint.targets"."""

from importlib.metadata import entry_points

from scalepoint.errors import TargetError, nearest, shown
from scalepoint.targets.onnxruntime import onnxruntime_target
from scalepoint.targets.openvino import openvino_target
from scalepoint.targets.reference import REFERENCE
from scalepoint.targets.target import Target
from scalepoint.targets.tensorrt import TENSORRT

GROUP = "scalepoint.targets"
_OWN = {target.name: target for target in (onnxruntime_target(), openvino_target(), TENSORRT, REFERENCE)}


def list_targets() -> list[str]:
    """All names, ours first; nothing of another package is imported."""
    return [*_OWN, *sorted({point.name for point in entry_points(group=GROUP)} - set(_OWN))]


def find_target(target: str | Target) -> Target:
    """A target from itself or from its name."""
    if isinstance(target, Target):
        return target
    if target in _OWN:
        return _OWN[target]
    for point in entry_points(group=GROUP):
        if point.name == target:
            found = point.load()
            if not isinstance(found, Target):
                raise TargetError(f"the entry point {target!r} of {GROUP} is not a Target: {shown(found)}")
            return found
    raise TargetError(f"no target {shown(target)}: {nearest(str(target), list_targets())}")
