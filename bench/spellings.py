"""Whether the rewrites of a target still make files faster: the runtime's time with and without each rewrite.

A float transformer block (post-norm and pre-norm, two sizes) as two files that differ in one operator: the residual
add before a layer norm as Sum, and as Add, which ONNX Runtime fuses into SkipLayerNormalization. That block in int8,
its GELUs with the half last, which ONNX Runtime fuses into one kernel, and as torch writes them. Attention with
masked keys without the check for NaN behind its softmax, and with it. Products of attention in int8, which no rule
writes, and in float. A float stem and its pool before integer convolutions, with a Max of one tensor behind the pool,
and without, where ONNX Runtime moves the quantizer before the pool. Activations between integer convolutions: SiLU
and GELU as one operator, Mish and Elu with Exp, and as torch writes them. A decoder of a UNet that upsamples codes,
and one that upsamples floats. A stem, a pool and a convolution for OpenVINO, quantized before the pool and behind it.
An int8 block for OpenVINO on a CPU without VNNI, with linear layers as convolutions and as products. Both run in turn
in one process, one thread, CPU time, medians. A ratio of 1 or more says that the runtime has become better, and that
the rule should go.
"""

import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import openvino
import torch
from torch import Tensor, nn

from measure import Row, interleave, report
from scalepoint.formats import export
from scalepoint.quantize import Override, QuantConfig, quantize
from scalepoint.support.cpu import instruction_set
from scalepoint.targets import onnxruntime_target, openvino_target

OUT = Path(__file__).parent.parent / "out"
SIZES = {"32 tokens of 384": (32, 384), "197 tokens of 768": (197, 768)}


class Block(nn.Module):
    """An attention-free block: its adds and norms weigh as much as in a real one of this width."""

    def __init__(self, width: int, is_first: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.is_first = is_first

    def forward(self, x: Tensor) -> Tensor:
        for norm in self.norms:
            y = self.down(torch.nn.functional.gelu(self.up(norm(x) if self.is_first else x)))
            x = x + y if self.is_first else norm(x + y)
        return x


def files(folder: Path, tokens: int, width: int, is_first: bool) -> dict[str, onnxruntime.InferenceSession]:
    model, x = Block(width, is_first).eval(), torch.randn(1, tokens, width)
    quantized = quantize(model, x, forward_loop=[x], target="onnxruntime", freeze_weights=True)
    path = export(quantized, folder / "sum.onnx", x)
    proto = onnx.load(path)
    for node in proto.graph.node:
        node.op_type = "Add" if node.op_type == "Sum" else node.op_type
    onnx.save(proto, folder / "add.onnx")
    return {name: session(folder / f"{name}.onnx") for name in ("sum", "add")}


def gelus(folder: Path, tokens: int, width: int) -> dict[str, onnxruntime.InferenceSession]:
    """An int8 block with the half of its GELUs last, and as torch writes them."""
    model, x = Block(width, is_first=False).eval(), torch.randn(1, tokens, width)
    default_target = onnxruntime_target()
    plain = replace(
        default_target,
        rewrites=tuple(rewrite for rewrite in default_target.rewrites if rewrite.name != "gelu_halved_last"),
    )
    for name, target in {"last": default_target, "first": plain}.items():
        export(quantize(model, x, forward_loop=[x], target=target, freeze_weights=True), folder / f"{name}.onnx", x)
    return {name: session(folder / f"{name}.onnx") for name in ("last", "first")}


class Attention(nn.Module):
    """Attention of heads of 32 in which padded keys are masked, between linear layers; the last token is padding."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.in_projection, self.out_projection = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, 32)).transpose(1, 2) for part in self.in_projection(x).chunk(3, -1))
        is_visible = x[:, None, None, :, 0] < x[:, None, None, :, 0].amax(-1, keepdim=True)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=is_visible)
        output: Tensor = self.out_projection(y.transpose(1, 2).flatten(2))
        return output


def masked(folder: Path, tokens: int, width: int) -> dict[str, onnxruntime.InferenceSession]:
    """Attention whose probabilities are not looked through for NaN, and as torch writes it."""
    model, x = Attention(width).eval(), torch.randn(8, tokens, width)
    default_target = onnxruntime_target()
    plain = replace(
        default_target,
        rewrites=tuple(rewrite for rewrite in default_target.rewrites if rewrite.name != "softmax_of_finite"),
    )
    for name, target in {"unchecked": default_target, "checked": plain}.items():
        export(quantize(model, x, forward_loop=[x], target=target, freeze_weights=True), folder / f"{name}.onnx", x)
    return {name: session(folder / f"{name}.onnx") for name in ("unchecked", "checked")}


class Activated(nn.Module):
    """Two convolutions with an activation between them."""

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.second(self.activation(self.first(x)))
        return output


class Decoder(nn.Module):
    """Two scales of a UNet: the smaller one is upsampled and concatenated with the larger one."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.outer, self.inner = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 2 * width, 3, padding=1)
        self.up = nn.Conv2d(3 * width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        skip = torch.relu(self.outer(x))
        x = torch.relu(self.inner(nn.functional.max_pool2d(skip, 2)))
        output: Tensor = self.up(torch.cat([nn.functional.interpolate(x, scale_factor=2), skip], 1))
        return output


ATTENTIONS = {
    "32 tokens": (12, 32, 32),
    "128 tokens": (12, 128, 64),
    "197 tokens": (12, 197, 64),
    "512 tokens": (12, 512, 64),
}
CODES = ("scale", "zero")  # of all tensors: their values do not matter for the time


def attention_products(folder: Path, heads: int, tokens: int, width: int) -> dict[str, onnxruntime.InferenceSession]:
    """softmax(x x') x with both products in int8, and in float.

    Query, key and value are one tensor, so the int8 file quantizes one tensor instead of three.
    """
    make = onnx.helper.make_node

    def quantized(name: str) -> list[onnx.NodeProto]:
        codes = make("QuantizeLinear", [name, *CODES], [f"{name}_codes"])
        return [codes, make("DequantizeLinear", [f"{name}_codes", *CODES], [f"{name}_int8"])]

    for suffix, file in (("_int8", "int8"), ("", "float")):
        nodes = [
            make("Transpose", [f"x{suffix}"], ["keys"], perm=[0, 1, 3, 2]),
            make("MatMul", [f"x{suffix}", "keys"], ["scores"]),
            make("Softmax", [f"scores{suffix}"], ["shares"], axis=-1),
            make("MatMul", [f"shares{suffix}", f"x{suffix}"], ["y"]),
        ]
        if suffix:
            nodes = [*quantized("x"), *nodes[:2], *quantized("scores"), nodes[2], *quantized("shares"), nodes[3]]
            nodes += [
                make("QuantizeLinear", ["y", *CODES], ["codes"]),
                make("DequantizeLinear", ["codes", *CODES], ["z"]),
            ]
        info = onnx.helper.make_tensor_value_info
        ports = [
            info(name, onnx.TensorProto.FLOAT, [1, heads, tokens, width]) for name in ("x", "z" if suffix else "y")
        ]
        values = [
            onnx.numpy_helper.from_array(np.float32(0.05), "scale"),
            onnx.numpy_helper.from_array(np.uint8(128), "zero"),
        ]
        graph = onnx.helper.make_graph(nodes, "attention", ports[:1], ports[1:], values if suffix else [])
        onnx.save(
            onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10),
            folder / f"{file}.onnx",
        )
    return {name: session(folder / f"{name}.onnx") for name in ("int8", "float")}


ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "SiLU": (nn.functional.silu, "activations_of_codes"),
    "GELU": (nn.functional.gelu, "activations_of_codes"),
    "Mish": (nn.functional.mish, "exp_activations"),
    "Elu": (nn.functional.elu, "exp_activations"),
}


def with_and_without(folder: Path, model: nn.Module, x: Tensor, rule: str) -> dict[str, onnxruntime.InferenceSession]:
    """A network in int8 as two files, with a rule and without."""
    default_target, config = onnxruntime_target(), QuantConfig(speed_first=False)
    plain = replace(
        default_target, rewrites=tuple(rewrite for rewrite in default_target.rewrites if rewrite.name != rule)
    )
    for name, target in {"with": default_target, "without": plain}.items():
        quantized = quantize(model.eval(), x, config, forward_loop=[x], target=target, freeze_weights=True)
        export(quantized, folder / f"{name}.onnx", x)
    return {name: session(folder / f"{name}.onnx") for name in ("with", "without")}


def integer_row(title: str, model: nn.Module, pixels: int, rule: str) -> Row:
    shape = (1, 3, pixels, pixels)
    with tempfile.TemporaryDirectory() as folder:
        medians = timed(with_and_without(Path(folder), model, torch.randn(shape), rule), shape)
    return Row(
        f"{title}, {pixels} px", medians["with"] / medians["without"], 1.0, "as exported", onnxruntime.__version__
    )


def session(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def pooled(folder: Path, pixels: int) -> dict[str, onnxruntime.InferenceSession]:
    """A stem and its pool in float, and a convolution in int8."""
    model, x = stem().eval(), torch.randn(1, 3, pixels, pixels)
    config = QuantConfig(overrides=(Override(name="0", weight="float", activation="float"),))
    quantized = quantize(model, x, config, forward_loop=[x], target="onnxruntime", freeze_weights=True)
    path = export(quantized, folder / "held.onnx", x)
    proto = onnx.load(path)
    (pool,) = [node for node in proto.graph.node if node.op_type == "Max"]
    for node in proto.graph.node:
        for position, name in enumerate(node.input):
            if name == pool.output[0]:
                node.input[position] = pool.input[0]
    proto.graph.node.remove(pool)
    onnx.save(proto, folder / "moved.onnx")
    return {name: session(folder / f"{name}.onnx") for name in ("held", "moved")}


def in_openvino(folder: Path, model: nn.Module, x: Tensor, rule: str) -> dict[str, Any]:
    """With a rule and without."""
    default_target = openvino_target()
    plain = replace(
        default_target, rewrites=tuple(rewrite for rewrite in default_target.rewrites if rewrite.name != rule)
    )
    sessions = {}
    for name, target in {"with": default_target, "without": plain}.items():
        quantized = quantize(model, x, forward_loop=[x], target=target, freeze_weights=True)
        path = export(quantized, folder / f"{name}.onnx", x)
        compiled = openvino.Core().compile_model(path, "CPU", {"INFERENCE_NUM_THREADS": 1})
        sessions[name] = compiled.create_infer_request()
    return sessions


def timed(sessions: dict[str, Any], shape: tuple[int, ...]) -> dict[str, float]:
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    return interleave({name: run(session, x) for name, session in sessions.items()}, repeats=31, inner=5)


def run(session: Any, x: np.ndarray) -> Callable[[], Any]:
    if isinstance(session, onnxruntime.InferenceSession):
        return lambda: session.run(None, {session.get_inputs()[0].name: x})
    return lambda: session.infer([x])


def openvino_row(title: str, model: nn.Module, shape: tuple[int, ...], rule: str, against: str) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        medians = timed(in_openvino(Path(folder), model.eval(), torch.randn(shape), rule), shape)
    return Row(title, medians["with"] / medians["without"], 1.0, against, openvino.__version__)


def stem() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 64, 3, 2), nn.ReLU(), nn.MaxPool2d(3, 2), nn.Conv2d(64, 64, 3))


def main() -> int:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    rows = []
    for title, (tokens, width) in SIZES.items():
        for is_first in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                sessions = files(Path(folder), tokens, width, is_first)
            medians = timed(sessions, (1, tokens, width))
            name = f"Sum before {'pre' if is_first else 'post'}-norm, {title}"
            rows.append(Row(name, medians["sum"] / medians["add"], 1.0, "Add, fused", onnxruntime.__version__))
    for title, (tokens, width) in SIZES.items():
        with tempfile.TemporaryDirectory() as folder:
            medians = timed(gelus(Path(folder), tokens, width), (1, tokens, width))
        ratio = medians["last"] / medians["first"]
        rows.append(Row(f"GELU halved last, {title}", ratio, 1.0, "as exported", onnxruntime.__version__))
    for title, (tokens, width) in SIZES.items():
        with tempfile.TemporaryDirectory() as folder:
            medians = timed(masked(Path(folder), tokens, width), (8, tokens, width))
        ratio = medians["unchecked"] / medians["checked"]
        rows.append(Row(f"attention without a check, {title}", ratio, 1.0, "as exported", onnxruntime.__version__))
    for title, (heads, tokens, width) in ATTENTIONS.items():
        with tempfile.TemporaryDirectory() as folder:
            medians = timed(attention_products(Path(folder), heads, tokens, width), (1, heads, tokens, width))
        ratio = medians["int8"] / medians["float"]  # above 1: attention stays float
        rows.append(Row(f"attention products in int8, {title}", ratio, 99.0, "in float", onnxruntime.__version__))
    for pixels in (32, 96, 224):
        with tempfile.TemporaryDirectory() as folder:
            medians = timed(pooled(Path(folder), pixels), (1, 3, pixels, pixels))
        ratio = medians["held"] / medians["moved"]
        rows.append(
            Row(f"Max behind a pool of floats, {pixels} px", ratio, 1.0, "quantizer moved", onnxruntime.__version__)
        )
    for name, (activation, rule) in ACTIVATIONS.items():
        rows += [integer_row(f"{name} between integers", Activated(activation), pixels, rule) for pixels in (32, 128)]
    rows += [integer_row("upsampling of codes", Decoder(), pixels, "quantizers_before_moves") for pixels in (32, 128)]
    rows += [
        openvino_row(f"quantized before a pool in OpenVINO, {pixels} px", stem(), (1, 3, pixels, pixels),
                     "quantizers_before_pools", "behind it")
        for pixels in (32, 96, 224)
    ]  # fmt: skip
    rows += [
        openvino_row(f"linear layers as convolutions in OpenVINO, {title}", Block(width, True), (1, tokens, width),
                     "linears_as_convolutions", "as products")
        for title, (tokens, width) in (SIZES.items() if instruction_set() == "avx2" else ())
    ]  # fmt: skip
    return 0 if report("What is written in other words", rows, OUT / "spellings.json") else 1


if __name__ == "__main__":
    sys.exit(main())
