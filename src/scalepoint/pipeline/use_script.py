"""use.py: a program of about ten lines in the output folder that runs the file with its runtime alone."""

from collections.abc import Mapping

import numpy as np

START = '''"""Run {file} with {title} alone: pip install {package}; python use.py"""

from pathlib import Path

import numpy as np
{imports}

inputs = {{  # zeros: replace them by your data
{inputs}
}}
path = str(Path(__file__).with_name("{file}"))
'''
END = """
for name, value in outputs.items():
    print(name, value.shape, value.dtype)
"""
# Runtime -> its name, the packages to install, the imports, and the lines that compute `outputs`.
RUNTIMES = {
    "onnxruntime": (
        "ONNX Runtime",
        "onnxruntime numpy",
        "import onnxruntime",
        """\
session = onnxruntime.InferenceSession(path)
names = [output.name for output in session.get_outputs()]
outputs = dict(zip(names, session.run(None, inputs)))
""",
    ),
    "openvino": (
        "OpenVINO",
        "openvino numpy",
        "import openvino",
        """\
compiled = openvino.Core().compile_model(path, "CPU")
results = compiled(inputs)
outputs = {port.get_any_name(): results[port] for port in compiled.outputs}
""",
    ),
    "litert": (
        "LiteRT",
        "ai-edge-litert numpy",
        "from ai_edge_litert.interpreter import Interpreter",
        """\
interpreter = Interpreter(path)
slots = {slot["name"]: slot["index"] for slot in interpreter.get_input_details()}
for name, value in inputs.items():
    interpreter.resize_tensor_input(slots[name], value.shape)
interpreter.allocate_tensors()
for name, value in inputs.items():
    interpreter.set_tensor(slots[name], value)
interpreter.invoke()
outputs = {slot["name"]: interpreter.get_tensor(slot["index"]) for slot in interpreter.get_output_details()}
""",
    ),
    "executorch": (
        "ExecuTorch",
        "executorch numpy",
        "import torch\nfrom executorch.runtime import Runtime",
        """\
method = Runtime.get().load_program(path).load_method("forward")
values = method.execute([torch.from_numpy(value) for value in inputs.values()])
outputs = {f"output_{index}": value.numpy() for index, value in enumerate(values)}
""",
    ),
    "coreml": (
        "Core ML on macOS",
        "coremltools numpy",
        "import coremltools",
        "outputs = coremltools.models.MLModel(path).predict(inputs)\n",
    ),
}


def build_use_script(runtime: str | None, file: str, feeds: Mapping[str, np.ndarray]) -> str | None:
    """Return the program; None for a runtime without one.

    Args:
        runtime: Key of the runtime.
        file: Name of the file in the folder.
        feeds: Example inputs by name; the program makes zeros of their shapes and types.
    """
    if runtime not in RUNTIMES:
        return None
    title, package, imports, lines = RUNTIMES[runtime]
    inputs = "\n".join(
        f"    {name!r}: np.zeros({tuple(map(int, value.shape))}, {value.dtype.name!r}),"
        for name, value in feeds.items()
    )
    return START.format(file=file, title=title, package=package, imports=imports, inputs=inputs) + lines + END
