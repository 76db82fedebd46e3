"""Run real kinds of models with free sizes through the whole pipeline.

Each model is captured with dynamic_axes, quantized, exported, and run in ONNX Runtime and OpenVINO. The outputs are
compared with the simulation at the example's sizes, at the sizes that verify tries, and at two other sizes in steps
that the model allows.

`python bench/dynamic_axes.py [NAME ...]` runs each model in its own process, and adds rows to out/dynamic_axes.json. A
stopped run continues where it stopped; --again repeats the rows that failed. bench/write_page.py makes the table.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))  # the tests own the architectures
from architectures import ARCHITECTURES, ENCODER, PATCHES, WAVES, WHISPER, Architecture, transformer
from scalepoint.errors import CaptureError, ScalepointError, UsageError
from scalepoint.formats import export
from scalepoint.graph.dynamic_axes import resize_inputs
from scalepoint.graph.origin import get_origin
from scalepoint.quantize import quantize
from scalepoint.verification import Status, verify
from weighted import batch

OUT = Path(__file__).parent.parent / "out" / "dynamic_axes.json"
RUNTIMES = ("onnxruntime", "openvino")
SECONDS = 600
LONGEST = 500  # of what is kept of a message
Axes = Mapping[str, Mapping[int, str]]
PICTURE = {2: "height", 3: "width"}


def conv(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> nn.Module:
    layer = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.SiLU())


class UNet(nn.Module):
    """Four levels down and up, skips joined: sizes are multiples of 16."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(5)]
        self.first = conv(3, width)
        self.down = nn.ModuleList(conv(a, b) for a, b in pairwise(widths))
        self.rise = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in pairwise(widths))
        self.up = nn.ModuleList(conv(2 * channels, channels) for channels in widths[:-1])
        self.head = nn.Conv2d(width, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        skips = []
        for down in self.down:
            skips.append(x)
            x = down(F.max_pool2d(x, 2))
        for level in reversed(range(4)):
            x = self.up[level](torch.cat((skips[level], self.rise[level](x)), 1))
        return self.head(x)


class Yolo(nn.Module):
    """A detector's backbone with a pool pyramid, two scales joined by nearest neighbours, boxes decoded on a grid."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first, self.second = conv(3, 16, 3, 2), conv(16, 32, 3, 2), conv(32, 64, 3, 2)
        self.squeeze, self.join, self.merge = conv(64, 32, 1), conv(128, 64, 1), conv(96, 64)
        self.heads = nn.ModuleList(nn.Conv2d(64, 9, 1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        near = self.first(self.stem(x))
        far = self.squeeze(self.second(near))
        pools = [far]
        for _ in range(3):
            pools.append(F.max_pool2d(pools[-1], 5, 1, 2))
        far = self.join(torch.cat(pools, 1))
        near = self.merge(torch.cat((near, F.interpolate(far, scale_factor=2.0, mode="nearest")), 1))
        return torch.cat(
            [self.decoded(head(features), x) for head, features in zip(self.heads, (near, far), strict=True)], 1
        )

    def decoded(self, boxes: Tensor, x: Tensor) -> Tensor:
        rows = torch.arange(boxes.shape[2], device=boxes.device).view(1, 1, -1, 1).expand_as(boxes[:, :1])
        columns = torch.arange(boxes.shape[3], device=boxes.device).view(1, 1, 1, -1).expand_as(boxes[:, :1])
        step = x.shape[2] // boxes.shape[2]
        centers = (boxes[:, :2].sigmoid() + torch.cat((columns, rows), 1)) * step
        return torch.cat((centers, boxes[:, 2:4].exp(), boxes[:, 4:].sigmoid()), 1).flatten(2).transpose(1, 2)


class Crepe(nn.Module):
    """Pitch of a waveform: wide one-dimensional kernels, pooled over time."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv1d(1, 32, 64, 4, 32), nn.ReLU(), nn.BatchNorm1d(32), nn.MaxPool1d(2))
        self.second = nn.Sequential(nn.Conv1d(32, 64, 15, 1, 7), nn.ReLU(), nn.BatchNorm1d(64), nn.MaxPool1d(2))
        self.head = nn.Linear(64, 36)

    def forward(self, wave: Tensor) -> Tensor:
        return self.head(self.second(self.first(wave.unsqueeze(1))).mean(-1)).sigmoid()


class QuartzNet(nn.Module):
    """Speech to letters: separable convolutions over time with residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv1d(64, 64, 11, 2, 5), nn.BatchNorm1d(64), nn.ReLU())
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv1d(64, 64, 13, 1, 6, groups=64), nn.Conv1d(64, 64, 1), nn.BatchNorm1d(64))
            for _ in range(3)
        )
        self.head = nn.Conv1d(64, 29, 1)

    def forward(self, spectrum: Tensor) -> Tensor:
        x = self.first(spectrum)
        for block in self.blocks:
            x = F.relu(x + block(x))
        return self.head(x).transpose(1, 2).log_softmax(-1)


class Recurrent(nn.Module):
    """Features over time through an LSTM of both directions."""

    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM) -> None:
        super().__init__()
        self.first, self.cells = nn.Linear(40, 64), kind(64, 32, batch_first=True, bidirectional=True)
        self.head = nn.Linear(64, 10)

    def forward(self, features: Tensor) -> Tensor:
        return self.head(self.cells(self.first(features).relu())[0])


class Reader(nn.Module):
    """Text lines of any width: convolutions, then an LSTM over columns."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(conv(1, 16, 3), nn.MaxPool2d(2), conv(16, 32), nn.MaxPool2d((2, 1)), conv(32, 64))
        self.cells, self.head = nn.LSTM(64 * 8, 32, batch_first=True, bidirectional=True), nn.Linear(64, 40)

    def forward(self, line: Tensor) -> Tensor:
        x = self.net(line).permute(0, 3, 1, 2).flatten(2)
        return self.head(self.cells(x)[0])


class SuperResolution(nn.Module):
    """Twice as many pixels by a shuffle of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(conv(3, 32), conv(32, 32), nn.Conv2d(32, 12, 3, padding=1), nn.PixelShuffle(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)


class Interpolated(nn.Module):
    """A ViT of transformers whose table of positions is interpolated to the picture."""

    def __init__(self) -> None:
        super().__init__()
        self.net, _ = transformer("ViT", {**PATCHES, "image_size": 64}, dict)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.net(pixel_values, interpolate_pos_encoding=True).last_hidden_state


class Encoder(nn.Module):
    """Whisper's, of which transformers lets only spectra of one length through its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = transformer("Whisper", WHISPER, dict)[0].encoder

    def forward(self, spectrum: Tensor) -> Tensor:
        x = F.gelu(self.net.conv2(F.gelu(self.net.conv1(spectrum)))).transpose(1, 2)
        x = x + self.net.embed_positions.weight[: x.shape[1]]
        for layer in self.net.layers:
            encoded = layer(x, None)
            x = encoded[0] if isinstance(encoded, tuple) else encoded
        return self.net.layer_norm(x)


class Embedded(nn.Module):
    """BERT over embeddings that come from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.net, _ = transformer("Bert", ENCODER, dict)

    def forward(self, embeddings: Tensor, mask: Tensor) -> Tensor:
        return self.net(inputs_embeds=embeddings, attention_mask=mask).last_hidden_state


class Layers(nn.Module):
    """torch's own transformer over frames."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, activation="gelu", norm_first=True)
        self.net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, frames: Tensor) -> Tensor:
        return self.net(frames)


def _build(kind: Callable[[], nn.Module], *shapes: tuple[int, ...]) -> tuple[nn.Module, Any]:
    return kind(), tuple(torch.randn(shape) for shape in shapes)


def _embedded() -> tuple[nn.Module, Any]:
    return Embedded(), (torch.randn(2, 12, 32), torch.ones(2, 12, dtype=torch.long))


OWN_MODELS: dict[str, tuple[Callable[[], tuple[nn.Module, Any]], Axes]] = {
    "unet": (partial(_build, UNet, (2, 3, 64, 64)), {"x": PICTURE}),
    "yolo": (partial(_build, Yolo, (2, 3, 64, 64)), {"x": PICTURE}),
    "super_resolution": (partial(_build, SuperResolution, (2, 3, 32, 32)), {"x": PICTURE}),
    "text_reader": (partial(_build, Reader, (2, 1, 32, 96)), {"line": {3: "width"}}),
    "crepe": (partial(_build, Crepe, (2, 1024)), {"wave": {1: "samples"}}),
    "quartznet": (partial(_build, QuartzNet, (2, 64, 100)), {"spectrum": {2: "frames"}}),
    "lstm": (partial(_build, Recurrent, (2, 30, 40)), {"features": {1: "frames"}}),
    "gru": (partial(_build, partial(Recurrent, nn.GRU), (2, 30, 40)), {"features": {1: "frames"}}),
    "transformer_encoder": (partial(_build, Layers, (2, 20, 64)), {"frames": {1: "frames"}}),
    "whisper_encoder": (partial(_build, Encoder, (2, 16, 60)), {"spectrum": {2: "frames"}}),
    "bert_embeddings": (_embedded, {"embeddings": {1: "tokens"}, "mask": {1: "tokens"}}),
    "vit_interpolated": (partial(_build, Interpolated, (2, 3, 96, 64)), {"pixel_values": PICTURE}),
    "wav2vec2_conformer": (
        partial(transformer, "Wav2Vec2Conformer", WAVES, lambda: {"input_values": torch.randn(2, 800)}),
        {"input_values": {1: "samples"}},
    ),
}
PICTURES = (
    "fcn_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large", "resnet18_fpn", "convnext_tiny",
    "convnextv2", "segformer", "rt_detr", "mobilenet_v3_small", "test_vit", "swin",
)  # fmt: skip
WAVEFORMS = ("wav2vec2",)


def _pictures(inputs: Any) -> Axes:
    """Height and width of every picture among the inputs, and of its mask."""
    named_inputs = inputs if isinstance(inputs, dict) else dict(zip(("x", "y"), inputs, strict=False))
    pictures = {name: PICTURE for name, value in named_inputs.items() if isinstance(value, Tensor) and value.ndim == 4}
    return {**pictures, **({"pixel_mask": {1: "height", 2: "width"}} if "pixel_mask" in named_inputs else {})}


def subject(name: str) -> tuple[nn.Module, Any, Axes]:
    """A model, its inputs, and the axes that are to be free."""
    if name in OWN_MODELS:
        make, axes = OWN_MODELS[name]
        model, inputs = Architecture(name, make).build()
        return model, inputs, axes
    model, inputs = ARCHITECTURES[name].build()
    if name in WAVEFORMS:
        return model, inputs, {"input_values": {1: "samples"}}
    axes = _pictures(inputs)
    parameters = list(signature(model.forward).parameters)
    return model, inputs, axes if isinstance(inputs, dict) else dict(zip(parameters, axes.values(), strict=False))


def sizes_beyond(model: nn.Module, example: Mapping[str, int]) -> list[dict[str, int]]:
    """Two further sizes: each axis a step or more larger, and the first much larger."""
    origin = get_origin(model)
    steps = {name: max(1, origin.size_steps[name]) for name in example}
    next_one = {name: size + 3 * steps[name] for name, size in example.items()}
    first = next(iter(example))
    return [next_one, {**example, first: example[first] + steps[first] * max(1, round(example[first] / steps[first]))}]


def travel(name: str, runtime: str) -> dict[str, Any]:
    """The row of one model in one runtime."""
    model, inputs, axes = subject(name)
    data = [batch(inputs, [0, 1]), batch(inputs, [1, 0])]
    inputs_by_kind = {"kwargs": inputs} if isinstance(inputs, dict) else {"args": inputs}
    row: dict[str, Any] = {"outcome": "refused", "free": axes}
    quantized = quantize(model, forward_loop=data, target=runtime, dynamic_axes=axes, progress=False, **inputs_by_kind)
    origin = get_origin(quantized)
    row |= {"outcome": "fails", "steps": dict(origin.size_steps), "tried": dict(origin.compared_sizes)}
    call_inputs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    sizes = {label: call_inputs[1].get(input_name, call_inputs[0][0] if call_inputs[0] else None).shape[axis]
             for input_name, axes_of_input in origin.axes.items() for axis, label in axes_of_input.items()}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = export(quantized, Path(folder) / "model.onnx", inputs)
        verification = verify(path, quantized, inputs, layers=False)
        if verification.status != Status.OK:
            return row | {"reason": f"{verification.status.value}: {verification.message}"}
        resized = verification.resized
        row |= {
            "sqnr": verification.sqnr,
            "low": verification.low_precision,
            "resized": None if resized is None else str(resized),
        }
        agreed = [verification.sqnr, -1.0 if resized is None else resized.sqnr]
        for other in sizes_beyond(quantized, sizes):
            args, kwargs = resize_inputs(quantized, call_inputs, origin.axes, other)
            try:
                model(*args, **kwargs)
            except Exception:  # the model itself does not take it  # noqa: S112
                continue
            again = verify(path, quantized, args, kwargs=kwargs, layers=False)
            agreed.append(again.sqnr if again.status == Status.OK else -1.0)
            if again.status != Status.OK:
                row["reason"] = f"at {other}: {again.message}"
    row |= {"agreed": agreed, "outcome": "runs" if min(agreed) >= verification.bound else "departs"}
    return row if row["outcome"] == "runs" else {"reason": verification.resized.__str__(), **row}


def child(name: str, runtime: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        row = travel(name, runtime)
    except ScalepointError as error:
        is_refused = isinstance(error, CaptureError | UsageError)
        row = {"outcome": "refused" if is_refused else "fails", "reason": str(error), "free": subject(name)[2]}
    except Exception as error:  # each kind is a row
        row = {"outcome": "fails", "reason": f"{type(error).__name__}: {error}"}
    row["reason"] = " ".join(row.get("reason", "").split())[:LONGEST]
    print(json.dumps(row))


def in_child(name: str, runtime: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", runtime, name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        row: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return row
    except subprocess.TimeoutExpired:
        return {"outcome": "fails", "reason": f"not done in {SECONDS} s"}
    except (IndexError, ValueError):
        return {"outcome": "fails", "reason": done.stderr[-LONGEST:]}


def known() -> dict[str, Any]:
    rows: dict[str, Any] = json.loads(OUT.read_text()) if OUT.exists() else {}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="only these")
    parser.add_argument("--again", action="store_true", help="also those that are there already but do not run")
    parser.add_argument("--runtime", choices=RUNTIMES, help="only this one")
    parser.add_argument("--child", choices=RUNTIMES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(options.names[0], options.child)
    OUT.parent.mkdir(exist_ok=True)
    rows = known()
    for name in options.names or (*OWN_MODELS, *PICTURES, *WAVEFORMS):
        for runtime in (options.runtime,) if options.runtime else RUNTIMES:
            key = f"{name} {runtime}"
            is_done = key in rows and not (options.again and rows[key]["outcome"] != "runs")
            if options.names or not is_done:
                row = in_child(name, runtime)
                rows = {**known(), key: row}  # another run may have added some
                OUT.write_text(json.dumps(rows, indent=1))
                print(key, rows[key]["outcome"], rows[key].get("agreed", ""), rows[key]["reason"], flush=True)
    for runtime in RUNTIMES:
        print(runtime, dict(Counter(row["outcome"] for key, row in rows.items() if key.endswith(f" {runtime}"))))
    return None


if __name__ == "__main__":
    main()
