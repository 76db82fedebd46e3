"""Weight-only quantization: narrow weights and float activations, in the runtimes with kernels for them."""

import importlib.util

import numpy as np
import onnx
import pytest
import torch
from bench.plain_models import Sizes, llama
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import scalepoint
from scalepoint import DeployConfig, export, verify
from scalepoint.errors import ConfigError, TargetError
from scalepoint.quantize import Override, QuantConfig, TensorQuantConfig, coverage, quantize
from scalepoint.targets import onnxruntime_target

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
has_openvino = pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="openvino is not installed")

LINEARS = 15  # seven per block in two blocks, and the head


def export_quantized(folder, model, x, config, target="onnxruntime"):
    quantized = quantize(model, x, config, target=target)
    export(quantized, folder / "model.onnx", x, float_path=folder / "float.onnx")
    return quantized


class Wide(nn.Module):
    """Two linear layers whose width is a multiple of 64, and one whose width is not."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(256, 128), nn.Linear(128, 96), nn.Linear(96, 80)

    def forward(self, x):
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


@pytest.fixture(scope="module")
def token_ids():
    return torch.randint(0, 256, (2, 7), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def deployed(token_ids, tmp_path_factory):
    """A tied head: its table stays float for the embedding, and the head multiplies by int4."""
    folder = tmp_path_factory.mktemp("llama")
    config = QuantConfig.weight_only("int4", block_size=32)
    return scalepoint.deploy(llama(Sizes(is_tied=True)), token_ids[:1], [], config=config, output=folder), token_ids


class TestALlamaInOnnxRuntime:
    def test_every_linear_becomes_a_matmul_of_narrow_weights(self, deployed):
        verification = deployed[0].verification
        assert verification.executed["MatMulNBits"] == verification.low_precision == LINEARS
        assert verification.fallbacks == ()

    def test_it_agrees_at_both_accuracy_levels(self, deployed):
        done, token_ids = deployed
        verification = verify(done.path, done.model, token_ids)
        assert verification.holds
        assert verification.sqnr >= 40
        assert verification.exact[0].sqnr >= 100
        assert verification.unoptimized[0].sqnr >= 100
        summary = dict(verification.rows())
        assert summary["with exact floats"] == str(verification.exact[0])
        assert "rounds activations to int8" in summary["rounded by default"]

    def test_the_embedding_is_listed_with_a_scale_per_row(self, deployed):
        rows = coverage(deployed[0].model).operations
        assert {row.precision for row in rows if row.kind == "linear"} == {"w int4 per_block"}
        (table,) = (row for row in rows if row.kind == "embedding")
        assert table.precision == "w int8 per_channel"

    def test_the_report_keeps_both_levels(self, deployed):
        again = scalepoint.report.Report.from_json(deployed[0].report.to_json())
        assert again.verification.exact == deployed[0].verification.exact


@pytest.mark.parametrize(
    ("dtype", "block"),
    [
        ("uint4", 32),
        ("int8", None),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("int4", 128), ("int4", None), ("int8", 64), ("int2", 32))
        ),
    ],
)
def test_formats_in_onnx_runtime(tmp_path, dtype, block):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(256, 128), nn.GELU(), nn.Linear(128, 96)).eval(), torch.randn(3, 5, 256)
    quantized = export_quantized(tmp_path, model, x, QuantConfig.weight_only(dtype, block))
    verification = verify(tmp_path / "model.onnx", quantized, x)
    assert verification.holds
    assert verification.executed["MatMulNBits"] == verification.low_precision == 2
    assert verification.sqnr >= 38
    assert verification.exact[0].sqnr >= 100


def test_weight_only_files_run_on_any_cpu_without_a_warning(tmp_path):
    x = torch.randn(2, 256)
    model = nn.Sequential(nn.Linear(256, 64)).eval()
    quantized = export_quantized(tmp_path, model, x, QuantConfig.weight_only("int8"), onnxruntime_target("vnni"))
    verification = verify(tmp_path / "model.onnx", quantized, x)
    assert verification.made_for["cpu"] == "vnni"
    assert verification.warning == ""


@has_openvino
@pytest.mark.parametrize(
    ("dtype", "block"),
    [("int4", 32), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("uint4", 128), ("int8", None)))],
)
def test_a_llama_in_openvino(tmp_path, token_ids, dtype, block):
    """OpenVINO computes floats in bfloat16 on CPUs that support it, and may round activations: `verify` reports it."""
    config = QuantConfig.weight_only(dtype, block)
    quantized = export_quantized(tmp_path, llama(Sizes(layers=1)), token_ids, config, "openvino")
    verification = verify(tmp_path / "model.onnx", quantized, token_ids, runtime="openvino")
    assert verification.holds
    assert verification.sqnr >= 35
    assert verification.exact[0].sqnr >= 110
    assert "EXECUTION_MODE_HINT=ACCURACY" in verification.rounded
    assert verification.low_precision == 8
    assert verification.fallbacks == ()


def test_symmetric_blocks_have_no_zero_points(tmp_path):
    """All zero points would be 0; they would make the file larger and the kernel slower."""
    x = torch.randn(2, 256)
    export_quantized(tmp_path, nn.Sequential(nn.Linear(256, 64)).eval(), x, QuantConfig.weight_only())
    graph = onnx.load(tmp_path / "model.onnx").graph
    assert [len(node.input) for node in graph.node if node.op_type == "DequantizeLinear"] == [2]
    sizes = [(tmp_path / name).stat().st_size for name in ("model.onnx", "float.onnx")]
    assert sizes[0] / sizes[1] < 0.175


class TestWhatStaysFloat:
    @pytest.fixture(scope="class")
    def case(self, tmp_path_factory):
        torch.manual_seed(0)
        folder, x = tmp_path_factory.mktemp("ragged"), torch.randn(4, 256)
        with pytest.warns(UserWarning, match="blocks of 64") as caught:
            quantized = export_quantized(folder, Wide().eval(), x, QuantConfig.weight_only("int4", 64))
        return quantized, folder, x, [warning for warning in caught if "do not divide" in str(warning.message)]

    def test_blocks_that_do_not_divide_a_layer_cause_one_warning(self, case):
        quantized, _, _, warnings = case
        assert len(warnings) == 1
        rows = {row.name: row for row in coverage(quantized).operations}
        assert [rows[name].state for name in "abc"] == ["quantized", "quantized", "refused"]
        assert "64" in rows["c"].reason

    def test_the_file_runs_with_that_layer_in_float(self, case):
        quantized, folder, x, _ = case
        verification = verify(folder / "model.onnx", quantized, x)
        assert verification.holds
        assert verification.low_precision == 2
        (fallback,) = verification.fallbacks
        assert fallback.startswith("c_fused/")
        assert fallback.endswith("(Gemm: its weight is float)")

    def test_convolutions_have_no_weight_only_kernel(self):
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 32)).eval()
        quantized = quantize(model, torch.randn(2, 3, 8, 8), QuantConfig.weight_only("int8"), target="onnxruntime")
        rows = {row.kind: row for row in coverage(quantized).operations}
        assert rows["linear"].precision == "w int8 per_block"
        assert rows["conv"].reason == "no kernel for conv with integer weights and float activations"

    def test_a_block_size_without_a_kernel_is_refused(self):
        with pytest.raises(TargetError, match="blocks of 512"):
            quantize(
                nn.Sequential(nn.Linear(512, 8)),
                torch.randn(2, 512),
                QuantConfig.weight_only("int4", 512),
                target="onnxruntime",
            )


def blocked(folder, block, axis, transposed_by=""):
    """y = x w with w of (1024, 64) in int8 blocks, in layouts that ONNX allows; the same as a model."""
    generator = np.random.default_rng(0)
    shape = (64, 1024) if transposed_by else (1024, 64)
    codes = generator.integers(-127, 128, shape).astype(np.int8)
    scale = np.full([side // block if index == axis else side for index, side in enumerate(shape)], 0.01, np.float32)
    nodes = [helper.make_node("DequantizeLinear", ["q", "s"], ["w"], axis=axis, block_size=block)]
    if transposed_by == "Transpose":
        nodes.append(helper.make_node("Transpose", ["w"], ["t"], perm=[1, 0]))
    product = (
        helper.make_node("Gemm", ["x", "w"], ["y"], "product", transB=1)
        if transposed_by == "Gemm"
        else helper.make_node("MatMul", ["x", "t" if transposed_by else "w"], ["y"], "product")
    )
    infos = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", size]) for name, size in (("x", 1024), ("y", 64))
    ]
    constants = [numpy_helper.from_array(codes, "q"), numpy_helper.from_array(scale, "s")]
    graph = helper.make_graph([*nodes, product], "g", infos[:1], infos[1:], constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), folder / "m.onnx")
    model = nn.Linear(1024, 64, bias=False)
    weight = codes * np.repeat(scale, block, axis)
    model.weight = nn.Parameter(torch.from_numpy(weight if transposed_by else weight.T.copy()).float())
    return folder / "m.onnx", model


@pytest.mark.parametrize(
    ("block", "axis", "transposed_by", "why"),
    [
        pytest.param(512, 0, "", "blocks of 512 in 1024", id="large-block"),
        pytest.param(32, 1, "", "blocks along its outputs", id="outputs"),
        pytest.param(32, 1, "Gemm", "stored as (out, in)", id="gemm"),
        pytest.param(32, 1, "Transpose", "stored as (out, in)", id="transpose"),
    ],
)
def test_verify_reports_why_a_weight_is_dequantized_in_each_run(tmp_path, block, axis, transposed_by, why):
    path, model = blocked(tmp_path, block, axis, transposed_by)
    verification = verify(path, model, torch.randn(2, 1024))
    assert verification.holds
    assert verification.low_precision == 0
    assert len(verification.fallbacks) == 1
    assert why in verification.fallbacks[0]


class TestAskingForIt:
    def test_weight_only_equals_the_full_config(self):
        config = QuantConfig.weight_only("uint4", block_size=64)
        assert config == QuantConfig(
            activation="float", weight=TensorQuantConfig(n_bits=4, symmetric=False, block_size=64)
        )
        assert QuantConfig.weight_only("int8", None).weight == TensorQuantConfig(per_channel=True)

    def test_weight_only_takes_overrides(self):
        head = Override(name="head", weight=TensorQuantConfig(per_channel=True))
        assert QuantConfig.weight_only(overrides=[head]).overrides == (head,)

    def test_in_a_config_file(self, tmp_path):
        (tmp_path / "c.yaml").write_text("quantization: {activation: float, weight: {n_bits: 4, block_size: 32}}\n")
        assert DeployConfig.from_file(tmp_path / "c.yaml").quantization == QuantConfig.weight_only()

    def test_invalid_weight_only_arguments_are_refused(self):
        with pytest.raises(ConfigError, match="int4"):
            QuantConfig.weight_only("int9")
        with pytest.raises(ConfigError, match="cannot be used together"):
            TensorQuantConfig(per_channel=True, block_size=32)
        with pytest.raises(ConfigError, match="for weights"):
            TensorQuantConfig(block_size=32).activation_spec()
