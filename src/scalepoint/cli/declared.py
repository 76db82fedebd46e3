"""What our targets and the config file declare, kept as data beside this file: to look it up does not load torch.

`docs/generate.py` writes it anew, and a test holds it to the declarations themselves.
"""

# ruff: noqa: PLC0415  # torch is loaded only where the data is made
import json
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from scalepoint.plain import plain

FILE = Path(__file__).with_name("declared.json")
GROUP = "scalepoint.targets"


def read() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def own_targets() -> dict[str, dict[str, Any]]:
    """Our targets as they are made for this processor."""
    from scalepoint.targets.cpu import instruction_set

    return {each["name"]: each for each in read()["targets"][instruction_set()]}


def other_names() -> list[str]:
    """Targets that other packages bring."""
    return sorted({point.name for point in entry_points(group=GROUP)} - set(own_targets()))


def told(target: Any) -> dict[str, Any]:
    """All that a target says of itself, and the rules that `scalepoint check` applies for it."""
    from scalepoint.checking import describe_rules
    from scalepoint.quantize.coverage import describe as described
    from scalepoint.targets import describe

    inputs = "float" if target.is_language else described(target.activation)
    return {
        "name": target.name,
        "summary": target.summary,
        "is_language": target.is_language,
        "default": f"w {described(target.weight)}, x {inputs}",
        "accepts": sorted({str(row) for row in target.accepts}) or ["everything"],
        "runtime": target.runtime,
        "sections": plain((*describe(target), *describe_rules(target.name))),
    }


def made() -> dict[str, Any]:
    """The data from the declarations themselves."""
    from scalepoint.options import DeployConfig
    from scalepoint.targets import find_target, list_targets, onnxruntime_target, openvino_target

    names = ("tensorrt", "executorch", "litert", "coreml", "reference", *list_targets(language=True))
    fixed = tuple(map(find_target, names))
    by_cpu = {
        cpu: [told(each) for each in (onnxruntime_target(cpu), openvino_target(cpu), *fixed)]
        for cpu in ("vnni", "avx2")
    }
    found: dict[str, Any] = plain({"targets": by_cpu, "schema": DeployConfig.model_json_schema()})
    return found


def write() -> None:
    FILE.write_text(json.dumps(made(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
