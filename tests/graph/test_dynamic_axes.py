"""The option dynamic_axes: its forms, what capture makes of it, and what it refuses."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from scalepoint.errors import CaptureError, UsageError
from scalepoint.graph import capture
from scalepoint.graph.deserialization import rebuild
from scalepoint.graph.dynamic_axes import get_named_inputs, is_dynamic, parse_axes, resize_inputs
from scalepoint.graph.nodes import get_fake_tensor
from scalepoint.graph.origin import get_origin
from scalepoint.graph.serialization import describe
from scalepoint.graph.torch_export import export_graph
from tests.errors import raises

PICTURE = {"x": {2: "height", 3: "width"}}


class Pixels(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, 2, 1)

    def forward(self, x):
        return F.interpolate(self.conv(x), size=x.shape[-2:])


class Skips(nn.Module):
    """Two levels and a skip connection with a concatenation: sizes must be even."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 4, 3, 2, 1), nn.ConvTranspose2d(4, 4, 2, 2)

    def forward(self, x):
        return torch.cat((x, self.up(self.down(x))), 1)


class Flat(nn.Module):
    """A classifier that takes one size only."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3 * 8 * 8, 5)

    def forward(self, x):
        return self.head(x.flatten(1))


class Sum(nn.Module):
    def forward(self, x, y):
        return x + y["a"]


def shapes(graph):
    return [["*" if is_dynamic(size) else size for size in get_fake_tensor(node).shape] for node in inputs_of(graph)]


def inputs_of(graph):
    return [node for node in graph.graph.nodes if node.op == "placeholder"]


def captured(model, *inputs, axes=None, **options):
    args = inputs if len(inputs) > 1 else inputs[0]
    return capture(model.eval(), args, dynamic_axes=PICTURE if axes is None else axes, **options)


@pytest.mark.parametrize(
    ("option", "axes"),
    [
        (None, {}),
        ({"x": {2: "height", 3: "width"}}, PICTURE),
        ({"x": {"2": "height", "3": "width"}}, PICTURE),
        (["x:2=height,3=width"], PICTURE),
        ("x:2=height,3=width", PICTURE),
        ({"x": [2, 3]}, {"x": {2: "x_2", 3: "x_3"}}),
        ("x:2,3 y:-1", {"x": {2: "x_2", 3: "x_3"}, "y": {-1: "y_last"}}),
    ],
)
def test_axes_can_be_written_in_several_ways(option, axes):
    assert parse_axes(option) == axes


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (5, "must be {'input': {2: 'height', 3: 'width'}} or {'input': [2, 3]}, got 5"),
        ({"x": 2}, "got 2 for 'x'"),
        ({"x": {"two": "height"}}, "an axis of 'x' must be a number, got 'two'"),
        ({"x": [True]}, "an axis of 'x' must be a number, got True"),
        (
            {"x": {2: "the height"}},
            "the name of axis 2 of 'x' must be an identifier, such as 'height', got 'the height'",
        ),
        ("x:2;3", "must be written as x:2=height,3=width or x:2,3, got 'x:2;3'"),
        ("x:2 x:3", "names an axis or an input twice: 'x:3'"),
    ],
)
def test_invalid_axes_are_refused(option, message):
    with pytest.raises(UsageError) as caught:
        parse_axes(option)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"y": [2]}, "the model has no input 'y': Known: x"),
        ({"x": [4]}, "'x' has no axis 4: its shape in the example is 2x3x8x8"),
        ({"x": {2: "height", -2: "width"}}, "names an axis of 'x' twice"),
        (
            {"x": {2: "batch"}},
            "'batch' has the size 2 on axis 0 of 'x' and 8 on axis 2 of 'x' in the example",
        ),
    ],
)
def test_axes_that_do_not_exist_are_refused(axes, message):
    with pytest.raises(UsageError) as caught:
        captured(Pixels(), torch.randn(2, 3, 8, 8), axes=axes)
    assert message in str(caught.value)


def test_an_example_of_one_and_an_input_without_axes_are_refused():
    with raises(UsageError, "axis 3 of 'x'", "size 1"):
        captured(Pixels(), torch.randn(2, 3, 8, 1))
    with raises(UsageError, "'y_a'", "not a tensor"):
        captured(Sum(), torch.randn(2, 3), {"a": 2}, axes={"y_a": [0]})
    with pytest.raises(CaptureError, match="dynamic_axes= needs example inputs"):
        capture(Pixels(), dynamic_axes=PICTURE)
    program = torch.export.export(Pixels().eval(), (torch.randn(2, 3, 8, 8),))
    with raises(UsageError, "dynamic_axes", "dynamic_shapes="):
        capture(program, dynamic_axes=PICTURE)


def test_named_axes_are_free_and_the_graph_is_compared_at_other_sizes():
    model = Pixels()
    graph = captured(model, torch.randn(2, 3, 8, 8))
    assert shapes(graph) == [["*", 3, "*", "*"]]
    origin = get_origin(graph)
    assert origin.axes == PICTURE
    assert origin.size_steps == {"height": 1, "width": 1}
    assert origin.compared_sizes == {"height": 12, "width": 6}
    x = torch.randn(1, 3, 13, 7)
    assert torch.equal(graph(x), model(x))


def test_the_batch_can_be_fixed_while_named_axes_are_free():
    graph = captured(Pixels(), torch.randn(2, 3, 8, 8), dynamic=False)
    assert shapes(graph) == [[2, 3, "*", "*"]]


def test_sizes_that_the_model_takes_in_steps_are_found():
    assert get_origin(captured(Skips(), torch.randn(1, 3, 8, 8))).size_steps == {"height": 2, "width": 2}


def test_a_name_on_two_inputs_is_one_size():
    axes = {"x": {1: "frames"}, "y_a": {1: "frames"}}
    graph = captured(Sum(), torch.randn(2, 5), {"a": torch.randn(2, 5)}, axes=axes)
    assert get_origin(graph).compared_sizes == {"frames": 7}
    with raises(CaptureError, "'frames'", "'steps'", "one name"):
        captured(Sum(), torch.randn(2, 5), {"a": torch.randn(2, 5)}, axes={"x": {1: "frames"}, "y_a": {1: "steps"}})
    with raises(UsageError, "'frames'", "5 on axis 1 of 'x'", "4 on axis 1 of 'y_a'"):
        captured(Sum(), torch.randn(2, 5), {"a": torch.randn(2, 4)}, axes=axes)


def test_an_axis_that_the_model_computes_with_is_named_with_its_size_and_what_fails():
    with pytest.raises(CaptureError) as caught:
        captured(Flat(), torch.randn(2, 3, 8, 8))
    message = str(caught.value)
    for words in ("height or width", "Flat", "Eq(3*height*width, 192)", "height 16", "Leave that axis out"):
        assert words in message
    assert "self.head(x.flatten(1)): RuntimeError: " in message
    assert "mat1 and mat2 shapes cannot be multiplied (2x384 and 192x5)" in message
    with raises(CaptureError, "axis 2 of 'x' (height)", "a number, 8", "height 16"):
        captured(Flat(), torch.randn(2, 3, 8, 8), axes={"x": {2: "height"}})


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("batch_first", [True, False])
def test_recurrent_layers_take_sequences_of_any_length(kind, batch_first):
    class Over(nn.Module):
        def __init__(self):
            super().__init__()
            self.cells = kind(4, 3, num_layers=2, bidirectional=True, batch_first=batch_first)

        def forward(self, x):
            return self.cells(x)[0]

    model, time = Over(), 1 if batch_first else 0
    graph = captured(model, torch.randn(5, 6, 4), axes={"x": {time: "frames", 1 - time: "samples"}})
    x = torch.randn(3, 7, 4)
    assert torch.equal(graph(x), model(x))


def test_a_size_computed_with_a_fraction_is_reported():
    class Halves(nn.Module):
        def forward(self, x):
            return F.adaptive_avg_pool2d(x, (int(x.shape[2] * 0.5), 4))

    with raises(CaptureError, "height", "TruncToInt(0.5*", "whole numbers"):
        captured(Halves(), torch.randn(2, 3, 8, 8), axes={"x": {2: "height"}})


def test_a_table_of_positions_limits_the_sizes():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(8, 4))

        def forward(self, x):
            return x + self.table[: x.shape[1]]

    graph = captured(Positions(), torch.randn(2, 6, 4), axes={"x": {1: "tokens"}})
    assert get_origin(graph).compared_sizes["tokens"] in range(2, 9)
    full = captured(Positions(), torch.randn(2, 8, 4), axes={"x": {1: "tokens"}})
    assert get_origin(full).compared_sizes["tokens"] in range(2, 8)


def test_a_graph_that_differs_from_the_model_at_other_sizes_is_refused():
    class Remembers(nn.Module):
        """Computes with a number that torch.export does not recognize as a size."""

        def __init__(self):
            super().__init__()
            self.scale = 1.0

        def forward(self, x):
            self.scale = 1.0 if torch.compiler.is_compiling() else float(x.shape[2])
            return x * self.scale

    with raises(CaptureError, "height 12", "Remembers"):
        captured(Remembers(), torch.randn(2, 3, 8, 8), axes={"x": {2: "height"}})


def test_inputs_of_other_sizes_are_cut_or_repeated():
    model = Sum()
    inputs = (torch.arange(6.0).view(2, 3), {"a": torch.ones(2, 3)})
    assert list(get_named_inputs(model, inputs, {})) == ["x", "y_a"]
    (x, y), _ = resize_inputs(model, (inputs, {}), {"x": {1: "n"}, "y_a": {1: "n"}}, {"n": 5})
    assert x.tolist() == [[0, 1, 2, 0, 1], [3, 4, 5, 3, 4]]
    assert y["a"].shape == (2, 5)
    (x, _), _ = resize_inputs(model, (inputs, {}), {"x": {1: "n"}}, {"n": 2})
    assert x.tolist() == [[0, 1], [3, 4]]


def test_a_graph_as_data_keeps_its_free_axes():
    graph = captured(Skips(), torch.randn(2, 3, 8, 8))
    description = describe(graph)
    rebuilt = rebuild(description.data, {**graph.state_dict(), **description.constants})
    assert get_origin(rebuilt) == get_origin(graph)
    assert shapes(rebuilt) == [["*", 3, "*", "*"]]
    x = torch.randn(1, 3, 10, 6)
    assert torch.equal(rebuilt(x), graph(x))


def test_a_program_has_the_free_axes_of_its_graph_with_any_example():
    graph = captured(Skips(), torch.randn(2, 3, 8, 8))
    program = export_graph(graph, (torch.randn(1, 3, 4, 12),), {}, dynamic=True)
    (x,) = (node for node in program.graph.nodes if node.name == "x")
    assert [is_dynamic(size) for size in x.meta["val"].shape] == [True, False, True, True]
