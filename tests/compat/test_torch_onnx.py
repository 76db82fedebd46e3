"""The fast translation writes the same graph as torch.onnx.export."""

import pytest
import torch
from torch import Tensor, nn

from scalepoint.compat import torch_onnx
from scalepoint.compat.fast_export import RecordedProgram
from scalepoint.compat.torch_onnx import translate_program
from scalepoint.graph import capture
from scalepoint.graph.torch_export import export_graph, export_logs_silenced
from tests.models import with_norm_statistics

OPSET = 18


class Blocks(nn.Module):
    """Operations that leave something to simplify: batch norm, pad, several reshapes, attention, a rolled window."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.out = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn(self.conv(nn.functional.pad(x, (1, 1, 1, 1)))).relu().clamp(max=6.0)
        y = y.roll(1, 2).flatten(2).transpose(1, 2).unsqueeze(1)
        y = nn.functional.scaled_dot_product_attention(y, y, y).squeeze(1)
        return self.out(y.mean(1)) * 2.0


class Mixed(nn.Module):
    """Operands of two dtypes."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (x > 0) * torch.arange(x.shape[-1]) + 1


def nodes(model) -> list[tuple]:
    return [
        (node.op_type, tuple(sorted((name, str(attribute.value)) for name, attribute in node.attributes.items())))
        for node in model.graph
    ]


def values(model) -> list[bytes]:
    return sorted(value.const_value.numpy().tobytes() for value in model.graph.initializers.values())


def program(model: nn.Module, x: Tensor) -> RecordedProgram:
    recorded = export_graph(capture(model, x), (x,), {}, dynamic=True)
    assert isinstance(recorded, RecordedProgram)
    return recorded


@pytest.mark.parametrize(("model", "is_fast"), [(Blocks, True), (Mixed, False)])
def test_the_graph_is_the_same_as_from_torch_onnx_export(model, is_fast, monkeypatch):
    torch.manual_seed(0)
    model, x, calls, original = with_norm_statistics(model()), torch.randn(2, 3, 6, 6), [], torch.onnx.export
    monkeypatch.setattr(torch.onnx, "export", lambda *args, **kwargs: calls.append(1) or original(*args, **kwargs))
    with export_logs_silenced(), torch.no_grad():
        theirs = original(program(model, x), opset_version=OPSET, verbose=False).model
        ours = translate_program(program(model, x), OPSET, {})
    assert nodes(ours) == nodes(theirs)
    assert values(ours) == values(theirs)
    assert bool(calls) == (not is_fast)


def test_torch_onnx_export_runs_when_torch_lacks_the_private_parts(monkeypatch):
    def missing(*_args):
        raise AttributeError("no such part")

    x, model = torch.randn(2, 3, 6, 6), with_norm_statistics(Blocks())
    with export_logs_silenced(), torch.no_grad():
        expected = translate_program(program(model, x), OPSET, {})
        monkeypatch.setattr(torch_onnx, "_build_registry", missing)
        translated = translate_program(program(model, x), OPSET, {})
    assert nodes(translated) == nodes(expected)


def test_the_code_of_a_program_is_written_by_run_decompositions():
    model, x = with_norm_statistics(Blocks()), torch.randn(2, 3, 6, 6)
    recorded = export_graph(capture(model, x), (x,), {}, dynamic=True, has_code=False)
    assert "conv" not in recorded.graph_module.code
    assert "conv" in recorded.run_decompositions({}).graph_module.code
