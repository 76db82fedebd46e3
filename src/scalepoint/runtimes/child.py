"""The other side of the process boundary: loads a file in its runtime and reports. Started by `scalepoint.verify`.

A runtime can crash, hang or eat all memory; here it takes only itself down. The request is JSON on stdin, the answer
JSON on stdout, tensors travel in .npz files. Nothing of torch is imported.
"""

import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

PASSED = ("DequantizeLinear", "Transpose", "Cast")  # from a weight to the product
BLOCKS = (16, 32, 64, 128, 256)
MULTIPLY = ("Convolution", "GroupConvolution", "Deconvolution", "FullyConnected", "MatMul")  # of OpenVINO
Arrays = dict[str, np.ndarray]


def main() -> None:
    request = json.load(sys.stdin)
    limit = request.get("memory")
    if limit:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    answer = TASKS[request["task"]](request)
    json.dump(answer, sys.stdout)


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Outputs of a file, and of its QuantizeLinear nodes when asked; the compiled graph beside."""
    feeds = _given(request["inputs"])
    if request["runtime"] == "openvino":
        outputs, executed = _openvino(request, feeds)
    else:
        outputs, executed = _onnxruntime(request, feeds)
    numbered: dict[str, Any] = {str(index): value for index, (_, value) in enumerate(outputs)}
    np.savez(request["outputs"], **numbered)
    return {"names": [name for name, _ in outputs], "executed": executed}


def _given(path: str) -> Arrays:
    with np.load(path, allow_pickle=False) as file:
        return {name.removeprefix("input."): file[name] for name in file.files}


def _session(request: dict[str, Any], path: str | bytes, optimized: str | None = None) -> Any:
    import onnxruntime as ort  # noqa: PLC0415

    options = ort.SessionOptions()
    options.intra_op_num_threads = request.get("threads", 1)
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    levels = ort.GraphOptimizationLevel
    options.graph_optimization_level = (
        levels.ORT_ENABLE_ALL if request.get("optimize", True) else levels.ORT_DISABLE_ALL
    )
    if optimized:
        options.graph_optimization_level = levels.ORT_ENABLE_EXTENDED
        options.optimized_model_filepath = optimized
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "weights")
        options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
    if isinstance(path, bytes):  # then it does not know where the data files lie
        folder = str(Path(request["path"]).parent)
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
    for key, value in request.get("session", {}).items():
        options.add_session_config_entry(key, value)
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _onnxruntime(request: dict[str, Any], feeds: Arrays) -> tuple[list[tuple[str, np.ndarray]], list[dict[str, Any]]]:
    path = request["path"]
    session = _session(request, _exposed(path) if request.get("expose") else path)
    names = [output.name for output in session.get_outputs()]
    outputs = list(zip(names, session.run(None, _feeds(session, feeds)), strict=True))
    executed: list[dict[str, Any]] = []
    if request.get("compiled"):
        _session(request, path, request["compiled"])
        executed = _compiled(request["compiled"])
    return outputs, executed


def _feeds(session: Any, feeds: Arrays) -> Arrays:
    """The arrays by the names of the file's inputs: by name where they agree, else by place."""
    names = [each.name for each in session.get_inputs()]
    values = list(feeds.values())
    if len(names) > len(values):
        raise SystemExit(f"the file takes {', '.join(names)}, {len(values)} inputs were given")
    return {name: feeds.get(name, values[index]) for index, name in enumerate(names)}


def _exposed(path: str) -> bytes:
    """The model with the outputs of its QuantizeLinear nodes as outputs of its own, named after the nodes."""
    import onnx  # noqa: PLC0415

    model = onnx.load(path, load_external_data=False)
    for node in model.graph.node:
        if node.op_type == "QuantizeLinear":
            model.graph.output.append(onnx.helper.make_empty_tensor_value_info(node.output[0]))
    data: bytes = model.SerializeToString()
    return data


def _compiled(path: str) -> list[dict[str, Any]]:
    """The nodes of the graph that the runtime really runs."""
    import onnx  # noqa: PLC0415

    model = onnx.load(path, load_external_data=False)
    constants = {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}
    made = {name: node for node in model.graph.node for name in node.output}
    executed = []
    for node in model.graph.node:
        name, passed = node.input[1] if len(node.input) > 1 else "", []
        while name in made and made[name].op_type in PASSED:
            passed.append(made[name])
            name = made[name].input[0]
        weighted = name in constants
        why = _why_float(node, passed, constants[name]) if weighted else ""
        executed.append({"name": node.name, "op": node.op_type, "weighted": weighted, "why": why})
    return executed


def _why_float(node: Any, passed: list[Any], shape: list[int]) -> str:
    """Why a product with a constant is one of floats: `passed` leads from the node to the constant."""
    from onnx.helper import get_node_attr_value  # noqa: PLC0415

    dequantize = next((each for each in passed if each.op_type == "DequantizeLinear"), None)
    if dequantize is None:
        return "its weight is float"
    found = {each.name: get_node_attr_value(dequantize, each.name) for each in dequantize.attribute}
    block, axis = found.get("block_size", 0), found.get("axis", 1)
    is_turned = any(each.name == "transB" and each.i for each in node.attribute)
    if is_turned or any(each.op_type == "Transpose" for each in passed):
        why = "which is stored as (out, in): MatMulNBits takes (in, out)"
    elif block and axis:
        why = "which has blocks along its outputs: MatMulNBits takes them along its inputs"
    elif block and (block not in BLOCKS or shape[axis] % block):
        why = f"which has blocks of {block} in {shape[axis]}: MatMulNBits takes {', '.join(map(str, BLOCKS))}"
    elif any(each.op_type == "Cast" for each in passed):
        why = "through a Cast that MatMulNBits does not take"
    else:
        return "its weight is dequantized at each run"
    return f"it dequantizes its weight at each run, {why}"


def _openvino(request: dict[str, Any], feeds: Arrays) -> tuple[list[tuple[str, np.ndarray]], list[dict[str, Any]]]:
    import openvino  # noqa: PLC0415

    core = openvino.Core()
    settings = {"INFERENCE_NUM_THREADS": request.get("threads", 1)}
    compiled = core.compile_model(request["path"], "CPU", settings)
    names = [each.get_any_name() for each in compiled.inputs]
    values = list(feeds.values())
    result = compiled({name: feeds.get(name, values[index]) for index, name in enumerate(names)})
    outputs = [(each.get_any_name(), np.asarray(result[each])) for each in compiled.outputs]
    return outputs, [_openvino_node(op) for op in compiled.get_runtime_model().get_ops()]


def _openvino_node(op: Any) -> dict[str, Any]:
    """What a node of OpenVINO's compiled graph runs; `narrow` when a float product reads its weight as integers."""
    info = op.get_rt_info()
    kind, primitive = str(info["layerType"].value), str(info["primitiveType"].value)
    weighted, narrow = False, ""
    if kind in MULTIPLY:
        weight = op.input_value(1) if len(op.inputs()) > 1 else None
        type_name = "" if weight is None else weight.get_element_type().get_type_name()
        narrow = type_name if type_name.startswith(("i", "u")) else ""
        while weight is not None and _kind(weight) in ("Transpose", "Reorder", "Reshape", "Convert"):
            weight = weight.get_node().input_value(0)
        weighted = kind != "MatMul" or (weight is not None and _kind(weight) == "Const")
    return {"name": op.get_friendly_name(), "op": f"{kind} {primitive}", "weighted": weighted, "narrow": narrow}


def _kind(value: Any) -> str:
    return str(value.get_node().get_rt_info()["layerType"].value)


def benchmark(request: dict[str, Any]) -> dict[str, Any]:
    """Seconds a run of several files, interleaved: noise hits all alike. One thread: of the CPU, which others share."""
    clock = time.process_time if request.get("threads", 1) == 1 else time.perf_counter
    feeds = _given(request["inputs"])
    runs = [_runner(request, path, feeds) for path in request["paths"]]
    taken: list[list[float]] = [[] for _ in runs]
    for each in runs:
        each()
        each()
    deadline = time.monotonic() + request["seconds"]
    while len(taken[0]) < request["repeats"] and (len(taken[0]) < 5 or time.monotonic() < deadline):
        for index, each in enumerate(runs):
            start = clock()
            each()
            taken[index].append(clock() - start)
    return {"medians": [statistics.median(times) for times in taken], "repeats": len(taken[0])}


def _runner(request: dict[str, Any], path: str, feeds: Arrays) -> Callable[[], Any]:
    if request["runtime"] == "openvino":
        import openvino  # noqa: PLC0415

        settings = {"INFERENCE_NUM_THREADS": request.get("threads", 1)}
        compiled = openvino.Core().compile_model(path, "CPU", settings)
        names = [each.get_any_name() for each in compiled.inputs]
        values = list(feeds.values())
        given = {name: feeds.get(name, values[index]) for index, name in enumerate(names)}
        return lambda: compiled(given)
    session = _session(request, path)
    given = _feeds(session, feeds)
    return lambda: session.run(None, given)


TASKS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {"run": run, "benchmark": benchmark}


if __name__ == "__main__":
    main()
