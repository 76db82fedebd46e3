"""Deployment targets. Each target is one declarative value of the class Target; your own targets are too."""

from typing import TYPE_CHECKING

from scalepoint.support.plugins import lazy_attributes

if TYPE_CHECKING:
    from scalepoint.targets.describe_target import Section, describe
    from scalepoint.targets.onnxruntime import onnxruntime_target
    from scalepoint.targets.openvino import openvino_target
    from scalepoint.targets.registry import find_target, list_targets
    from scalepoint.targets.target import Accepted, CostRule, OperationFacts, Target

__all__ = [
    "Accepted",
    "CostRule",
    "OperationFacts",
    "Section",
    "Target",
    "describe",
    "find_target",
    "list_targets",
    "onnxruntime_target",
    "openvino_target",
]

_MODULES = {
    "Accepted": "target",
    "OperationFacts": "target",
    "CostRule": "target",
    "Section": "describe_target",
    "Target": "target",
    "describe": "describe_target",
    "find_target": "registry",
    "list_targets": "registry",
    "onnxruntime_target": "onnxruntime",
    "openvino_target": "openvino",
}
__getattr__ = lazy_attributes(__name__, _MODULES)
