"""Checks that a model that was read from an ONNX file computes the same as the file in ONNX Runtime.

inputs --> file in ONNX Runtime --> outputs  <-- SQNR -->  outputs of the module
                 |  if they differ: run the file again with all tensors as outputs
                 v
           the first node whose outputs differ
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import ModelProto
from torch import Tensor

from scalepoint.onnx_reader import OnnxModel
from scalepoint.onnx_reader.values import KnownArray, as_tensor
from scalepoint.runtimes import Status, find_runtime
from scalepoint.runtimes.process import exchange_files, run_task
from scalepoint.support.files import TemporaryFolder
from scalepoint.support.formatting import format_decibels
from scalepoint.support.untrusted import LARGEST_PROTOBUF, read_bytes
from scalepoint.verification.agreement import Agreement, compare_outputs

MIN_SQNR = 40.0  # dB; the float32 results of two runtimes usually agree to 80 dB or more
MIN_SQNR_HALF = 20.0  # dB, for a file that computes in half precision
MAX_TINY = 1e-3  # a tensor without a larger number is about 0: its SQNR only compares rounding errors
RUNTIME = "onnxruntime"


class Parity(StrEnum):
    """The outcome of a comparison."""

    SAME = "same"
    DIFFERENT = "different"
    NOT_COMPARED = "not compared"


@dataclass(frozen=True)
class ParityResult:
    """Result of the comparison.

    Attributes:
        status: Whether the module computes what the file computes.
        message: One sentence that says how close, why nothing was compared, or where they differ.
        sqnr: SQNR of the worst output in dB; None if nothing was compared.
        node: The first node whose outputs differ; "" if none does or it is not known.
    """

    status: Parity
    message: str
    sqnr: float | None = None
    node: str = ""


def check_parity(model: OnnxModel, inputs: Mapping[str, Tensor]) -> ParityResult:
    """Compare a loaded model with its file.

    Args:
        model: The result of `load_onnx`, unchanged.
        inputs: One set of inputs, by name.

    Returns:
        The status, a message, the SQNR, and the first node that differs.
    """
    if model.is_requantized:
        return ParityResult(Parity.NOT_COMPARED, "not compared with the file, whose quantizers were left out")
    feeds = _build_feeds(model, inputs)
    with exchange_files(feeds) as files:
        request = {"task": "run", "path": model.path, "options": {"threads": 1}, **files.paths}
        answer = run_task(find_runtime(RUNTIME), request)
        if answer.status != Status.OK:
            return ParityResult(Parity.NOT_COMPARED, f"not compared: {RUNTIME} cannot run the file: {answer.message}")
        outputs = files.outputs(answer)
    with torch.no_grad():
        results = model(**inputs)
    expected = results if isinstance(results, tuple) else (results,)
    agreements = compare_outputs(expected, outputs)
    return _summarize(model, inputs, feeds, agreements, outputs)


def _summarize(
    model: OnnxModel,
    inputs: Mapping[str, Tensor],
    feeds: Mapping[str, np.ndarray],
    agreements: tuple[Agreement, ...],
    outputs: Mapping[str, np.ndarray],
) -> ParityResult:
    min_sqnr = MIN_SQNR_HALF if model.has_half_precision else MIN_SQNR
    tiny_outputs = {name for name, array in outputs.items() if _is_tiny(array)}
    different = [
        agreement for agreement in agreements if agreement.sqnr < min_sqnr and agreement.output not in tiny_outputs
    ]
    same = [agreement for agreement in agreements if agreement.sqnr >= min_sqnr and not agreement.uncompared]
    if different:
        node = _first_different_node(model, inputs, feeds, min_sqnr)
        where = f": the first node that differs is {node}" if node else ""
        text = f"the model in PyTorch differs from the file in {RUNTIME} ({'; '.join(map(str, different))}){where}"
        return ParityResult(Parity.DIFFERENT, text, min(agreement.sqnr for agreement in different), node)
    if not same:
        text = "nothing could be compared with the file: its outputs are about 0 or constant on these inputs. Pass real"
        return ParityResult(Parity.NOT_COMPARED, f"{text} ones as example_inputs or data")
    sqnr = min(agreement.sqnr for agreement in same)
    closeness = "exactly" if sqnr == np.inf else f"to {format_decibels(sqnr)} dB"
    return ParityResult(Parity.SAME, f"PyTorch and {RUNTIME} agree {closeness} on the file", sqnr)


def _is_tiny(array: np.ndarray) -> bool:
    return array.dtype.kind == "f" and bool(np.abs(array.astype(np.float64)).max(initial=0) < MAX_TINY)


def _build_feeds(model: OnnxModel, inputs: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Return all inputs of the file, with its names and types, including the fixed ones."""
    feeds = {
        info.name: inputs[name].detach().to(info.file_dtype).contiguous().numpy()
        for name, info in model.inputs.items()
        if info.file_dtype != torch.bfloat16  # numpy has no such type; ONNX Runtime will report a missing input
    }
    return feeds | {name: value.numpy() for name, value in model.fixed_inputs.items()}


def _first_different_node(
    model: OnnxModel, inputs: Mapping[str, Tensor], feeds: Mapping[str, np.ndarray], min_sqnr: float
) -> str:
    """Return the first node whose outputs differ; "" if the file with all outputs does not run."""
    proto = ModelProto()
    proto.ParseFromString(read_bytes(Path(model.path), LARGEST_PROTOBUF))
    values: dict[str, Any] = {}
    with torch.no_grad():
        model.run([inputs[name] for name in model.inputs], record=values)
    node_texts = {
        name: f"{node.name or node.output[0]!r} ({node.op_type})" for node in proto.graph.node for name in node.output
    }
    runtime_values = _run_with_all_outputs(proto, [name for name in node_texts if name in values], feeds)
    for name, node_text in node_texts.items():
        if name not in runtime_values or name not in values or not isinstance(values[name], Tensor | KnownArray):
            continue
        array = runtime_values[name]
        agreement = compare_outputs([as_tensor(values[name])], {name: array})[0]
        if agreement.sqnr < min_sqnr and not _is_tiny(array):
            return node_text
    return ""


def _run_with_all_outputs(
    proto: ModelProto, names: list[str], feeds: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Run the file unoptimized with further outputs; {} if that fails."""
    if any(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in proto.graph.initializer):
        return {}  # ONNX Runtime reads external data from the folder of the file only
    known = {output.name for output in proto.graph.output}
    proto.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in names if name not in known)
    with TemporaryFolder() as temporary, exchange_files(feeds) as files:
        path = temporary / "all_outputs.onnx"
        path.write_bytes(proto.SerializeToString())
        request = {"task": "run", "path": str(path), "options": {"threads": 1, "optimize": False}, **files.paths}
        answer = run_task(find_runtime(RUNTIME), request)
        return files.outputs(answer) if answer.status == Status.OK else {}
