"""A recorded program has the same operations, sizes and values as the one of torch.export."""

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from scalepoint.compat.fast_export import FakeInputCache, RecordedProgram, record_program
from scalepoint.errors import ScalepointWarning
from scalepoint.formats.export import export
from scalepoint.graph import capture, torch_export
from scalepoint.graph.nodes import get_info, recorded_meta
from scalepoint.graph.torch_export import export_graph, find_fixed_batches
from scalepoint.quantize import quantize
from tests.models import with_norm_statistics

aten = torch.ops.aten


class Branches(nn.Module):
    """Convolutions with batch norm in branches, attention, computed sizes, a table that forward creates."""

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
    return capture(with_norm_statistics(Branches()), (x,), kwargs)


def batch_of(name: str, value: Tensor) -> tuple[int, ...]:
    return (0,) if value.ndim else ()


def test_a_program_gives_the_same_outputs_as_its_graph_for_any_batch(graph):
    program = record_program(graph, (inputs()[0],), inputs()[1], batch_of)
    for batch in (2, 5):
        x, kwargs = inputs(batch)
        outputs, expected = program.module(check_guards=False)(x, **kwargs), graph(x, **kwargs)
        assert torch.equal(outputs["logits"], expected["logits"])
        assert outputs["batch"] == batch


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # from torch's own code
def test_a_program_has_the_same_operations_and_names_as_from_torch_export(graph):
    x, kwargs = inputs()
    ours, theirs = (
        export_graph(graph, (x,), kwargs, dynamic=True),
        torch_export.export(graph, (x,), kwargs, dynamic=True),
    )
    assert isinstance(ours, RecordedProgram)
    operations = [
        sorted(str(node.target) for node in program.run_decompositions({}).graph.nodes if node.op == "call_function")
        for program in (ours, theirs)
    ]
    operations = [
        [name for name in names if name != "aten.sym_size.int"] for names in operations
    ]  # their number may differ
    assert operations[0] == operations[1]
    assert ours.graph_signature.user_inputs == theirs.graph_signature.user_inputs
    assert ours.call_spec == theirs.call_spec
    assert set(ours.state_dict) <= set(theirs.state_dict)


def test_writing_a_file_does_not_trace_the_program_again(tmp_path, monkeypatch):
    x, kwargs = inputs()
    quantized = quantize(
        with_norm_statistics(Branches()),
        (x,),
        kwargs=kwargs,
        forward_loop=lambda model: model(x, **kwargs),
        target="onnxruntime",
    )

    def fail(*_args, **_kwargs):
        raise AssertionError("the program was traced again")

    monkeypatch.setattr(torch.export, "export", fail)
    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", fail)
    export(quantized, tmp_path / "m.onnx", (x,), kwargs=kwargs, float_path=tmp_path / "float.onnx")
    assert (tmp_path / "float.onnx").is_file()


class FixedBatch(nn.Module):
    """A model that uses the batch size as a number."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x).view(2, -1)


def test_an_axis_that_the_graph_uses_as_a_number_is_static_and_the_others_stay_dynamic():
    graph = capture(FixedBatch(), torch.randn(2, 4), dynamic=False)
    program = record_program(graph, (torch.randn(2, 4),), {}, lambda name, value: range(value.ndim))
    assert find_fixed_batches(program) == {"x": 2}
    shape = program.graph.find_nodes(op="placeholder")[0].meta["val"].shape
    assert isinstance(shape[1], torch.SymInt)


def shapes_of(program):
    return [(node.name, str(getattr(node.meta.get("val"), "shape", None))) for node in program.graph.nodes]


def test_a_second_graph_with_the_same_inputs_reuses_inferred_shapes(monkeypatch):
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(36, 2), nn.Softmax(1))
    graph, fake_input_cache, counts = capture(net.eval(), torch.randn(2, 3, 8, 8)), FakeInputCache(), []
    arguments = ((torch.randn(2, 3, 8, 8),), {}, batch_of)
    original = FakeTensorMode.__torch_dispatch__
    monkeypatch.setattr(
        FakeTensorMode, "__torch_dispatch__", lambda *args, **kwargs: counts.append(1) or original(*args, **kwargs)
    )
    record_program(graph, *arguments, fake_input_cache)
    count = len(counts)
    second = record_program(graph, *arguments, fake_input_cache)
    assert len(counts) == count > 0
    assert shapes_of(second) == shapes_of(record_program(graph, *arguments))


def test_the_size_cache_is_cleared_when_a_graph_makes_two_sizes_equal(graph):
    fake_input_cache, arguments = FakeInputCache(), ((inputs()[0],), inputs()[1], batch_of)
    programs = [record_program(graph, *arguments, cache) for cache in (fake_input_cache, fake_input_cache, None)]
    assert shapes_of(programs[0]) == shapes_of(programs[1]) == shapes_of(programs[2])


def test_the_size_cache_is_cleared_for_other_inputs_and_when_a_size_becomes_a_number(graph):
    fake_input_cache = FakeInputCache()
    record_program(
        capture(FixedBatch(), torch.randn(2, 4), dynamic=False),
        (torch.randn(2, 4),),
        {},
        lambda *_: (0, 1),
        fake_input_cache,
    )
    fresh, cached = (
        record_program(graph, (inputs()[0],), inputs()[1], batch_of, cache) for cache in (None, fake_input_cache)
    )
    assert shapes_of(cached) == shapes_of(fresh)
    x, kwargs = inputs(3)
    fresh, cached = (record_program(graph, (x,), kwargs, batch_of, cache) for cache in (None, fake_input_cache))
    assert shapes_of(cached) == shapes_of(fresh)


class WithConstants(nn.Module):
    """For an opaque module: a constant that forward creates, and the value of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("power", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x ** float(self.power) + torch.tensor([1.0, 2.0, 3.0, 4.0])


def test_a_constant_that_an_opaque_module_creates_is_in_the_program():
    x, model = torch.randn(3, 4), nn.Sequential(nn.Linear(4, 4), WithConstants())
    program = export_graph(capture(model, torch.randn(2, 4), leave=["1"]), (torch.randn(2, 4),), {}, dynamic=True)
    assert isinstance(program, RecordedProgram)
    assert torch.allclose(program.module(check_guards=False)(x), model(x))


class WritesInPlace(nn.Module):
    """For an opaque module."""

    def forward(self, x: Tensor) -> Tensor:
        return x.clone().add_(1)


def test_a_graph_that_cannot_be_recorded_goes_through_torch_export_with_a_warning():
    x = torch.randn(2, 4)
    model = nn.Sequential(nn.Linear(4, 4), WritesInPlace())
    graph = capture(model, x, leave=["1"])
    with pytest.warns(ScalepointWarning, match="once more.*aten.add_.Tensor"):
        program = export_graph(graph, (x,), {}, dynamic=True)
    assert not isinstance(program, RecordedProgram)
    assert torch.allclose(program.module(check_guards=False)(x), model(x))


def test_an_operation_is_decomposed_in_place_and_its_parts_know_its_name(graph):
    program = record_program(graph, (inputs()[0],), inputs()[1], batch_of, node_meta=recorded_meta)
    decomposed = program.run_decompositions({aten.hardswish.default: lambda x: x * (x + 3).clamp(0, 6) / 6})
    parts = [node for node in decomposed.graph.nodes if get_info(node).decomposed_from is aten.hardswish.default]
    assert [str(node.target) for node in parts] == [
        "aten.add.Tensor",
        "aten.clamp.default",
        "aten.mul.Tensor",
        "aten.div.Tensor",
    ]
    assert not decomposed.graph.find_nodes(op="call_function", target=aten.hardswish.default)
    x, kwargs = inputs(3)
    assert torch.allclose(
        decomposed.module(check_guards=False)(x, **kwargs)["logits"], graph(x, **kwargs)["logits"], atol=1e-6
    )


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_the_program_is_traced_again_when_an_operation_cannot_be_decomposed_in_place(graph):
    program = record_program(graph, (inputs()[0],), inputs()[1], batch_of)

    def with_unknown_size(x: Tensor) -> Tensor:  # a size that no tensor of the program has
        return x * (x + 3).clamp(0, 6) / x.new_full((x.shape[0] * 7 // 2 + 1,), 6).mean()

    decomposed = program.run_decompositions({aten.hardswish.default: with_unknown_size})
    x, kwargs = inputs(3)
    assert not isinstance(decomposed, RecordedProgram)
    assert "code that is not recorded" in str(program.trace_error)
    assert torch.allclose(
        decomposed.module(check_guards=False)(x, **kwargs)["logits"], graph(x, **kwargs)["logits"], atol=1e-6
    )


class ChannelsLastPool(nn.Module):
    """A pool of a channels-last tensor: torch changes the strides of its result in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).permute(0, 2, 3, 1).relu().permute(0, 3, 1, 2)
        return nn.functional.adaptive_avg_pool2d(y, (1, 1))


def test_a_channels_last_pool_is_decomposed_in_place():
    x, model = torch.randn(2, 3, 4, 4), ChannelsLastPool().eval()
    program = record_program(capture(model, x), (x,), {}, batch_of)
    kernel = aten.adaptive_avg_pool2d.default
    assert program.decompose_in_place({kernel: kernel.decompose}), program.trace_error
    assert not program.graph.find_nodes(op="call_function", target=kernel)
    assert torch.allclose(program.module(check_guards=False)(x), model(x), atol=1e-6)


def test_a_batch_that_the_graph_fixes_is_recorded_with_the_size_of_the_example(monkeypatch):
    graph = capture(FixedBatch(), torch.randn(2, 4), dynamic=False)
    monkeypatch.setattr(torch.export, "export", None)
    assert find_fixed_batches(export_graph(graph, (torch.randn(1, 4),), {}, dynamic=True)) == {"x": 1}


class Windows(nn.Module):
    """For an opaque module: a size that is computed from others."""

    def forward(self, x: Tensor) -> Tensor:
        return x.new_ones(3 * x.shape[0] + 1, 2).sum() + x.reshape(-1, 2, 2).flatten(0, 1)


def test_a_size_that_is_computed_from_others_is_computed_in_the_program():
    model, x = nn.Sequential(nn.Linear(4, 4), Windows()), torch.randn(2, 4)
    program = record_program(capture(model, x, leave=["1"]), (x,), {}, batch_of)
    x = torch.randn(5, 4)
    assert torch.equal(program.module(check_guards=False)(x), model(x))


def test_a_padded_picture_keeps_its_dynamic_batch():
    class Padded(nn.Module):
        def forward(self, x):
            return nn.functional.pad(x, (1, 1, 1, 1)) * 2

    x = torch.randn(2, 3, 8, 8)
    model = capture(Padded().eval(), x)
    program = record_program(model, (x,), {}, lambda name, leaf: (0,))
    placeholder = next(node for node in program.graph.nodes if node.op == "placeholder")
    assert isinstance(placeholder.meta["val"].shape[0], torch.SymInt)
