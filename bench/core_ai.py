"""Core AI files of ten networks, next to those of coreai-opt: size, and dB against the float model.

    python bench/core_ai.py [--json FILE] [--nearest] [--ways W8A8 w8] [resnet18 mobilenet lite0 ...]
    python bench/write_page.py    # the table of docs/measured/core-ai.md

Needs `pip install scalepoint[coreai]`. coreai-opt 0.3.0 takes part if it can be imported. It gets the same model and
calibration data, and its file is written as its documentation says (16-bit floats, release mode). Both files run in
Core AI's own runtime on the CPU, in a child process. dB compares the outputs of the held-out batch with those of the
float model. Sizes are those of the program (main.mlirb). "agrees" is our file against our simulation, "differ" the
tensors of our file that differ from the model's (none may). Our files have accuracy="balanced", which reads the
calibration data; --nearest adds our files with weights that are rounded to nearest.
All networks but lite0, resnet8 and minilm have random weights. Pictures are small, because this runtime is slow.
coreai-opt leaves the input projections of nn.MultiheadAttention in float, except in palettes. With "projections float"
ours are float too, next to the same file of coreai-opt.
"""

import argparse
import copy
import json
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import scalepoint
from networks import SUBJECTS, Subject, liven, torchvision_models
from plain_models import Sizes, UNet, llama, mobilenet_v2, resnet18
from scalepoint.compat.torch_names import pytree
from scalepoint.formats import find_format
from scalepoint.graph.torch_export import export_logs_silenced
from scalepoint.pipeline.accuracy import PRESETS
from scalepoint.quantize import Override, QuantConfig, quantize
from scalepoint.quantize.presets import COREAI_MACOS, FLOAT_EMBEDDINGS
from scalepoint.runtimes import find_runtime
from scalepoint.runtimes.process import exchange_files, run_task
from scalepoint.tuning import TuneConfig, tune

try:
    import coreai_opt
except ModuleNotFoundError:
    coreai_opt = None

WAYS = {
    "W8A8": QuantConfig(),
    "w8": QuantConfig.weight_only("int8", None),
    "w4 / 32": QuantConfig.weight_only("int4", 32),
    "palette 4 / 16": QuantConfig.palettes(4, 16),
}
FLOAT_PROJECTIONS = Override(name="*.in_proj", weight="float", activation="float")
SAME_LAYERS = {f"{way}, projections float": way for way in WAYS if not way.startswith("palette")}
WAYS |= {
    name: WAYS[way].model_copy(update={"overrides": (*WAYS[way].overrides, FLOAT_PROJECTIONS)})
    for name, way in SAME_LAYERS.items()
}
PROGRAM_FILE = "main.mlirb"
SECONDS = 900
ROWS = Path(__file__).parent.parent / "docs" / "measured" / "core-ai.json"


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(64, 128, batch_first=True), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.lstm(x)
        output: Tensor = self.head(hidden)
        return output


def random_inputs(title: str, model: nn.Module, *shape: int) -> Subject:
    generator = torch.Generator().manual_seed(0)
    held_out, *calibration = (torch.randn(*shape, generator=generator) for _ in range(5))
    return Subject(title, model.eval(), held_out, calibration, held_out)


def convnext() -> Subject:
    torch.manual_seed(0)
    block = torchvision_models().convnext.CNBlockConfig
    stages = [block(48, 96, 2), block(96, 192, 2), block(192, None, 2)]
    model = torchvision_models().convnext.ConvNeXt(stages, layer_scale=1.0, num_classes=100)
    return random_inputs("ConvNeXt @64", model, 1, 3, 64, 64)


def unet() -> Subject:
    torch.manual_seed(0)
    model = UNet()
    liven(model)
    return random_inputs("U-Net @64", model, 1, 3, 64, 64)


def livened(title: str, model: nn.Module, size: int) -> Subject:
    """A network whose batch norms have random statistics, so that its outputs depend on its input."""
    liven(model)
    return random_inputs(title, model, 1, 3, size, size)


def small_vit() -> Subject:
    """The one of networks.py, with 32 pictures to calibrate: a layer has up to 768 inputs, and 65 rows per picture."""
    subject = single_samples("small_vit", 4)
    generator = torch.Generator().manual_seed(0)
    more = [torch.randn(1, 3, 32, 32, generator=generator) for _ in range(28)]
    return Subject(subject.title, subject.model, subject.held_out, [*subject.calibration, *more], subject.held_out)


def lstm() -> Subject:
    torch.manual_seed(0)
    return random_inputs("LSTM, 16 steps", Lstm(), 1, 16, 64)


def small_llama() -> Subject:
    batches = [torch.randint(0, 256, (1, 32), generator=torch.Generator().manual_seed(seed)) for seed in range(5)]
    return Subject("Llama of 2 layers", llama(Sizes()), batches[0], batches[1:], batches[0])


def resnet8() -> Subject:
    from trained_networks import resnet8 as trained  # noqa: PLC0415

    subject = trained()
    calibration = list(subject.calibration[:4])
    return Subject("ResNet-8 @32, trained", subject.model, calibration[0][:4], calibration[1:], calibration[0][:4])


def single_samples(name: str, most: int) -> Subject:
    """One sample in every batch: the programs of coreai-opt have the batch of the example."""
    subject = SUBJECTS[name](None)
    held_out = pytree.tree_map(lambda value: value[:1], subject.held_out)
    calibration = [
        pytree.tree_map(lambda value, index=index: value[index : index + 1], batch)
        for batch in subject.calibration
        for index in range(len(pytree.tree_leaves(batch)[0]))
    ]
    return Subject(subject.title, subject.model, held_out, calibration[:most], held_out)


NETWORKS: Mapping[str, Callable[[], Subject]] = {
    "resnet18": lambda: livened("ResNet-18 @64", resnet18(), 64),
    "mobilenet": lambda: livened("MobileNetV2 @96", mobilenet_v2(), 96),
    "lite0": lambda: single_samples("lite0", 8),
    "resnet8": resnet8,
    "minilm": lambda: single_samples("minilm", 16),
    "small_vit": small_vit,
    "convnext": convnext,
    "unet": unet,
    "lstm": lstm,
    "llama": small_llama,
}


def as_call(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((), dict(inputs)) if isinstance(inputs, Mapping) else ((inputs,), {})


def run_model(model: nn.Module, inputs: Any) -> list[np.ndarray]:
    args, kwargs = as_call(inputs)
    with torch.no_grad():
        return [value.numpy() for value in pytree.tree_leaves(model(*args, **kwargs))]


def run_file(path: Path, inputs: Any) -> list[np.ndarray]:
    """Run a file in Core AI's runtime and return its outputs."""
    feeds = {str(index): value.numpy() for index, value in enumerate(pytree.tree_leaves(inputs))}
    with exchange_files(feeds) as files:
        request = {"task": "run", "path": str(path), "options": {}, "executed": False, **files.paths}
        answer = run_task(find_runtime("coreai"), request, seconds=SECONDS)
        if answer.status.value != "ok":
            raise RuntimeError(f"{answer.status.value}: {answer.message}")
        return list(files.outputs(answer).values())


def decibels(expected: list[np.ndarray], actual: list[np.ndarray]) -> float:
    """Signal-to-noise ratio of the worst output."""
    ratios = []
    for reference, output in zip(expected, actual, strict=True):
        noise = float(((reference - output.astype(np.float64)) ** 2).sum())
        signal = float((reference.astype(np.float64) ** 2).sum())
        ratios.append(float("inf") if noise == 0 else 10 * np.log10(signal / noise))
    return float(min(ratios))


def config_for(way: str, model: nn.Module) -> QuantConfig:
    """Embedding tables are those of coreai-opt's presets: int4 in blocks of 32, and float next to palettes."""
    has_tables = any(isinstance(module, nn.Embedding) for module in model.modules())
    if has_tables and way == "w4 / 32":
        return COREAI_MACOS
    if has_tables and "palette" in way:
        return QuantConfig.palettes(4, 16, overrides=[FLOAT_EMBEDDINGS])
    return WAYS[way]


def our_file(subject: Subject, way: str, folder: Path, *, tuned: bool) -> dict[str, Any]:
    args, kwargs = as_call(subject.held_out)
    path = folder / "ours.aimodel"
    needs_data = way == "W8A8" or tuned
    data = subject.calibration if needs_data else None
    with warnings.catch_warnings(), export_logs_silenced():
        warnings.simplefilter("ignore")
        model = quantize(
            subject.model,
            args,
            config_for(way, subject.model),
            kwargs=kwargs,
            forward_loop=data,
            target="coreai",
            freeze_weights=True,
        ).eval()
        if tuned:
            tune(model, subject.calibration, TuneConfig(steps=PRESETS["balanced"]))
        scalepoint.export(model, path, args, kwargs=kwargs)
        differences = find_format("coreai").compare(path, model)
    outputs = run_file(path, subject.held_out)
    row = measure(path, subject, outputs)
    return row | {"agrees": decibels(run_model(model, subject.held_out), outputs), "differ": len(differences)}


def peer_file(subject: Subject, way: str, folder: Path) -> dict[str, Any]:
    """The file of coreai-opt, written as its documentation says."""
    import coreai_torch  # noqa: PLC0415
    from coreai_opt.casting import cast_to_16_bit_precision  # noqa: PLC0415
    from coreai_opt.palettization import KMeansPalettizer, KMeansPalettizerConfig  # noqa: PLC0415
    from coreai_opt.quantization import Quantizer, QuantizerConfig  # noqa: PLC0415

    args, kwargs = as_call(subject.held_out)
    args = (*args, *kwargs.values())
    model = copy.deepcopy(subject.model)
    path = folder / "peer.aimodel"
    way = SAME_LAYERS.get(way, way)
    with warnings.catch_warnings(), export_logs_silenced():
        warnings.simplefilter("ignore")
        if way.startswith("palette"):
            compressor = KMeansPalettizer(model, KMeansPalettizerConfig.presets.w4(group_size=16))
        else:
            presets = QuantizerConfig.presets
            configs = {"W8A8": QuantizerConfig, "w8": presets.w8, "w4 / 32": presets.w4_per_block}
            compressor = Quantizer(model, configs[way]())
        prepared = compressor.prepare(args)
        if way == "W8A8":
            with compressor.calibration_mode(), torch.no_grad():
                for batch in subject.calibration:
                    batch_args, batch_kwargs = as_call(batch)
                    prepared(*batch_args, *batch_kwargs.values())
        finalized = compressor.finalize()
        program = torch.export.export(finalized, args).run_decompositions(coreai_torch.get_decomp_table())
        cast_to_16_bit_precision(program)
        converter = coreai_torch.TorchConverter(mode=coreai_torch.TorchConverter.Mode.RELEASE)
        converter.add_exported_program(program)
        converter.to_coreai().save_asset(path)
    return measure(path, subject, run_file(path, subject.held_out))


def measure(path: Path, subject: Subject, outputs: list[np.ndarray]) -> dict[str, Any]:
    size = (path / PROGRAM_FILE).stat().st_size
    return {"kb": size / 1e3, "db": decibels(run_model(subject.model, subject.held_out), outputs)}


def rows_of(name: str, ways: Sequence[str], done: Collection[Any], *, nearest: bool) -> Iterator[dict[str, Any]]:
    subject = NETWORKS[name]()
    has_projections = any(isinstance(module, nn.MultiheadAttention) for module in subject.model.modules())
    for way in ways:
        if way in SAME_LAYERS and not has_projections:
            continue
        makers: dict[str, Callable[[Path], dict[str, Any]]] = {
            "scalepoint": lambda folder, way=way: our_file(subject, way, folder, tuned=True)  # type: ignore[misc]
        }
        if nearest:
            makers["scalepoint, nearest"] = lambda folder, way=way: our_file(subject, way, folder, tuned=False)  # type: ignore[misc]
        if coreai_opt is not None:
            makers["coreai-opt"] = lambda folder, way=way: peer_file(subject, way, folder)  # type: ignore[misc]
        for tool, make in makers.items():
            row: dict[str, Any] = {"network": subject.title, "way": way, "tool": tool}
            if tuple(row.values()) in done:
                continue
            with tempfile.TemporaryDirectory() as folder:
                try:
                    row |= make(Path(folder))
                except Exception as error:  # a tool that refuses or fails is a result of this bench
                    row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
            yield row


def describe(row: Mapping[str, Any]) -> str:
    start = f"{row['network']:24} {row['way']:15} {row['tool']:18}"
    if "error" in row:
        return f"{start} {row['error']}"
    agreement = f"  agrees {row['agrees']:6.1f} dB, {row['differ']} differ" if "agrees" in row else ""
    return f"{start} {row['kb']:9.1f} kB {row['db']:6.1f} dB{agreement}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=tuple(NETWORKS))
    parser.add_argument("--nearest", action="store_true", help="also our files with weights rounded to nearest")
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=tuple(WAYS), help="default: all")
    parser.add_argument("--json", type=Path, default=ROWS, help="rows that this file has are not run again")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.names:
        done = {(row["network"], row["way"], row["tool"]) for row in read_rows(options.json) if "error" not in row}
        for row in rows_of(name, options.ways, done, nearest=options.nearest):
            print(describe(row), flush=True)
            add_row(options.json, row)


def read_rows(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    return rows


def add_row(path: Path, row: Mapping[str, Any]) -> None:
    """Write a row into a JSON file. It replaces the row with the same network, way and tool."""
    rows = read_rows(path)
    kept_rows = [old for old in rows if any(old[key] != row[key] for key in ("network", "way", "tool"))]
    path.write_text(json.dumps([*kept_rows, row], indent=1) + "\n")


if __name__ == "__main__":
    main()
