"""The graph that comes out is that of torch.onnx.export, whichever way it was made."""

import pytest
import torch
from torch import Tensor, nn

from scalepoint.formats.onnx import translation
from scalepoint.formats.onnx.translation import translate_program
from scalepoint.graph import capture
from scalepoint.graph.program import Program
from scalepoint.graph.torch_export import export_graph, export_logs_silenced
from tests.models import settled

OPSET = 18


class Blocks(nn.Module):
    """What leaves something to simplify: batch norm, a pad, reshapes in a row, attention, a window that is rolled."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.out = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn(self.conv(nn.functional.pad(x, (1, 1, 1, 1)))).relu().clamp(max=6.0)
        y = y.roll(1, 2).flatten(2).transpose(1, 2).unsqueeze(1)
        y = nn.functional.scaled_dot_product_attention(y, y, y).squeeze(1)
        return self.out(y.mean(1)) * 2.0


class Mixed(nn.Module):
    """Operands of two types."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (x > 0) * torch.arange(x.shape[-1]) + 1


def nodes(model) -> list[tuple]:
    return [
        (node.op_type, tuple(sorted((key, str(each.value)) for key, each in node.attributes.items())))
        for node in model.graph
    ]


def values(model) -> list[bytes]:
    return sorted(each.const_value.numpy().tobytes() for each in model.graph.initializers.values())


def program(model: nn.Module, x: Tensor) -> Program:
    made = export_graph(capture(model, x), (x,), {}, dynamic=True)
    assert isinstance(made, Program)
    return made


@pytest.mark.parametrize(("model", "by_parts"), [(Blocks, True), (Mixed, False)])
def test_the_graph_is_that_of_torch(model, by_parts, monkeypatch):
    torch.manual_seed(0)
    model, x, calls, original = settled(model()), torch.randn(2, 3, 6, 6), [], torch.onnx.export
    monkeypatch.setattr(torch.onnx, "export", lambda *args, **kwargs: calls.append(1) or original(*args, **kwargs))
    with export_logs_silenced(), torch.no_grad():
        theirs = original(program(model, x), opset_version=OPSET, verbose=False).model
        ours = translate_program(program(model, x), OPSET, {})
    assert nodes(ours) == nodes(theirs)
    assert values(ours) == values(theirs)
    assert bool(calls) == (not by_parts)


def test_a_torch_without_these_parts_is_asked_as_a_whole(monkeypatch):
    def gone(*_args):
        raise AttributeError("no such part")

    x, model = torch.randn(2, 3, 6, 6), settled(Blocks())
    with export_logs_silenced(), torch.no_grad():
        wanted = translate_program(program(model, x), OPSET, {})
        monkeypatch.setattr(translation, "_build_registry", gone)
        found = translate_program(program(model, x), OPSET, {})
    assert nodes(found) == nodes(wanted)


def test_the_code_of_a_program_is_written_when_it_is_asked_for():
    model, x = settled(Blocks()), torch.randn(2, 3, 6, 6)
    made = export_graph(capture(model, x), (x,), {}, dynamic=True, has_code=False)
    assert "conv" not in made.graph_module.code
    assert "conv" in made.run_decompositions({}).graph_module.code
