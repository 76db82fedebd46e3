"""Files with free sizes compute no shapes that are known, or that another size has."""

from collections import Counter

import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from scalepoint.formats import export
from scalepoint.quantize import quantize

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.cells = kind(8, 16, **options)
        self.head = nn.Linear(32 if options.get("bidirectional") else 16, 8)

    def forward(self, x):
        return self.head(self.cells(x)[0])


class GivenState(Recurrent):
    """An LSTM whose first state is not zero."""

    def forward(self, x):
        state = torch.full((1, x.shape[0], 16), 0.5)
        return self.head(self.cells(x, (state, torch.zeros_like(state)))[0])


class Attention(nn.Module):
    """Attention with a free batch and a free number of tokens."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        batch, tokens, _ = x.shape
        q, k, v = (part.view(batch, tokens, 2, 8).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, 16))


def export_quantized(model, x, folder, **options):
    """Export a model with free sizes. Returns the count of its operators, and a function that runs the file."""
    torch.manual_seed(0)
    quantized = quantize(model.eval(), (x,), forward_loop=[x], target="onnxruntime", **options)
    path = export(quantized, folder / "model.onnx", (x,))
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name

    def run(value):
        return torch.from_numpy(session.run(None, {name: value.numpy()})[0])

    return quantized, Counter(node.op_type for node in onnx.load(path).graph.node), run


@pytest.mark.parametrize(
    ("model", "reshapes"),
    [
        pytest.param(Recurrent(nn.LSTM, batch_first=True), 0, id="LSTM"),
        pytest.param(Recurrent(nn.LSTM), 0, id="LSTM, steps first"),
        pytest.param(Recurrent(nn.LSTM, batch_first=True, bidirectional=True), 1, id="LSTM, both directions"),
        pytest.param(Recurrent(nn.LSTM, batch_first=True, num_layers=2), 0, id="LSTM, two layers"),
        pytest.param(Recurrent(nn.GRU, batch_first=True), 0, id="GRU"),
        pytest.param(
            Recurrent(nn.GRU, batch_first=True, bidirectional=True, num_layers=3), 3, id="GRU, three layers, both ways"
        ),
    ],
)
def test_a_recurrent_layer_with_a_free_batch_computes_no_shape(model, reshapes, tmp_path):
    quantized, operators, run = export_quantized(model, torch.randn(3, 5, 8), tmp_path)
    assert operators["Shape"] == operators["Expand"] == 0
    assert operators["Reshape"] == reshapes
    for batch in (3, 1, 7) if model.cells.batch_first else (3, 3):
        x = torch.randn(batch, 5, 8)
        torch.testing.assert_close(run(x), quantized(x), atol=0.05, rtol=0.0)


def test_a_state_that_is_not_zero_stays(tmp_path):
    quantized, _, run = export_quantized(GivenState(nn.LSTM, batch_first=True), torch.randn(3, 5, 8), tmp_path)
    for batch in (3, 1):
        x = torch.randn(batch, 5, 8)
        torch.testing.assert_close(run(x), quantized(x), atol=0.05, rtol=0.0)


def test_attention_with_free_sizes_has_constant_shapes_and_one_transpose_of_the_keys(tmp_path):
    x = torch.randn(2, 6, 16)
    axes = {"x": {0: "batch", 1: "tokens"}}
    quantized, operators, run = export_quantized(Attention(), x, tmp_path, dynamic_axes=axes)
    assert operators["Shape"] == 0
    assert operators["Reshape"] == 4  # three into heads, one back
    for batch, tokens in ((2, 6), (1, 3), (3, 9)):
        x = torch.randn(batch, tokens, 16)
        torch.testing.assert_close(run(x), quantized(x), atol=0.05, rtol=0.0)


def test_a_free_batch_times_a_number_is_not_computed(tmp_path):
    class Folded(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.out = nn.Linear(16, 16), nn.Linear(8, 8)

        def forward(self, x):
            tokens, batch, _ = x.shape
            return self.out(self.linear(x).reshape(tokens, batch * 2, 8))

    quantized, operators, run = export_quantized(
        Folded(), torch.randn(5, 3, 16), tmp_path, dynamic_axes={"x": {1: "b"}}
    )
    assert operators["Shape"] == operators["Concat"] == 0
    for batch in (3, 1, 7):
        x = torch.randn(5, batch, 16)
        torch.testing.assert_close(run(x), quantized(x), atol=0.05, rtol=0.0)


def test_a_pool_over_one_axis_needs_no_second_axis(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(2, 4, 20)
    model = nn.Sequential(nn.Conv1d(4, 8, 3), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8, 3)).eval()
    quantized = quantize(model, (x,), forward_loop=[x], target="onnxruntime")
    float_path = tmp_path / "float.onnx"
    export(quantized, tmp_path / "model.onnx", (x,), float_path=float_path)
    operators = {node.op_type for node in onnx.load(float_path).graph.node}
    assert "GlobalAveragePool" in operators
    assert not operators & {"Unsqueeze", "Squeeze", "ReduceMean"}
    session = onnxruntime.InferenceSession(float_path, providers=["CPUExecutionProvider"])
    result = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
    torch.testing.assert_close(torch.from_numpy(result), model(x).detach())


class PooledTwice(nn.Module):
    """Returns the result of a pool over one axis, and computes with it."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv1d(4, 8, 3), nn.Linear(8, 3)

    def forward(self, x):
        pooled = nn.functional.adaptive_avg_pool2d(self.conv(x).unsqueeze(2), 1)
        return pooled, self.head(pooled.squeeze(2).flatten(1))


def test_a_pool_whose_result_is_an_output_stays(tmp_path):
    torch.manual_seed(0)
    model, x = PooledTwice().eval(), torch.randn(2, 4, 20)
    quantized = quantize(model, (x,), forward_loop=[x], target="onnxruntime")
    float_path = tmp_path / "float.onnx"
    export(quantized, tmp_path / "model.onnx", (x,), float_path=float_path)
    session = onnxruntime.InferenceSession(float_path, providers=["CPUExecutionProvider"])
    results = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    for result, expected in zip(results, model(x), strict=True):
        torch.testing.assert_close(torch.from_numpy(result), expected.detach())


class TwoLastStates(nn.Module):
    """Two recurrent layers of different sizes of which only the last state is used."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.GRU(4, 6, batch_first=True), nn.GRU(4, 10, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(torch.cat([self.first(x)[1][0], self.second(x)[1][0]], -1))


def test_recurrent_layers_of_different_sizes_get_their_own_first_states(tmp_path):
    torch.manual_seed(0)
    model, x = TwoLastStates().eval(), torch.randn(2, 5, 4)
    quantized = quantize(model, (x,), forward_loop=[x], target="openvino")
    path = export(quantized, tmp_path / "model.onnx", (x,), dynamic=True)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for batch in (x, torch.randn(3, 5, 4)):
        result = session.run(None, {"x": batch.numpy()})[0]
        torch.testing.assert_close(torch.from_numpy(result), quantized(batch).detach(), atol=0.05, rtol=0.0)


@pytest.mark.parametrize(("dynamic", "inputs"), [(True, 6), (False, 4)], ids=["free batch", "fixed batch"])
def test_openvino_gets_the_first_states_of_a_gru_with_a_free_batch(dynamic, inputs, tmp_path):
    torch.manual_seed(0)
    x = torch.randn(3, 5, 8)
    model = Recurrent(nn.GRU, batch_first=True, num_layers=2, bidirectional=True).eval()
    quantized = quantize(model, (x,), forward_loop=[x], target="openvino")
    path = export(quantized, tmp_path / "model.onnx", (x,), dynamic=dynamic)
    nodes = onnx.load(path).graph.node
    assert [len(node.input) for node in nodes if node.op_type == "GRU"] == [inputs] * 2
    assert sum(node.op_type == "ConstantOfShape" for node in nodes) == int(dynamic)  # both layers share the zeros
    (shape,) = [node for node in nodes if node.op_type == "Shape"] if dynamic else [None]
    assert shape is None or shape.input[0] == "x"
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for batch in (3, 1) if dynamic else (3,):
        part = torch.randn(batch, 5, 8)
        result = torch.from_numpy(session.run(None, {"x": part.numpy()})[0])
        torch.testing.assert_close(result, quantized(part), atol=0.05, rtol=0.0)
