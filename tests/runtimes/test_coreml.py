"""An .mlpackage evaluated where Core ML is not, and what verify and deploy say of it."""

import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import scalepoint
from scalepoint.errors import VerificationError
from scalepoint.formats import ExportRequest, find_format
from scalepoint.runtimes import find_runtime
from scalepoint.verification import Status
from tests.errors import raises
from tests.formats.apple.conftest import net, pictures, quantized
from tests.formats.apple.test_package import exported
from tests.pace import fast

pytestmark = pytest.mark.skipif(
    find_spec("coremltools") is None or sys.platform == "darwin", reason="pip install scalepoint[coreml]"
)
RUNTIME = find_runtime("coreml")


@pytest.fixture(scope="module")
def file_class():
    with pytest.MonkeyPatch.context():
        import logging

        level = logging.root.manager.disable
        try:
            return runpy.run_path(str(RUNTIME.child))["File"]
        finally:
            logging.disable(level)


def test_a_file_is_evaluated_and_agrees_with_the_simulation_up_to_ties(tmp_path: Path) -> None:
    path, model = exported(tmp_path, float_dtype="float32", float_path=tmp_path / "f.mlpackage")
    found = scalepoint.verify(path, model, pictures(), float_path=tmp_path / "f.mlpackage")
    assert found.status == Status.OK
    assert found.sqnr > 60
    assert found.holds
    assert not found.is_run
    assert "macOS alone" in found.message
    assert found.latency is None
    assert found.low_precision == 3
    assert found.executed["conv, narrow weights x codes"] == 2


def test_one_call_writes_compares_and_evaluates_and_the_metric_judges_the_simulation(tmp_path: Path) -> None:
    x = pictures()
    seen = []

    def evaluate(run):
        seen.append(type(run))
        return float(run(x).argmax(-1).float().mean())

    done = scalepoint.deploy(net(), x, [x], target="coreml", output=tmp_path / "out", evaluate=evaluate, progress=False)
    assert done.path == tmp_path / "out" / "model.mlpackage"
    assert (tmp_path / "out" / "float.mlpackage" / "Manifest.json").is_file()
    assert done.verification.holds
    assert done.verification.differences == ()
    assert "scalepoint bench" not in str(done.report)
    assert not any("RuntimeModel" in kind.__name__ for kind in seen)


def test_a_file_that_was_changed_does_not_hold_whatever_it_computes(tmp_path: Path) -> None:
    path, _ = exported(tmp_path, float_dtype="float32")
    other = quantized()
    stub = next(each for name, each in other.named_modules() if name == "input_quant")
    stub.scale.mul_(1.001)
    found = scalepoint.verify(path, other, pictures(), layers=False)
    assert found.sqnr > 20
    assert not found.holds
    with raises(VerificationError, "input_quant", "1 of 1 scale"):
        found.check()


def test_there_is_no_speed_to_measure_where_core_ml_is_not(tmp_path: Path) -> None:
    path, _ = exported(tmp_path)
    with raises(VerificationError, "speed", "macOS"):
        scalepoint.benchmark(path, path, runtime="coreml")


@pytest.mark.parametrize(
    "way",
    fast(
        ["weights int8, 2:4", "palettes of 3 bits per group", "weights uint4 per channel"],
        "palettes of 3 bits per group",
    ),
)
def test_narrow_weights_are_unpacked_to_what_the_simulation_multiplies_by(tmp_path: Path, file_class, way: str) -> None:
    path, model = exported(tmp_path, way, float_dtype="float32")
    ((_, found),) = file_class(str(path), {"threads": 1}).run({"input": pictures().numpy()})
    with torch.no_grad():
        np.testing.assert_allclose(found, model(pictures()).numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_batch_of_another_size_is_refused_with_the_shape_that_the_file_takes(tmp_path: Path) -> None:
    path, model = exported(tmp_path)
    found = scalepoint.verify(path, model, torch.randn(3, 3, 16, 16), layers=False)
    assert found.status == Status.FAILED
    assert "has the shape (3, 3, 16, 16): the file takes (2, 3, 16, 16), that of its example" in found.message


class Many(nn.Module):
    """Operations of every row of the table that torch's models come to."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(8, 6, 3, stride=2, padding=1, output_padding=1)
        self.deep = nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=8)
        self.norm, self.group = nn.LayerNorm(12), nn.GroupNorm(2, 8)
        self.mix = nn.Linear(12, 12, bias=False)

    def forward(self, x):
        y = self.group(F.silu(self.deep(x)))
        y = F.hardsigmoid(y) * y + F.elu(y) - torch.tanh(y).abs()
        z = self.up(F.avg_pool2d(F.pad(y, (1, 1, 1, 1), mode="reflect"), 3, stride=2, padding=1))
        a, b = z.split([2, 4], 1)
        z = torch.cat([a.square().clamp(0, 3), F.max_pool2d(b, 3, 1, 1)], 1)
        t = self.norm(z[:, :, 1:7, ::2].flatten(2)[:, :, :12])
        t = self.mix(t).softmax(-1) @ t.transpose(-1, -2)
        t = torch.where(t > 0.1, t.exp(), torch.rsqrt(t.abs() + 1))
        return t.amax(-1), F.interpolate(y, scale_factor=2.0, mode="nearest").mean((2, 3)), t.unsqueeze(1).sum(-1)


def test_operations_are_evaluated_as_torch_computes_them(tmp_path: Path, file_class) -> None:
    torch.manual_seed(0)
    model, x = Many().eval(), torch.randn(2, 8, 12, 12)
    made = scalepoint.quantize.quantize(model, x, scalepoint.quantize.QuantConfig.weight_only("int8", None),
                                        target="coreml", freeze_weights=True)  # fmt: skip
    request = ExportRequest(((x,), {}), None, tmp_path / "f.mlpackage")
    find_format("coreml").write(made, tmp_path / "m.mlpackage", request)
    outputs = file_class(str(tmp_path / "f.mlpackage"), {"threads": 1}).run({"x": x.numpy()})
    with torch.no_grad():
        for expected, (_, found) in zip(model(x), outputs, strict=True):
            np.testing.assert_allclose(found, expected.numpy(), rtol=1e-4, atol=1e-5)


def test_an_operation_that_is_not_known_is_named(tmp_path: Path, file_class) -> None:
    path, _ = exported(tmp_path)
    file = file_class(str(path), {})
    table = file.run.__func__.__globals__["TABLE"]
    kept = table.pop("relu")
    try:
        with pytest.raises(file_class.gaps, match=r"relu.*macOS"):
            file.run({"input": pictures().numpy()})
    finally:
        table["relu"] = kept


class Summed(nn.Module):
    """`cumsum` is not evaluated here."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).cumsum(1)


def test_a_file_that_cannot_be_evaluated_here_is_not_verified_and_no_error(tmp_path: Path) -> None:
    model = quantized(model=Summed().eval())
    scalepoint.export(model, tmp_path / "m.mlpackage", pictures())
    found = scalepoint.verify(tmp_path / "m.mlpackage", model, pictures())
    assert found.status == Status.NOT_VERIFIED
    assert "cumsum" in found.message
    assert "macOS" in found.message
    assert not found.holds
    found.check()
