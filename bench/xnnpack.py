"""Networks for ExecuTorch with XNNPACK: our file, ExecuTorch's own quantizer (PT2E) on the same data, the float file.

    python bench/xnnpack.py [resnet18 mobilenet lite0 minilm small_vit llama]

One thread, all files interleaved in one process, speeds against our float .pte. Their quantizer has constant scales for
convolutions and for transformers, and once more dynamic ones for transformers, as their documentation advises. "share"
is that of the operations which XNNPACK runs. Needs `pip install scalepoint[executorch]`; each network takes minutes, as
ExecuTorch lowers slowly. Results go to out/xnnpack.json, network by network.
"""

import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from networks import SUBJECTS, Subject
from plain_models import Sizes, llama
from scalepoint.formats import export
from scalepoint.graph.export import quiet
from scalepoint.quantize import QuantConfig, quantize
from scalepoint.runtimes import find_runtime
from scalepoint.runtimes.process import ask, exchange
from scalepoint.spec import PerBlockGranularity, QuantizationSpec
from scalepoint.verification import RuntimeModel
from scalepoint.verification.simulation import feeds_of

OUT = Path(__file__).parent.parent / "out" / "xnnpack.json"
NAMES = ("resnet18", "mobilenet", "lite0", "minilm", "small_vit", "llama")
INT4 = QuantizationSpec(dtype="int4", granularity=PerBlockGranularity(block_size=32), qparam_calculator_cls="static")
RUNTIME = find_runtime("executorch")


@dataclass(frozen=True)
class Result:
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


def sqnr(expected: Tensor, found: Tensor) -> float:
    noise = (expected - found).square().sum()
    return float(10 * torch.log10(expected.square().sum() / noise)) if noise else float("inf")


def called(model: Any, inputs: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
    return found


def their_file(subject: Subject, path: Path, *, dynamic: bool) -> Tensor:
    """XNNPACKQuantizer through PT2E, as ExecuTorch documents it; what the converted model gives for the inputs."""
    with quiet():
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
        given = called(converted, subject.inputs)
        final = torch.export.export(converted, args, kwargs, strict=False)
        lowered = to_edge_transform_and_lower(final, partitioner=[XnnpackPartitioner()])
        path.write_bytes(lowered.to_executorch().buffer)
    return given


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
    return [each for each in batch.split(len(inputs)) if len(each) == len(inputs)]


def run(path: Path, feeds: Mapping[str, Any]) -> tuple[list[Tensor], list[dict[str, Any]]]:
    with exchange(feeds) as files:
        answer = ask(
            RUNTIME, {"task": "run", "path": str(path), "options": {"threads": 1}, **files.files, "executed": True}
        )
        if answer.data is None:
            raise SystemExit(f"{path.name}: {answer.status.value}: {answer.message}")
        return [torch.from_numpy(each) for each in files.outputs(answer).values()], list(answer.data["executed"])


def speeds(paths: list[Path], feeds: Mapping[str, Any]) -> list[float]:
    """Against the first."""
    with exchange(feeds) as files:
        request = {"task": "benchmark", "paths": list(map(str, paths)), "options": {"threads": 1}}
        answer = ask(RUNTIME, {**request, "repeats": 40, "seconds": 30, **files.files})
        assert answer.data is not None, answer.message
        medians = [quarters[1] for quarters in answer.data["quartiles"]]
    return [medians[0] / each for each in medians]


def measured(subject: Subject, config: QuantConfig | None = None, others: bool = True) -> list[Result]:
    folder = Path(tempfile.mkdtemp(prefix="xnnpack-"))
    ours, plain = folder / "ours.pte", folder / "float.pte"
    data = [subject.inputs] if config is not None else subject.calibration
    with quiet():
        model = quantize(subject.model, subject.inputs, config, forward_loop=data, target="executorch")
        feeds = feeds_of(
            model,
            (
                () if isinstance(subject.inputs, Mapping) else (subject.inputs,),
                dict(subject.inputs) if isinstance(subject.inputs, Mapping) else {},
            ),
        )
    export(model, ours, subject.inputs, float_path=plain)
    files = [("scalepoint", ours, called(model, subject.inputs))]
    ways = {False: "XNNPACKQuantizer", True: "XNNPACKQuantizer, dynamic"}
    for dynamic, how in ways.items() if others else ():
        if dynamic and not subject.is_transformer:
            continue
        theirs = folder / f"theirs-{dynamic}.pte"
        files.append((how, theirs, their_file(subject, theirs, dynamic=dynamic)))
    ratios = speeds([plain, *(path for _, path, _ in files)], feeds)[1:]
    wanted = called(subject.model, subject.held_out)
    found = []
    for (how, path, simulated), ratio in zip(files, ratios, strict=True):
        outputs, executed = run(path, feeds)
        held_out = _held_out(path, subject)
        kernels = [each for each in executed if each["op"] != "XnnpackBackend"]
        inside = [each for each in kernels if each["op"].startswith("XNN")]
        found.append(
            Result(
                subject.title,
                how,
                len(executed) - len(kernels),
                len(inside) / len(kernels),
                sum(each["low"] is True for each in executed),
                path.stat().st_size / plain.stat().st_size,
                ratio,
                sqnr(simulated, outputs[0]),
                sqnr(wanted, held_out),
                float((wanted.argmax(-1) == held_out.argmax(-1)).float().mean()),
            )
        )
    return found


def _held_out(path: Path, subject: Subject) -> Tensor:
    """In pieces of the batch that every file takes."""
    with RuntimeModel(path, runtime="executorch", threads=1) as runner:
        if isinstance(subject.held_out, Mapping):
            return runner(*subject.held_out.values())
        size = len(subject.inputs)
        return torch.cat([runner(each) for each in subject.held_out.split(size)])


def small_llama() -> Subject:
    torch.manual_seed(0)
    sizes = Sizes(hidden=512, mlp=1408, layers=2, heads=8, words=512)
    model = llama(sizes).eval()
    words = torch.randint(0, 512, (1, 32))
    return Subject("Llama, 2 blocks of 512, 32 words", model, words, [words], torch.randint(0, 512, (1, 32)))


def show(rows: list[Result]) -> None:
    table = Table("network", "how", "delegates", "in XNNPACK", "low", "size", "speed", "dB sim", "dB float", "top-1")
    for row in rows:
        table.add_row(
            row.network, row.how, str(row.delegates), f"{row.share:.0%}", str(row.low), f"{row.size:.3f}",
            f"{row.speed:.2f}", f"{row.simulation:.1f}", f"{row.against_float:.1f}", f"{row.top1:.0%}",
        )  # fmt: skip
    Console(width=160).print(table)


def main() -> None:
    names = sys.argv[1:] or list(NAMES)
    OUT.parent.mkdir(exist_ok=True)
    for name in names:
        if name == "llama":
            rows = measured(small_llama(), QuantConfig(weight=INT4), others=False)
        else:
            rows = measured(SUBJECTS[name](None))
        show(rows)
        known = [Result(**each) for each in json.loads(OUT.read_text())] if OUT.is_file() else []
        kept = [each for each in known if each.network != rows[0].network]
        OUT.write_text(json.dumps([asdict(each) for each in (*kept, *rows)], indent=1))


if __name__ == "__main__":
    main()
