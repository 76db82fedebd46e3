"""A captured graph as a program without torch.export: the same operations and sizes, the same values, other batches."""

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from scalepoint.errors import ScalepointWarning
from scalepoint.formats.export import export
from scalepoint.graph import capture
from scalepoint.graph import torch_export as ladder
from scalepoint.graph.nodes import get_info
from scalepoint.graph.program import Known, Program, program_of
from scalepoint.graph.torch_export import export_graph, find_fixed_batches
from scalepoint.quantize import quantize
from tests.models import settled

aten = torch.ops.aten


class Branches(nn.Module):
    """Convolutions with batch norm in branches, attention, sizes that are computed, a table that is made in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.bn = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)
        self.project, self.norm, self.out = nn.Linear(8, 24), nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: Tensor, *, extra: dict[str, Tensor]) -> dict[str, Tensor | int]:
        y = nn.functional.hardswish(self.bn(self.one(x)) + self.two(x))
        y = y.flatten(2).transpose(1, 2)
        y = self.norm(y + torch.arange(y.shape[1], dtype=torch.float32)[:, None] / 64)
        query, key, value = self.project(y).reshape(y.shape[0], -1, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        y = nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        return {"logits": self.out(y.mean(1)) * extra["factor"], "batch": x.shape[0]}


def inputs(batch: int = 2) -> tuple[Tensor, dict[str, dict[str, Tensor]]]:
    generator = torch.Generator().manual_seed(batch)
    return torch.randn(batch, 3, 8, 8, generator=generator), {"extra": {"factor": torch.ones(batch, 1)}}


@pytest.fixture
def graph():
    x, kwargs = inputs()
    return capture(settled(Branches()), (x,), kwargs)


def batch_of(name: str, value: Tensor) -> tuple[int, ...]:
    return (0,) if value.ndim else ()


def test_a_program_computes_what_its_graph_does_for_any_batch(graph):
    program = program_of(graph, (inputs()[0],), inputs()[1], batch_of)
    for batch in (2, 5):
        x, kwargs = inputs(batch)
        found, wanted = program.module(check_guards=False)(x, **kwargs), graph(x, **kwargs)
        assert torch.equal(found["logits"], wanted["logits"])
        assert found["batch"] == batch


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch warns of its own class
def test_a_program_has_the_operations_and_names_that_torch_export_gives(graph):
    x, kwargs = inputs()
    ours, theirs = export_graph(graph, (x,), kwargs, dynamic=True), ladder.export(graph, (x,), kwargs, dynamic=True)
    assert isinstance(ours, Program)
    kinds = [
        sorted(str(node.target) for node in program.run_decompositions({}).graph.nodes if node.op == "call_function")
        for program in (ours, theirs)
    ]
    kinds = [[kind for kind in each if kind != "aten.sym_size.int"] for each in kinds]  # one more or less says nothing
    assert kinds[0] == kinds[1]
    assert ours.graph_signature.user_inputs == theirs.graph_signature.user_inputs
    assert ours.call_spec == theirs.call_spec
    assert set(ours.state_dict) <= set(theirs.state_dict)


def test_writing_a_file_traces_nothing_anew(tmp_path, monkeypatch):
    x, kwargs = inputs()
    quantized = quantize(
        settled(Branches()), (x,), kwargs=kwargs, forward_loop=lambda model: model(x, **kwargs), target="onnxruntime"
    )

    def traced(*_args, **_kwargs):
        raise AssertionError("the program was traced anew")

    monkeypatch.setattr(torch.export, "export", traced)
    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", traced)
    export(quantized, tmp_path / "m.onnx", (x,), kwargs=kwargs, float_path=tmp_path / "float.onnx")
    assert (tmp_path / "float.onnx").is_file()


class Fixed(nn.Module):
    """A batch that the model computes with as a number."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x).view(2, -1)


def test_an_axis_that_the_graph_has_as_a_number_is_fixed_and_the_others_stay_free():
    graph = capture(Fixed(), torch.randn(2, 4), dynamic=False)
    program = program_of(graph, (torch.randn(2, 4),), {}, lambda name, value: range(value.ndim))
    assert find_fixed_batches(program) == {"x": 2}
    shape = program.graph.find_nodes(op="placeholder")[0].meta["val"].shape
    assert isinstance(shape[1], torch.SymInt)


def shapes_of(program):
    return [(node.name, str(getattr(node.meta.get("val"), "shape", None))) for node in program.graph.nodes]


def test_a_second_graph_of_the_same_inputs_finds_its_sizes_known(monkeypatch):
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(36, 2), nn.Softmax(1))
    graph, known, counts = capture(net.eval(), torch.randn(2, 3, 8, 8)), Known(), []
    given = ((torch.randn(2, 3, 8, 8),), {}, batch_of)
    original = FakeTensorMode.__torch_dispatch__
    monkeypatch.setattr(
        FakeTensorMode, "__torch_dispatch__", lambda *words, **more: counts.append(1) or original(*words, **more)
    )
    program_of(graph, *given, known)
    first = len(counts)
    again = program_of(graph, *given, known)
    assert len(counts) == first > 0
    assert shapes_of(again) == shapes_of(program_of(graph, *given))


def test_sizes_that_a_graph_found_to_be_equal_are_begun_anew(graph):
    known, given = Known(), ((inputs()[0],), inputs()[1], batch_of)
    programs = [program_of(graph, *given, each) for each in (known, known, None)]
    assert shapes_of(programs[0]) == shapes_of(programs[1]) == shapes_of(programs[2])


def test_other_inputs_and_a_size_that_became_a_number_are_begun_anew(graph):
    known = Known()
    program_of(capture(Fixed(), torch.randn(2, 4), dynamic=False), (torch.randn(2, 4),), {}, lambda *_: (0, 1), known)
    alone, after = (program_of(graph, (inputs()[0],), inputs()[1], batch_of, each) for each in (None, known))
    assert shapes_of(after) == shapes_of(alone)
    x, kwargs = inputs(3)
    alone, after = (program_of(graph, (x,), kwargs, batch_of, each) for each in (None, known))
    assert shapes_of(after) == shapes_of(alone)


class Made(nn.Module):
    """A module that is left as it is: a constant that forward makes, and the value of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("power", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x ** float(self.power) + torch.tensor([1.0, 2.0, 3.0, 4.0])


def test_a_constant_that_a_left_module_makes_is_in_the_program():
    x, model = torch.randn(3, 4), nn.Sequential(nn.Linear(4, 4), Made())
    program = export_graph(capture(model, torch.randn(2, 4), leave=["1"]), (torch.randn(2, 4),), {}, dynamic=True)
    assert isinstance(program, Program)
    assert torch.allclose(program.module(check_guards=False)(x), model(x))


class Written(nn.Module):
    """A module that is left as it is and writes in place."""

    def forward(self, x: Tensor) -> Tensor:
        return x.clone().add_(1)


def test_what_cannot_be_noted_goes_through_torch_export_and_is_told():
    x = torch.randn(2, 4)
    model = nn.Sequential(nn.Linear(4, 4), Written())
    graph = capture(model, x, leave=["1"])
    with pytest.warns(ScalepointWarning, match="once more.*aten.add_.Tensor"):
        program = export_graph(graph, (x,), {}, dynamic=True)
    assert not isinstance(program, Program)
    assert torch.allclose(program.module(check_guards=False)(x), model(x))


def test_an_operation_is_taken_apart_where_it_stands_and_keeps_its_name(graph):
    program = program_of(graph, (inputs()[0],), inputs()[1], batch_of)
    taken = program.run_decompositions({aten.hardswish.default: lambda x: x * (x + 3).clamp(0, 6) / 6})
    parts = [node for node in taken.graph.nodes if get_info(node).written is aten.hardswish.default]
    found = [str(node.target) for node in parts]
    assert found == ["aten.add.Tensor", "aten.clamp.default", "aten.mul.Tensor", "aten.div.Tensor"]
    assert not taken.graph.find_nodes(op="call_function", target=aten.hardswish.default)
    x, kwargs = inputs(3)
    assert torch.allclose(
        taken.module(check_guards=False)(x, **kwargs)["logits"], graph(x, **kwargs)["logits"], atol=1e-6
    )


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_what_cannot_be_taken_apart_alone_is_traced_as_a_whole(graph):
    program = program_of(graph, (inputs()[0],), inputs()[1], batch_of)

    def sized(x: Tensor) -> Tensor:  # a size that no tensor of the program has
        return x * (x + 3).clamp(0, 6) / x.new_full((x.shape[0] * 7 // 2 + 1,), 6).mean()

    taken = program.run_decompositions({aten.hardswish.default: sized})
    x, kwargs = inputs(3)
    assert not isinstance(taken, Program)
    assert "computed of sizes" in str(program.why_traced)
    assert torch.allclose(
        taken.module(check_guards=False)(x, **kwargs)["logits"], graph(x, **kwargs)["logits"], atol=1e-6
    )


class Pooled(nn.Module):
    """A pool of a tensor in channels-last, into which torch writes a layout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).permute(0, 2, 3, 1).relu().permute(0, 3, 1, 2)
        return nn.functional.adaptive_avg_pool2d(y, (1, 1))


def test_a_pool_of_channels_last_is_taken_apart_alone():
    x, model = torch.randn(2, 3, 4, 4), Pooled().eval()
    program = program_of(capture(model, x), (x,), {}, batch_of)
    kernel = aten.adaptive_avg_pool2d.default
    assert program.take_apart({kernel: kernel.decompose}), program.why_traced
    assert not program.graph.find_nodes(op="call_function", target=kernel)
    assert torch.allclose(program.module(check_guards=False)(x), model(x), atol=1e-6)


def test_a_batch_that_the_graph_fixes_is_noted_as_it_was_given(monkeypatch):
    graph = capture(Fixed(), torch.randn(2, 4), dynamic=False)
    monkeypatch.setattr(torch.export, "export", None)
    assert find_fixed_batches(export_graph(graph, (torch.randn(1, 4),), {}, dynamic=True)) == {"x": 1}


class Windows(nn.Module):
    """A size that is computed of others inside a module that is left as it is."""

    def forward(self, x: Tensor) -> Tensor:
        return x.new_ones(3 * x.shape[0] + 1, 2).sum() + x.reshape(-1, 2, 2).flatten(0, 1)


def test_a_size_that_is_computed_of_others_is_computed_in_the_program():
    model, x = nn.Sequential(nn.Linear(4, 4), Windows()), torch.randn(2, 4)
    program = program_of(capture(model, x, leave=["1"]), (x,), {}, batch_of)
    x = torch.randn(5, 4)
    assert torch.equal(program.module(check_guards=False)(x), model(x))


def test_a_padded_picture_keeps_its_free_batch():
    class Padded(nn.Module):
        def forward(self, x):
            return nn.functional.pad(x, (1, 1, 1, 1)) * 2

    x = torch.randn(2, 3, 8, 8)
    model = capture(Padded().eval(), x)
    program = program_of(model, (x,), {}, lambda name, leaf: (0,))
    placeholder = next(node for node in program.graph.nodes if node.op == "placeholder")
    assert isinstance(placeholder.meta["val"].shape[0], torch.SymInt)
