"""A package outside of scalepoint: a format for nets of linear layers, a runtime in numpy for it, a target of both."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import fx, nn

from scalepoint.formats import ExportRequest, FileFormat, FileInfo, FileInput
from scalepoint.patterns import Fused
from scalepoint.quantize import QuantStub
from scalepoint.quantize.quantized_layers import QuantizedLayer
from scalepoint.runtimes import Runtime
from scalepoint.support.files import replace_file
from scalepoint.targets import onnxruntime_target


def write(model: fx.GraphModule, path: Path, request: ExportRequest) -> None:
    """A zip of arrays: the steps in JSON, what they multiply by beside them."""
    labels = {} if request.target is None else {"target": request.target.name}
    _save(path, *_steps(model, is_float=False), labels)
    if request.float_path is not None:
        _save(request.float_path, *_steps(model, is_float=True), {})


def _steps(model: fx.GraphModule, is_float: bool) -> tuple[list[dict], dict[str, np.ndarray]]:
    steps, arrays = [], {}
    for node in model.graph.nodes:
        module = model.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(module, QuantStub) and not is_float:
            low, high = module.quantizer.quant_min, module.quantizer.quant_max
            scale, zero = float(module.scale), int(module.zero_point)
            steps.append({"op": "quantize", "scale": scale, "zero": zero, "low": low, "high": high})
        for role, part in module.parts.items() if isinstance(module, Fused) else ():
            name = f"{node.name}.{role}"
            if isinstance(part, QuantizedLayer):
                steps.append({"op": "linear", "name": name})
                arrays |= {f"{name}.{key}": value for key, value in _linear(part, is_float).items()}
            elif isinstance(part, nn.ReLU):
                steps.append({"op": "relu"})
            elif part is not None:
                raise ValueError(f"{name}: the toy format has no {type(part).__name__}")
    return steps, arrays


def _linear(part: QuantizedLayer, is_float: bool) -> dict[str, np.ndarray]:
    if is_float:
        weight, bias = part.fold_norm()
        return {"codes": weight.detach().numpy(), "scale": np.float32(1), "bias": bias.detach().numpy()}
    deployed = part.get_deployed()
    bias = deployed.bias if deployed.bias_scale is None else deployed.bias * deployed.bias_scale
    scale = part.weight_quant.scale.reshape(-1, 1)
    return {"codes": deployed.codes.numpy(), "scale": scale.detach().numpy(), "bias": bias.detach().numpy()}


def _save(path: Path, steps: list[dict], arrays: dict[str, np.ndarray], labels: dict[str, str]) -> None:
    text = np.frombuffer(json.dumps({"steps": steps, "labels": labels}).encode(), np.uint8)

    def put(temporary: Path) -> None:
        with temporary.open("wb") as file:
            np.savez(file, steps=text, **arrays)

    replace_file(path, put)


def about(path: Path) -> FileInfo:
    with np.load(path) as file:
        labels = json.loads(file["steps"].tobytes())["labels"]
        first = next(value for name in file.files if name.endswith(".codes") for value in [file[name]])
    return FileInfo(path.stat().st_size, (FileInput("x", "float32", (None, first.shape[1])),), labels)


def files(path: Path) -> list[Path]:
    return [path]


FORMAT = FileFormat("toy", ".toy", write, files, about, "nets of linear layers")
RUNTIME = Runtime("toy-numpy", "numpy", Path(__file__).with_name("toy_child.py"), ("toy",), "numpy")
TARGET = replace(onnxruntime_target("avx2"), name="toy", summary="a toy", format="toy", runtime="toy-numpy")
NO_FORMAT = "a string"
