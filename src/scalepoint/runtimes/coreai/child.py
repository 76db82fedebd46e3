"""Child program that runs an .aimodel in Core AI's own runtime, on the CPU.

`child_loop.py` starts it. It imports nothing of scalepoint; it only loads support/coreai_text.py, which also imports
nothing. Products in float16 take about 100 times as long as in float32 here (coreai-core 1.0.0b3), so the float16
numbers of a large program are converted to float32 first, without rounding. Errors of this runtime end the process.
"""

import asyncio
import re
import runpy
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from coreai._compiler.ir import Module
from coreai.authoring import AIProgram, Context
from coreai.authoring.asset import AIModelAsset
from coreai.runtime import NDArray

TEXT = runpy.run_path(str(Path(__file__).parents[2] / "support" / "coreai_text.py"))
MAX_FLOAT16_MACS = 10_000_000  # of a program that runs in float16: about 2 seconds
MAX_MACS = 20_000_000_000  # of a program that runs at all: about 2 minutes
PROGRAM_FILE = "main.mlirb"
NUMPY_TYPES: dict[str, Any] = {"f32": np.float32, "f16": np.float16, "i1": np.bool_, "si8": np.int8, "ui8": np.uint8}
NUMPY_TYPES |= {"si16": np.int16, "ui16": np.uint16, "si32": np.int32, "ui32": np.uint32}
PRODUCTS = ("conv1d", "conv2d", "conv3d", "conv_transpose", "batch_matmul")
WEIGHT_OPERATIONS = ("blockwise_shift_scale", "lut_to_dense", "lut_to_sparse_with_bitmask")
MOVES = ("transpose", "reshape", "cast", "broadcast_in_dims", "sparse_with_bitmask_to_dense")  # weight to product
_SIGNATURE = re.compile(r'%(arg\d+): tensor<((?:[\d?]+x)*)(\w+)> \{coreai\.name = "([^"]*)"')
_OPERATION = re.compile(r"^ *(%\S+?)(?::\d+)? = coreai\.(?:decomposable\.)?(\w+)(.*)$")
_SHAPE = re.compile(r"tensor<((?:[\d?]+x)*)\w+[^>]*>")


class TooSlowError(Exception):
    """The program has too many multiplications for this runtime. The file may be correct."""


class File:
    """A loaded program. Options: expose (return the codes of every quantizer and the product of every layer too)."""

    gaps = (TooSlowError,)

    def __init__(self, path: str, options: dict[str, Any]) -> None:
        self.path = Path(path)
        self.program = TEXT["parse_program"](str(AIModelAsset.load(path).program))
        if options.get("expose"):
            self.program = TEXT["with_layers_as_outputs"](self.program)
        self.is_changed = bool(options.get("expose"))
        header = next(line for line in self.program.lines if TEXT["MAIN_GRAPH"] in line)
        arguments, _, results = header.partition(") -> ")
        self.input_types = {name: NUMPY_TYPES[element] for _, _, element, name in _SIGNATURE.findall(arguments)}
        self.inputs = list(self.input_types)
        self.outputs = re.findall(r'coreai\.name = "([^"]*)"', results)
        self.note = ""

    def run(self, feeds: dict[str, np.ndarray]) -> list[tuple[str, np.ndarray]]:
        batch = max((len(value) for value in feeds.values() if value.ndim), default=1)
        macs = sum(node["macs"] for node in _describe_operations(self.program.lines, batch))
        if macs > MAX_MACS:
            raise TooSlowError(
                f"the program has {macs / 1e9:.1f} billion multiplications, and Core AI's runtime on a CPU is verified "
                f"with up to {MAX_MACS / 1e9:.0f} billion: give inputs with a smaller batch or size"
            )
        program = self.program
        if macs > MAX_FLOAT16_MACS and any("xf16>" in line for line in program.lines):
            program = TEXT["convert_floats"](program, "f16", "f32", keeps_interface=True)
            self.note = "its float16 numbers were computed in float32, because this runtime is slow in float16"
        arrays: dict[str, Any] = {
            name: np.ascontiguousarray(feeds[name], self.input_types[name]) for name in self.inputs
        }
        with tempfile.TemporaryDirectory(prefix="scalepoint-") as folder:
            copy = Path(folder) / "program.aimodel"
            if program is self.program and not self.is_changed:
                shutil.copytree(self.path, copy)
            else:
                _write_program(program, self.path, copy)
            outputs = asyncio.run(_run(copy, arrays))
        return [(name, outputs[name]) for name in self.outputs]

    def executed(self) -> list[dict[str, Any]]:
        """Return the operations of the program. Only the compiler of a device decides about its kernels."""
        names = ("name", "op", "low", "why")
        return [{key: node[key] for key in names} for node in _describe_operations(self.program.lines, 1)]


async def _run(path: Path, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Compile and run the program. AIModel.load alone works on macOS only."""
    async with AIModelAsset.load(path).executable() as model:
        function = model.load_function("main")
        outputs = await function({name: NDArray(value) for name, value in feeds.items()})
        return {name: np.array(value.numpy(), copy=True) for name, value in outputs.items()}


def _write_program(program: Any, source: Path, path: Path) -> None:
    """Write a changed program next to the metadata of the file."""
    shutil.copytree(source, path)
    with Context()._mlir_context:
        AIProgram._from_mlir_module(Module.parse(str(program)))._save_bytecode(path / PROGRAM_FILE)


def _describe_operations(lines: tuple[str, ...], batch: int) -> list[dict[str, Any]]:
    """List the operations with the number of their multiplications; `batch` is the size of free axes.

    "low" says whether a product reads a weight that is stored as codes. It is None for all other operations, and for a
    product of two computed tensors.
    """
    producers: dict[str, tuple[str, list[str]]] = {}
    nodes = []
    for line in lines:
        match = _OPERATION.match(line)
        if match is None:
            continue
        result, kind, rest = match.groups()
        operands = re.findall(r"%[\w#]+", rest.partition(" : ")[0])
        producers[result] = (kind, operands)
        if kind == "constant":
            continue
        low, macs = None, 0
        if any(product in kind for product in PRODUCTS):
            weight = _find_weight(operands[1], producers)
            low = None if weight == "computed" else weight in WEIGHT_OPERATIONS
            macs = _count_macs(kind, rest, batch)
        op = kind.removeprefix("broadcasting_")
        why = "float weights" if low is False else ""
        nodes.append({"name": f"{op} {result}", "op": op, "low": low, "why": why, "macs": macs})
    return nodes


def _find_weight(value: str, producers: dict[str, tuple[str, list[str]]]) -> str:
    """Return the operation that makes a weight: one of WEIGHT_OPERATIONS, "constant", or "computed"."""
    kind, operands = producers.get(value, ("computed", []))
    while kind in MOVES and operands:
        kind, operands = producers.get(operands[0], ("computed", []))
    return kind if kind in (*WEIGHT_OPERATIONS, "constant") else "computed"


def _parse_sizes(sizes: str, batch: int) -> list[int]:
    """Convert the sizes of a tensor type, such as "1x3x?x" for tensor<1x3x?xf32>; a free size becomes `batch`."""
    return [batch if size == "?" else int(size) for size in sizes.split("x")[:-1]]


def _count_macs(kind: str, rest: str, batch: int) -> int:
    """Count multiplications from the types of a line: (x, weight, ..) -> result."""
    shapes = [_parse_sizes(sizes, batch) for sizes in _SHAPE.findall(rest.partition(" : ")[2])]
    x, weight, result = shapes[0], shapes[1], shapes[-1]
    if "matmul" in kind:
        return int(np.prod(result, dtype=np.int64)) * x[-1]
    if "transpose" in kind:  # every input element is multiplied with the weights of its channel
        return int(np.prod(x, dtype=np.int64)) * int(np.prod(weight[1:], dtype=np.int64))
    return int(np.prod(result, dtype=np.int64)) * int(np.prod(weight[1:], dtype=np.int64))
