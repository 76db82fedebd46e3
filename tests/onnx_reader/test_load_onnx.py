"""load_onnx: a file becomes a module that runs, trains, saves, prints and is captured like any other."""

import copy
import io
import warnings

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from google.protobuf.message import EncodeError
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from torch import nn

import scalepoint
from scalepoint.errors import OnnxReadError, StoreError, UsageError
from tests.onnx_reader.graphs import model_of, random, save


class SmallNet(nn.Module):
    """A convolution, an attention block and a classifier."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.SiLU())
        self.norm = nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.stem(x)
        batch, channels, height, width = x.shape
        tokens = x.reshape(batch, channels, height * width).transpose(1, 2)
        return self.head((tokens + self.mlp(self.norm(tokens))).mean(1))


@pytest.fixture(scope="module", params=["script", "dynamo"])
def exported(request, tmp_path_factory):
    torch.manual_seed(0)
    model = SmallNet().eval()
    for parameter in model.parameters():  # an exporter stores equal tensors once, under one name
        nn.init.uniform_(parameter, 0.1, 0.5)
    path = tmp_path_factory.mktemp("exported") / f"{request.param}.onnx"
    x = torch.randn(2, 3, 12, 12)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if request.param == "script":
            axes = {"x": {0: "batch", 2: "height"}}
            torch.onnx.export(model, (x,), path, dynamo=False, input_names=["x"], dynamic_axes=axes)
        else:
            shapes = {"x": {0: torch.export.Dim("batch"), 2: torch.export.Dim("height") * 2}}
            torch.onnx.export(model, (x,), path, dynamo=True, dynamic_shapes=shapes, verbose=False)
    return model, path


def test_an_exported_model_computes_what_the_original_does_at_other_sizes_too(exported):
    model, path = exported
    loaded = scalepoint.load_onnx(path)
    for shape in ((2, 3, 12, 12), (1, 3, 20, 12)):
        x = torch.randn(shape)
        torch.testing.assert_close(loaded(x), model(x))
        torch.testing.assert_close(loaded(x=x), model(x))


@pytest.mark.parametrize("shape", [(2, 3, 5), (2, 3, 4, 4), (2, 3, 2, 4, 4)])
def test_an_instance_norm_takes_any_number_of_spatial_axes(shape):
    axes = ", ".join(map(str, shape))
    text = f"net (float[{axes}] x) => (float[{axes}] y) {{ y = InstanceNormalization(x, scale, bias) }}"
    loaded = scalepoint.load_onnx(model_of(text, scale=random(3), bias=random(3, seed=1)))
    x = torch.randn(shape)
    scale, bias = torch.from_numpy(random(3)), torch.from_numpy(random(3, seed=1))
    torch.testing.assert_close(loaded(x), nn.functional.instance_norm(x, weight=scale, bias=bias))


def test_layers_have_the_names_and_classes_of_the_original(exported):
    model, path = exported
    layers = dict(scalepoint.load_onnx(path).named_modules())
    for name in ("stem.0", "norm", "mlp.0", "mlp.2", "head"):
        assert type(layers[name]) is type(model.get_submodule(name)), name
    assert any(isinstance(module, nn.SiLU) for module in layers.values())
    assert any(isinstance(module, nn.GELU) for module in layers.values())


def test_the_captured_graph_has_the_groups_of_the_original(exported):
    model, path = exported
    x = torch.randn(2, 3, 12, 12)
    counts = scalepoint.transform(scalepoint.load_onnx(path), x).report.counts()
    expected = scalepoint.transform(model, x).report.counts()
    # the file has the batch norm in the convolution already
    assert sum(counts.values()) == sum(expected.values())
    assert {name: n for name, n in counts.items() if "Conv" not in name} == {
        name: n for name, n in expected.items() if "Conv" not in name
    }


def test_a_loaded_model_copies_saves_and_trains(exported):
    _, path = exported
    loaded, x = scalepoint.load_onnx(path), torch.randn(2, 3, 12, 12)
    expected = loaded(x)
    torch.testing.assert_close(copy.deepcopy(loaded)(x), expected)
    buffer = io.BytesIO()
    torch.save(loaded, buffer)
    buffer.seek(0)
    torch.testing.assert_close(torch.load(buffer, weights_only=False)(x), expected)
    other = scalepoint.load_onnx(path)
    other.load_state_dict(loaded.state_dict())
    optimizer = torch.optim.SGD(loaded.parameters(), 1e-4)
    for _ in range(3):
        optimizer.zero_grad()
        loss = loaded(x).square().mean()
        loss.backward()
        optimizer.step()
    assert loaded(x).square().mean() < expected.square().mean()
    assert all(parameter.grad is not None for parameter in loaded.parameters())
    assert "stem" in repr(loaded)
    assert "x: float32" in repr(loaded)


def test_shape_arithmetic_stays_symbolic_in_a_captured_graph():
    model = model_of(
        """net (float[n, c, h, w] x) => (float[n, k] y) {
            s = Shape(x)
            one = Constant<value_ints = [0]>()
            n = Gather(s, one)
            rest = Constant<value_ints = [-1]>()
            target = Concat<axis = 0>(n, rest)
            y = Reshape(x, target)
        }"""
    )
    loaded = scalepoint.load_onnx(model)
    graph = scalepoint.graph.capture(loaded, torch.randn(2, 3, 4, 4), dynamic_axes={"x": {2: "height"}})
    assert graph(torch.randn(5, 3, 6, 4)).shape == (5, 72)


def test_a_shape_that_is_compared_with_filled_numbers_is_known_in_a_captured_graph():
    """As TorchScript writes x.expand(n, -1): every -1 of the shape becomes 1."""
    model = model_of(
        """net (float[n, 3] x, float[1, 3] row) => (float[n, 3] y) {
            s = Shape(x)
            first = Constant<value_ints = [0]>()
            n = Gather(s, first)
            rest = Constant<value_ints = [-1]>()
            target = Concat<axis = 0>(n, rest)
            count = Shape(target)
            ones = ConstantOfShape<value = int64[1] {1}>(count)
            minus = Neg(ones)
            is_free = Equal(target, minus)
            sizes = Where(is_free, ones, target)
            rows = Expand(row, sizes)
            y = Add(x, rows)
        }"""
    )
    inputs = (torch.ones(2, 3), torch.ones(1, 3))
    graph = scalepoint.graph.capture(scalepoint.load_onnx(model), inputs)
    torch.testing.assert_close(graph(*inputs), torch.full((2, 3), 2.0))


def test_a_quotient_of_rounded_sizes_stays_a_fraction_in_a_captured_graph():
    """Floor makes whole numbers of type float, and their quotient is not rounded."""
    model = model_of(
        """net (float[h, w] x) => (float[h, w] y) {
            s = Shape(x)
            sizes = Cast<to = 1>(s)
            whole = Floor(sizes)
            first = Constant<value_int = 0>()
            second = Constant<value_int = 1>()
            height = Gather(whole, first)
            width = Gather(whole, second)
            ratio = Div(height, width)
            y = Mul(x, ratio)
        }"""
    )
    example, x = torch.ones(6, 4), torch.ones(7, 3)
    axes = {"x": {0: "h", 1: "w"}}
    graph = scalepoint.graph.capture(scalepoint.load_onnx(model), example, dynamic_axes=axes)
    for value in (example, x):
        expected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": value.numpy()})[0]
        torch.testing.assert_close(graph(value), torch.from_numpy(expected))


@pytest.mark.parametrize("has_nan_rows", [False, True])
def test_attention_that_is_spelled_out_becomes_scaled_dot_product_attention(has_nan_rows):
    """As torch.onnx.export writes it: the root of the scale on both sides, a mask, rows without a key as 0."""
    rows = "s = Softmax<axis = -1>(masked) bad = IsNaN(s) p = Where(bad, zero, s)"
    rows = rows if has_nan_rows else "p = Softmax<axis = -1>(masked)"
    model = model_of(
        f"""net (float[n, 2, 5, 4] q, float[n, 2, 5, 4] k, float[n, 2, 5, 4] v, float[5, 5] m) => (float[n, 2, 5, 4] y)
        {{
            a = Mul(q, root)
            t = Transpose<perm = [0, 1, 3, 2]>(k)
            b = Mul(t, root)
            scores = MatMul(a, b)
            masked = Add(scores, m)
            {rows}
            y = MatMul(p, v)
        }}""",
        root=np.float32(0.5**0.5),
        zero=np.float32(0),
    )
    inputs = (*(torch.from_numpy(random(2, 2, 5, 4, seed=seed)) for seed in range(3)), torch.from_numpy(random(5, 5)))
    loaded = scalepoint.load_onnx(model)
    expected = nn.functional.scaled_dot_product_attention(*inputs)
    torch.testing.assert_close(loaded(*inputs), expected)
    assert scalepoint.transform(loaded, inputs, dynamic=False).report.counts() == {
        "ScaledDotProductAttentionPattern": 1
    }


def test_weights_behind_other_constants_are_found():
    model = model_of(
        """net (float[2, 4] x) => (float[2, 3] y) {
            copy = Identity(w)
            turned = Transpose<perm = [1, 0]>(copy)
            product = MatMul(x, turned)
            y = Add(b, product)
        }""",
        w=random(3, 4),
        b=random(3),
    )
    loaded = scalepoint.load_onnx(model)
    linear = next(module for module in loaded.modules() if isinstance(module, nn.Linear))
    torch.testing.assert_close(linear.weight.data, torch.from_numpy(random(3, 4)))
    assert linear.bias is not None
    assert len(list(loaded.parameters())) == 2


def test_a_weight_that_two_nodes_read_is_one_parameter():
    model = model_of(
        """net (int64[2] i) => (float[2, 6] y) {
            rows = Gather<axis = 0>(w, i)
            turned = Transpose<perm = [1, 0]>(w)
            y = MatMul(rows, turned)
        }""",
        w=random(6, 4),
    )
    loaded = scalepoint.load_onnx(model)
    assert len(list(loaded.parameters())) == 1
    assert loaded(torch.tensor([1, 2])).shape == (2, 6)


def test_a_branch_with_a_constant_condition_is_resolved():
    model = model_of(
        """net (float[2] x, int64 rate) => (float[2] y) {
            limit = Constant<value_int = 16000>()
            fast = Equal(rate, limit)
            y = If(fast) <
                then_branch = a () => (float[2] p) { p = Mul(x, two) },
                else_branch = b () => (float[2] q) { q = NoSuchOperator(x) }
            >
        }""",
        two=np.array(2.0, np.float32),
    )
    loaded = scalepoint.load_onnx(model, fixed_inputs={"rate": 16000})
    assert list(loaded.inputs) == ["x"]
    torch.testing.assert_close(loaded(torch.ones(2)), torch.full((2,), 2.0))
    scalepoint.graph.capture(loaded, torch.ones(2))
    open_model = scalepoint.load_onnx(model)
    torch.testing.assert_close(open_model(torch.ones(2), torch.tensor(16000)), torch.full((2,), 2.0))
    with pytest.raises(OnnxReadError, match="NoSuchOperator"):
        open_model(torch.ones(2), torch.tensor(8000))
    with pytest.raises(UsageError, match="rate"):
        scalepoint.load_onnx(model, fixed_inputs={"sr": 16000})


def test_a_value_computed_from_data_is_refused_by_name_at_capture_and_runs_before():
    model = model_of(
        """net (float[4] x, int64[1] n) => (float[m] y) {
            zero = Constant<value_ints = [0]>()
            y = Slice(x, zero, n)
        }"""
    )
    loaded = scalepoint.load_onnx(model)
    assert loaded(torch.ones(4), torch.tensor([2])).shape == (2,)
    with pytest.raises(scalepoint.errors.ScalepointError, match=r"Slice.*computed from data"):
        scalepoint.graph.capture(loaded, (torch.ones(4), torch.tensor([2])))


def test_a_local_function_is_inlined():
    text = """<ir_version: 8, opset_import: ["": 18, "mine": 1]>
    net (float[2] x) => (float[2] y) { y = mine.double(x) }
    <opset_import: ["": 18], domain: "mine"> double (a) => (b) { b = Add(a, a) }"""
    loaded = scalepoint.load_onnx(onnx.parser.parse_model(text))
    torch.testing.assert_close(loaded(torch.ones(2)), torch.full((2,), 2.0))


def test_loops_of_known_length_are_unrolled():
    model = model_of(
        """net (float[2] x) => (float[2] y) {
            count = Constant<value_int = 3>()
            go = Constant<value = bool {1}>()
            y = Loop(count, go, x) <
                body = b (int64 i, bool c, float[2] v) => (bool d, float[2] w) { d = Identity(c) w = Add(v, v) }
            >
        }"""
    )
    graph = scalepoint.graph.capture(scalepoint.load_onnx(model), torch.ones(2))
    torch.testing.assert_close(graph(torch.ones(2)), torch.full((2,), 8.0))


def test_inputs_whose_names_are_not_identifiers_get_one():
    model = model_of("net (float[2] x) => (float[2] y) { y = Relu(x) }")
    model.graph.input[0].name = model.graph.node[0].input[0] = "serving default:0"
    loaded = scalepoint.load_onnx(model)
    assert list(loaded.inputs) == ["serving_default_0"]
    assert loaded.inputs["serving_default_0"].name == "serving default:0"
    assert loaded(serving_default_0=torch.ones(2)).shape == (2,)


def test_an_axis_of_size_minus_1_is_free():
    loaded = scalepoint.load_onnx(model_of("net (float[-1, 3] x) => (float[-1, 3] y) { y = Relu(x) }"))
    assert loaded.inputs["x"].shape == ("", 3)
    assert loaded.make_example()["x"].shape == (1, 3)


def test_layers_have_the_names_of_modules_that_the_exporter_notes_even_if_their_biases_are_one_tensor():
    model = model_of(
        """net (float[2, 4] x) => (float[2, 4] y) {
            a = Gemm(x, v1, norm__bias)
            y = Gemm(a, v2, norm__bias)
        }""".replace("__", "_"),
        v1=random(4, 4),
        v2=random(4, 4, seed=1),
        norm_bias=np.zeros(4, np.float32),
    )
    for node, path in zip(model.graph.node, ("encoder.query", "encoder.key"), strict=True):
        node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=str(["", "encoder", path, "linear"]))
    loaded = scalepoint.load_onnx(model)
    names = [name for name, module in loaded.named_modules() if isinstance(module, nn.Linear)]
    assert names == ["encoder.query", "encoder.key"]


def test_a_half_precision_file_is_computed_in_float32_by_default():
    weight = random(4, 3).astype(np.float16)
    model = model_of("net (float16[2, 4] x) => (float16[2, 3] y) { y = MatMul(x, w) }", w=weight)
    x = torch.randn(2, 4)
    loaded = scalepoint.load_onnx(model)
    torch.testing.assert_close(loaded(x), x @ torch.from_numpy(weight).float())
    assert loaded(x.half()).dtype == torch.float32
    assert scalepoint.load_onnx(model, half_as_float=False)(x.half()).dtype == torch.float16


def test_a_quantized_file_is_refused_or_read_back():
    codes = np.arange(-6, 6, dtype=np.int8).reshape(4, 3)
    text = """net (float[2, 4] x) => (float[2, 3] y) {
        qx = QuantizeLinear(x, s, z)
        dx = DequantizeLinear(qx, s, z)
        dw = DequantizeLinear(w, s, z)
        y = MatMul(dx, dw)
    }"""
    model = model_of(text, w=codes, s=np.float32(0.5), z=np.int8(0))
    with pytest.raises(OnnxReadError, match=r"already quantized: 3 nodes.*requantize=True"):
        scalepoint.load_onnx(model)
    x = torch.randn(2, 4)
    expected = x @ torch.from_numpy(codes * np.float32(0.5))
    torch.testing.assert_close(scalepoint.load_onnx(model, requantize=True)(x), expected)


@pytest.mark.parametrize(
    ("zero_point", "attributes", "scale", "limits"),
    [
        (", zero", "", 0.01, (0, torch.inf)),
        ("", "", 0.01, (0, torch.inf)),  # the default is 0 in uint8
        ("", "", 6 / 255, (0, 6)),
        ("", "<output_dtype = 2>", 0.01, (0, torch.inf)),  # uint8
        ("", "<output_dtype = 4>", 6 / 65535, (0, 6)),  # uint16
        ("", "<output_dtype = 21>", 6 / 15, (0, 6)),  # uint4
        ("", "<output_dtype = 3>", 0.1, (-torch.inf, torch.inf)),  # int8
    ],
)
def test_an_activation_that_a_quantizer_replaces_is_read_back(zero_point, attributes, scale, limits):
    text = f"""net (float[1, 2, 3, 3] x) => (float[1, 2, 3, 3] y) {{
        convolved = Conv(x, w)
        codes = QuantizeLinear{attributes}(convolved, scale{zero_point})
        y = DequantizeLinear(codes, scale{zero_point})
    }}"""
    constants = {"zero": np.uint8(0)} if zero_point else {}
    model = model_of(text, 21, w=random(2, 2, 1, 1), scale=np.float32(scale), **constants)
    x = 3 * random(1, 2, 3, 3)
    output = scalepoint.load_onnx(model, requantize=True)(torch.from_numpy(x)).detach()
    result = nn.functional.conv2d(torch.from_numpy(x), torch.from_numpy(random(2, 2, 1, 1)))
    assert result.min() < -1
    torch.testing.assert_close(output, result.clamp(*limits))
    expected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})[0]
    highest = float(expected.max())  # of the codes
    torch.testing.assert_close(output.clamp(max=highest), torch.from_numpy(expected), atol=scale, rtol=0)


def test_an_unknown_operator_is_refused_with_its_name_and_node():
    model = model_of("net (float[2] x) => (float[2] y) { y = NoSuchOperator(x) }")
    model.graph.node[0].name = "/head/Odd"
    with pytest.raises(OnnxReadError, match=r"'/head/Odd' \(NoSuchOperator\)"):
        scalepoint.load_onnx(model)


def test_external_data_is_read_from_the_folder_of_the_file_only(tmp_path):
    model = model_of("net (float[2, 4] x) => (float[2, 300] y) { y = MatMul(x, w) }", w=random(4, 300))
    path = tmp_path / "net.onnx"
    onnx.save(model, str(path), save_as_external_data=True, location="net.data", size_threshold=0)
    x = torch.randn(2, 4)
    torch.testing.assert_close(scalepoint.load_onnx(path)(x), x @ torch.from_numpy(random(4, 300)))
    stored = onnx.load(str(path), load_external_data=False)
    stored.graph.initializer[0].external_data[0].value = "../net.data"
    with pytest.raises(StoreError, match="folder"):
        scalepoint.load_onnx(save(stored, path))


def test_importing_scalepoint_does_not_load_the_reader():
    import subprocess
    import sys

    code = "import sys, scalepoint; sys.exit('scalepoint.onnx_reader' in sys.modules or 'onnx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def _dynamic_network():
    """A linear layer with a bias, one without, and an LSTM."""
    return model_of(
        """net (float[N, 5, 32] x) => (float[N, 5, 16] y, float[5, N, 8] states) {
            hidden = MatMul(x, up)
            shifted = Add(hidden, bias)
            active = Relu(shifted)
            y = MatMul(active, down)
            steps = Transpose<perm = [1, 0, 2]>(x)
            sequence, last = LSTM<hidden_size = 8>(steps, lstm_w, lstm_r, lstm_b)
            direction = Constant<value_ints = [1]>()
            states = Squeeze(sequence, direction)
        }""",
        up=random(32, 64) / 8,
        bias=random(64, seed=1),
        down=random(64, 16, seed=2) / 8,
        lstm_w=random(1, 32, 32) / 5,
        lstm_r=random(1, 32, 8) / 3,
        lstm_b=random(1, 64),
    )


@pytest.mark.parametrize("per_channel", [False, True])
def test_a_dynamically_quantized_file_is_read_back_as_its_linear_and_recurrent_layers(tmp_path, per_channel):
    source, quantized = save(_dynamic_network(), tmp_path / "net.onnx"), str(tmp_path / "dynamic.onnx")
    quantize_dynamic(source, quantized, per_channel=per_channel, weight_type=QuantType.QInt8)
    with pytest.raises(OnnxReadError, match="already quantized"):
        scalepoint.load_onnx(quantized)
    loaded = scalepoint.load_onnx(quantized, requantize=True)
    layers = [(type(layer), layer.bias is not None) for layer in loaded.modules() if isinstance(layer, nn.Linear)]
    assert layers == [(nn.Linear, True), (nn.Linear, False)]
    x = torch.from_numpy(random(2, 5, 32, seed=5))
    for expected, output in zip(scalepoint.load_onnx(source)(x), loaded(x), strict=True):
        noise = (expected - output).square().sum()
        assert 10 * torch.log10(expected.square().sum() / noise) > 35  # the error of 8-bit weights


@pytest.mark.parametrize("is_symmetric", [False, True])
def test_weights_of_4_bits_in_blocks_are_read_back_exactly(is_symmetric):
    text = "net (float[N, 96] x) => (float[N, 16] y) { y = MatMul(x, w) }"
    quantizer = MatMulNBitsQuantizer(model_of(text, 21, w=random(96, 16)), block_size=32, is_symmetric=is_symmetric)
    quantizer.process()
    model = quantizer.model.model
    assert [node.op_type for node in model.graph.node] == ["MatMulNBits"]
    x = random(2, 96, seed=3)
    expected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})[0]
    output = scalepoint.load_onnx(model, requantize=True)(torch.from_numpy(x))
    np.testing.assert_allclose(output.detach(), expected, rtol=1e-4, atol=1e-4)


def test_an_integer_convolution_is_read_back():
    weight = np.random.default_rng(0).integers(-100, 100, (4, 3, 3, 3)).astype(np.int8)
    text = """net (float[1, 3, 8, 8] x) => (float[1, 4, 6, 6] y) {
        codes, scale, zero = DynamicQuantizeLinear(x)
        product = ConvInteger(codes, weight, zero, weight_zero)
        real = Cast<to = 1>(product)
        scales = Mul(scale, weight_scale)
        y = Mul(real, scales)
    }"""
    model = model_of(text, weight=weight, weight_zero=np.int8(3), weight_scale=np.float32(0.02))
    x = torch.from_numpy(random(1, 3, 8, 8))
    expected = nn.functional.conv2d(x, (torch.from_numpy(weight).float() - 3) * 0.02)
    loaded = scalepoint.load_onnx(model, requantize=True)
    assert any(isinstance(layer, nn.Conv2d) for layer in loaded.modules())
    torch.testing.assert_close(loaded(x), expected)


def test_an_operator_without_a_row_is_computed_by_its_function_in_the_specification():
    text = """net (float[N, 4, 6, 6] x) => (float[N, 4, 5, 7] y) {
        size = Constant<value_ints = [4, 5, 7]>()
        y = CenterCropPad<axes = [1, 2, 3]>(x, size)
    }"""
    x = random(2, 4, 6, 6)
    model = model_of(text)
    expected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})[0]
    np.testing.assert_array_equal(scalepoint.load_onnx(model)(torch.from_numpy(x)), expected)


def test_a_model_of_2_gb_with_such_an_operator_is_refused_with_what_to_do(monkeypatch):
    """protobuf raises this error when onnx serializes such a model for the inliner."""

    def fail(*args, **settings):
        raise EncodeError("Failed to serialize proto")

    monkeypatch.setattr(onnx.inliner, "inline_selected_functions", fail)
    with pytest.raises(OnnxReadError, match=r"Celu.*2 GB.*external data"):
        scalepoint.load_onnx(model_of("net (float[2] x) => (float[2] y) { y = Celu(x) }"))
