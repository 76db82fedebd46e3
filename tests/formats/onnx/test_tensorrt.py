"""Files for TensorRT: real architectures pass the static checker, and every format is what the simulation computes.

TensorRT does not run here: the checker stands for its compiler, the reference evaluator of onnx for its arithmetic,
with TensorRT's own two operators written down in numpy.
"""

from collections import Counter

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from torch import nn
from torch.nn import functional as F

import scalepoint
from scalepoint import tensorrt
from scalepoint.checking import check
from scalepoint.errors import ExportError, ScalepointError, TargetError
from scalepoint.formats import export
from scalepoint.quantize import QuantConfig, coverage, freeze, insert_qdq, quantize
from scalepoint.quantize.quantizers import QuantizerBase
from tests.architectures import ARCHITECTURES
from tests.models import ResNet, resnet50, vit_b16

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Block(nn.Module):
    """A transformer block after a patch embedding."""

    def __init__(self, width=64):
        super().__init__()
        self.patches = nn.Conv2d(32, width, 4, 4)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(self.norm2(x))))


@pytest.fixture(scope="module")
def block():
    torch.manual_seed(0)
    return Block().eval(), torch.randn(2, 32, 16, 16)


def exported(model, x, path, config=None, **options):
    quantized = quantize(model, x, config, forward_loop=[x], target="tensorrt")
    export(quantized, path, x, **options)
    return quantized


def sqnr(expected, actual):
    noise = (expected - actual).double().square().sum()
    return float(10 * torch.log10(expected.double().square().sum() / noise))


def types(path):
    return Counter(TensorProto.DataType.Name(tensor.data_type) for tensor in onnx.load(path).graph.initializer)


class TRT_FP4DynamicQuantize(OpRun):  # noqa: N801  # the operator's name
    op_domain = "trt"

    def _run(self, x, outer, axis=None, block_size=None, scale_type=None):
        blocks = x.astype(np.float32).reshape(*x.shape[:-1], -1, block_size)
        inner = np.abs(blocks).max(-1) / 6 / outer
        inner = np.clip(inner, 2.0**-9, 448).astype(ml_dtypes.float8_e4m3fn)
        scaled = blocks / (inner.astype(np.float32) * outer)[..., None]
        codes = np.clip(scaled, -6, 6).astype(ml_dtypes.float4_e2m1fn)
        return codes.reshape(x.shape), inner


class TRT_MXFP8DynamicQuantize(OpRun):  # noqa: N801
    op_domain = "trt"

    def _run(self, x, axis=None, block_size=None, output_dtype=None):
        blocks = x.astype(np.float32).reshape(*x.shape[:-1], -1, block_size)
        exponents = np.ceil(np.log2(np.maximum(np.abs(blocks).max(-1) / 448, 2.0**-126)))
        codes = (blocks / np.exp2(exponents)[..., None]).astype(ml_dtypes.float8_e4m3fn)
        return codes.reshape(x.shape), (exponents + 127).astype(np.uint8)


class TRT_MXFP8DequantizeLinear(OpRun):  # noqa: N801
    op_domain = "trt"

    def _run(self, codes, exponents, axis=None, block_size=None, output_dtype=None):
        blocks = codes.astype(np.float32).reshape(*codes.shape[:-1], -1, block_size)
        values = blocks * np.exp2(exponents.astype(np.float32) - 127)[..., None]
        return (values.reshape(codes.shape).astype(onnx.helper.tensor_dtype_to_np_dtype(output_dtype)),)


OPERATORS = [TRT_FP4DynamicQuantize, TRT_MXFP8DynamicQuantize, TRT_MXFP8DequantizeLinear]


def run(path, x):
    (output,) = ReferenceEvaluator(str(path), new_ops=OPERATORS).run(None, {"x": x.numpy()})
    return torch.from_numpy(output)


class TestRealArchitectures:
    @staticmethod
    def findings(model, inputs, tmp_path):
        quantized = quantize(model, inputs, forward_loop=[inputs], target="tensorrt")
        export(quantized, tmp_path / "plain.onnx", inputs)
        export(quantized, tmp_path / "half.onnx", inputs, float_dtype="fp16")
        return [
            str(finding)
            for name, version in (("plain", 10), ("half", 10), ("half", 11))
            for finding in check(tmp_path / f"{name}.onnx", "tensorrt", version=version)
        ]

    @pytest.mark.slow
    def test_a_narrow_resnet(self, tmp_path):
        torch.manual_seed(0)
        assert self.findings(ResNet((1, 2, 1, 1), width=16).eval(), torch.randn(2, 3, 32, 32), tmp_path) == []

    @pytest.mark.parametrize(
        "name",
        [
            "bert_masked",
            *(pytest.param(name, marks=pytest.mark.slow) for name in ("test_convnext", "gpt2", "convnext_tiny")),
        ],
    )
    def test_small_configurations(self, name, tmp_path):
        model, inputs = ARCHITECTURES[name].build()
        assert self.findings(model, inputs, tmp_path) == []

    @pytest.mark.slow
    def test_resnet50(self, tmp_path):
        assert self.findings(resnet50().eval(), torch.randn(2, 3, 224, 224), tmp_path) == []

    @pytest.mark.slow
    def test_vit_b16(self, tmp_path):
        assert self.findings(vit_b16().eval(), torch.randn(2, 3, 224, 224), tmp_path) == []

    @pytest.mark.slow
    def test_bert_base(self, tmp_path):
        transformers = pytest.importorskip("transformers")
        ARCHITECTURES["bert"].build()  # it declares what transformers needs of torchvision
        model = transformers.BertModel(transformers.BertConfig()).eval()
        mask = torch.ones(2, 128, dtype=torch.long)
        mask[1, 100:] = 0
        inputs = {"input_ids": torch.randint(0, 1000, (2, 128)), "attention_mask": mask}
        assert self.findings(model, inputs, tmp_path) == []


class TestRules:
    def test_attention_with_a_mask_stays_float_and_says_why(self):
        class Masked(nn.Module):
            def forward(self, q, k, v, mask):
                return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.project, self.core = nn.Linear(32, 96), Masked()

            def forward(self, x, mask):
                q, k, v = self.project(x).reshape(-1, 8, 3, 2, 16).permute(2, 0, 3, 1, 4)
                return self.core(q, k, v, mask)

        x, mask = torch.randn(2, 8, 32), torch.zeros(2, 1, 8, 8)
        quantized = quantize(Net().eval(), (x, mask), forward_loop=[(x, mask)], target="tensorrt")
        rows = {row.kind: row for row in coverage(quantized).operations}
        assert rows["linear"].state == "quantized"
        assert rows["attention"].state == "float"
        assert "mask" in rows["attention"].reason

    @pytest.mark.parametrize(("tokens", "state"), [(512, "quantized"), (513, "float")])
    def test_long_attention_stays_float(self, tokens, state):
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.project = nn.Linear(16, 48)

            def forward(self, x):
                return F.scaled_dot_product_attention(*self.project(x).chunk(3, -1))

        x = torch.randn(2, tokens, 16)
        quantized = quantize(Net().eval(), x, forward_loop=[x], target="tensorrt")
        assert next(row.state for row in coverage(quantized).operations if row.kind == "attention") == state

    def test_a_pool_before_a_small_head_stays_float_with_it(self, tmp_path):
        net = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU())
        net = nn.Sequential(*net, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)).eval()
        x = torch.randn(2, 3, 16, 16)
        quantized = exported(net, x, tmp_path / "m.onnx")
        assert [row.state for row in coverage(quantized).operations] == ["quantized", "quantized", "float"]
        assert [str(finding) for finding in check(tmp_path / "m.onnx")] == []

    def test_there_is_no_clip_before_a_quantizer(self, block, tmp_path):
        exported(*block, tmp_path / "m.onnx")
        assert "Clip" not in {node.op_type for node in onnx.load(tmp_path / "m.onnx").graph.node}

    def test_fp8_leaves_depthwise_and_narrow_convolutions_float(self):
        net = nn.Sequential(nn.Conv2d(3, 32, 3), nn.Conv2d(32, 32, 3, groups=32), nn.Conv2d(32, 64, 3)).eval()
        x = torch.randn(2, 3, 16, 16)
        rows = coverage(quantize(net, x, tensorrt.FP8, forward_loop=[x], target="tensorrt")).operations
        assert [row.state for row in rows] == ["float", "float", "quantized"]
        assert "R17" in rows[1].reason


class TestFloatType:
    @pytest.mark.parametrize(
        "name", ["fp16", *(pytest.param(name, marks=pytest.mark.slow) for name in ("float16", torch.float16))]
    )
    def test_only_the_interface_is_float32(self, block, tmp_path, name):
        model, x = block
        quantized = exported(model, x, tmp_path / "m.onnx", float_dtype=name)
        assert set(types(tmp_path / "m.onnx")) == {"FLOAT16", "INT8", "INT64"}
        graph = onnx.load(tmp_path / "m.onnx").graph
        assert {value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)} == {TensorProto.FLOAT}
        with torch.no_grad():
            assert sqnr(quantized(x), run(tmp_path / "m.onnx", x)) > 35

    def test_onnx_runtime_runs_float16(self, block, tmp_path):
        model, x = block
        quantized = exported(model, x, tmp_path / "m.onnx", float_dtype="fp16")
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = onnxruntime.InferenceSession(tmp_path / "m.onnx", options)
        for batch in (1, 3):
            y = torch.randn(batch, *x.shape[1:])
            (output,) = session.run(None, {"x": y.numpy()})
            with torch.no_grad():
                assert sqnr(quantized(y), torch.from_numpy(output)) > 30

    def test_bfloat16(self, block, tmp_path):
        model, x = block
        quantized = exported(model, x, tmp_path / "m.onnx", float_dtype="bf16")
        assert set(types(tmp_path / "m.onnx")) == {"BFLOAT16", "INT8", "INT64"}
        with torch.no_grad():
            assert sqnr(quantized(x), run(tmp_path / "m.onnx", x)) > 20

    def test_codes_are_computed_with_the_stored_scale(self, tmp_path):
        """A bf16 scale is off by up to 0.2 %: a quarter of a step at code 127, if codes came from the exact scale."""
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(64, 64, bias=False)).eval(), torch.randn(2, 64)
        exported(model, x, tmp_path / "m.onnx", float_dtype="bf16")
        initializers = {
            tensor.name: onnx.numpy_helper.to_array(tensor)
            for tensor in onnx.load(tmp_path / "m.onnx").graph.initializer
        }
        codes = next(value for value in initializers.values() if value.shape == (64, 64))
        scale = next(value for value in initializers.values() if value.shape == (64,) and value.dtype != np.int8)
        stored = codes.astype(np.float32) * scale.astype(np.float32)
        error = np.abs(stored - model[0].weight.detach().numpy().T) / scale.astype(np.float32)
        assert error.max() <= 0.5 + 127 * 2**-9  # only the largest value may be clipped
        assert np.quantile(error, 0.999) <= 0.5

    def test_the_lowest_float_stays_finite(self, tmp_path):
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(16, 16)
                self.register_buffer("mask", torch.tensor([0.0, torch.finfo(torch.float32).min] * 8))

            def forward(self, x):
                return torch.softmax(self.linear(x) + self.mask, -1)

        x = torch.randn(2, 16)
        exported(Net().eval(), x, tmp_path / "m.onnx", float_dtype="fp16")
        assert torch.isfinite(run(tmp_path / "m.onnx", x)).all()

    def test_operands_that_must_be_float32_stay_float32(self, tmp_path):
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv = nn.Conv2d(16, 16, 3, padding=1)

            def forward(self, x):
                return F.interpolate(self.conv(x), scale_factor=1.1, mode="nearest")

        x = torch.randn(2, 16, 10, 10)
        quantized = exported(Net().eval(), x, tmp_path / "m.onnx", float_dtype="fp16")
        with torch.no_grad():
            assert sqnr(quantized(x), run(tmp_path / "m.onnx", x)) > 35

    def test_a_float_dtype_that_the_target_does_not_support_is_refused(self, block, tmp_path):
        model, x = block
        quantized = quantize(model, x, forward_loop=[x], target="onnxruntime")
        with pytest.raises(TargetError, match=r"float_dtype=float16.*onnxruntime.*float32"):
            export(quantized, tmp_path / "m.onnx", x, float_dtype="fp16")
        assert list(tmp_path.iterdir()) == []

    def test_a_misspelt_float_dtype_is_refused(self, block, tmp_path):
        model, x = block
        quantized = quantize(model, x, forward_loop=[x], target="tensorrt")
        with pytest.raises(ScalepointError, match="flot16"):
            export(quantized, tmp_path / "m.onnx", x, float_dtype="flot16")


class TestFormats:
    CASES = (
        ("FP8", tensorrt.FP8, {"FLOAT8E4M3FN"}, 19),
        ("MXFP8", tensorrt.MXFP8, {"FLOAT8E4M3FN", "UINT8"}, 21),
        ("NVFP4", tensorrt.NVFP4, {"FLOAT8E4M3FN", "FLOAT4E2M1"}, 23),
        ("INT4", QuantConfig.weight_only("int4", block_size=64), {"INT4"}, 21),
    )

    @pytest.mark.parametrize(
        ("name", "config", "kinds", "opset", "float_dtype"),
        [
            pytest.param(*case, float_dtype, id=f"{case[0]}-{float_dtype}", marks=marks)
            for case in CASES
            for float_dtype, marks in ((None, []), ("fp16", [] if case[0] == "MXFP8" else [pytest.mark.slow]))
        ],
    )
    def test_the_file_has_the_types_and_values(self, block, tmp_path, name, config, kinds, opset, float_dtype):
        model, x = block
        path = tmp_path / "m.onnx"
        quantized = exported(model, x, path, config, float_dtype=float_dtype)
        assert kinds <= set(types(path))
        versions = {opset.domain: opset.version for opset in onnx.load(path).opset_import}
        assert versions[""] == opset
        assert [str(finding) for finding in check(path, "tensorrt", version=11 if float_dtype else 10)] == []
        with torch.no_grad():
            expected = quantized(x)
            assert sqnr(model(x), expected) > 15
        assert sqnr(expected, run(path, x)) > (60 if float_dtype is None else 25)  # 16 bits flip some codes

    def test_activations_in_blocks_take_any_batch_and_length(self, tmp_path):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).eval()
        x = torch.randn(4, 64)
        quantized = exported(model, x, tmp_path / "m.onnx", tensorrt.NVFP4)
        y = torch.randn(7, 64)
        with torch.no_grad():
            expected = quantized(y)
        graph = onnx.load(tmp_path / "m.onnx")
        (output,) = ReferenceEvaluator(graph, new_ops=OPERATORS).run(None, {graph.graph.input[0].name: y.numpy()})
        assert sqnr(expected, torch.from_numpy(output)) > 60

    def test_other_targets_refuse_dynamic_block_scales(self, tmp_path):
        x = torch.randn(2, 64)
        quantized = quantize(
            nn.Sequential(nn.Linear(64, 64)).eval(), x, tensorrt.MXFP8, forward_loop=[x], target="reference"
        )
        with pytest.raises(ExportError, match="dynamic scales"):
            export(quantized, tmp_path / "m.onnx", x)

    def test_a_quantizer_without_a_tensor_scale_is_refused(self, tmp_path):
        """One call computes scales of blocks, but only calibration observes the scale of the tensor."""
        x = torch.randn(2, 64)
        captured = scalepoint.transform(nn.Sequential(nn.Linear(64, 64)).eval(), x, target="tensorrt")
        model = insert_qdq(captured.model, captured.matches, tensorrt.NVFP4)
        for module in model.modules():
            if isinstance(module, QuantizerBase):
                module.enabled = True
        with torch.no_grad():
            model(x)
        freeze(model)
        with pytest.raises(ExportError, match="no tensor scale yet: run calibrate"):
            export(model, tmp_path / "m.onnx", x)

    def test_a_width_that_the_blocks_do_not_divide_stays_float(self):
        x = torch.randn(2, 40)
        model = nn.Sequential(nn.Linear(40, 64), nn.Linear(64, 64)).eval()
        with pytest.warns(UserWarning, match="disabled"):
            quantized = quantize(model, x, tensorrt.MXFP8, forward_loop=[x], target="tensorrt")
        first, second = coverage(quantized).operations
        assert first.state == "refused"
        assert second.state == "quantized"

    def test_save_and_load_keep_the_tensor_scale(self, tmp_path):
        x = torch.randn(4, 64)
        model = nn.Sequential(nn.Linear(64, 64)).eval()
        quantized = quantize(model, x, tensorrt.NVFP4, forward_loop=[x, 3 * x], target="tensorrt")
        scalepoint.save(quantized, tmp_path / "kept")
        loaded = scalepoint.load(tmp_path / "kept", model, x)
        y = torch.randn(5, 64) * 2
        with torch.no_grad():
            assert torch.equal(quantized(y), loaded(y))
