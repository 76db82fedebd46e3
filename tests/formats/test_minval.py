"""Specs with a minimum instead of a zero point are written exactly, or the target refuses them before any work."""

import numpy as np
import onnxruntime as ort
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from scalepoint import deploy, deploy_checkpoint, export, transform
from scalepoint.errors import TargetError
from scalepoint.quantize import Override, QuantConfig, calibrate, insert_qdq
from scalepoint.spec import ExtendedQuantizationSpec, PerBlockGranularity, PerChannelGranularity, QuantizationSpec
from tests.formats.gguf.checkpoints import VOCABULARY_SIZE, save_byte_level_tokenizer
from tests.language.conftest import text, write_llama

FILES = ("onnxruntime", "openvino", "tensorrt", "executorch", "litert", "coreml")
FOLDERS = ("compressed-tensors", "gptq", "awq", "ort-genai")


def minval(dtype, scheme="asymmetric", granularity=None, calculator="static"):
    settings = {} if granularity is None else {"granularity": granularity}
    return QuantizationSpec(
        dtype=dtype, qscheme=scheme, qformulation="minval", qparam_calculator_cls=calculator, **settings
    )


INT8 = minval("int8", granularity=PerChannelGranularity())
UINT4_BLOCKS = minval("uint4", granularity=PerBlockGranularity(block_size=32))
ACTIVATION = minval("uint8", calculator="global_minmax")


class Counted(nn.Module):
    """Counts its calls."""

    def __init__(self):
        super().__init__()
        self.conv, self.pool, self.head = nn.Conv2d(3, 32, 3), nn.AdaptiveAvgPool2d(1), nn.Linear(32, 8)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.head(self.pool(self.conv(x).relu()).flatten(1))


@pytest.mark.parametrize(
    "config",
    [
        QuantConfig(weight=INT8),
        QuantConfig(activation=ACTIVATION),
        QuantConfig(overrides=(Override(name="head", weight=INT8),)),
        QuantConfig(overrides=(Override(name="head", input=ACTIVATION),)),
    ],
    ids=["weights", "activations", "an override's weight", "an override's input"],
)
@pytest.mark.parametrize("target", FILES)
def test_targets_with_integer_zero_points_refuse_minval_before_capture(tmp_path, target, config):
    model, x = Counted().eval(), torch.randn(2, 3, 8, 8)
    with pytest.raises(TargetError, match=r"qformulation='minval'.*'zp'") as error:
        deploy(model, x, [x], target=target, config=config, output=tmp_path / "out", progress=False)
    assert error.value.code == "SP-Q002"
    assert model.calls == 0
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("target", FILES)
def test_insert_qdq_refuses_minval_as_deploy_does(target):
    result = transform(Counted().eval(), torch.randn(2, 3, 8, 8), target=target)
    with pytest.raises(TargetError, match=r"qformulation='minval'.*'zp'"):
        insert_qdq(result.model, result.matches, QuantConfig(weight=INT8))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    source_folder = tmp_path_factory.mktemp("minval")
    tokens = save_byte_level_tokenizer(source_folder).encode(text(60)).ids
    write_llama(source_folder, tokens, words=VOCABULARY_SIZE, hidden=256, inner=256, steps=2)
    return source_folder


@pytest.mark.parametrize("target", FOLDERS)
def test_folder_formats_with_integer_zero_points_refuse_minval_before_any_work(folder, tmp_path, target):
    config = QuantConfig(weight=UINT4_BLOCKS, activation="float")
    with pytest.raises(TargetError, match=r"qformulation='minval'.*'zp'"):
        deploy_checkpoint(folder, tmp_path / "out", target=target, config=config, progress=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("dtype", "block", "kind"),
    [
        ("uint4", 32, "Q4_K"),
        pytest.param("int2", 16, "Q2_K", marks=pytest.mark.slow),
        pytest.param("int5", None, "Q5_K", marks=pytest.mark.slow),
    ],
)
def test_gguf_blocks_have_the_minimum_and_scale_of_the_simulation(folder, tmp_path, dtype, block, kind):
    gguf = pytest.importorskip("gguf", reason='needs the package gguf: pip install "scalepoint[gguf]"')
    granularity = PerChannelGranularity() if block is None else PerBlockGranularity(block_size=block)
    weight = ExtendedQuantizationSpec(
        dtype=dtype,
        qscheme="asymmetric",
        qformulation="minval",
        granularity=granularity,
        qparam_calculator_cls="static",
    )
    config = QuantConfig(weight=weight, activation="float")
    (tmp_path / "judge.txt").write_text(text(2, seed=6))
    deploy_checkpoint(
        folder, tmp_path / "m.gguf", target="gguf", config=config, accuracy="fast", verify=False, progress=False,
        data=folder / "calibration.txt", judge=tmp_path / "judge.txt", length=16, samples=1,
    )  # fmt: skip
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    stored = tensors["blk.0.ffn_up.weight"]
    assert stored.tensor_type.name == kind
    exact = load_file(folder / "model.safetensors")["model.layers.0.mlp.up_proj.weight"].to(torch.float32)
    actual = torch.tensor(gguf.dequantize(stored.data, stored.tensor_type)).reshape(exact.shape)
    span = exact.reshape(256, -1, block or 256)
    step = (span.amax(-1).clamp(min=0) - span.amin(-1).clamp(max=0)) / (2 ** int(dtype[-1]) - 1)
    difference = (actual - exact).abs().reshape(span.shape) / step[..., None]
    assert (
        float(difference.max()) < 0.75
    )  # half a step of rounding, plus the rounding of scales and minima to 4 or 6 bits
    assert float(difference.max()) > 0.1


def simulated_and_run(model, path, x):
    with torch.no_grad():
        expected = model(x).numpy()
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return expected, session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]


def quantize_for_reference(config):
    torch.manual_seed(0)
    x = torch.randn(4, 3, 12, 12)
    result = transform(Counted().eval(), x, target="reference")
    model = insert_qdq(result.model, result.matches, config)
    calibrate(model, [x], freeze_weights=True)
    return model, x


WRITTEN_CONFIGS = {
    "weights": QuantConfig(weight=INT8, activation="float"),
    "weights of a tensor": QuantConfig(weight=minval("uint8")),
    "activations": QuantConfig(activation=ACTIVATION),
    "both, symmetric": QuantConfig(
        weight=minval("int8", "symmetric"), activation=minval("int8", "symmetric", calculator="global_minmax")
    ),
    "both, clipped": QuantConfig(
        weight=minval("int8", "symmetric_with_clipping", PerChannelGranularity()),
        activation=minval("int8", "symmetric_with_clipping", calculator="global_minmax"),
    ),
    "blocks of four bits": QuantConfig(
        activation="float", weight="float", overrides=(Override(name="head", weight=UINT4_BLOCKS),)
    ),
}


@pytest.mark.parametrize("config", WRITTEN_CONFIGS.values(), ids=WRITTEN_CONFIGS)
def test_an_onnx_file_of_the_reference_target_equals_the_simulation(tmp_path, config):
    model, x = quantize_for_reference(config)
    export(model, tmp_path / "m.onnx", x)
    expected, actual = simulated_and_run(model, tmp_path / "m.onnx", 3 * x)  # beyond the calibrated range
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
@pytest.mark.parametrize(
    "name", ["both, clipped", *(pytest.param(name, marks=pytest.mark.slow) for name in ("weights", "activations"))]
)
@pytest.mark.filterwarnings("ignore")
def test_a_plain_onnx_export_equals_the_simulation(tmp_path, name, dynamo):
    model, x = quantize_for_reference(WRITTEN_CONFIGS[name])
    torch.onnx.export(model.eval(), (x,), tmp_path / "m.onnx", dynamo=dynamo, verbose=False)
    expected, actual = simulated_and_run(model, tmp_path / "m.onnx", x)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
