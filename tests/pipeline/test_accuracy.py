"""accuracy= of deploy: what is chosen by data, by default below 8 bits, and kept through resume."""

import pytest
import torch
from torch import nn

import scalepoint
from scalepoint.errors import UsageError
from scalepoint.pipeline import context, stages
from scalepoint.pipeline.accuracy import CLOSED_FORM, choose_tuning
from scalepoint.quantize import QuantConfig, TensorQuantConfig, quantize
from scalepoint.quantize.quantized_layers import QuantizedLayer
from scalepoint.tuning import TuneConfig

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
FOUR = QuantConfig(weight=TensorQuantConfig(n_bits=4, per_channel=True))


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()


@pytest.fixture(scope="module")
def data():
    noise = torch.randn(48, 3, 14, 14, generator=torch.Generator().manual_seed(1))
    return list((nn.functional.avg_pool2d(noise, 3, 1) * 3).split(12))


def deployed(net, data, folder, **options):
    defaults = {"target": "reference", "config": FOUR, "output": folder, "progress": False}
    return scalepoint.deploy(net, data[0], data, **{**defaults, **options})


def shifted(model):
    return [module.bias_shift is not None for module in model.modules() if isinstance(module, QuantizedLayer)]


def test_the_default_accuracy_of_4_bits_is_balanced(net, data, tmp_path):
    done = deployed(net, data, tmp_path / "balanced")
    assert [layer.name for layer in done.tuned.layers] == ["0", "2", "4"]
    assert all(layer.moved > 0 for layer in done.tuned.layers)
    fast = deployed(net, data, tmp_path / "fast", accuracy="fast")
    assert all(layer.moved == 0 for layer in fast.tuned.layers)
    assert any(shifted(fast.model))
    with torch.no_grad():
        truth = net(data[1])
        errors = [float((deployment.model(data[1]) - truth).square().mean()) for deployment in (done, fast)]
    assert errors[0] < 0.5 * errors[1]


def test_weights_of_8_bits_are_only_rounded_by_default(net, data, tmp_path):
    assert deployed(net, data, tmp_path / "plain", config=None).tuned is None
    tuned = deployed(net, data, tmp_path / "asked", config=None, accuracy="balanced")
    assert len(tuned.tuned.layers) == 3


@pytest.mark.slow
def test_tuning_is_resumed(net, data, tmp_path):
    class Stop(KeyboardInterrupt):
        pass

    def stop(*_):
        raise Stop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "publish", stop)
        with pytest.raises(Stop):
            deployed(net, data, tmp_path / "out")
    done = deployed(net, data, tmp_path / "out", resume=True)
    fresh = deployed(net, data, tmp_path / "fresh")
    assert [layer.name for layer in done.tuned.layers] == [layer.name for layer in fresh.tuned.layers]
    assert done.path.read_bytes() == fresh.path.read_bytes()


def test_without_data_nothing_is_tuned():
    linear = nn.Sequential(nn.Linear(32, 32)).eval()
    model = quantize(linear, torch.randn(2, 32), QuantConfig.weight_only("int4", block_size=32))
    assert choose_tuning(model, None, has_data=False) is None


@pytest.mark.parametrize("bad_data", [list, lambda: iter([torch.ones(2, 32)])], ids=["no batches", "an iterator"])
def test_data_that_cannot_be_read_again_is_refused_before_capture(tmp_path, monkeypatch, bad_data):
    monkeypatch.setattr(context, "capture_for_plan", None)  # it would fail if it ran
    with pytest.raises(UsageError, match="accuracy='balanced' reads the calibration data a second time"):
        scalepoint.deploy(
            nn.Linear(32, 32), torch.ones(2, 32), bad_data(), accuracy="balanced", output=tmp_path / "out"
        )
    assert not (tmp_path / "out").exists()


def test_an_unknown_accuracy_is_refused(net, data, tmp_path):
    with pytest.raises(UsageError, match="'fast', 'balanced' or 'best'"):
        deployed(net, data, tmp_path, accuracy="beste")


def test_the_closed_form_steps_are_the_default_of_tuning():
    assert TuneConfig().steps == CLOSED_FORM
