"""Unusual inputs, types and operations, from the model to its file in ONNX Runtime."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, fx, nn

from scalepoint import deploy
from scalepoint.errors import ExportError, ScalepointWarning
from scalepoint.formats import export
from scalepoint.graph.capture import as_inputs
from scalepoint.quantize import quantize
from scalepoint.verification import Verification, verify

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def quantize_model(model: nn.Module, inputs: Any) -> fx.GraphModule:
    args, kwargs = as_inputs(inputs, None)
    return quantize(model.eval(), args, kwargs=kwargs, forward_loop=[inputs], target="onnxruntime")


def run(model: nn.Module, inputs: Any, folder: Path) -> Verification:
    """Export a model, and compare its file in the runtime with the simulation."""
    quantized = quantize_model(model, inputs)
    verification = verify(export(quantized, folder / "model.onnx", inputs), quantized, inputs, layers=False)
    assert verification.holds, verification
    return verification


class Layer(nn.Module):
    """A linear layer followed by a function."""

    def __init__(self, after: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.after = after

    def forward(self, x: Tensor, *rest: Any, **keywords: Any) -> Any:
        return self.after(self.layer(x), *rest, **keywords)


class Switched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, factor: float = 1.0, absolute: bool = True) -> Tensor:
        y = self.layer(x) * factor
        return y.abs() if absolute else y


def test_a_layer_name_need_not_be_a_python_identifier(tmp_path):
    model = nn.Sequential()
    model.add_module("block1-0", nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))  # a name as in RegNet
    run(model, torch.randn(4, 8), tmp_path)


@pytest.mark.parametrize("settings", [{"absolute": False}, {"factor": 2.0, "absolute": True}], ids=str)
def test_a_keyword_input_that_is_not_a_tensor_is_a_constant_of_the_file(tmp_path, settings):
    run(Switched(), {"x": torch.randn(4, 8), **settings}, tmp_path)


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, file: Tensor, allow_pickle: Tensor, pair: tuple[Tensor, dict[str, Tensor]]) -> Tensor:
        return self.layer(file) - 2 * allow_pickle + 3 * pair[0] - 5 * pair[1]["max"]


def test_inputs_may_have_any_names_nesting_and_order(tmp_path):
    tensors = [torch.randn(4, 8) for _ in range(4)]
    pair = (tensors[0], {"max": tensors[1]})
    run(Reader(), {"pair": pair, "allow_pickle": tensors[2], "file": tensors[3]}, tmp_path)


class Attends(nn.Module):
    """Attention without an axis for heads."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)
        self.options = options

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key, value = self.project(x).chunk(3, -1)
        return nn.functional.scaled_dot_product_attention(query, key, value, mask, **self.options)


class Heads(Attends):
    """Attention whose heads are merged by a view, which is possible only with the strides of torch's kernel."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, key, value = self.project(x).view(4, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(query, key, value)
        return y.transpose(1, 2).reshape(4, 5, 8) * (1.0 - mask)[:, None, None]


@pytest.mark.filterwarnings("ignore:the first axis of")
def test_attention_heads_merged_by_a_view_run(tmp_path):
    run(Heads(), (torch.randn(4, 5, 8), torch.tensor([0, 1, 0, 0])), tmp_path)


@pytest.mark.parametrize(
    ("options", "mask"),
    [
        pytest.param({}, None, id="plain", marks=pytest.mark.slow),
        pytest.param({"scale": 0.3}, torch.randn(4, 5, 5), id="scaled-and-biased"),
        pytest.param({}, torch.ones(5, 5).tril().bool().repeat(4, 1, 1), id="masked", marks=pytest.mark.slow),
        pytest.param({"is_causal": True}, None, id="causal"),
    ],
)
def test_attention_with_three_axes_runs(tmp_path, options, mask):
    x = torch.randn(4, 5, 8)
    run(Attends(**options), (x,) if mask is None else (x, mask), tmp_path)


@pytest.mark.parametrize(
    "after",
    [
        pytest.param(lambda y, mask: y + (1.0 - mask)[:, None], id="one-minus"),
        pytest.param(lambda y, mask: y + torch.rsub(mask, 1.5, alpha=2)[:, None], id="with-a-factor"),
    ],
)
def test_integer_tensors_can_be_subtracted_from_a_number(tmp_path, after):
    run(Layer(after), (torch.randn(4, 8), torch.tensor([0, 1, 1, 0])), tmp_path)


@pytest.mark.parametrize("batch", [2, 4, 5])
def test_a_dynamic_axis_can_be_split(tmp_path, batch):
    model = Layer(lambda y: [part.flip(0) for part in y.repeat(2, 1).chunk(2)])
    quantized = quantize_model(model, (torch.randn(4, 8),))
    path = export(quantized, tmp_path / "model.onnx", (torch.randn(4, 8),))
    assert verify(path, quantized, torch.randn(batch, 8), layers=False).sqnr > 60


def test_returned_numbers_are_tensors_in_the_file(tmp_path):
    model = Layer(lambda y: (3, y, "text", None, y.shape[0], 0.5, y.argmax(-1)))
    verification = run(model, torch.randn(4, 8), tmp_path)
    assert len(verification.optimized) == 5


class Experts(nn.Module):
    """Each row goes to its own expert, as transformers computes it."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(3, 8, 6))

    def forward(self, x: Tensor, expert: Tensor) -> Tensor:
        order = expert.argsort()
        counts = torch.nn.functional.one_hot(expert, 3).sum(0)
        sorted_rows = self.before(x)[order]
        return torch.ops.transformers.grouped_mm_fallback(sorted_rows, self.weight, counts.cumsum(0))[order.argsort()]


@pytest.mark.parametrize("expert", [[0, 2, 1, 0, 2, 0], [2, 2, 2, 2, 2, 0]], ids=["all", "one-without-rows"])
def test_experts_run(tmp_path, expert):
    pytest.importorskip("transformers.integrations.moe")
    run(Experts(), (torch.randn(6, 8), torch.tensor(expert)), tmp_path)


class Stacked(nn.Module):
    """The same number of rows for every expert, in a separate axis."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.weight = nn.Linear(8, 8), nn.Parameter(torch.randn(3, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.before(x).transpose(0, 1)
        return torch.ops.aten._grouped_mm(rows.bfloat16(), self.weight.bfloat16()).float()


def test_the_error_for_an_unsupported_grouped_product_has_its_line_and_a_hint(tmp_path):
    x = torch.randn(4, 3, 8)
    with pytest.raises(ExportError) as raised:
        export(quantize_model(Stacked(), x), tmp_path / "model.onnx", x)
    message = str(raised.value)
    assert re.search(r"a grouped product of \(3, \w+, 8\) x \(3, 8, 8\) cannot be written to ONNX", message), message
    assert re.search(rf"aten._grouped_mm at .*{Path(__file__).name}:\d+", message), message
    assert "sort the rows by expert" in message


class Bessel(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.special.bessel_j0(x)


def test_the_error_for_an_operation_without_onnx_form_has_its_line(tmp_path):
    model, x = nn.Sequential(nn.Linear(8, 8), Bessel()), torch.randn(4, 8)
    with pytest.raises(ExportError) as raised:
        export(quantize_model(model, x), tmp_path / "model.onnx", x)
    message = str(raised.value)
    assert "torch cannot write aten.special_bessel_j0 as ONNX" in message
    assert re.search(rf"{Path(__file__).name}:\d+: return torch.special.bessel_j0\(x\) \(in 1\b", message), message
    assert not re.search(r"\x1b|step \d/\d|Next steps", message)


class Half(nn.Module):
    """Convolutions with batch norm, a pooled vector, attention, and a dtype that forward names."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.project = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn(self.conv(x)).relu().flatten(2).transpose(1, 2)
        query, key, value = self.project(y).unsqueeze(1).chunk(3, -1)
        y = nn.functional.scaled_dot_product_attention(query, key, value)
        return y.float().softmax(-1).to(x.dtype).mean(2)


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float16, marks=pytest.mark.slow), torch.bfloat16, torch.float64], ids=str
)
def test_models_with_other_float_dtypes_are_written_in_float32(tmp_path, dtype):
    torch.manual_seed(0)
    model, x = Half().to(dtype), torch.randn(4, 3, 8, 8, dtype=dtype)
    quantized = quantize_model(model, x)
    state = {name: value.clone() for name, value in quantized.state_dict().items()}
    message = f"{str(dtype).removeprefix('torch.')}.*feed x as float32"
    with pytest.warns(ScalepointWarning, match=message):
        path = export(quantized, tmp_path / "model.onnx", x, float_path=tmp_path / "float.onnx")
    verification = verify(path, quantized, x, layers=False)
    assert verification.holds, verification
    assert verification.low_precision == 2
    assert {value.type.tensor_type.elem_type for value in onnx.load(path).graph.input} == {onnx.TensorProto.FLOAT}
    assert verify(tmp_path / "float.onnx", model, x, layers=False).sqnr > 30
    assert all(torch.equal(value, state[name]) for name, value in quantized.state_dict().items())
    assert quantized(x).dtype == dtype


class Bag(nn.Module):
    """Computes the offsets of the bags from the sizes of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.EmbeddingBag(50, 16, mode="sum"), nn.Linear(16, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.table(tokens))


def test_embedding_bags_run_with_any_number_of_rows(tmp_path):
    torch.manual_seed(0)
    assert run(Bag(), torch.randint(0, 50, (2, 6)), tmp_path).holds
    quantized = quantize_model(Bag(), torch.randint(0, 50, (2, 6)))
    path = export(quantized, tmp_path / "more.onnx", torch.randint(0, 50, (2, 6)))
    assert verify(path, quantized, torch.randint(0, 50, (5, 6)), layers=False).holds


class Head(nn.Module):
    """A linear layer after a layer without an ONNX operator."""

    def __init__(self, before: nn.Module, width: int = 8) -> None:
        super().__init__()
        self.before, self.head = before, nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        return self.head(y[0] if isinstance(y, tuple) else y)


@pytest.mark.parametrize(
    ("before", "width"),
    [
        (nn.RReLU(), 8),
        (nn.LSTM(8, 8, proj_size=5, num_layers=2, batch_first=True), 5),
        (nn.LSTM(8, 8, proj_size=5, bidirectional=True, bias=False, batch_first=True), 10),
    ],
    ids=["RReLU", "a projected LSTM", "a projected LSTM, both ways"],
)
def test_layers_without_an_onnx_operator_are_decomposed(before, width, tmp_path):
    torch.manual_seed(0)
    model, x = Head(before, width).eval(), torch.randn(4, 3, 8)
    verification = run(model, x, tmp_path)
    assert verification.sqnr > 100


def test_tensors_that_are_broadcast_repeatedly(tmp_path):
    def losses(x):
        one, two = torch.broadcast_tensors(x, x[:, :1])
        two, one = torch.broadcast_tensors(two, one)
        three, four = torch.broadcast_tensors(one, two)
        return nn.functional.mse_loss(three, four, reduction="none") + one * two

    run(Layer(losses), torch.randn(4, 8), tmp_path)


@pytest.mark.parametrize("p", [1, 2])
def test_distances_of_all_pairs(p, tmp_path):
    run(Layer(lambda x: torch.cdist(x, x[:, :2], p=p)), torch.randn(4, 3, 8), tmp_path)


class Remembering(nn.Module):
    """Writes its buffers in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.layer(x - self.mean)


@pytest.mark.filterwarnings("ignore:torch traces the model once more")
def test_state_that_a_file_does_not_keep_causes_a_warning(tmp_path):
    with pytest.warns(ScalepointWarning, match="forward writes calls, mean"):
        done = deploy(Remembering().eval(), torch.randn(4, 8), [torch.randn(4, 8)], output=tmp_path, smoke=True)
    assert any("writes calls, mean" in warning for warning in done.report.warnings)
    assert "writes calls, mean" in " ".join(str(done).split())
