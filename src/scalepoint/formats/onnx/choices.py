"""Writes a copy of a file that also returns the scores and indices of TopK, ArgMax and ArgMin.

If two scores are nearly equal, a rounding can change an index, and then every value that is looked up by it.
"""

from pathlib import Path
from typing import Any

from scalepoint.formats.format import ChoiceOutputs
from scalepoint.formats.onnx.file_info import read_model

INDEX_OUTPUTS = {"TopK": 1, "ArgMax": 0, "ArgMin": 0}  # operator -> position of its output with indices


def show_choices(path: Path, copy: Path) -> ChoiceOutputs | None:
    """Write a copy whose additional outputs are scores and indices. Returns None if the file has no such operator."""
    import onnx  # noqa: PLC0415  # only files need it

    model = read_model(path)
    nodes = [node for node in model.graph.node if _returns_indices(node)]
    if not nodes:
        return None
    onnx.load_external_data_for_model(model, str(path.parent))
    choices: list[tuple[str, str, str]] = []
    for number, node in enumerate(nodes):
        scores = f"scalepoint_scores_{number}"  # a copy: the scores may be an input, which cannot also be an output
        model.graph.node.append(onnx.helper.make_node("Identity", [node.input[0]], [scores]))
        choices.append((node.name.rpartition("/")[0] or node.name, scores, node.output[INDEX_OUTPUTS[node.op_type]]))
    outputs = [output.name for output in model.graph.output]
    new_names = [name for _, scores, indices in choices for name in (scores, indices)]
    outputs += dict.fromkeys(name for name in new_names if name not in outputs)
    for name in outputs[len(model.graph.output) :]:
        model.graph.output.append(onnx.helper.make_empty_tensor_value_info(name))
    onnx.save(model, str(copy), save_as_external_data=True, location=f"{copy.name}.data")
    return ChoiceOutputs(tuple(outputs), tuple(choices))


def _returns_indices(node: Any) -> bool:
    position = INDEX_OUTPUTS.get(node.op_type)
    return position is not None and len(node.output) > position and bool(node.output[position])
