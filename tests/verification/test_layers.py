"""Every layer of a file in its runtime, with the inputs of the simulation."""

import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from scalepoint.errors import VerificationError
from scalepoint.formats import export
from scalepoint.quantize import quantize
from scalepoint.support.cpu import instruction_set
from scalepoint.targets import onnxruntime_target
from scalepoint.verification import verify_layers
from tests.formats.onnx.test_export import Net, with_random_statistics

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Block(nn.Module):
    """A transformer block, whose linear layers have float outputs."""

    def __init__(self, width=32, heads=4):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.dense = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x):
        parts = (part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value))
        x = self.norm1(x + self.dense(F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class Padded(nn.Module):
    """Paddings that the exporter folds into convolutions."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(3, 8, 3, 2), nn.ReLU())
        self.second = nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(8, 8, 3, 2, groups=8), nn.ReLU6())

    def forward(self, x):
        return self.second(self.first(x)).mean((2, 3))


CASES = {
    "convolutions": (lambda: with_random_statistics(Net()), (4, 3, 32, 32), 5, 1),
    "transformer": (lambda: Block().eval(), (2, 16, 32), 6, 6),
    "padded": (lambda: Padded().eval(), (2, 3, 16, 16), 2, 0),
}


def deployed(model, x, cpu, path):
    quantized = quantize(model, x, forward_loop=[x], target=onnxruntime_target(cpu))
    export(quantized, path, x)
    return quantized


@pytest.mark.parametrize("name", CASES)
def test_every_layer_has_the_codes_of_the_simulation(name, tmp_path):
    make, shape, weighted, floats = CASES[name]
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape)
    quantized = deployed(model, x, "avx2", tmp_path / "m.onnx")
    result = verify_layers(tmp_path / "m.onnx", quantized, x)
    assert result.holds, "\n".join(map(str, result.departing))
    assert result.least_equal >= 0.999
    assert result.largest_codes <= 1
    assert result.low_precision == weighted
    assert result.fallbacks == ()
    assert sum(layer.is_float for layer in result.layers) == floats
    assert len(result.layers) >= weighted


@pytest.mark.parametrize("name", ["convolutions", "transformer"])
def test_layers_that_saturate_are_found_and_no_others(name, tmp_path):
    """Products of weights and inputs of one sign need more than 16 bits. Only a CPU with VNNI adds them exactly."""
    make, shape, *_ = CASES[name]
    torch.manual_seed(0)
    model, x = make(), torch.rand(shape)
    first = model.stem if name == "convolutions" else model.query
    with torch.no_grad():
        first.weight.abs_().clamp_(min=float(first.weight.abs().max()) * 0.9)
    naive = deployed(model, x, "vnni", tmp_path / "naive.onnx")
    result = verify_layers(tmp_path / "naive.onnx", naive, x)
    if instruction_set() == "vnni":
        assert result.holds, "\n".join(map(str, result.departing))
        return
    assert not result.holds
    assert "stem" in result.departing[0].where if name == "convolutions" else result.largest_steps > 1e5


def test_a_changed_layer_is_found_and_no_other(tmp_path):
    """A difference in one layer does not reach the next layer."""
    torch.manual_seed(0)
    model, x = with_random_statistics(Net()), torch.randn(4, 3, 32, 32)
    quantized = deployed(model, x, "avx2", tmp_path / "m.onnx")
    proto = onnx.load(tmp_path / "m.onnx")
    scale = next(
        tensor
        for tensor in proto.graph.initializer
        if tensor.name.startswith("expand") and tensor.name.endswith("conv.scale")
    )
    doubled = 2 * onnx.numpy_helper.to_array(scale)
    scale.CopyFrom(onnx.numpy_helper.from_array(doubled, scale.name))
    onnx.save(proto, tmp_path / "changed.onnx")
    result = verify_layers(tmp_path / "changed.onnx", quantized, x)
    assert [layer.where.split("_")[0] for layer in result.departing] == ["expand"]


def test_a_file_that_does_not_run_is_an_error(tmp_path):
    x = torch.randn(2, 3, 32, 32)
    quantized = quantize(with_random_statistics(Net()), x, forward_loop=[x], target="onnxruntime")
    proto = onnx.helper.make_model(
        onnx.helper.make_graph([onnx.helper.make_node("Nonsense", ["x"], ["y"])], "g", [], [])
    )
    onnx.save(proto, tmp_path / "bad.onnx")
    with pytest.raises(VerificationError, match="failed"):
        verify_layers(tmp_path / "bad.onnx", quantized, x)
