"""Shows by which scores a file chooses: TopK, ArgMax and ArgMin give indices, and every value that is looked up by an
index depends on them."""

from pathlib import Path
from typing import Any

from scalepoint.formats.format import ChoiceOutputs
from scalepoint.formats.onnx.file_info import read_model

INDEX_OUTPUTS = {"TopK": 1, "ArgMax": 0, "ArgMin": 0}  # which output has the indices


def show_choices(path: Path, copy: Path) -> ChoiceOutputs | None:
    """Write a copy of the file with the scores and the indices of every choice as outputs, unless it has none."""
    import onnx  # noqa: PLC0415  # only files need it

    model = read_model(path)
    nodes = [node for node in model.graph.node if _gives_indices(node)]
    if not nodes:
        return None
    onnx.load_external_data_for_model(model, str(path.parent))
    choices: list[tuple[str, str, str]] = []
    for place, node in enumerate(nodes):
        scores = f"scalepoint_scores_{place}"  # the scores may be an input, which cannot be an output too
        model.graph.node.append(onnx.helper.make_node("Identity", [node.input[0]], [scores]))
        choices.append((node.name.rpartition("/")[0] or node.name, scores, node.output[INDEX_OUTPUTS[node.op_type]]))
    outputs = [each.name for each in model.graph.output]
    outputs += dict.fromkeys(name for _, *shown in choices for name in shown if name not in outputs)
    for name in outputs[len(model.graph.output) :]:
        model.graph.output.append(onnx.helper.make_empty_tensor_value_info(name))
    onnx.save(model, str(copy), save_as_external_data=True, location=f"{copy.name}.data")
    return ChoiceOutputs(tuple(outputs), tuple(choices))


def _gives_indices(node: Any) -> bool:
    place = INDEX_OUTPUTS.get(node.op_type)
    return place is not None and len(node.output) > place and bool(node.output[place])
