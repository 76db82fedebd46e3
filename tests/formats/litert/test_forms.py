"""Every supported operation computes what torch does, for any stored order of axes and any batch size."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from scalepoint.errors import TargetError
from scalepoint.formats import ExportRequest, find_format
from scalepoint.formats.litert.write import write_float
from scalepoint.runtimes import find_runtime
from scalepoint.runtimes.process import exchange_files, run_task
from scalepoint.transformation import transform

HERE = find_runtime("litert").is_installed
pytestmark = pytest.mark.skipif(not HERE, reason="LiteRT is not installed: pip install 'scalepoint[litert]'")


class Pictures(nn.Module):
    """Operations on images, each applied to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(
            {
                "strided": nn.Conv2d(4, 6, 3, 2, 1),
                "same": nn.Conv2d(4, 6, 5, 1, 2),
                "uneven": nn.Conv2d(4, 6, (3, 1), 1, (2, 1), bias=False),
                "dilated": nn.Conv2d(4, 6, 3, padding="same", dilation=2),
                "grouped": nn.Conv2d(4, 6, 3, groups=2),
                "depthwise": nn.Conv2d(4, 8, 3, 1, 1, groups=4),
                "max_pool": nn.MaxPool2d(3, 2, 1),
                "max_pool_up": nn.MaxPool2d(3, 2, 1, ceil_mode=True),
                "average": nn.AvgPool2d(2),
                "average_padded": nn.AvgPool2d(3, 2, 1),
                "average_inside": nn.AvgPool2d(3, 1, 1, count_include_pad=False),
                "adaptive": nn.AdaptiveAvgPool2d(4),
                "adaptive_uneven": nn.AdaptiveAvgPool2d((3, 5)),
                "nearest": nn.Upsample(scale_factor=2),
                "bilinear": nn.Upsample(scale_factor=2, mode="bilinear"),
                "corners": nn.Upsample((11, 13), mode="bilinear", align_corners=True),
                "shuffled": nn.PixelShuffle(2),
                "prelu": nn.PReLU(4),
                "groups": nn.GroupNorm(2, 4),
                "batch": nn.BatchNorm2d(4),
                "silu": nn.SiLU(),
                "hardswish": nn.Hardswish(),
                "hardsigmoid": nn.Hardsigmoid(),
                "mish": nn.Mish(),
            }
        )
        self.line, self.last, self.head = nn.Conv1d(4, 3, 3, 2, 1), nn.LayerNorm(4), nn.Linear(4 * 64, 5)

    def forward(self, x):
        outputs = {name: layer(x) for name, layer in self.layers.items()}
        outputs["line"] = self.line(x.flatten(2))
        outputs["norm_of_channels"] = self.last(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        outputs["joined"] = torch.cat([x, x.sigmoid()], 1) + 1
        outputs["padded"] = F.pad(x, (1, 2, 0, 3), value=0.5)
        outputs["cropped"] = F.pad(x, (-1, 0, -2, -1))
        outputs["head"] = self.head(x.flatten(1))
        outputs["pooled"] = x.mean((2, 3))
        outputs["gated"] = x * x.mean((2, 3), keepdim=True).sigmoid()
        outputs["flipped"], outputs["rolled"] = x.flip(2), x.roll((1, -2), (2, 3))
        outputs["chances"] = x.softmax(1)
        outputs["alike"] = F.cosine_similarity(x, x.flip(3))
        outputs["between"] = x.clamp(x.mean(1, keepdim=True), x.flip(2).abs())
        outputs["turned"] = x.transpose(2, 3) - x.flip(3)
        outputs["steps"] = x[:, 1:, ::2, -3:]
        outputs["tokens"] = torch.cat([x.new_ones(1, 1, 4).expand(len(x), -1, -1), x.flatten(2).transpose(1, 2)], 1)
        return outputs


class Rows(nn.Module):
    """Operations on rows and indices."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.out = nn.Embedding(20, 8), nn.LayerNorm(8), nn.Linear(8, 8, bias=False)

    def forward(self, x, words):
        positive, mask = x.abs() + 0.5, words > 5
        query, key, value = (torch.stack([x * n, x + n], 1) for n in (1, 2, 3))
        rows = self.table(words)
        outputs = {
            "rows": self.norm(rows) @ self.out.weight,
            "first": rows + self.table(torch.zeros_like(words)) * torch.full_like(x, 2.0),
            "attention": F.scaled_dot_product_attention(query, key, value),
            "masked": F.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None, None]),
            "causal": F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.3),
            "product": x @ rows.transpose(1, 2),
            "chosen": torch.where(mask[..., None], x, rows),
            "filled": x.masked_fill(mask[..., None], -2.0),
            "logic": (mask & (words < 15)) | ~mask,
            "largest": x.argmax(-1),
            "sum": x.cumsum(1) + x.amax(1, keepdim=True) - x.sum(-1, keepdim=True),
            "numbers": words.to(torch.float32) * 2 + 1,
            "picked": x[:, 1] + x.select(2, 3).mean(1, keepdim=True),
            "parts": torch.cat(x.chunk(2, -1)[::-1], -1),
            "places": x[:, torch.tensor([2, 0, -1])],
            "repeated": x.repeat(1, 2, 1),
            "length": torch.linalg.vector_norm(x, dim=-1),
        }
        for name in ("exp", "log", "sqrt", "rsqrt", "sin", "cos", "floor", "ceil", "tanh", "reciprocal"):
            outputs[name] = getattr(torch, name)(positive)
        for name in ("gelu", "elu", "leaky_relu", "relu6", "softplus", "logsigmoid", "log_softmax"):
            outputs[name] = getattr(F, name)(x, dim=-1) if name == "log_softmax" else getattr(F, name)(x)
        outputs["gelu_tanh"] = F.gelu(x, approximate="tanh")
        outputs["below"] = (x * 2).clamp(max=0)
        return outputs | {"pow": positive**3, "clamped": x.clamp(-0.5, 0.7), "less": 1 - x, "root": positive**0.5}


def write_float_file(model, inputs, path):
    """Transform a model and write its float file."""
    result = transform(model.eval(), inputs, target="litert")
    write_float(result.model, path, ExportRequest((inputs, {})))
    return path


def run(path, feeds):
    with exchange_files({name: value.numpy() for name, value in feeds.items()}) as files:
        task = {"task": "run", "path": str(path), "options": {"threads": 1}}
        answer = run_task(find_runtime("litert"), {**task, **files.paths})
        assert answer.data is not None, answer.message
        return files.outputs(answer)


def compare(model, feeds, outputs):
    with torch.no_grad():
        expected = model(*feeds.values())
    assert list(outputs) == list(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(outputs[name], value.numpy(), rtol=2e-4, atol=2e-5, err_msg=name)


def test_image_operations_compute_what_torch_does(tmp_path):
    torch.manual_seed(0)
    model = Pictures()
    path = write_float_file(model, (torch.randn(2, 4, 8, 8),), tmp_path / "pictures.tflite")
    assert find_format("litert").about(path).inputs[0].shape == (None, 4, 8, 8)
    for batch in (2, 3):
        feeds = {"x": torch.randn(batch, 4, 8, 8)}
        compare(model, feeds, run(path, feeds))


def test_row_operations_compute_what_torch_does(tmp_path):
    torch.manual_seed(0)
    model, words = Rows(), torch.randint(0, 20, (2, 6))
    feeds = {"x": torch.randn(2, 6, 8), "words": words}
    compare(model, feeds, run(write_float_file(model, tuple(feeds.values()), tmp_path / "rows.tflite"), feeds))


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain, self.padded = nn.ConvTranspose2d(4, 3, 2, 2), nn.ConvTranspose2d(4, 3, 3, 2, 1, output_padding=1)

    def forward(self, x):
        return {"plain": self.plain(x), "padded": self.padded(x)}


def test_a_transposed_convolution_fixes_the_batch_of_the_example(tmp_path):
    torch.manual_seed(0)
    model, feeds = Transposed(), {"x": torch.randn(2, 4, 5, 5)}
    path = write_float_file(model, (feeds["x"],), tmp_path / "transposed.tflite")
    assert find_format("litert").about(path).inputs[0].shape == (2, 4, 5, 5)
    compare(model, feeds, run(path, feeds))
    with exchange_files({"x": torch.randn(3, 4, 5, 5).numpy()}) as files:
        answer = run_task(find_runtime("litert"), {"task": "run", "path": str(path), "options": {}, **files.paths})
    assert "input x: the file takes the shape [2, 4, 5, 5], got [3, 4, 5, 5]" in answer.message


class Ranked(nn.Module):
    def forward(self, x):
        best, at = x.topk(3, 1)
        least = x.topk(2, -1, largest=False)
        down, up = x.sort(-1, descending=True), x.sort(1)
        return {
            "best": best, "at": at, "least": least.values, "least at": least.indices, "down": down.values,
            "up": up.values, "up at": up.indices,
        }  # fmt: skip


class Assigned(nn.Module):
    def forward(self, x):
        x = x.clone()
        x[:, 0] = 1.0
        x[:, 2:4, -3:] *= 2
        x[..., 1] = x[..., 0] - 1
        x[x > 0.5] = 0.5
        return {"x": x, "apart": torch.cdist(x, x), "steps": torch.cdist(x, x[:, :2], p=1)}


@pytest.mark.parametrize("model", [Ranked(), Assigned()], ids=["ranked", "assigned"])
def test_sorting_and_in_place_writes_compute_what_torch_does(model, tmp_path):
    torch.manual_seed(0)
    path = write_float_file(model, (torch.randn(2, 5, 6),), tmp_path / "model.tflite")
    for batch in (2, 3):
        feeds = {"x": torch.randn(batch, 5, 6)}
        compare(model, feeds, run(path, feeds))


class Recurrent(nn.Module):
    def __init__(self, kind, **options) -> None:
        super().__init__()
        self.layer = kind(6, 8, **options)
        self.is_lstm = kind is nn.LSTM

    def forward(self, x):
        y, state = self.layer(x)
        return {"y": y, "h": state[0], "c": state[1]} if self.is_lstm else {"y": y, "h": state}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (nn.LSTM, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
        (nn.LSTM, {"proj_size": 5, "bias": False}),
        (nn.GRU, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
        (nn.RNN, {"nonlinearity": "relu", "batch_first": True}),
        (nn.RNN, {}),
    ],
    ids=["LSTM", "projected LSTM", "GRU", "RNN of ReLU", "RNN of tanh"],
)
@pytest.mark.filterwarnings("ignore:the first axis of 'x' is fixed", "ignore:LSTM with projections is not supported")
def test_recurrent_layers_compute_what_torch_does(kind, options, tmp_path):
    torch.manual_seed(0)
    model = Recurrent(kind, **options).eval()
    is_first = options.get("batch_first", False)
    path = write_float_file(model, (torch.randn(2, 4, 6),), tmp_path / "model.tflite")
    for count in (2, 3) if is_first else (2,):
        feeds = {"x": torch.randn(count, 4, 6)}
        compare(model, feeds, run(path, feeds))


class Middle(nn.Module):
    def forward(self, x):
        return torch.kthvalue(x, 2).values


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Middle(), "aten.kthvalue .*return torch.kthvalue"),
        (nn.MaxPool2d(2, dilation=2), "aten.max_pool2d.*dilated"),
    ],
    ids=["kthvalue", "dilated pool"],
)
def test_the_error_for_an_unsupported_operation_has_its_line(model, message, tmp_path):
    with pytest.raises(TargetError, match=message) as caught:
        write_float_file(model, (torch.randn(2, 3, 8, 8),), tmp_path / "never.tflite")
    assert "deploy for 'onnxruntime'" in str(caught.value)
    assert not Path(tmp_path / "never.tflite").exists()
