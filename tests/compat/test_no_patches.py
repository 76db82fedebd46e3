"""With SCALEPOINT_NO_PATCHES=1 every patch is off, and the public fallback gives the same result."""

import os
import subprocess
import sys
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn

from scalepoint import compat
from scalepoint.compat.outside_tracing import run_untraced
from scalepoint.compat.transformer_masks import mask_values_unread
from scalepoint.compat.transformers import parameters_without_memory
from scalepoint.formats.export import export
from scalepoint.graph import capture
from scalepoint.graph.nodes import get_kind
from scalepoint.graph.origin import get_origin
from scalepoint.quantize import calibrate, insert_qdq, quantize
from scalepoint.transformation import transform
from tests.formats.onnx.test_plain_constants import weight_sources
from tests.graph.test_inline_blocks import X, model_of
from tests.models import Bottleneck, with_norm_statistics


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).chunk(3, -1)
        return x + nn.functional.gelu(self.out(nn.functional.scaled_dot_product_attention(query, key, value)))


NETS = {
    "residual": (lambda: nn.Sequential(Bottleneck(32, 8), Bottleneck(32, 8)), (2, 32, 8, 8)),
    "attention": (Attention, (2, 6, 16)),
    "linear layers": (lambda: nn.Sequential(nn.Linear(16, 16), nn.Hardswish(), nn.Linear(16, 4)), (4, 16)),
}


@pytest.fixture
def no_patches(monkeypatch):
    """Returns a function that turns the patches off."""
    return lambda: monkeypatch.setenv(compat.NO_PATCHES_VARIABLE, "1")


def onnx_summary(path: Path) -> tuple[list[tuple], list[bytes]]:
    """Operators with their attributes, and the data of all initializers, in any order."""
    graph = onnx.load(path).graph
    operators = [
        (node.op_type, node.domain, *sorted(str(attribute) for attribute in node.attribute)) for node in graph.node
    ]
    initializers = [onnx.numpy_helper.to_array(tensor).tobytes() for tensor in graph.initializer]
    return sorted(operators), sorted(initializers)


def run_onnx(path: Path, x: Tensor) -> np.ndarray:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]


@pytest.mark.parametrize("net", NETS)
def test_onnx_files_have_the_same_operators_and_initializers_and_outputs(net, tmp_path, no_patches):
    torch.manual_seed(0)
    make, shape = NETS[net]
    x = torch.randn(shape)
    quantized = quantize(with_norm_statistics(make()), (x,), forward_loop=[x], target="onnxruntime")
    paths = [tmp_path / f"{name}.onnx" for name in ("patched", "patched_float", "plain", "plain_float")]
    export(quantized, paths[0], (x,), float_path=paths[1])
    no_patches()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # without a warning that the model is traced again
        warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)  # from torch's own code
        export(quantized, paths[2], (x,), float_path=paths[3])
    for patched, plain in zip(paths[:2], paths[2:], strict=True):
        assert onnx_summary(patched) == onnx_summary(plain)
        for batch in (shape[0], 5):
            x = torch.randn(batch, *shape[1:])
            assert np.array_equal(run_onnx(patched, x), run_onnx(plain, x))


@pytest.mark.slow
def test_executorch_programs_have_the_same_bytes(tmp_path, no_patches):
    pytest.importorskip("executorch")
    torch.manual_seed(0)
    make, shape = NETS["linear layers"]
    x = torch.randn(shape)
    quantized = quantize(with_norm_statistics(make()), (x,), forward_loop=[x], target="executorch")
    patched = export(quantized, tmp_path / "patched.pte", (x,)).read_bytes()
    no_patches()
    assert export(quantized, tmp_path / "plain.pte", (x,)).read_bytes() == patched


def test_autocast_is_ignored_in_a_captured_model(no_patches):
    no_patches()
    with pytest.warns(match=r"torch.autocast.*test_inline_blocks.py:\d+.*bfloat16"):
        graph = capture(model_of(), X)
    plain = model_of(enabled=False)
    with torch.autocast("cpu", enabled=False), torch.no_grad():
        assert torch.allclose(graph(X), plain(X), atol=1e-6)
    assert {"conv", "linear", "batch_norm"} <= {get_kind(node) for node in graph.graph.nodes}
    assert len(get_origin(graph).ignored_autocast) == 2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
def test_folded_weights_of_a_plain_torch_export_are_constants(tmp_path, dynamo, no_patches):
    torch.manual_seed(0)
    model, x = with_norm_statistics(Bottleneck(32, 8)), torch.randn(2, 32, 8, 8)
    result = transform(model, x, target="tensorrt")
    quantized = insert_qdq(result.model, result.matches).cpu()
    calibrate(quantized, [x])
    summaries = []
    for name in ("patched", "plain"):
        path = tmp_path / f"{name}.onnx"
        torch.onnx.export(quantized.eval(), (x,), path, dynamo=dynamo, verbose=False)
        assert set(weight_sources(onnx.load(path).graph)) <= {"initializer", "Constant"}
        summaries.append(onnx_summary(path))
        no_patches()
    assert summaries[0][1] == summaries[1][1]
    assert [operator[0] for operator in summaries[0][0]] == [operator[0] for operator in summaries[1][0]]


def test_code_outside_of_the_tracer_is_not_recorded(no_patches):
    no_patches()
    weight = torch.ones(3)

    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * run_untraced(lambda: weight * 2 + 0)

    program = torch.export.export(Scaled(), (torch.ones(3),))
    assert [str(node.target) for node in program.graph.nodes if node.op == "call_function"].count(
        "aten.mul.Tensor"
    ) == 1
    assert torch.equal(program.module()(torch.ones(3)), torch.full((3,), 2.0))


def test_an_error_outside_of_the_tracer_is_raised_in_the_calling_thread(no_patches):
    no_patches()
    with pytest.raises(ZeroDivisionError):
        run_untraced(lambda: 1 // 0)


class Encoder(nn.Module):
    """An encoder with a causal mask. It is not marked as causal, so torch compares its values."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x, nn.Transformer.generate_square_subsequent_mask(x.shape[1]))


@pytest.mark.parametrize("with_patches", [True, False])
def test_an_encoder_with_a_mask_is_captured(with_patches, no_patches):
    torch.manual_seed(0)
    model, x = Encoder().eval(), torch.randn(2, 5, 8)
    if not with_patches:
        no_patches()
    graph = capture(model, x)
    assert torch.allclose(graph(x), model(x), atol=1e-6)
    assert not model.encoder._forward_pre_hooks


def test_a_mask_is_causal_only_if_is_causal_is_set(no_patches):
    no_patches()
    encoder = Encoder().eval().encoder
    hints = []
    encoder.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: hints.append(kwargs["is_causal"]), with_kwargs=True
    )
    x, mask = torch.randn(2, 5, 8), nn.Transformer.generate_square_subsequent_mask(5)
    with mask_values_unread(encoder):
        encoder(x, mask)
        encoder(x, mask, None, True)
    encoder(x, mask)
    assert hints == [False, True, True]


def test_a_module_tree_is_the_same_with_memory_and_without(no_patches):
    with parameters_without_memory():
        hollow = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    no_patches()
    state = torch.random.get_rng_state()
    with parameters_without_memory():
        allocated = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    assert all(parameter.is_meta for parameter in hollow.parameters())
    assert not any(parameter.is_meta for parameter in allocated.parameters())
    assert not any(buffer.is_meta for buffer in hollow.buffers())
    assert [tensor.shape for tensor in hollow.parameters()] == [tensor.shape for tensor in allocated.parameters()]
    assert torch.equal(torch.random.get_rng_state(), state)


def test_the_environment_variable_also_works_when_set_before_python_starts():
    code = (
        "import sys, scalepoint.spec.onnx_export as module; from scalepoint.compat import patches_enabled;"
        "print(patches_enabled(), vars(module.in_onnx_export))"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, compat.NO_PATCHES_VARIABLE: value},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split(maxsplit=1)
        for value in ("0", "1")
    ]
    assert [output[0] for output in outputs] == ["True", "False"]
    assert outputs[0][1] == outputs[1][1]


@pytest.mark.parametrize("patch", compat.PATCHES, ids=lambda patch: patch.module)
def test_every_patch_was_tested_with_the_installed_version(patch):
    try:
        installed = version(patch.package)
    except PackageNotFoundError:
        pytest.skip(f"{patch.package} is not installed")
    assert installed.startswith(patch.tested_versions)
    assert patch.reason
    assert patch.fallback
    assert (Path(compat.__file__).parent / f"{patch.module}.py").is_file()
