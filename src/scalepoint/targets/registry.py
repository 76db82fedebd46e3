"""The targets by name: our own, and those that other packages bring through the entry point "scalepoint.targets"."""

from collections.abc import Callable, Mapping

from scalepoint.errors import TargetError, UsageError, did_you_mean, short_repr
from scalepoint.support.cpu import CPU_CHOICES
from scalepoint.support.plugins import Registry
from scalepoint.targets.coreml import COREML
from scalepoint.targets.executorch import EXECUTORCH
from scalepoint.targets.language_models import LANGUAGE
from scalepoint.targets.litert import LITERT
from scalepoint.targets.onnxruntime import onnxruntime_target
from scalepoint.targets.openvino import openvino_target
from scalepoint.targets.reference import REFERENCE
from scalepoint.targets.target import Target
from scalepoint.targets.tensorrt import TENSORRT

_BUILTIN = (onnxruntime_target(), openvino_target(), TENSORRT, EXECUTORCH, LITERT, COREML, REFERENCE, *LANGUAGE)
BY_CPU: Mapping[str, Callable[[str], Target]] = {"onnxruntime": onnxruntime_target, "openvino": openvino_target}
_ALL = Registry(Target, "scalepoint.targets", {target.name: target for target in _BUILTIN}, TargetError)


def list_targets(*, language: bool = False) -> list[str]:
    """List the names of all targets, built-in ones first. Plugins are not imported.

    Args:
        language: List the targets of `deploy_checkpoint` instead.
    """
    language_names = {each.name for each in LANGUAGE}
    return [name for name in _ALL.names() if (name in language_names) == language]


def has_cpu_option(target: Target) -> bool:
    """Whether the option cpu= of `deploy` made this target. Targets of other packages may have such an option too."""
    return target.name in BY_CPU and "cpu" in target.options


def find_target(target: str | Target, cpu: str = "auto") -> Target:
    """A target from itself or from its name.

    Args:
        target: A target, or the name of one.
        cpu: For targets that run on CPUs: "vnni" uses all 8 bits of the weights, "avx2" chooses scales that are exact
            on CPUs without VNNI too, "auto" looks at this machine, or leaves a target that was given as it is.
    """
    known = _ALL.find(target)
    if cpu not in CPU_CHOICES:
        raise UsageError(f"cpu={short_repr(cpu)}: {did_you_mean(str(cpu), CPU_CHOICES)}")
    if cpu in ("auto", known.options.get("cpu")):
        return known
    if not has_cpu_option(known):
        raise UsageError(f"cpu={cpu!r} cannot be used with target {known.name!r}: it is for {' and '.join(BY_CPU)}")
    if not isinstance(target, str):
        raise UsageError(
            f"cpu={cpu!r} contradicts the target, which was made with cpu={known.options['cpu']!r}: omit one of them"
        )
    return BY_CPU[known.name](cpu)
