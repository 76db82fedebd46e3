"""Calibration data that never changes causes a warning that names the constant tensors."""

import warnings

import pytest
import torch
from torch import Tensor, nn

import scalepoint
from scalepoint.errors import ScalepointWarning
from scalepoint.quantize import QuantConfig, QuantStub, calibrate, quantize, record_of

EXAMPLE = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)


class Branches(nn.Module):
    """`second` reads a ReLU whose output is always 0."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.dead, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1)
        nn.init.constant_(self.dead.bias, -100.0)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        y = self.first(x) + self.second(self.dead(x).relu())
        return y if scale is None else y * scale


def warned(data, args=EXAMPLE, model=None):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quantized = quantize(model or nn.Sequential(nn.Conv2d(3, 4, 3)), args, forward_loop=data, target="onnxruntime")
    messages = [str(warning.message) for warning in caught if "calibration data" in str(warning.message)]
    assert record_of(quantized).constant == (messages[0] if messages else "")
    return messages[0] if messages else ""


@pytest.mark.parametrize("value", [0.0, -3.5])
@pytest.mark.parametrize("batches", [1, 3])
def test_the_warning_names_the_constant_input_and_layer(value, batches):
    messages = warned([torch.full_like(EXAMPLE, value)] * batches)
    assert f"input input is always {value:.6g}" in messages.replace("input_1", "input")
    assert f"the activation at 0 is always {value:.6g}" in messages


@pytest.mark.parametrize(
    "data",
    [
        pytest.param([EXAMPLE], id="real"),
        pytest.param([EXAMPLE * 0, EXAMPLE * 0 + 1], id="batches that differ"),
        pytest.param([torch.cat([EXAMPLE[:1] * 0, EXAMPLE[1:]])], id="one sample of zeros"),
        pytest.param([torch.zeros(2, 3, 8, 8).index_fill(3, torch.tensor([7]), 1.0)], id="few other values"),
    ],
)
def test_data_with_several_values_causes_no_warning(data):
    assert warned(data) == ""


def test_only_the_layer_that_always_reads_zeros_is_named():
    messages = warned([EXAMPLE], model=Branches())
    assert "second is always 0" in messages
    assert "input x" not in messages
    assert "first" not in messages


def test_a_constant_second_input_causes_no_warning():
    messages = warned([(EXAMPLE, torch.ones(4, 1, 1))], (EXAMPLE, torch.ones(4, 1, 1)), Branches())
    assert "input scale" not in messages


def test_readers_that_are_modules_are_named_by_their_class():
    layer = nn.Linear(4, 4)
    with pytest.warns(ScalepointWarning, match="the activation at Linear is always 1"):
        calibrate(nn.Sequential(QuantStub([layer]), layer), [torch.ones(2, 4)], progress=False)


def test_the_warning_is_in_the_report_and_in_the_saved_model(tmp_path):
    options = {"config": QuantConfig(speed_first=False), "output": tmp_path / "out", "smoke": True, "progress": False}
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)).eval()

    with pytest.warns(ScalepointWarning, match="calibration data is constant"):
        done = scalepoint.deploy(net, EXAMPLE, [EXAMPLE * 0], **options)
    assert any("calibration data is constant" in warning for warning in done.report.warnings)
    assert "calibration data is constant" in str(done)
    loaded = scalepoint.load(tmp_path / "out" / "quantized", net, EXAMPLE)
    assert record_of(loaded).constant == record_of(done.model).constant != ""
