"""Rewrites of a graph for the compiler of a target."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import helper
from torch import nn
from torch.nn import functional as F

from scalepoint.errors import ExportError
from scalepoint.formats import export
from scalepoint.formats.onnx.target_rewrites import float_weights_stay, softmax_of_finite
from scalepoint.quantize import Override, QuantConfig, TensorQuantConfig, quantize
from scalepoint.targets import find_target, onnxruntime_target
from scalepoint.targets.target import RewriteRule
from scalepoint.verification import verify

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


PACKED = {4: onnx.TensorProto.INT4, 2: onnx.TensorProto.INT2}


class Block(nn.Module):
    """Norms after and before a residual add, and an add that no norm reads."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(32, 32), nn.Linear(32, 32)
        self.after, self.before = nn.LayerNorm(32), nn.LayerNorm(32)

    def forward(self, x):
        x = self.after(x + self.one(x))
        y = x + torch.relu(self.two(x))
        return y + self.before(y)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("spelled")
    torch.manual_seed(0)
    model, data = Block().eval(), [torch.randn(4, 8, 32) for _ in range(2)]
    paths = {}
    for target in ("onnxruntime", "openvino"):
        quantized = quantize(model, data[0], forward_loop=data, target=target, freeze_weights=True)
        export(quantized, folder / f"{target}.onnx", data[0], float_path=folder / f"{target}-float.onnx")
        paths[target] = folder / f"{target}.onnx"
        paths[f"{target} float"] = folder / f"{target}-float.onnx"
    return paths


def count_operations(path):
    return Counter(node.op_type for node in onnx.load(path).graph.node)


def compiled(path, folder):
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(folder / "compiled.onnx")
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.log_severity_level = 3
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return count_operations(folder / "compiled.onnx")


def test_for_onnx_runtime_only_adds_before_a_layer_norm_become_sums(files):
    operations = count_operations(files["onnxruntime"])
    assert operations["Sum"] == 2
    assert operations["Add"] >= 1  # the last one, and biases


class Gelus(nn.Module):
    """A GELU after a layer, one of a sum, one that is read twice, and factors of 0.5 without a GELU."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(32, 32), nn.Linear(32, 32, bias=False)

    def forward(self, x):
        y = F.gelu(self.one(x)) + F.gelu(self.two(x) + x)
        z = F.gelu(y)
        return z * 0.5 * y, z * (0.5 * (1 + torch.erf(y)))


def test_gelus_are_one_kernel_in_onnx_runtime(tmp_path):
    torch.manual_seed(0)
    model, x = Gelus().eval(), torch.randn(4, 8, 32)
    target = onnxruntime_target()
    plain = replace(target, rewrites=tuple(rule for rule in target.rewrites if rule.name != "gelu_halved_last"))
    outputs = {}
    for name, used_target in {"own": target, "plain": plain}.items():
        quantized = quantize(model, x, forward_loop=[x], target=used_target, freeze_weights=True)
        path = export(quantized, tmp_path / f"{name}.onnx", x, float_path=tmp_path / f"{name}-float.onnx")
        operations = compiled(path, tmp_path)
        counts = tuple(operations[operator] for operator in ("BiasGelu", "Gelu", "Erf"))
        assert counts == ((1, 2, 1) if name == "own" else (0, 0, 4))
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        outputs[name] = onnxruntime.InferenceSession(path, options).run(None, {"x": x.numpy()})
        onnx.checker.check_model(str(path), full_check=True)
    assert all(np.array_equal(*pair) for pair in zip(*outputs.values(), strict=True))
    assert (tmp_path / "own-float.onnx").read_bytes() == (tmp_path / "plain-float.onnx").read_bytes()
    assert verify(tmp_path / "own.onnx", quantized, x).holds


def test_float_files_and_other_targets_keep_their_adds(files):
    assert all(not count_operations(files[name])["Sum"] for name in ("onnxruntime float", "openvino", "openvino float"))


def test_onnx_runtime_does_not_fuse_sum_and_layer_norm(files, tmp_path):
    assert (
        compiled(files["onnxruntime float"], tmp_path)["SkipLayerNormalization"] > 0
    )  # the fusion that the rewrite prevents
    spelled = compiled(files["onnxruntime"], tmp_path)
    assert not spelled["SkipLayerNormalization"]
    assert spelled["LayerNormalization"] == 2


def test_rewritten_files_compute_equal_values(files, tmp_path):
    proto = onnx.load(files["onnxruntime"])
    for node in proto.graph.node:
        node.op_type = "Add" if node.op_type == "Sum" else node.op_type
    onnx.save(proto, tmp_path / "add.onnx")
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    x = {"x": np.random.default_rng(0).normal(size=(4, 8, 32)).astype(np.float32)}
    one, two = (
        onnxruntime.InferenceSession(path, options).run(None, x)[0]
        for path in (files["onnxruntime"], tmp_path / "add.onnx")
    )
    assert np.array_equal(one, two)


def test_the_error_for_an_unknown_rewrite_suggests_the_most_similar_name(tmp_path):
    target = replace(find_target("onnxruntime"), name="mine", rewrites=(RewriteRule("sum_before_norm", "typing"),))
    model, x = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).eval(), torch.randn(2, 8)
    quantized = quantize(model, x, forward_loop=[x], target=target, freeze_weights=True)
    with pytest.raises(ExportError, match=r"sum_before_norm.*sum_before_layer_norm"):
        export(quantized, tmp_path / "m.onnx", x)


class Pictures(nn.Module):
    """Convolutions, one depthwise, a head over vectors, and one over a sequence of them."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3, groups=16)
        self.head, self.tokens = nn.Linear(16, 8), nn.Linear(16, 32)

    def forward(self, x):
        x = torch.relu(self.two(torch.relu(self.one(x))))
        return self.head(x.mean((2, 3))), self.tokens(x.flatten(2).transpose(1, 2))


def narrow(bits, target):
    torch.manual_seed(0)
    data = [torch.randn(4, 3, 12, 12) for _ in range(2)]
    weight = TensorQuantConfig(n_bits=bits, per_channel=True)
    config = QuantConfig(activation=TensorQuantConfig(symmetric=False), weight=weight)
    return quantize(Pictures().eval(), data[0], config, forward_loop=data, target=target, freeze_weights=True), data


@pytest.mark.parametrize(("target", "bits"), [("onnxruntime", 4), ("onnxruntime", 2), ("openvino", 4)])
def test_narrow_weights_next_to_integers_run_in_8_bit_kernels(target, bits, tmp_path):
    quantized, data = narrow(bits, target)
    export(quantized, tmp_path / "m.onnx", data[0])
    stored = Counter(tensor.data_type for tensor in onnx.load(tmp_path / "m.onnx").graph.initializer)
    assert stored[PACKED[bits]] == 4
    verification = verify(tmp_path / "m.onnx", quantized, data[0], runtime=target)
    assert (verification.low_precision, verification.fallbacks) == (4, ())
    assert all(agreement.sqnr > 35 for agreement in verification.optimized), verification


def test_narrow_weights_next_to_floats_or_in_blocks_are_not_rewritten(tmp_path):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).eval(), torch.randn(4, 64)
    alone = Override(name="2", weight=TensorQuantConfig(n_bits=4, per_channel=True))
    config = QuantConfig.weight_only("int4", block_size=32).model_copy(update={"overrides": (alone,)})
    quantized = quantize(model, x, config, forward_loop=[x], target="onnxruntime", freeze_weights=True)
    export(quantized, tmp_path / "m.onnx", x)
    assert not count_operations(tmp_path / "m.onnx")["Cast"]
    assert compiled(tmp_path / "m.onnx", tmp_path)["MatMulNBits"] == 2


class Mixed(nn.Module):
    """Float layers between quantized layers."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.side = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3), nn.Conv2d(16, 16, 3)
        self.up, self.last = nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(8, 8, 1)
        self.hidden, self.head = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        x = torch.relu(self.first(x))
        x = torch.relu(self.middle(x)) + self.side(x)
        x = self.last(torch.relu(self.up(x)))
        return self.head(torch.relu(self.hidden(x.mean((2, 3)))))


def test_a_float_weight_between_integers_stays_float_in_the_runtime(tmp_path):
    torch.manual_seed(0)
    x, names = torch.randn(4, 3, 16, 16), ("middle", "hidden")
    config = QuantConfig(overrides=tuple(Override(name=name, weight="float") for name in names))
    quantized = quantize(Mixed().eval(), x, config, forward_loop=[x], target="onnxruntime", freeze_weights=True)
    export(quantized, tmp_path / "m.onnx", x)
    onnx.checker.check_model(str(tmp_path / "m.onnx"), full_check=True)
    verification = verify(tmp_path / "m.onnx", quantized, x)
    assert verification.low_precision == 4
    assert [name.partition("_")[0] for name in verification.fallbacks] == ["middle", "up", "hidden"]
    assert verification.optimized[0].sqnr > 60, verification


@pytest.mark.parametrize(("shape", "count"), [((4, 3), 2), ((4,), 1)], ids=["matrix", "vector"])
def test_a_product_by_a_vector_is_not_rewritten(shape, count):
    parameters = {"scale": np.float32(0.1), "zero": np.uint8(3), "weight": np.ones(shape, np.float32)}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["codes"]),
        helper.make_node("DequantizeLinear", ["codes", "scale", "zero"], ["values"]),
        helper.make_node("MatMul", ["values", "weight"], ["product"]),
        helper.make_node("QuantizeLinear", ["product", "scale", "zero"], ["y"]),
    ]
    input_info = helper.make_tensor_value_info("x", 1, ["batch", 4])
    output_info = helper.make_tensor_value_info("y", 2, None)
    stored = [onnx.numpy_helper.from_array(value, name) for name, value in parameters.items()]
    model = helper.make_model(helper.make_graph(nodes, "g", [input_info], [output_info], stored))
    graph = ir.from_proto(onnx.shape_inference.infer_shapes(model))
    float_weights_stay(graph)
    assert [node.op_type for node in graph.graph].count("DequantizeLinear") == count


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """A network that is slower in int8, so that all of it stays float for speed."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 5), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(1800, 10))
    model, x = nn.Sequential(*layers).eval(), torch.randn(2, 3, 64, 64)
    target = onnxruntime_target("vnni")
    quantized = quantize(model, x, QuantConfig(speed_first=True), forward_loop=[x], target=target, freeze_weights=True)
    path = tmp_path_factory.mktemp("unpacked") / "m.onnx"
    export(quantized, path, x, float_path=path.with_name("float.onnx"))
    return model, quantized, path, x


def test_weights_of_float_products_are_int8_in_the_file_and_float_in_the_compiled_graph(unpacked, tmp_path):
    _, _, path, _ = unpacked
    types = {tensor.data_type for tensor in onnx.load(path).graph.initializer if np.prod(tensor.dims) > 100}
    assert types == {onnx.TensorProto.INT8}
    assert path.stat().st_size < 0.4 * path.with_name("float.onnx").stat().st_size
    assert compiled(path, tmp_path) == compiled(path.with_name("float.onnx"), tmp_path)


def test_an_unpacked_file_runs_as_simulated(unpacked):
    model, quantized, path, x = unpacked
    verification = verify(path, quantized, x)
    assert verification.sqnr > 100
    with torch.no_grad():
        noise = (model(x) - quantized(x)).square().sum() / model(x).square().sum()
    assert 0 < noise < 1e-4


def test_without_the_rewrite_the_same_codes_have_a_dequantize_linear(unpacked, tmp_path):
    model, _, _, x = unpacked
    target = replace(onnxruntime_target("vnni"), rewrites=())
    quantized = quantize(model, x, QuantConfig(speed_first=True), forward_loop=[x], target=target, freeze_weights=True)
    export(quantized, tmp_path / "m.onnx", x)
    assert count_operations(tmp_path / "m.onnx")["DequantizeLinear"] == 2
    assert verify(tmp_path / "m.onnx", quantized, x).holds  # a linear layer in MatMulNBits, which rounds its inputs


class Pair(nn.Module):
    """One encoder for two inputs."""

    def __init__(self):
        super().__init__()
        first, second = nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.Conv2d(16, 32, 3, 2, 1, bias=False)
        self.encoder = nn.Sequential(first, nn.BatchNorm2d(16), nn.ReLU(), second, nn.BatchNorm2d(32), nn.ReLU())

    def forward(self, a, b):
        return self.encoder(a), self.encoder(b)


def test_a_float_convolution_called_twice_stores_codes_and_scales_once(tmp_path):
    torch.manual_seed(0)
    model, x = Pair().eval(), (torch.randn(2, 3, 32, 32), torch.randn(2, 3, 32, 32))
    target, config = onnxruntime_target("avx2"), QuantConfig(speed_first=True)
    quantized = quantize(model, x, config, forward_loop=[x], target=target, freeze_weights=True)
    path = export(quantized, tmp_path / "m.onnx", x)
    stored = [tuple(tensor.dims) for tensor in onnx.load(path).graph.initializer]
    assert stored.count((32, 16, 3, 3)) == stored.count((32, 1, 1, 1)) == 1
    assert count_operations(path)["DequantizeLinear"] == 0
    assert verify(path, quantized, x).holds


def test_a_float_pool_stays_a_float_pool(tmp_path):
    """Otherwise the runtime moves the quantizer before the pool and uses a slower kernel for codes."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.MaxPool2d(2)
    )
    data = [torch.randn(2, 3, 24, 24) for _ in range(2)]
    config = QuantConfig(overrides=(Override(name="0", weight="float", activation="float"),))
    quantized = quantize(model.eval(), data[0], config, forward_loop=data, target="onnxruntime", freeze_weights=True)
    path = export(quantized, tmp_path / "m.onnx", data[0])
    assert count_operations(path)["Max"] == 1  # the second pool reads codes
    operations = compiled(path, tmp_path)
    assert operations["QLinearConv"] == 1
    order = [node.op_type for node in onnx.load(tmp_path / "compiled.onnx").graph.node]
    assert order.index("MaxPool") < order.index("QuantizeLinear")
    assert verify(path, quantized, data[0]).optimized[0].sqnr == math.inf


class Pooled(nn.Module):
    """A stem whose pool a layer and a residual read, two pools in a row, and one whose values are returned."""

    def __init__(self):
        super().__init__()
        self.stem, self.body, self.more = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3)
        self.last = nn.Conv2d(8, 8, 1)

    def forward(self, x):
        x = F.max_pool2d(torch.relu(self.stem(x)), 3, 2, 1)
        x = torch.relu(x + self.body(x))
        x = F.max_pool2d(F.max_pool2d(torch.relu(self.more(x)), 2), 2)
        pooled = F.max_pool2d(self.last(x), 2)
        return self.last(pooled), pooled


def test_quantizers_move_before_pools_for_openvino_with_equal_values(tmp_path):
    torch.manual_seed(0)
    model, x = Pooled().eval(), torch.randn(2, 3, 40, 40)
    target = find_target("openvino")
    plain = replace(target, name="plain", rewrites=())
    rewritten, other = (
        quantize(model, x, forward_loop=[x], target=used, freeze_weights=True) for used in (target, plain)
    )
    path, second = export(rewritten, tmp_path / "m.onnx", x), export(other, tmp_path / "p.onnx", x)
    onnx.checker.check_model(str(path), full_check=True)
    before = [_before(file, "QuantizeLinear") for file in (path, second)]
    assert (before[0]["MaxPool"], before[1]["MaxPool"]) == (1, 3)  # the pool whose values are returned
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    results = [onnxruntime.InferenceSession(file, options).run(None, {"x": x.numpy()}) for file in (path, second)]
    assert all(map(np.array_equal, *results))
    checked = verify(path, rewritten, x, runtime="openvino")
    assert (checked.low_precision, checked.fallbacks) == (5, ())
    assert checked.sqnr > 35


def _before(path, kind):
    """Count the operators that compute the inputs of operators of a type."""
    graph = onnx.load(path).graph
    makers = {name: node.op_type for node in graph.node for name in node.output}
    return Counter(makers.get(node.input[0]) for node in graph.node if node.op_type == kind)


class Masked(nn.Module):
    """Attention with a mask of padded keys, for which the exporter adds a check for rows without keys."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(32, 96)

    def forward(self, x, mask):
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.project(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        return y.transpose(1, 2).flatten(2)


def test_softmax_has_no_nan_check_with_finite_masks(tmp_path):
    torch.manual_seed(0)
    target = onnxruntime_target("vnni")
    plain = replace(target, rewrites=tuple(rule for rule in target.rewrites if rule.name != "softmax_of_finite"))
    model, x, mask = Masked().eval(), torch.randn(3, 6, 32), torch.ones(3, 6, dtype=torch.bool)
    mask[1, 4:] = False
    outputs = {}
    for name, used_target in {"checked": plain, "unchecked": target}.items():
        quantized = quantize(model, (x, mask), forward_loop=[(x, mask)], target=used_target)
        path = export(quantized, tmp_path / f"{name}.onnx", (x, mask))
        assert count_operations(path)["IsNaN"] == (name == "checked")
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        names = [session_input.name for session_input in session.get_inputs()]
        outputs[name] = [
            session.run(None, dict(zip(names, (x.numpy(), test_mask.numpy()), strict=True)))[0]
            for test_mask in (mask, torch.ones_like(mask), torch.zeros_like(mask))
        ]
    for one, other in zip(outputs["checked"], outputs["unchecked"], strict=True):
        assert np.array_equal(one, other)


class BoxDistribution(nn.Module):
    """The head of a YOLO detector: a convolution of the softmax over the bins of each box side."""

    def __init__(self, *, is_reshaped):
        super().__init__()
        self.is_reshaped = is_reshaped
        self.bins = nn.Conv2d(4, 32, 3)
        self.weigh = nn.Conv2d(8 if is_reshaped else 32, 1, 1, bias=False)

    def forward(self, x):
        bins = self.bins(x)
        if self.is_reshaped:
            bins = bins.flatten(2).unflatten(1, (4, 8)).transpose(1, 2)
        return self.weigh(torch.softmax(bins, 1))


@pytest.mark.parametrize("is_reshaped", [False, True])
def test_a_softmax_with_small_outputs_does_not_wrap_around(tmp_path, is_reshaped):
    torch.manual_seed(0)
    model, x = BoxDistribution(is_reshaped=is_reshaped).eval(), torch.randn(2, 4, 10, 10)
    with torch.no_grad():
        model.bins.weight *= 0.1  # nearly equal bins: all outputs are far below 1
    target = onnxruntime_target("vnni")
    fused = replace(target, rewrites=tuple(rule for rule in target.rewrites if rule.name != "softmax_in_float"))
    agreed = {}
    for name, used_target in {"fused": fused, "float": target}.items():
        quantized = quantize(model, x, forward_loop=[x], target=used_target)
        path = export(quantized, tmp_path / f"{name}.onnx", x)
        agreed[name] = verify(path, quantized, x, layers=False).sqnr
    assert agreed["fused"] < 10  # if this fails, the runtime saturates, and the rewrite can go
    assert agreed["float"] > 60


LOWEST = np.finfo(np.float32).min
CAUSAL = np.triu(np.full((4, 4), -np.inf, np.float32), 1)


def of_scores(*masks, axis=-1):
    """A softmax with a NaN check, of a product plus masks: names are inputs, pairs are Where, arrays are constants.

    A dict {"Mul": factor} stands for another operation with a constant.
    """
    nodes, constants, inputs = [helper.make_node("MatMul", ["q", "k"], ["scores_0"])], {"zero": np.float32(0)}, []
    for index, mask in enumerate(masks):
        name, operation = f"mask_{index}", "Add"
        if isinstance(mask, dict):
            ((operation, factor),) = mask.items()
            constants[name] = np.float32(factor)
        elif isinstance(mask, str):
            inputs.append(helper.make_tensor_value_info(name, 1, [4, 4]))
        elif isinstance(mask, tuple):
            constants |= {f"{name}_yes": np.float32(mask[0]), f"{name}_no": np.float32(mask[1])}
            inputs.append(helper.make_tensor_value_info(f"{name}_if", 9, [4, 4]))
            nodes.append(helper.make_node("Where", [f"{name}_if", f"{name}_yes", f"{name}_no"], [name]))
        else:
            constants[name] = mask
        nodes.append(helper.make_node(operation, [f"scores_{index}", name], [f"scores_{index + 1}"]))
    nodes += [
        helper.make_node("Softmax", [f"scores_{len(masks)}"], ["p"], axis=axis),
        helper.make_node("IsNaN", ["p"], ["is_nan"]),
        helper.make_node("Where", ["is_nan", "zero", "p"], ["chosen"]),
        helper.make_node("MatMul", ["chosen", "k"], ["y"]),
    ]
    graph_inputs = [*(helper.make_tensor_value_info(name, 1, [4, 4]) for name in "qk"), *inputs]
    stored = [onnx.numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "g", graph_inputs, [helper.make_tensor_value_info("y", 1, [4, 4])], stored)
    model = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]))
    softmax_of_finite(model)
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    return Counter(node.op_type for node in model.graph)["IsNaN"]


@pytest.mark.parametrize(
    ("masks", "is_checked"),
    [
        ((), False),
        (((0, LOWEST),), False),
        ((CAUSAL,), False),
        (((0, LOWEST), np.zeros((4, 4), np.float32)), False),
        (((0, -np.inf),), True),
        (("an input",), True),
        ((np.full((4, 4), -np.inf, np.float32),), True),
        (((0, LOWEST), (0, LOWEST)), True),
        (((0, LOWEST), CAUSAL), True),
        ((np.array([[0, np.nan, 0, 0]], np.float32),), True),
        ((np.array([[0, np.inf, 0, 0]], np.float32),), True),
        (({"Mul": -0.5}, {"Div": -2.0}, CAUSAL, {"Mul": 0.5}, {"Div": 2.0}), False),
        ((CAUSAL, {"Mul": -1.0}), True),
        ((CAUSAL, {"Mul": 0.0}), True),
        ((CAUSAL, {"Div": -2.0}), True),
        (({"Mul": np.nan},), True),
        (({"Div": np.nan},), True),
        (({"Div": [-np.inf, 1, 1, 1]},), True),
    ],
    ids=[
        *("none", "finite", "causal", "and a bias", "infinite", "input", "all", "two that overflow", "two that meet"),
        *("nan in the mask", "plus infinity", "factors", "negated mask", "mask times zero", "mask by a negative"),
        *("nan factor", "nan divisor", "infinite divisor"),
    ],
)
def test_the_nan_check_is_removed_only_if_no_row_can_be_fully_masked(masks, is_checked):
    assert of_scores(*masks) == is_checked


def test_the_nan_check_stays_if_the_softmax_is_along_another_axis_than_the_rows_of_the_mask():
    assert of_scores(CAUSAL, axis=0) == 1
