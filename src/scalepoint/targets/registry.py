"""Find targets by name: built-in ones, and those of other packages with the entry point "scalepoint.targets"."""

from collections.abc import Callable, Mapping

from scalepoint.errors import TargetError, UsageError, did_you_mean, short_repr
from scalepoint.support.cpu import CPU_CHOICES
from scalepoint.support.plugins import PluginRegistry
from scalepoint.targets.onnxruntime import onnxruntime_target
from scalepoint.targets.openvino import openvino_target
from scalepoint.targets.target import Target

# The module of a target in text is imported when the target is used.
_LANGUAGE_TARGETS = {
    "compressed-tensors": "scalepoint.targets.language_models:COMPRESSED_TENSORS",
    "gptq": "scalepoint.targets.language_models:GPTQ",
    "awq": "scalepoint.targets.language_models:AWQ",
    "gguf": "scalepoint.targets.language_models:GGUF",
    "ort-genai": "scalepoint.targets.language_models:ORT_GENAI",
}
_TARGETS: dict[str, Target | str] = {
    "onnxruntime": onnxruntime_target(),
    "openvino": openvino_target(),
    "tensorrt": "scalepoint.targets.tensorrt:TENSORRT",
    "executorch": "scalepoint.targets.executorch:EXECUTORCH",
    "litert": "scalepoint.targets.litert:LITERT",
    "coreml": "scalepoint.targets.coreml:COREML",
    "coreai": "scalepoint.targets.coreai:COREAI",
    "reference": "scalepoint.targets.reference:REFERENCE",
    **_LANGUAGE_TARGETS,
}
TARGETS_WITH_CPU_OPTION: Mapping[str, Callable[[str], Target]] = {
    "onnxruntime": onnxruntime_target,
    "openvino": openvino_target,
}
_REGISTRY = PluginRegistry(Target, "scalepoint.targets", _TARGETS, TargetError)


def list_targets(*, language: bool = False) -> list[str]:
    """List the names of all targets, built-in ones first. Plugins are not imported.

    Args:
        language: List the targets of `deploy_checkpoint` instead.
    """
    return [name for name in _REGISTRY.names() if (name in _LANGUAGE_TARGETS) == language]


def has_cpu_option(target: Target) -> bool:
    """Whether a target depends on the option cpu= of `deploy`. Targets of other packages may have another "cpu"."""
    return target.name in TARGETS_WITH_CPU_OPTION and "cpu" in target.options


def find_target(target: str | Target, cpu: str = "auto") -> Target:
    """Find a target by name.

    Args:
        target: A target or its name.
        cpu: For targets that run on CPUs: "vnni" and "arm" use all 8 bits of the weights, "avx2" chooses scales that
            are also exact on CPUs without VNNI, "auto" chooses for this machine, or returns a Target unchanged.

    Returns:
        The target.

    Raises:
        TargetError: There is no target of that name.
        UsageError: `cpu` is unknown, or contradicts the target.
    """
    known = _REGISTRY.find(target)
    if cpu not in CPU_CHOICES:
        raise UsageError(f"cpu={short_repr(cpu)}: {did_you_mean(str(cpu), CPU_CHOICES)}")
    if cpu in ("auto", known.options.get("cpu")):
        return known
    if not has_cpu_option(known):
        raise UsageError(
            f"cpu={cpu!r} cannot be used with target {known.name!r}: it is for {' and '.join(TARGETS_WITH_CPU_OPTION)}"
        )
    if not isinstance(target, str):
        raise UsageError(
            f"cpu={cpu!r} contradicts the target, which was made with cpu={known.options['cpu']!r}: omit one of them"
        )
    return TARGETS_WITH_CPU_OPTION[known.name](cpu)
