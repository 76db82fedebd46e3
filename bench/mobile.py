"""Networks on mobile runtimes: ExecuTorch with XNNPACK, LiteRT and Core ML.

    python bench/mobile.py executorch [resnet18 mobilenet lite0 minilm small_vit llama]
    python bench/mobile.py litert [resnet18 mobilenet squeezenet lite0 minilm small_vit]
    python bench/mobile.py litert-kernels
    python bench/mobile.py coreml [--json FILE] [resnet18 mobilenet lite0 minilm small_vit]

One thread, all files interleaved in one process; speeds are ratios to our float file.
executorch (pip install scalepoint[executorch]): ours, and ExecuTorch's own quantizer (PT2E) on the same data. It has
constant scales, and for transformers also dynamic ones, as its documentation advises. "share" is that of the operations
which XNNPACK runs. Lowering takes minutes per network. Adds to out/xnnpack.json.
litert (pip install scalepoint[litert]): ours, "balanced" with accuracy="balanced", and ai-edge-quantizer on the float
file and the same data where AI_EDGE_QUANTIZER names the Python of an environment that has it. "integer" is the share of
operators that compute with integers, "XNNPACK" of those in its delegate, "pieces" the number of delegated subgraphs.
Networks of random weights are judged on 32 random pictures that calibrated nothing. Adds to out/litert.json.
litert-kernels: whether LiteRT runs a file written by its public schema in integer kernels. For a convolution, a
depthwise one and a linear layer: which operations the interpreter holds, and how many codes equal those of exact
integer arithmetic, with LiteRT's own kernels and with XNNPACK. Uses nothing of scalepoint; see docs/decisions/0017.
coreml (pip install scalepoint[coreml]): tensors of the file that differ from the model's (none may), agreement of the
evaluated program with the simulation, and the size against the float16 file.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import scalepoint
from measure import run_part
from networks import SUBJECTS, Subject
from plain_models import Sizes, llama
from scalepoint.formats import export, find_format
from scalepoint.graph.torch_export import export_logs_silenced
from scalepoint.pipeline.accuracy import PRESETS
from scalepoint.quantize import QuantConfig, quantize
from scalepoint.runtimes import Runtime, find_runtime
from scalepoint.runtimes.process import exchange_files, run_task
from scalepoint.spec import PerBlockGranularity, QuantizationSpec
from scalepoint.tuning import tune
from scalepoint.verification import RuntimeModel
from scalepoint.verification.simulation import build_feeds

try:
    import flatbuffers
    from ai_edge_litert import schema_py_generated as schema
    from ai_edge_litert.interpreter import Interpreter, OpResolverType
except ModuleNotFoundError:  # reported by litert_kernels
    schema = None

EXECUTORCH_FILE = Path(__file__).parent.parent / "out" / "xnnpack.json"
EXECUTORCH_NETWORKS = ("resnet18", "mobilenet", "lite0", "minilm", "small_vit", "llama")
INT4 = QuantizationSpec(dtype="int4", granularity=PerBlockGranularity(block_size=32), qparam_calculator_cls="static")
EXECUTORCH = find_runtime("executorch")


@dataclass(frozen=True)
class ExecutorchResult:
    network: str
    how: str
    delegates: int
    share: float
    low: int
    size: float  # of the float file's
    speed: float  # of the float file's
    simulation: float  # dB
    against_float: float  # dB, on held-out data
    top1: float  # the same as the float model's, on held-out data


def named_networks(description: str, names: Sequence[str]) -> list[str]:
    """The networks that the command line names; all of them unless it names some."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(names)}; all unless named")
    return parser.parse_args().names or list(names)


def sqnr(expected: Tensor, output: Tensor) -> float:
    noise = (expected - output).square().sum()
    return float(10 * torch.log10(expected.square().sum() / noise)) if noise else float("inf")


def called(model: Any, inputs: Any) -> Tensor:
    with torch.no_grad():
        output: Tensor = model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
    return output


def xnnpack_quantizer_file(subject: Subject, path: Path, *, dynamic: bool) -> Tensor:
    """XNNPACKQuantizer through PT2E, as ExecuTorch documents it; what the converted model gives for the inputs."""
    with export_logs_silenced():
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner  # noqa: PLC0415
        from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (  # noqa: PLC0415
            XNNPACKQuantizer,
            get_symmetric_quantization_config,
        )
        from executorch.exir import to_edge_transform_and_lower  # noqa: PLC0415
        from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e  # noqa: PLC0415

        args = () if isinstance(subject.inputs, Mapping) else (subject.inputs,)
        kwargs = dict(subject.inputs) if isinstance(subject.inputs, Mapping) else {}
        config = get_symmetric_quantization_config(is_per_channel=True, is_dynamic=dynamic)
        program = torch.export.export(subject.model, args, kwargs, strict=False)
        prepared = prepare_pt2e(program.module(), XNNPACKQuantizer().set_global(config))
        for batch in subject.calibration:
            for piece in pieces_of(batch, subject.inputs):
                called(prepared, piece)
        converted = convert_pt2e(prepared)
        output = called(converted, subject.inputs)
        final = torch.export.export(converted, args, kwargs, strict=False)
        lowered = to_edge_transform_and_lower(final, partitioner=[XnnpackPartitioner()])
        path.write_bytes(lowered.to_executorch().buffer)
    return output


def _same_shape(batch: Any, inputs: Any) -> bool:
    if isinstance(batch, Mapping):
        return all(batch[name].shape == inputs[name].shape for name in inputs)
    return bool(batch.shape == inputs.shape)


def pieces_of(batch: Any, inputs: Any) -> list[Any]:
    """In the shape of the example, for what takes no other: in pieces, other lengths cut or padded."""
    if _same_shape(batch, inputs):
        return [batch]
    if isinstance(batch, Mapping):
        count, length = next(iter(inputs.values())).shape
        fitted = {
            name: nn.functional.pad(value, (0, max(0, length - value.shape[1])))[:, :length]
            for name, value in batch.items()
        }
        size = len(next(iter(fitted.values())))
        return [
            {name: value[at : at + count] for name, value in fitted.items()} for at in range(0, size - count + 1, count)
        ]
    return [piece for piece in batch.split(len(inputs)) if len(piece) == len(inputs)]


def run(runtime: Runtime, path: Path, feeds: Mapping[str, Any]) -> tuple[list[Tensor], list[dict[str, Any]]]:
    with exchange_files(feeds) as files:
        answer = run_task(
            runtime, {"task": "run", "path": str(path), "options": {"threads": 1}, **files.paths, "executed": True}
        )
        if answer.data is None:
            raise SystemExit(f"{path.name}: {answer.status.value}: {answer.message}")
        return [torch.from_numpy(array) for array in files.outputs(answer).values()], list(answer.data["executed"])


def speeds(runtime: Runtime, paths: list[Path], feeds: Mapping[str, Any]) -> list[float]:
    """Against the first."""
    with exchange_files(feeds) as files:
        request = {"task": "benchmark", "paths": list(map(str, paths)), "options": {"threads": 1}}
        answer = run_task(runtime, {**request, "repeats": 40, "seconds": 30, **files.paths})
        assert answer.data is not None, answer.message
        medians = answer.data["medians"]
    return [medians[0] / median for median in medians]


def measure_executorch(
    subject: Subject, config: QuantConfig | None = None, with_peers: bool = True
) -> list[ExecutorchResult]:
    folder = Path(tempfile.mkdtemp(prefix="xnnpack-"))
    ours, plain = folder / "ours.pte", folder / "float.pte"
    data = [subject.inputs] if config is not None else subject.calibration
    with export_logs_silenced():
        model = quantize(subject.model, subject.inputs, config, forward_loop=data, target="executorch")
        feeds = build_feeds(
            model,
            (
                () if isinstance(subject.inputs, Mapping) else (subject.inputs,),
                dict(subject.inputs) if isinstance(subject.inputs, Mapping) else {},
            ),
        )
    export(model, ours, subject.inputs, float_path=plain)
    files = [("scalepoint", ours, called(model, subject.inputs))]
    ways = {False: "XNNPACKQuantizer", True: "XNNPACKQuantizer, dynamic"}
    for dynamic, how in ways.items() if with_peers else ():
        if dynamic and not subject.is_transformer:
            continue
        theirs = folder / f"theirs-{dynamic}.pte"
        files.append((how, theirs, xnnpack_quantizer_file(subject, theirs, dynamic=dynamic)))
    ratios = speeds(EXECUTORCH, [plain, *(path for _, path, _ in files)], feeds)[1:]
    expected = called(subject.model, subject.held_out)
    results = []
    for (how, path, simulated), ratio in zip(files, ratios, strict=True):
        outputs, executed = run(EXECUTORCH, path, feeds)
        held_out = _executorch_held_out(path, subject)
        kernels = [operation for operation in executed if operation["op"] != "XnnpackBackend"]
        inside = [operation for operation in kernels if operation["op"].startswith("XNN")]
        results.append(
            ExecutorchResult(
                subject.title,
                how,
                len(executed) - len(kernels),
                len(inside) / len(kernels),
                sum(operation["low"] is True for operation in executed),
                path.stat().st_size / plain.stat().st_size,
                ratio,
                sqnr(simulated, outputs[0]),
                sqnr(expected, held_out),
                float((expected.argmax(-1) == held_out.argmax(-1)).float().mean()),
            )
        )
    return results


def _executorch_held_out(path: Path, subject: Subject) -> Tensor:
    """In pieces of the batch that every file takes."""
    with RuntimeModel(path, runtime="executorch", threads=1) as runner:
        if isinstance(subject.held_out, Mapping):
            return runner(*subject.held_out.values())
        size = len(subject.inputs)
        return torch.cat([runner(piece) for piece in subject.held_out.split(size)])


def small_llama() -> Subject:
    torch.manual_seed(0)
    sizes = Sizes(hidden=512, mlp=1408, layers=2, heads=8, words=512)
    model = llama(sizes).eval()
    words = torch.randint(0, 512, (1, 32))
    return Subject("Llama, 2 blocks of 512, 32 words", model, words, [words], torch.randint(0, 512, (1, 32)))


def show_executorch(rows: list[ExecutorchResult]) -> None:
    table = Table("network", "how", "delegates", "in XNNPACK", "low", "size", "speed", "dB sim", "dB float", "top-1")
    for row in rows:
        table.add_row(
            row.network, row.how, str(row.delegates), f"{row.share:.0%}", str(row.low), f"{row.size:.3f}",
            f"{row.speed:.2f}", f"{row.simulation:.1f}", f"{row.against_float:.1f}", f"{row.top1:.0%}",
        )  # fmt: skip
    Console(width=160).print(table)


def executorch() -> None:
    names = named_networks("Networks for ExecuTorch with XNNPACK", EXECUTORCH_NETWORKS)
    EXECUTORCH_FILE.parent.mkdir(exist_ok=True)
    for name in names:
        if name == "llama":
            rows = measure_executorch(small_llama(), QuantConfig(weight=INT4), with_peers=False)
        else:
            rows = measure_executorch(SUBJECTS[name](None))
        show_executorch(rows)
        known = (
            [ExecutorchResult(**result) for result in json.loads(EXECUTORCH_FILE.read_text())]
            if EXECUTORCH_FILE.is_file()
            else []
        )
        other_results = [result for result in known if result.network != rows[0].network]
        EXECUTORCH_FILE.write_text(json.dumps([asdict(result) for result in (*other_results, *rows)], indent=1))


LITERT_FILE = Path(__file__).parent.parent / "out" / "litert.json"
LITERT_NETWORKS = ("resnet18", "mobilenet", "squeezenet", "lite0", "minilm", "small_vit")
LITERT = find_runtime("litert")
OWN_KERNEL = " (own kernel)"
# Its algorithms: the default, and of the others the one that did best among those that leave no more layers float. Its
# GPTQ and OSCAR leave all convolutions float; its MSE is behind its default on every network here.
DEFAULT_ALGORITHM = ("MIN_MAX_UNIFORM_QUANT", "ai-edge-quantizer")
SECOND_ALGORITHM = {False: ("OCTAV", "ai-edge-quantizer, OCTAV"), True: ("GPTQ", "ai-edge-quantizer, GPTQ")}
AI_EDGE_QUANTIZER = """
import json, sys
import numpy as np
from ai_edge_quantizer import algorithm_manager, qtyping, quantizer, recipe
source, data, target, is_dynamic, algorithm = sys.argv[1:]
key = algorithm_manager.AlgorithmName[algorithm]
made = quantizer.Quantizer(source)
held = np.load(data)
count = len({name.split(".", 1)[0] for name in held.files})
batches = [{n.split(".", 1)[1]: held[n] for n in held.files if n.startswith(f"{at}.")} for at in range(count)]
if is_dynamic == "1":
    made.load_quantization_recipe(recipe.dynamic_wi8_afp32(key))
else:
    made.load_quantization_recipe(recipe.static_wi8_ai8(key))
    for name in (qtyping.TFLOperationName.INPUT, qtyping.TFLOperationName.OUTPUT):  # as the model has them, like ours
        made.update_quantization_recipe(".*", name, algorithm_key="no_quantize")
result = made.quantize(made.calibrate({"serving_default": batches}) if made.need_calibration else None)
result.export_model(target, overwrite=True)
"""


@dataclass(frozen=True)
class LitertResult:
    network: str
    how: str
    pieces: int  # of the graph that XNNPACK runs
    delegated: float
    integer: float
    low: int  # operations with weights that run in integers
    size: float  # of the float file's
    speed: float  # of the float file's
    simulation: float | None  # dB
    against_float: float  # dB, on held-out data
    top1: float  # the same as the float model's, on held-out data


def ai_edge_quantizer_file(subject: Subject, source: Path, target: Path, names: list[str], algorithm: str) -> bool:
    """Whether ai-edge-quantizer is here: int8 throughout for CNNs, dynamic for transformers, as its recipes have it."""
    python = os.environ.get("AI_EDGE_QUANTIZER")
    if not python:
        return False
    batches = [piece for batch in subject.calibration for piece in pieces_of(batch, subject.inputs)]
    tensors = {
        f"{at}.{name}": value.numpy()
        for at, piece in enumerate(batches)
        for name, value in zip(names, piece.values() if isinstance(piece, Mapping) else [piece], strict=True)
    }
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data.npz"
        np.savez(data, **tensors)
        how = str(int(subject.is_transformer))
        command = [python, "-c", AI_EDGE_QUANTIZER, str(source), str(data), str(target), how, algorithm]
        done = subprocess.run(command, check=False, capture_output=True)
        if done.returncode:
            raise SystemExit(f"ai-edge-quantizer: {done.stderr.decode()[-2000:]}")
    return True


def judged_by_more(subject: Subject) -> Subject:
    """Random pictures cost nothing: 32 that were not seen."""
    if subject.held_out is not subject.inputs or isinstance(subject.inputs, Mapping):
        return subject
    pictures = torch.randn(32, *subject.inputs.shape[1:], generator=torch.Generator().manual_seed(32))
    return replace(subject, held_out=pictures)


def measure_litert(subject: Subject, folder: Path) -> list[LitertResult]:
    ours, tuned, plain = (folder / f"{name}.tflite" for name in ("ours", "tuned", "float"))
    inputs = subject.inputs
    with export_logs_silenced():
        model = quantize(subject.model, inputs, None, forward_loop=subject.calibration, target="litert")
        call_inputs = ((), dict(inputs)) if isinstance(inputs, Mapping) else ((inputs,), {})
        feeds = build_feeds(model, call_inputs)
    export(model, ours, inputs, float_path=plain)
    files: list[tuple[str, Path, Tensor | None]] = [("scalepoint", ours, called(model, inputs))]
    for algorithm, how in (DEFAULT_ALGORITHM, SECOND_ALGORITHM[subject.is_transformer]):
        path = folder / f"{algorithm}.tflite"
        if ai_edge_quantizer_file(subject, plain, path, list(feeds), algorithm):
            files.append((how, path, None))
    with export_logs_silenced():
        tune(model, subject.calibration, PRESETS["balanced"])
    export(model, tuned, inputs)
    files.insert(1, ("scalepoint, balanced", tuned, called(model, inputs)))
    ratios = speeds(LITERT, [plain, *(path for _, path, _ in files)], feeds)[1:]
    expected = torch.cat([called(subject.model, piece) for piece in pieces_of(subject.held_out, inputs)])
    return [
        _litert_result(subject, piece, ratio, plain, (feeds, expected))
        for piece, ratio in zip(files, ratios, strict=True)
    ]


def _litert_result(
    subject: Subject, file: tuple[str, Path, Tensor | None], ratio: float, plain: Path, test_data: Any
) -> LitertResult:
    how, path, simulated = file
    feeds, expected = test_data
    outputs, executed = run(LITERT, path, feeds)
    held_out = _litert_held_out(path, subject)
    kernels = [operation["op"] for operation in executed if operation["op"] != "XNNPACK"]
    return LitertResult(
        subject.title,
        how,
        len(executed) - len(kernels),
        sum(not op.endswith(OWN_KERNEL) for op in kernels) / len(kernels),
        sum("int8" in op or "int4" in op for op in kernels) / len(kernels),
        sum(operation["low"] is True for operation in executed),
        path.stat().st_size / plain.stat().st_size,
        ratio,
        None if simulated is None else sqnr(simulated, outputs[0]),
        sqnr(expected, held_out),
        float((expected.argmax(-1) == held_out.argmax(-1)).float().mean()),
    )


def _litert_held_out(path: Path, subject: Subject) -> Tensor:
    """In pieces of the shape that every file takes."""
    with RuntimeModel(path, runtime="litert", threads=1) as runner:
        pieces = pieces_of(subject.held_out, subject.inputs)
        return torch.cat([runner(*(piece.values() if isinstance(piece, Mapping) else [piece])) for piece in pieces])


def show_litert(rows: list[LitertResult]) -> None:
    table = Table(
        "network", "how", "pieces", "XNNPACK", "integer", "low", "size", "speed", "dB sim", "dB float", "top-1"
    )
    for row in rows:
        simulation = "" if row.simulation is None else f"{row.simulation:.1f}"
        table.add_row(
            row.network, row.how, str(row.pieces), f"{row.delegated:.0%}", f"{row.integer:.0%}", str(row.low),
            f"{row.size:.3f}", f"{row.speed:.2f}", simulation, f"{row.against_float:.1f}", f"{row.top1:.0%}",
        )  # fmt: skip
    Console(width=160).print(table)


def litert() -> None:
    LITERT_FILE.parent.mkdir(exist_ok=True)
    for name in named_networks("Networks for LiteRT", LITERT_NETWORKS):
        with tempfile.TemporaryDirectory(prefix="litert-") as folder:
            rows = measure_litert(judged_by_more(SUBJECTS[name](None)), Path(folder))
        show_litert(rows)
        known = (
            [LitertResult(**result) for result in json.loads(LITERT_FILE.read_text())] if LITERT_FILE.is_file() else []
        )
        other_results = [result for result in known if result.network != rows[0].network]
        LITERT_FILE.write_text(json.dumps([asdict(result) for result in (*other_results, *rows)], indent=1))


INPUT_QPARAMS, OUTPUT_QPARAMS = (np.float32(0.03), 5), (np.float32(0.05), -7)  # scale and zero point


class TfliteFile:
    """A model of one subgraph, tensor after tensor."""

    def __init__(self) -> None:
        self.model, self.graph = schema.ModelT(), schema.SubGraphT()
        self.model.version, self.model.subgraphs = 3, [self.graph]
        self.model.buffers, self.model.operatorCodes = [schema.BufferT()], []
        self.graph.tensors, self.graph.operators = [], []

    def tensor(self, shape: Any, kind: int, data: Any = None, scale: Any = None, zero: Any = 0, axis: int = 0) -> int:
        record = schema.TensorT()
        record.name, record.shape, record.type = f"t{len(self.graph.tensors)}", np.array(shape, np.int32), kind
        if data is not None:
            buffer = schema.BufferT()
            buffer.data = np.frombuffer(data.tobytes(), np.uint8)
            self.model.buffers.append(buffer)
            record.buffer = len(self.model.buffers) - 1
        if scale is not None:
            qparams = schema.QuantizationParametersT()
            qparams.scale = np.atleast_1d(scale).astype(np.float32)
            qparams.zeroPoint, qparams.quantizedDimension = np.full(qparams.scale.shape, zero, np.int64), axis
            record.quantization = qparams
        self.graph.tensors.append(record)
        return len(self.graph.tensors) - 1

    def operation(self, code: int, inputs: Any, outputs: Any, kind: int = 0, options: Any = None) -> None:
        kind_record, record = schema.OperatorCodeT(), schema.OperatorT()
        kind_record.builtinCode, kind_record.deprecatedBuiltinCode, kind_record.version = code, min(code, 127), 3
        self.model.operatorCodes.append(kind_record)
        record.opcodeIndex, record.builtinOptionsType = len(self.model.operatorCodes) - 1, kind
        record.inputs, record.outputs = np.array(inputs, np.int32), np.array(outputs, np.int32)
        record.builtinOptions = options
        self.graph.operators.append(record)

    def packed(self, inputs: int, outputs: int) -> bytes:
        self.graph.inputs, self.graph.outputs = np.array([inputs], np.int32), np.array([outputs], np.int32)
        builder = flatbuffers.Builder(1024)
        builder.Finish(self.model.Pack(builder), b"TFL3")
        return bytes(builder.Output())


def kernel_layer(kind: str, rng: np.random.Generator) -> tuple[Any, Any, Any, int]:
    """A weight as LiteRT lays it out, input and output shapes, the axis of its scales."""
    if kind == "FULLY_CONNECTED":
        return rng.integers(-127, 128, (16, 64)).astype(np.int8), (8, 64), (8, 16), 0
    if kind == "DEPTHWISE_CONV_2D":
        return rng.integers(-127, 128, (1, 3, 3, 8)).astype(np.int8), (1, 10, 10, 8), (1, 8, 8, 8), 3
    return rng.integers(-127, 128, (16, 3, 3, 8)).astype(np.int8), (1, 10, 10, 8), (1, 8, 8, 16), 0


def kernel_options(kind: str) -> tuple[int, Any]:
    if kind == "FULLY_CONNECTED":
        return schema.BuiltinOptions.FullyConnectedOptions, schema.FullyConnectedOptionsT()
    is_plain = kind == "CONV_2D"
    options: Any = schema.Conv2DOptionsT() if is_plain else schema.DepthwiseConv2DOptionsT()
    options.padding, options.strideW, options.strideH = schema.Padding.VALID, 1, 1
    options.dilationWFactor = options.dilationHFactor = 1
    if is_plain:
        return schema.BuiltinOptions.Conv2DOptions, options
    options.depthMultiplier = 1
    return schema.BuiltinOptions.DepthwiseConv2DOptions, options


def exact_product(kind: str, codes: Any, weight: Any) -> Any:
    wide = weight.astype(np.int64)
    if kind == "FULLY_CONNECTED":
        return codes @ wide.T
    positions = [(row, column) for row in range(3) for column in range(3)]
    if kind == "DEPTHWISE_CONV_2D":
        return sum(codes[:, r : r + 8, c : c + 8] * wide[0, r, c] for r, c in positions)
    return sum(codes[:, r : r + 8, c : c + 8] @ wide[:, r, c].T for r, c in positions)


def compare_kernel(kind: str, resolver: Any) -> str:
    rng = np.random.default_rng(0)
    weight, input_shape, gives, axis = kernel_layer(kind, rng)
    scales = (rng.random(weight.shape[axis]) * 0.004 + 0.0005).astype(np.float32)
    bias = rng.integers(-500, 500, len(scales)).astype(np.int32)
    file, types = TfliteFile(), schema.TensorType
    source, target = file.tensor(input_shape, types.FLOAT32), file.tensor(gives, types.FLOAT32)
    codes_in = file.tensor(input_shape, types.INT8, None, *INPUT_QPARAMS)
    codes_out = file.tensor(gives, types.INT8, None, *OUTPUT_QPARAMS)
    tensors = [
        file.tensor(weight.shape, types.INT8, weight, scales, 0, axis),
        file.tensor(bias.shape, types.INT32, bias, INPUT_QPARAMS[0] * scales),
    ]
    operators = schema.BuiltinOperator
    file.operation(operators.QUANTIZE, [source], [codes_in])
    file.operation(getattr(operators, kind), [codes_in, *tensors], [codes_out], *kernel_options(kind))
    file.operation(operators.DEQUANTIZE, [codes_out], [target])
    run = Interpreter(model_content=file.packed(source, target), experimental_op_resolver_type=resolver)
    run.allocate_tensors()
    x = rng.standard_normal(input_shape).astype(np.float32)
    run.set_tensor(source, x)
    run.invoke()
    output_codes = np.rint(run.get_tensor(target) / OUTPUT_QPARAMS[0]) + OUTPUT_QPARAMS[1]
    codes = np.clip(np.rint(x / INPUT_QPARAMS[0]) + INPUT_QPARAMS[1], -128, 127).astype(np.int64) - INPUT_QPARAMS[1]
    values = (exact_product(kind, codes, weight) + bias) * (np.float64(INPUT_QPARAMS[0]) * scales)
    apart = np.abs(output_codes - np.clip(np.rint(values / OUTPUT_QPARAMS[0]) + OUTPUT_QPARAMS[1], -128, 127))
    ran = ", ".join(sorted({operation["op_name"] for operation in run._get_ops_details()} - {"QUANTIZE", "DEQUANTIZE"}))
    return f"{100 * float((apart == 0).mean()):6.2f} % equal, at most {int(apart.max())} apart, {ran}"


def litert_kernels() -> None:
    argparse.ArgumentParser(description="Integer kernels of LiteRT in single operators").parse_args()
    if schema is None:
        raise SystemExit("LiteRT is not installed: pip install scalepoint[litert]")
    kernels = {"own": OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES, "XNNPACK": OpResolverType.AUTO}
    for kind in ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED"):
        for name, resolver in kernels.items():
            print(f"{kind:18} {name:8} {compare_kernel(kind, resolver)}", flush=True)


COREML_NETWORKS = ("resnet18", "mobilenet", "lite0", "minilm", "small_vit")
COREML_CONFIGS = {
    "int8": QuantConfig(),
    "w int4 / channel": QuantConfig.weight_only("int4", None),
    "w int4 / 32": QuantConfig.weight_only("int4", 32),
    "palette 4": QuantConfig.palettes(4),
    "palette 2 / 16": QuantConfig.palettes(2, 16),
}


def coreml_rows(name: str) -> list[dict[str, Any]]:
    subject = SUBJECTS[name](None)
    has_named_inputs = isinstance(subject.inputs, dict)
    args, kwargs = ((), subject.inputs) if has_named_inputs else ((subject.inputs,), {})
    form = find_format("coreml")
    rows = []
    for way, config in COREML_CONFIGS.items():
        data = subject.calibration[:2] if way == "int8" else None
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of layers that blocks or groups do not divide
            quantized = quantize(
                subject.model, args, config, kwargs=kwargs, forward_loop=data, target="coreml", freeze_weights=True
            ).eval()
            path, plain = Path(folder) / "m.mlpackage", Path(folder) / "f.mlpackage"
            scalepoint.export(quantized, path, args, kwargs=kwargs, float_path=plain)
            verification = scalepoint.verify(path, quantized, args, kwargs=kwargs)
            size, float_size = (form.about(file).size for file in (path, plain))
        row = {"model": subject.title, "way": way, "different": len(verification.differences), "db": verification.sqnr}
        row |= {
            "low": verification.low_precision,
            "mb": size / 1e6,
            "of float16": size / float_size,
            "status": verification.status.value,
        }
        rows.append(row)
        print(
            f"{row['model']:34} {way:18} {row['different']} differ, {row['db']:6.1f} dB, {row['low']:3} narrow, "
            f"{row['mb']:6.2f} MB, {row['of float16']:.3f} of float16, {row['status']}",
            flush=True,
        )
    return rows


def coreml() -> None:
    parser = argparse.ArgumentParser(description="Core ML files")
    parser.add_argument("names", nargs="*", default=COREML_NETWORKS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for name in options.names for row in coreml_rows(name)]
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


PARTS = {"executorch": executorch, "litert": litert, "litert-kernels": litert_kernels, "coreml": coreml}

if __name__ == "__main__":
    sys.exit(run_part(__doc__, PARTS))
