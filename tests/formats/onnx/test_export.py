"""Exported ONNX files: integer weights, results in ONNX Runtime, and models that are refused."""

import sys
from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from scalepoint import transform
from scalepoint.checking import check
from scalepoint.errors import ExportError
from scalepoint.formats import export
from scalepoint.formats.onnx.passes import share_equal_initializers
from scalepoint.quantize import (
    QuantConfig,
    TensorQuantConfig,
    calibrate,
    disable_fake_quant,
    enable_fake_quant,
    freeze,
    insert_qdq,
    quantize,
)
from scalepoint.spec import QuantizationSpec
from scalepoint.verification import verify

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Net(nn.Module):
    """Convolutions with and without batch norm, depthwise, a residual, a pool, a concat, a linear head."""

    def __init__(self):
        super().__init__()
        self.stem, self.bn1 = nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16)
        self.pool = nn.MaxPool2d(2)
        self.expand, self.bn2 = nn.Conv2d(16, 32, 1), nn.BatchNorm2d(32)
        self.depthwise = nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.project = nn.Conv2d(32, 16, 1)
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        x = self.pool(torch.relu(self.bn1(self.stem(x))))
        y = F.relu6(self.depthwise(F.relu6(self.bn2(self.expand(x)))))
        x = torch.cat([x + self.project(y), x], 1)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


def with_random_statistics(model):
    torch.manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 2)
            nn.init.uniform_(module.weight, 0.5, 2)
    return model.eval()


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    torch.manual_seed(0)
    model, x = with_random_statistics(Net()), torch.randn(8, 3, 32, 32)
    quantized = quantize(model, x[:2], forward_loop=[x], target="onnxruntime")
    folder = tmp_path_factory.mktemp("exported")
    export(quantized, folder / "model.onnx", x[:1], float_path=folder / "float.onnx")
    return model, quantized, x, folder


def optimized_operations(path, folder):
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return Counter(node.op_type for node in onnx.load(folder / "optimized.onnx").graph.node)


def run(path, x, *, optimize=True):
    options, levels = onnxruntime.SessionOptions(), onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimize else levels.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]


def sqnr(expected, actual):
    return 10 * np.log10((expected**2).sum() / (((expected - actual) ** 2).sum() + 1e-30))


class TestTheFile:
    def test_every_convolution_and_linear_runs_in_int8(self, case):
        *_, folder = case
        actual = optimized_operations(folder / "model.onnx", folder)
        assert actual["QLinearConv"] == 4
        assert actual["QGemm"] + actual["MatMulIntegerToFloat"] + actual["QLinearMatMul"] == 1
        assert not {"Conv", "FusedConv", "Gemm", "MatMul", "Relu", "Clip", "Add"} & set(actual)

    @pytest.mark.parametrize("batch", [1, 3, 8])
    def test_the_runtime_computes_what_the_simulation_does(self, case, batch):
        _, quantized, x, folder = case
        with torch.no_grad():
            expected = quantized(x[:batch]).numpy()
        assert sqnr(expected, run(folder / "model.onnx", x[:batch])) > 35

    def test_the_float_file_is_the_float_model(self, case):
        model, _, x, folder = case
        with torch.no_grad():
            np.testing.assert_allclose(run(folder / "float.onnx", x), model(x).numpy(), atol=1e-5)

    def test_weights_and_biases_are_integers(self, case):
        *_, folder = case
        stored = onnx.load(folder / "model.onnx").graph.initializer
        kinds = Counter(tensor.data_type for tensor in stored if tensor.dims)
        assert kinds[onnx.TensorProto.INT8] >= 5
        assert kinds[onnx.TensorProto.INT32] == 5
        large = [tensor for tensor in stored if np.prod(tensor.dims) > 100]
        assert all(tensor.data_type == onnx.TensorProto.INT8 for tensor in large)

    def test_it_passes_the_checker_and_contains_no_data_of_this_machine(self, case):
        *_, folder = case
        onnx.checker.check_model(str(folder / "model.onnx"), full_check=True)
        data = (folder / "model.onnx").read_bytes()
        assert sys.prefix.encode() not in data
        assert b".py" not in data

    def test_nodes_are_named_after_modules(self, case):
        *_, folder = case
        names = [node.name for node in onnx.load(folder / "model.onnx").graph.node if node.op_type == "Conv"]
        assert [name.split("_")[0].split("/")[0] for name in names] == ["stem", "expand", "depthwise", "project"]

    def test_the_same_model_gives_the_same_bytes(self, case, tmp_path):
        _, quantized, x, folder = case
        export(quantized, tmp_path / "again.onnx", x[:1])
        assert (tmp_path / "again.onnx").read_bytes() == (folder / "model.onnx").read_bytes()


class Wide(nn.Module):
    def __init__(self, size=512):
        super().__init__()
        self.a, self.b = nn.Linear(size, size), nn.Linear(size, size)

    def forward(self, x):
        return self.b(F.gelu(self.a(x)))


class TestWeightOnly:
    def test_int4_blocks_run_as_matmul_nbits_and_shrink_the_file(self, tmp_path):
        torch.manual_seed(0)
        model, x = Wide().eval(), torch.randn(2, 7, 512)
        blocks = QuantizationSpec(
            dtype="int4",
            qscheme="symmetric_with_clipping",
            granularity={"type": "per_block", "axis": 1, "block_size": 32},
            qparam_calculator_cls="static",
        )
        config = QuantConfig(activation="float", weight=blocks)
        quantized = quantize(model, x, config, target="onnxruntime")
        export(quantized, tmp_path / "model.onnx", x, float_path=tmp_path / "float.onnx")
        assert optimized_operations(tmp_path / "model.onnx", tmp_path)["MatMulNBits"] == 2
        ratio = (tmp_path / "model.onnx").stat().st_size / (tmp_path / "float.onnx").stat().st_size
        assert ratio <= 0.17
        with torch.no_grad():
            assert sqnr(quantized(x).numpy(), run(tmp_path / "model.onnx", x)) > 35

    def test_int8_shrinks_the_file_to_a_quarter(self, tmp_path):
        model, x = Wide().eval(), torch.randn(2, 512)
        quantized = quantize(model, x, forward_loop=[x], target="onnxruntime")
        export(quantized, tmp_path / "model.onnx", x, float_path=tmp_path / "float.onnx")
        ratio = (tmp_path / "model.onnx").stat().st_size / (tmp_path / "float.onnx").stat().st_size
        assert ratio <= 0.27


class TestRefused:
    @pytest.fixture
    def inserted(self):
        x = torch.randn(2, 3, 32, 32)
        result = transform(with_random_statistics(Net()), x, target="onnxruntime")
        return insert_qdq(result.model, result.matches), x

    def test_an_uncalibrated_model_is_refused(self, inserted, tmp_path):
        model, x = inserted
        with pytest.raises(ExportError, match="never calibrated"):
            export(model, tmp_path / "m.onnx", x)
        assert not list(tmp_path.iterdir())

    def test_live_weight_scales_are_refused(self, inserted, tmp_path):
        model, x = inserted
        calibrate(model, [x])
        with pytest.raises(ExportError, match="freeze"):
            export(model, tmp_path / "m.onnx", x)

    def test_disabled_fake_quantization_is_refused(self, inserted, tmp_path):
        model, x = inserted
        calibrate(model, [x], freeze_weights=True)
        disable_fake_quant(model)
        with pytest.raises(ExportError, match="is disabled"):
            export(model, tmp_path / "m.onnx", x)
        enable_fake_quant(model)
        freeze(model)

    def test_another_target_is_refused(self, inserted, tmp_path):
        model, x = inserted
        with pytest.raises(ExportError, match="quantized for target 'onnxruntime'"):
            export(model, tmp_path / "m.onnx", x, target="tensorrt")

    def test_a_float_model_is_refused(self, tmp_path):
        result = transform(with_random_statistics(Net()), torch.randn(2, 3, 32, 32))
        with pytest.raises(ExportError, match="no quantizers"):
            export(result.model, tmp_path / "m.onnx", torch.randn(2, 3, 32, 32))


def test_dead_channels_keep_their_bias(tmp_path):
    """Weights near zero make a tiny scale; the int32 bias must not overflow."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    with torch.no_grad():
        model[0].weight[2].mul_(1e-12)
        model[0].bias[2] = 3.0
    x = torch.randn(4, 3, 8, 8)
    quantized = quantize(model, x, forward_loop=[x], target="onnxruntime")
    export(quantized, tmp_path / "m.onnx", x)
    with torch.no_grad():
        expected = model(x).numpy()
    assert sqnr(expected, run(tmp_path / "m.onnx", x)) > 25


def test_tensorrt_weights_have_zero_points_and_float_biases(tmp_path):
    model, x = with_random_statistics(Net()), torch.randn(4, 3, 32, 32)
    config = QuantConfig(activation=TensorQuantConfig(), weight=TensorQuantConfig(per_channel=True))
    quantized = quantize(model, x, config, forward_loop=[x], target="tensorrt")
    export(quantized, tmp_path / "m.onnx", x)
    graph = onnx.load(tmp_path / "m.onnx").graph
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            zero = constants[node.input[2]]
            assert zero.dtype == np.int8
            assert not zero.any()
    assert not any(tensor.data_type == onnx.TensorProto.INT32 for tensor in graph.initializer)


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(32), nn.MultiheadAttention(32, 2, batch_first=True)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(x)))


def test_quantized_attention_is_scaled_before_its_quantizer(tmp_path):
    """No Mul is between DequantizeLinear and the product, the result is the same, and TensorRT rules are kept."""
    torch.manual_seed(0)
    model, x = Attends().eval(), torch.randn(4, 16, 32)
    quantized = quantize(model, x, forward_loop=[x], target="tensorrt")
    export(quantized, tmp_path / "m.onnx", x)
    assert check(tmp_path / "m.onnx", target="tensorrt") == []
    with torch.no_grad():
        actual = run(
            tmp_path / "m.onnx", x, optimize=False
        )  # symmetric int8 saturates in optimized kernels of ONNX Runtime
        np.testing.assert_allclose(actual, quantized(x).numpy(), atol=0.02)


class Padded(nn.Module):
    """Zero padding at one end only, as TensorFlow pads, at the input and between two convolutions."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, 2), nn.Conv2d(8, 8, 3, 2)

    def forward(self, x):
        x = torch.relu(self.first(F.pad(x, (0, 1, 0, 1))))
        return self.second(F.pad(x, (1, 2, 0, 1)))


def test_zero_padding_of_an_image_becomes_padding_of_the_convolution(tmp_path):
    torch.manual_seed(0)
    model, x = Padded().eval(), torch.randn(4, 3, 16, 16)
    quantized = quantize(model, x, forward_loop=[x], target="onnxruntime")
    export(quantized, tmp_path / "m.onnx", x, float_path=tmp_path / "float.onnx")
    convolutions = [node for node in onnx.load(tmp_path / "m.onnx").graph.node if node.op_type == "Conv"]
    pads = [list(next(tensor.ints for tensor in node.attribute if tensor.name == "pads")) for node in convolutions]
    assert pads == [[0, 0, 1, 1], [0, 1, 1, 2]]
    assert "Pad" not in {node.op_type for node in onnx.load(tmp_path / "m.onnx").graph.node}
    with torch.no_grad():
        assert sqnr(quantized(x).numpy(), run(tmp_path / "m.onnx", x)) > 35
        np.testing.assert_allclose(run(tmp_path / "float.onnx", x), model(x).numpy(), atol=1e-5)


class Often(nn.Module):
    """One layer, called three times."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        for _ in range(3):
            x = torch.relu(self.layer(x))
        return x


@pytest.mark.parametrize("is_fast", [False, True], ids=["quantized", "as is faster"])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(64, 64), (8, 64)),
        (nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)), (2, 16, 8, 8)),
    ],
    ids=["linear", "conv and norm"],
)
def test_a_layer_that_is_called_several_times_is_stored_once(layer, shape, is_fast, tmp_path):
    torch.manual_seed(0)
    model, x = with_random_statistics(Often(layer)), torch.randn(shape)
    config = QuantConfig(speed_first=is_fast)
    quantized = quantize(model, x, config, forward_loop=[x], target="onnxruntime", freeze_weights=True)
    export(quantized, tmp_path / "m.onnx", x, float_path=tmp_path / "float.onnx")
    for name in ("m.onnx", "float.onnx"):
        stored = [tensor for tensor in onnx.load(tmp_path / name).graph.initializer if np.prod(tensor.dims) > 1024]
        assert len(stored) == 1, name
    verification = verify(tmp_path / "m.onnx", quantized, x)
    assert verification.holds, verification


def test_equal_constants_are_shared_bit_by_bit():
    arrays = {"a": np.zeros(2000, np.float32), "b": np.zeros(2000, np.float32), "c": np.zeros(2000, np.float32)}
    arrays["c"][1] = -0.0
    arrays |= {"d": np.zeros(2000, np.int32), "e": np.zeros((2, 1000), np.float32)}
    stored = [onnx.numpy_helper.from_array(array, name) for name, array in arrays.items()]
    nodes = [onnx.helper.make_node("Identity", [name], [f"of {name}"]) for name in arrays]
    outputs = [onnx.helper.make_tensor_value_info(f"of {name}", 1, None) for name in arrays]
    model = ir.from_proto(onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", [], outputs, stored)))
    share_equal_initializers(model)
    assert list(model.graph.initializers) == ["a", "c", "d", "e"]
    assert [node.inputs[0].name for node in model.graph] == ["a", "a", "c", "d", "e"]
