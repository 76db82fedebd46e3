"""Evaluation of an .mlpackage on a system without Core ML, and what verify and deploy report about it."""

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
    result = scalepoint.verify(path, model, pictures(), float_path=tmp_path / "f.mlpackage")
    assert result.status == Status.OK
    assert result.sqnr > 60
    assert result.holds
    assert not result.is_run
    assert "only on macOS" in result.message
    assert result.latency is None
    assert result.low_precision == 3
    assert result.executed["conv, narrow weights x codes"] == 2


def test_deploy_verifies_by_evaluation_and_runs_the_metric_on_the_simulation(tmp_path: Path) -> None:
    x = pictures()
    run_types = []

    def evaluate(run):
        run_types.append(type(run))
        return float(run(x).argmax(-1).float().mean())

    done = scalepoint.deploy(net(), x, [x], target="coreml", output=tmp_path / "out", evaluate=evaluate, progress=False)
    assert done.path == tmp_path / "out" / "model.mlpackage"
    assert (tmp_path / "out" / "float.mlpackage" / "Manifest.json").is_file()
    assert done.verification.holds
    assert done.verification.differences == ()
    assert "scalepoint bench" not in str(done.report)
    assert not any("RuntimeModel" in kind.__name__ for kind in run_types)


def test_a_file_that_differs_from_the_model_does_not_hold_even_if_the_outputs_agree(tmp_path: Path) -> None:
    path, _ = exported(tmp_path, float_dtype="float32")
    other = quantized()
    stub = next(module for name, module in other.named_modules() if name == "input_quant")
    stub.scale.mul_(1.001)
    result = scalepoint.verify(path, other, pictures(), layers=False)
    assert result.sqnr > 20
    assert not result.holds
    with raises(VerificationError, "input_quant", "1 of 1 scale"):
        result.check()


def test_the_speed_cannot_be_measured_without_core_ml(tmp_path: Path) -> None:
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
def test_compressed_weights_are_unpacked_to_the_values_of_the_simulation(tmp_path: Path, file_class, way: str) -> None:
    path, model = exported(tmp_path, way, float_dtype="float32")
    ((_, output),) = file_class(str(path), {"threads": 1}).run({"input": pictures().numpy()})
    with torch.no_grad():
        np.testing.assert_allclose(output, model(pictures()).numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_another_batch_size_is_refused_with_the_shape_of_the_file(tmp_path: Path) -> None:
    path, model = exported(tmp_path)
    result = scalepoint.verify(path, model, torch.randn(3, 3, 16, 16), layers=False)
    assert result.status == Status.FAILED
    assert "has shape (3, 3, 16, 16): the file takes only the shape of its example, (2, 3, 16, 16)" in result.message


class ManyOperations(nn.Module):
    """A model with many of the operations that can be evaluated."""

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
    model, x = ManyOperations().eval(), torch.randn(2, 8, 12, 12)
    quantized_model = scalepoint.quantize.quantize(model, x, scalepoint.quantize.QuantConfig.weight_only("int8", None),
                                        target="coreml", freeze_weights=True)  # fmt: skip
    request = ExportRequest(((x,), {}), None, tmp_path / "f.mlpackage")
    find_format("coreml").write(quantized_model, tmp_path / "m.mlpackage", request)
    outputs = file_class(str(tmp_path / "f.mlpackage"), {"threads": 1}).run({"x": x.numpy()})
    with torch.no_grad():
        for expected, (_, output) in zip(model(x), outputs, strict=True):
            np.testing.assert_allclose(output, expected.numpy(), rtol=1e-4, atol=1e-5)


def test_an_unknown_operation_is_named(tmp_path: Path, file_class) -> None:
    path, _ = exported(tmp_path)
    file = file_class(str(path), {})
    operations = file.run.__func__.__globals__["OPERATIONS"]
    relu = operations.pop("relu")
    try:
        with pytest.raises(file_class.gaps, match=r"relu.*macOS"):
            file.run({"input": pictures().numpy()})
    finally:
        operations["relu"] = relu


class CumulativeSum(nn.Module):
    """A model with `cumsum`, which cannot be evaluated without Core ML."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).cumsum(1)


def test_a_file_that_cannot_be_evaluated_is_not_verified_without_an_error(tmp_path: Path) -> None:
    model = quantized(model=CumulativeSum().eval())
    scalepoint.export(model, tmp_path / "m.mlpackage", pictures())
    result = scalepoint.verify(tmp_path / "m.mlpackage", model, pictures())
    assert result.status == Status.NOT_VERIFIED
    assert "cumsum" in result.message
    assert "macOS" in result.message
    assert not result.holds
    result.check()
