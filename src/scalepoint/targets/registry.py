"""The targets by name: our own, and those that other packages bring through the entry point "scalepoint.targets"."""

from importlib.metadata import EntryPoint, entry_points

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
            return _loaded(point)
    raise TargetError(f"no target {shown(target)}: {nearest(str(target), list_targets())}")


def _loaded(point: EntryPoint) -> Target:
    """The target of another package, or an error that names the package."""
    package = "an unknown package" if point.dist is None else f"the package {point.dist.name!r}"
    where = f"target {point.name!r} of {package} ({point.value})"
    try:
        found = point.load()
    except Exception as error:  # foreign code raises what it likes
        raise TargetError(f"{where} cannot be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(found, Target):
        raise TargetError(f"{where} is not a scalepoint.targets.Target: {shown(found)}")
    if found.name != point.name:
        raise TargetError(f"{where} calls itself {found.name!r}: both names must be the same")
    return found
