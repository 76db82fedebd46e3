"""tune: closer to the float model, never worse than the nearest codes; the chosen codes are saved, exported and run."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from scalepoint.analysis import compare
from scalepoint.errors import ConfigError, NonFiniteError, ScalepointError, ScalepointWarning, UsageError
from scalepoint.formats import export
from scalepoint.quantize import QuantConfig, TensorQuantConfig, disable_fake_quant, load, quantize, save
from scalepoint.quantize.quantized_layers import QuantizedLayer
from scalepoint.spec import PerChannelGranularity, QuantizationSpec
from scalepoint.spec.pair_safe import pair_sums
from scalepoint.targets import onnxruntime_target
from scalepoint.tuning import TuneConfig, register, tune
from scalepoint.tuning.checkpoint import Checkpoint
from scalepoint.tuning.solve import LayerSolver
from scalepoint.verification import verify
from tests.models import with_norm_statistics

FOUR = QuantConfig(activation=TensorQuantConfig(symmetric=False), weight=TensorQuantConfig(n_bits=4, per_channel=True))


class Net(nn.Module):
    """A residual, a depthwise and a transposed convolution, a classifier."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = F.relu(self.norm(self.stem(x)))
        x = F.relu(self.depthwise(x) + x)
        return self.head(F.relu(self.up(x)).mean((2, 3)))


def pictures(count, seed):
    """Images with similar neighbours: with uncorrelated inputs there is nothing to compensate."""
    noise = torch.randn(count, 3, 14, 14, generator=torch.Generator().manual_seed(seed))
    return F.avg_pool2d(noise, 3, 1) * 3


@pytest.fixture
def net():
    torch.manual_seed(0)
    return with_norm_statistics(Net())


@pytest.fixture
def data():
    return list(pictures(48, 1).split(8))


def near(net, model):
    return compare(net, model, [pictures(32, 2)], progress=False).outputs[0].sqnr_db


def quantized(net, data, config=FOUR, **options):
    return quantize(net, data[0], config, forward_loop=data, progress=False, **options)


def codes(model):
    return [layer.get_deployed().codes.clone() for layer in model.modules() if isinstance(layer, QuantizedLayer)]


def test_the_outputs_are_closer_to_float_on_new_data(net, data):
    model = quantized(net, data)
    before = near(net, model)
    report = tune(model, data, progress=False)
    assert near(net, model) > before + 4
    assert [layer.name for layer in report.layers] == ["stem", "depthwise", "up", "head"]
    assert all(layer.after <= layer.before for layer in report.layers)
    assert report.samples == 48
    assert "stem" in str(report)


def test_the_float_model_is_untouched(net, data):
    model = quantized(net, data)
    tune(model, data, progress=False)
    disable_fake_quant(model)
    with torch.no_grad():
        torch.testing.assert_close(model(data[0]), net(data[0]), rtol=1e-4, atol=1e-5)


def test_another_batch_size_gives_nearly_the_same_codes(net, data):
    one, other = quantized(net, data), quantized(net, data)
    tune(one, data, progress=False)
    tune(other, list(torch.cat(data).split(12)), progress=False)
    pairs = list(zip(codes(one), codes(other), strict=True))
    assert sum(int((a != b).sum()) for a, b in pairs) <= 0.02 * sum(a.numel() for a, _ in pairs)


def test_tuning_is_deterministic_also_with_activations_on_disk(net, data):
    one, other = quantized(net, data), quantized(net, data)
    tune(one, data, progress=False)
    tune(other, lambda model: [model(batch) for batch in data], {"memory": "1MB"}, progress=False)
    assert all(torch.equal(a, b) for a, b in zip(codes(one), codes(other), strict=True))


def test_chosen_codes_are_saved_exported_and_run(net, data, tmp_path):
    target = onnxruntime_target()
    model = quantized(net, data, QuantConfig(weight=target.weight), target=target)
    assert tune(model, data, progress=False).layers
    x = pictures(4, 5)
    save(model, tmp_path / "kept")
    again = load(tmp_path / "kept", net, data[0], target=target)
    with torch.no_grad():
        assert torch.equal(again(x), model(x))
    export(model, tmp_path / "model.onnx", x)
    verify(tmp_path / "model.onnx", model, x).check()


def test_four_bit_blocks_of_a_linear_layer_run_in_the_runtime(tmp_path):
    torch.manual_seed(0)
    mix = torch.randn(64, 64)
    data = [torch.randn(32, 64) @ mix for _ in range(8)]
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)).eval()
    config = QuantConfig.weight_only("int4", block_size=32)
    model = quantize(net, data[0], config, target="onnxruntime", progress=False)
    before = compare(net, model, [torch.randn(64, 64) @ mix], progress=False).outputs[0].sqnr_db
    tune(model, data, progress=False)
    assert compare(net, model, [torch.randn(64, 64) @ mix], progress=False).outputs[0].sqnr_db > before + 3
    export(model, tmp_path / "model.onnx", data[0])
    verify(tmp_path / "model.onnx", model, data[0]).check()


def test_the_intercept_alone_changes_no_code(net, data):
    model = quantized(net, data)
    before = codes(model)
    tune(model, data, TuneConfig(steps=("intercept",)), progress=False)
    assert all(torch.equal(a, b) for a, b in zip(codes(model), before, strict=True))
    assert any(layer.bias_shift is not None for layer in model.modules() if isinstance(layer, QuantizedLayer))


class Pooled(nn.Module):
    """A layer with many rows per sample, and a head with one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(32, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(torch.relu(self.body(x)).mean(1))
        return y


def test_a_layer_with_few_rows_keeps_its_codes_and_gets_the_bias_that_corrects_the_mean():
    torch.manual_seed(0)
    model, samples = Pooled().eval(), [torch.randn(1, 64, 32) for _ in range(4)]
    weight_only = QuantConfig(activation="float", weight=TensorQuantConfig(n_bits=4, per_channel=True))
    narrow = quantize(model, samples[0], weight_only, freeze_weights=True)
    before = codes(narrow)
    report = tune(narrow, samples, progress=False)
    after = codes(narrow)
    (head,) = [row for row in report.layers if row.name == "head"]
    assert "head" not in report.left
    assert head.step == "intercept"
    assert head.after < head.before
    assert [torch.equal(old, new) for old, new in zip(before, after, strict=True)] == [False, True]


def test_tuning_again_changes_nothing_and_says_why(net, data):
    model = quantized(net, data)
    tune(model, data, progress=False)
    with torch.no_grad():
        before = model(data[0])
    report = tune(model, data, progress=False)
    assert not report.layers
    assert all("chosen before" in why for why in report.left.values())
    with torch.no_grad():
        assert torch.equal(model(data[0]), before)


def test_a_registered_step_is_called_for_every_layer(net, data):
    calls = []

    @register("nothing")
    def nothing(problem, solution):
        calls.append(problem.name)
        return solution

    tune(quantized(net, data), data, TuneConfig(steps=("nothing",)), progress=False)
    assert calls == ["stem", "depthwise", "up", "head"]


class Killed(BaseException):
    """Stands for a process that is killed."""


STEPS = ("ranges", "intercept", "target", "scale", "gptq", "descend", "sign_round", "end_to_end")


@pytest.mark.parametrize(
    "solved_layers", [pytest.param(0, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]
)
def test_a_killed_run_continues_after_its_last_piece(net, data, tmp_path, solved_layers, monkeypatch):
    config = TuneConfig(unit="layer", steps=STEPS, iterations=3)
    uninterrupted = quantized(net, data)
    tune(uninterrupted, data, config, progress=False)
    solved = []
    original = LayerSolver.find_best

    def best(self, problem, *args, **options):
        if len(solved) == solved_layers:
            raise Killed
        solved.append(problem.name)
        return original(self, problem, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(LayerSolver, "find_best", best)
        with pytest.raises(Killed):
            tune(quantized(net, data), data, config, folder=tmp_path, progress=False)
    model = quantized(net, data)
    counted = []
    monkeypatch.setattr(
        LayerSolver, "find_best", lambda *args, **options: counted.append(1) or original(*args, **options)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error" if solved_layers else "ignore")
        report = tune(model, data, config, folder=tmp_path, resume=True, progress=False)
    assert len(counted) == 4 - solved_layers
    assert len(report.layers) == 4
    assert all(torch.equal(a, b) for a, b in zip(codes(model), codes(uninterrupted), strict=True))
    for name, value in uninterrupted.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_changed_or_damaged_files_give_a_warning_and_are_tuned_again(net, data, tmp_path):
    tune(quantized(net, data), data, folder=tmp_path, progress=False)
    with pytest.warns(ScalepointWarning, match="changed since"):
        tune(quantized(net, data), data[:3], folder=tmp_path, resume=True, progress=False)
    file = next(tmp_path.glob("piece-*"))
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.warns(ScalepointWarning, match="is tuned again"):
        tune(quantized(net, data), data[:3], folder=tmp_path, resume=True, progress=False)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(16, 16)

    def forward(self, x):
        return self.shared(F.relu(self.shared(x)))


class Shared(nn.Module):
    """Readers of one value, and a weight that is used twice."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.tied = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        x = F.relu(self.tied(x))
        return self.tied(F.relu(self.q(x) * self.k(x)))


@pytest.mark.parametrize("steps", [("intercept",), TuneConfig().steps], ids=["intercept", "all"])
@pytest.mark.parametrize("after", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)])
def test_rows_that_layers_share_are_collected_again_on_resume(tmp_path, steps, after, monkeypatch):
    torch.manual_seed(0)
    mix = torch.randn(16, 16)
    data = [torch.randn(16, 16) @ mix for _ in range(4)]
    config = TuneConfig(unit="layer", steps=steps)

    def build():
        torch.manual_seed(1)
        return quantize(Shared().eval(), data[0], FOUR, forward_loop=data, progress=False)

    uninterrupted, model = build(), build()
    rows = tune(uninterrupted, data, config, progress=False).layers
    stored, keep = [], Checkpoint.store_piece

    def killed(self, name, states, done):
        keep(self, name, states, done)
        stored.append(name)
        if len(stored) == after:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "store_piece", killed)
        with pytest.raises(Killed):
            tune(build(), data, config, folder=tmp_path, progress=False)
    again = tune(model, data, config, folder=tmp_path, resume=True, progress=False).layers
    assert [row.rows for row in again] == [row.rows for row in rows]
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in uninterrupted.state_dict().items())


def test_a_bias_still_fits_into_int32():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 4)).eval()
    with torch.no_grad():
        net[0].weight[0] *= 1e-3
        net[0].bias[0] = 1e4
    data = [torch.randn(16, 32) for _ in range(8)]
    model = quantize(net, data[0], None, forward_loop=data, target=onnxruntime_target(cpu="vnni"), progress=False)
    layer = next(layer for layer in model.modules() if isinstance(layer, QuantizedLayer))
    with torch.no_grad():
        assert float(layer.weight_quant.scale[0]) == pytest.approx(float(layer.compute_min_scale()[0]))  # it was raised
    tune(model, data, progress=False)
    assert float(layer.get_deployed().bias.detach().abs().max()) < 2**31


@pytest.mark.parametrize("steps", [("intercept",), TuneConfig().steps], ids=["intercept", "all"])
def test_a_layer_that_is_used_twice_is_tuned_on_the_rows_of_both_uses(steps):
    torch.manual_seed(0)
    mix = torch.randn(16, 16)
    data = [torch.randn(16, 16) @ mix for _ in range(8)]
    net, new = Twice().eval(), torch.randn(64, 16) @ mix
    model = quantize(net, data[0], FOUR.model_copy(update={"correct_bias": False}), forward_loop=data, progress=False)
    before = compare(net, model, [new], progress=False).outputs[0].sqnr_db
    report = tune(model, data, TuneConfig(steps=steps), progress=False)
    (row,) = report.layers
    assert row.rows == 2 * 128
    assert not report.left
    after = compare(net, model, [new], progress=False).outputs[0].sqnr_db
    assert after > before + (0.5 if len(steps) > 1 else -0.1)


def test_pair_safe_codes_stay_pair_safe_and_are_closer_to_float(net, data):
    target = onnxruntime_target(cpu="avx2")
    model = quantized(net, data, None, target=target)
    before = near(net, model)
    report = tune(model, data, progress=False)
    assert {layer.name for layer in report.layers} == {"stem", "depthwise", "head"}
    assert near(net, model) > before
    for layer in model.modules():
        if isinstance(layer, QuantizedLayer) and layer.weight_quant.spec.range_calculator_cls == "pair_safe":
            assert float(pair_sums(layer.get_deployed().codes.float()).max()) <= 128


def test_float8_weights_are_tuned(net, data):
    config = QuantConfig(
        activation=TensorQuantConfig(symmetric=False),
        weight=QuantizationSpec(
            dtype=torch.float8_e4m3fn, qscheme="symmetric", granularity=PerChannelGranularity(axis=0)
        ),
    )
    model = quantized(net, data, config)
    before = near(net, model)
    report = tune(model, data, progress=False)
    assert not report.left
    assert near(net, model) > before


def test_one_sample_is_enough_to_run(net):
    data = [pictures(1, 3)]
    model = quantized(net, data)
    report = tune(model, data, progress=False)
    assert all(layer.after <= layer.before for layer in report.layers)


def test_nan_names_the_layer(net, data):
    model = quantized(net, data)
    data[2][0, 0, 0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="stem"):
        tune(model, data, progress=False)
    report = tune(quantized(net, [data[0]]), data, on_nan="skip", progress=False)
    assert report.batches == 5


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"steps": ("gptg",)}, "gptq"),
        ({"steps": ()}, "tunes nothing"),
        ({"holdout": 0.9}, "holdout"),
        ({"step": ("gptq",)}, "steps"),
        ({"memory": "2 apples"}, "memory"),
        ({"memory": "infGB"}, "memory"),
    ],
    ids=str,
)
def test_an_invalid_config_is_refused(net, data, config, message):
    with pytest.raises((ConfigError, UsageError, ValueError), match=message):
        tune(quantized(net, data), data, config, progress=False)


def test_a_float_model_is_refused(net, data):
    with pytest.raises(ScalepointError, match="insert_qdq"):
        tune(net, data, progress=False)
