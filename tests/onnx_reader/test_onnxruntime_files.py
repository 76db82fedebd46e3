"""Files that ONNX Runtime optimized or quantized: the layers of the float model are read back."""

from collections import Counter

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_dynamic, quantize_static
from torch import nn

import scalepoint
from scalepoint.errors import OnnxReadError
from tests.onnx_reader.graphs import model_of, random, save

LAYERS = (nn.Conv2d, nn.Embedding, nn.LayerNorm, nn.Linear, nn.LSTM)
LEVELS = onnxruntime.GraphOptimizationLevel


def _convolutions():
    """Convolutions with Relu, Relu6 and LeakyRelu, a residual, a pool, and a linear layer."""
    return model_of(
        """net (float[N, 3, 16, 16] x) => (float[N, 5] y) {
            zero = Constant<value_float = 0.0>()  six = Constant<value_float = 6.0>()
            a = Conv<pads = [1, 1, 1, 1]>(x, w1, b1)  b = Relu(a)
            c = Conv<pads = [1, 1, 1, 1]>(b, w2, b2)  d = Add(c, b)  e = Relu(d)
            f = Conv<pads = [1, 1, 1, 1]>(e, w2, b2)  g = Clip(f, zero, six)
            h = Conv(g, w2)  i = LeakyRelu<alpha = 0.1>(h)
            j = GlobalAveragePool(i)  k = Flatten(j)
            y = Gemm<transB = 1>(k, w3, b3)
        }""",
        w1=random(8, 3, 3, 3) / 3,
        b1=random(8, seed=1),
        w2=random(8, 8, 3, 3, seed=2) / 4,
        b2=random(8, seed=3),
        w3=random(5, 8, seed=4),
        b3=random(5, seed=5),
    )


def _transformer():
    """Embeddings, attention with a mask, residuals with LayerNormalization, and GELU."""
    return model_of(
        """net (int64[N, 6] ids, float[N, 1, 1, 6] mask) => (float[N, 6, 16] y) {
            scale = Constant<value_float = 0.35>()  split = Constant<value_ints = [0, 0, 2, 8]>()
            joined = Constant<value_ints = [0, 0, 16]>()
            words = Gather(table, ids)
            x = LayerNormalization(words, gain, shift)
            q0 = MatMul(x, wq)  q1 = Add(q0, bias)  q2 = Reshape(q1, split)  q = Transpose<perm = [0, 2, 1, 3]>(q2)
            k0 = MatMul(x, wk)  k1 = Add(k0, bias)  k2 = Reshape(k1, split)  k = Transpose<perm = [0, 2, 3, 1]>(k2)
            v0 = MatMul(x, wv)  v1 = Add(v0, bias)  v2 = Reshape(v1, split)  v = Transpose<perm = [0, 2, 1, 3]>(v2)
            s0 = MatMul(q, k)  s1 = Mul(s0, scale)  s2 = Add(s1, mask)  p = Softmax<axis = -1>(s2)
            c0 = MatMul(p, v)  c1 = Transpose<perm = [0, 2, 1, 3]>(c0)  c = Reshape(c1, joined)
            o0 = MatMul(c, wo)  o = Add(o0, bias)
            r = Add(o, x)  n = LayerNormalization(r, gain, shift)
            u0 = MatMul(n, wu)  u1 = Add(u0, wide)  u = Gelu(u1)
            d0 = MatMul(u, wd)  d = Add(d0, bias)
            t = Add(d, n)  y = LayerNormalization(t, gain, shift)
        }""",
        opset=20,
        table=random(20, 16),
        gain=1 + random(16, seed=1) / 10,
        shift=random(16, seed=2) / 10,
        bias=random(16, seed=3) / 10,
        wide=random(32, seed=4) / 10,
        wq=random(16, 16, seed=5) / 4,
        wk=random(16, 16, seed=6) / 4,
        wv=random(16, 16, seed=7) / 4,
        wo=random(16, 16, seed=8) / 4,
        wu=random(16, 32, seed=9) / 4,
        wd=random(32, 16, seed=10) / 5,
    )


def _recurrent():
    """An LSTM between linear layers."""
    return model_of(
        """net (float[N, 5, 16] x) => (float[N, 5, 4] y) {
            a = MatMul(x, up)  b = Add(a, bias)  c = Relu(b)
            steps = Transpose<perm = [1, 0, 2]>(c)
            d, last, cell = LSTM<hidden_size = 8>(steps, lstm_w, lstm_r, lstm_b)
            direction = Constant<value_ints = [1]>()
            e = Squeeze(d, direction)
            f = Transpose<perm = [1, 0, 2]>(e)
            y = MatMul(f, down)
        }""",
        up=random(16, 32) / 4,
        bias=random(32, seed=1),
        down=random(8, 4, seed=2),
        lstm_w=random(1, 32, 32, seed=3) / 5,
        lstm_r=random(1, 32, 8, seed=4) / 3,
        lstm_b=random(1, 64, seed=5),
    )


NETWORKS = {"convolutions": _convolutions, "transformer": _transformer, "recurrent": _recurrent}
FEEDS = {
    "convolutions": {"x": random(4, 3, 16, 16, seed=9)},
    "transformer": {
        "ids": np.random.default_rng(0).integers(0, 20, (2, 6)),
        "mask": np.where(np.arange(6) < 5, 0, -1e4).astype(np.float32).reshape(1, 1, 1, 6).repeat(2, 0),
    },
    "recurrent": {"x": random(2, 5, 16, seed=9)},
}


class Reader(CalibrationDataReader):
    def __init__(self, feeds):
        self.batches = iter([feeds])

    def get_next(self):
        return next(self.batches, None)


def _optimized(source, path, level):
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(path)
    options.graph_optimization_level = level
    options.log_severity_level = 4  # it warns that such files depend on the machine
    onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    return str(path)


def _quantized(name, method, tmp_path):
    source, path = save(NETWORKS[name](), tmp_path / "float.onnx"), str(tmp_path / f"{method}.onnx")
    if method == "static":
        quantize_static(source, path, Reader(FEEDS[name]), activation_type=QuantType.QUInt8, per_channel=True)
    else:
        quantize_dynamic(source, path, weight_type=QuantType.QInt8)
    return path


def _layers(model):
    return Counter(kind.__name__ for layer in model.modules() for kind in LAYERS if isinstance(layer, kind))


def _run(model, name):
    with torch.no_grad():
        return model(*map(torch.from_numpy, FEEDS[name].values()))


def _decibels(expected, output):
    return float(10 * torch.log10(expected.square().sum() / (expected - output).square().sum()))


def _operators(path):
    return {f"{node.domain}::{node.op_type}" if node.domain else node.op_type for node in onnx.load(path).graph.node}


@pytest.mark.parametrize("level", [LEVELS.ORT_ENABLE_BASIC, LEVELS.ORT_ENABLE_EXTENDED], ids=["basic", "extended"])
@pytest.mark.parametrize("name", NETWORKS)
def test_an_optimized_file_has_the_layers_of_the_file_that_it_was_made_from(name, level, tmp_path):
    source = save(NETWORKS[name](), tmp_path / "float.onnx")
    path = _optimized(source, tmp_path / "optimized.onnx", level)
    original, optimized = scalepoint.load_onnx(source), scalepoint.load_onnx(path)
    assert _layers(optimized) == _layers(original)
    assert _decibels(_run(original, name), _run(optimized, name)) > 100
    expected = onnxruntime.InferenceSession(path).run(None, FEEDS[name])[0]
    assert _decibels(torch.from_numpy(expected), _run(optimized, name)) > 100


@pytest.mark.parametrize("level", [LEVELS.ORT_DISABLE_ALL, LEVELS.ORT_ENABLE_BASIC, LEVELS.ORT_ENABLE_EXTENDED])
@pytest.mark.parametrize("method", ["static", "dynamic"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_quantized_and_optimized_file_is_read_back_as_the_float_model(name, method, level, tmp_path):
    path = _optimized(_quantized(name, method, tmp_path), tmp_path / "optimized.onnx", level)
    original = scalepoint.load_onnx(str(tmp_path / "float.onnx"))
    with pytest.raises(OnnxReadError, match="already quantized"):
        scalepoint.load_onnx(path)
    loaded = scalepoint.load_onnx(path, requantize=True)
    assert _layers(loaded) == _layers(original)
    assert _decibels(_run(original, name), _run(loaded, name)) > 30  # the error of 8-bit weights


def test_these_files_have_the_fused_operators(tmp_path):
    """Otherwise the tests above test less than they say."""
    operators = set()
    for name, make_model in NETWORKS.items():
        source = save(make_model(), tmp_path / "float.onnx")
        operators |= _operators(_optimized(source, tmp_path / "optimized.onnx", LEVELS.ORT_ENABLE_EXTENDED))
        for method in ("static", "dynamic"):
            path = _quantized(name, method, tmp_path)
            operators |= _operators(_optimized(path, tmp_path / "optimized.onnx", LEVELS.ORT_ENABLE_EXTENDED))
    fused = ("FusedConv", "FusedMatMul", "SkipLayerNormalization", "BiasGelu")
    quantized = ("DynamicQuantizeMatMul", "MatMulIntegerToFloat", "DynamicQuantizeLSTM", "QLinearAdd", "QGemm")
    assert {f"com.microsoft::{operator}" for operator in (*fused, *quantized)} <= operators
    assert {"QLinearConv", "QLinearMatMul"} <= operators


def test_a_layout_of_one_machine_is_refused_by_name(tmp_path):
    path = _optimized(_quantized("convolutions", "static", tmp_path), tmp_path / "all.onnx", LEVELS.ORT_ENABLE_ALL)
    if "com.microsoft::QLinearConv" not in _operators(path):
        pytest.skip("ONNX Runtime does not change the layout on this machine")
    with pytest.raises(OnnxReadError, match=r"QLinearConv.*channels_last"):
        scalepoint.load_onnx(path, requantize=True)


def _compare_with_runtime(model, x, **settings):
    expected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})[0]
    output = scalepoint.load_onnx(model, **settings)(torch.from_numpy(x)).detach()
    return _decibels(torch.from_numpy(expected), output)


def test_the_parts_of_a_fused_node_get_other_names_than_the_values_of_the_file():
    text = """net (float[1, 2, 3, 3] x) => (float[1, 2, 3, 3] z) {
        y_Conv_0 = Neg(x)
        y = com.microsoft.FusedConv<activation = "Relu">(x, w)
        z = Add(y, y_Conv_0)
    }"""
    model = model_of(text, 17, domains=("com.microsoft",), w=random(2, 2, 1, 1))
    assert _compare_with_runtime(model, random(1, 2, 3, 3)) > 100


def test_the_parts_of_a_fused_node_in_a_body_get_other_names_than_the_values_around_it():
    text = """net (float[1, 2, 3, 3] x) => (float[1, 2, 3, 3] z) {
        y_Conv_0 = Neg(x)
        total = ReduceSum<keepdims = 0>(x)
        zero = Constant<value_float = 0.0>()
        is_positive = Greater(total, zero)
        z = If(is_positive) <
            then_branch = t () => (float[1, 2, 3, 3] p) {
                y = com.microsoft.FusedConv<activation = "Relu">(x, w)
                p = Add(y, y_Conv_0)
            },
            else_branch = e () => (float[1, 2, 3, 3] q) { q = Identity(y_Conv_0) }
        >
    }"""
    model = model_of(text, 17, domains=("com.microsoft",), w=random(2, 2, 1, 1))
    assert _compare_with_runtime(model, np.abs(random(1, 2, 3, 3))) > 100


def test_the_parts_of_a_quantized_node_get_other_names_than_the_values_of_the_file():
    text = """net (float[1, 4] x) => (float[1, 3] z) {
        xq = QuantizeLinear(x, s, zero)
        wide = Concat<axis = 1>(x, x)
        yq_DequantizeLinear_0 = Slice(wide, start, end)
        yq = QLinearMatMul(xq, s, zero, w, s, w_zero, result_scale, zero)
        y = DequantizeLinear(yq, result_scale, zero)
        z = Add(y, yq_DequantizeLinear_0)
    }"""
    model = model_of(
        text,
        17,
        s=np.float32(0.02),
        zero=np.uint8(128),
        w=np.random.default_rng(0).integers(-127, 128, (4, 3)).astype(np.int8),
        w_zero=np.int8(0),
        result_scale=np.float32(0.05),
        start=np.array([0, 1]),
        end=np.array([1, 4]),
    )
    assert _compare_with_runtime(model, random(1, 4), requantize=True) > 25


DAMAGED_NODES = {
    "FusedConv()": r"input 0 \(X\) is missing",
    "FusedConv(x)": r"input 1 \(W\) is missing",
    "FusedConv<activation = 3>(x, x)": "attribute activation has the wrong type: 3",
    'FusedConv<activation = "LeakyRelu">(x, x)': "activation LeakyRelu with 0 numbers",
    'FusedConv<activation = "LeakyRelu", activation_params = 0.1>(x, x)': "activation_params has the wrong type",
    "FusedGemm(x)": r"input 1 \(B\) is missing",
    "FusedMatMul(, x)": r"input 0 \(A\) is missing",
    'FusedMatMul<alpha = "two">(x, x)': "attribute alpha has the wrong type",
    "BiasGelu(x)": r"input 1 \(B\) is missing",
    "FastGelu()": r"input 0 \(X\) is missing",
    "QuickGelu()": r"input 0 \(X\) is missing",
    "SkipLayerNormalization(x)": r"input 1 \(skip\) is missing",
    "SkipSimplifiedLayerNormalization(x, x)": r"input 2 \(gamma\) is missing",
    'SkipLayerNormalization<epsilon = "small">(x, x, x)': "attribute epsilon has the wrong type",
    "EmbedLayerNormalization(x, , x, , , x, x)": r"input 3 \(position_embedding\) is missing",
}


@pytest.mark.parametrize("call", DAMAGED_NODES)
def test_a_damaged_fused_node_is_refused_by_its_name_and_what_is_missing(call):
    operator = call.partition("(")[0].partition("<")[0]
    text = f"net (float[2, 2] x) => (float[2, 2] y) {{ y = com.microsoft.{call} }}"
    model = model_of(text, 17, domains=("com.microsoft",))
    model.graph.node[0].name = "/layer/fused"
    with pytest.raises(
        OnnxReadError, match=rf"node '/layer/fused' \(com.microsoft::{operator}\).*{DAMAGED_NODES[call]}"
    ):
        scalepoint.load_onnx(model)


QUANTIZED_NODES = {
    "QLinearConcat": "com.microsoft.QLinearConcat<axis = 1>(s, z, xq, s, z, xq, s, z)",
    "QLinearMul": "com.microsoft.QLinearMul(xq, s, z, xq, s, z, s, z)",
    "QLinearSigmoid": "com.microsoft.QLinearSigmoid(xq, s, z, s, z)",
    "QLinearSoftmax": "com.microsoft.QLinearSoftmax<axis = -1, opset = 13>(xq, s, z, s, z)",
    "QLinearWhere": "com.microsoft.QLinearWhere(condition, xq, s, z, weight, s, z, s, z)",
    "QLinearLeakyRelu": "com.microsoft.QLinearLeakyRelu<alpha = 0.3>(xq, s, z, s, z)",
    "QLinearAveragePool": "com.microsoft.QLinearAveragePool<kernel_shape = [2, 2]>(xq, s, z, s, z)",
    "QLinearGlobalAveragePool": "com.microsoft.QLinearGlobalAveragePool(xq, s, z, s, z)",
}


@pytest.mark.parametrize("name", QUANTIZED_NODES)
def test_an_operator_on_codes_is_read_as_its_float_operator(name):
    text = f"""net (float[1, 4, 8, 8] x) => (float[] y) {{
        xq = QuantizeLinear(x, s, z)
        yq = {QUANTIZED_NODES[name]}
        y = DequantizeLinear(yq, s, z)
    }}"""
    constants = {
        "s": np.float32(0.01),
        "z": np.uint8(128),
        "weight": np.random.default_rng(1).integers(0, 256, (8, 8)).astype(np.uint8),
        "condition": np.random.default_rng(2).integers(0, 2, (8, 8)).astype(bool),
    }
    used = {key: value for key, value in constants.items() if key in ("s", "z") or name == "QLinearWhere"}
    model = model_of(text, 17, domains=("com.microsoft",), **used)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    x = random(1, 4, 8, 8) / 3
    expected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})[0]
    loaded = scalepoint.load_onnx(model, requantize=True)
    assert not any("Quant" in node.operator for node in loaded.nodes.values())
    assert _decibels(torch.from_numpy(expected), loaded(torch.from_numpy(x)).detach().reshape(expected.shape)) > 20


def test_quantized_attention_is_read_with_its_layer():
    text = """net (float[1, 5, 16] x) => (float[1, 5, 16] y) {
        xq = QuantizeLinear(x, s, z)
        y = com.microsoft.QAttention<num_heads = 2>(xq, weight, bias, s, weight_scale, mask, z, weight_zero)
    }"""
    model = model_of(
        text,
        17,
        domains=("com.microsoft",),
        s=np.float32(0.03),
        z=np.uint8(128),
        weight=np.random.default_rng(0).integers(-127, 128, (16, 48)).astype(np.int8),
        weight_scale=np.float32(0.005),
        weight_zero=np.int8(0),
        bias=random(48, seed=1),
        mask=np.ones((1, 5), np.int32),
    )
    x = random(1, 5, 16)
    expected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})[0]
    loaded = scalepoint.load_onnx(model, requantize=True)
    assert _layers(loaded) == {"Linear": 1}
    assert _decibels(torch.from_numpy(expected), loaded(torch.from_numpy(x)).detach()) > 30


@pytest.mark.parametrize("operator", ["QLinearAdd", "QLinearMul"])
def test_an_activation_is_read_back_from_an_operator_on_codes_without_a_zero_point(operator):
    text = f"""net (float[1, 4] x) => (float[1, 4] y) {{
        xq = QuantizeLinear(x, s, zero)
        yq = com.microsoft.{operator}(xq, s, zero, weight, s, zero, s)
        y = DequantizeLinear(yq, s)
    }}"""
    weight = np.array([140, 150, 90, 100], np.uint8)
    constants = {"s": np.float32(0.02), "zero": np.uint8(128), "weight": weight}
    model = model_of(text, 17, domains=("com.microsoft",), **constants)
    assert _compare_with_runtime(model, np.array([[1.1, -2, -1.5, 2]], np.float32), requantize=True) > 20
