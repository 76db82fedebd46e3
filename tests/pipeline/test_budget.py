"""budget= of deploy: a precision for every layer, the file within the budget, told in the report, resumed."""

import io

import pytest
import torch
from rich.console import Console
from torch import nn

import scalepoint
from scalepoint import Budget, allocation
from scalepoint.errors import ConfigError, ScalepointWarning, UsageError
from scalepoint.pipeline import deploy as pipeline
from scalepoint.pipeline import stages
from scalepoint.quantize import QuantConfig, TensorQuantConfig
from scalepoint.quantize.quantizers import WeightFakeQuantize
from scalepoint.report import Report
from tests.errors import raises

MINMAX = QuantConfig(activation=TensorQuantConfig(symmetric=False))
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3)).eval()


@pytest.fixture(scope="module")
def data():
    noise = torch.randn(24, 3, 12, 12, generator=torch.Generator().manual_seed(1))
    return list((nn.functional.avg_pool2d(noise, 3, 1) * 3).split(8))


def deployed(net, data, folder, **options):
    defaults = {"target": "reference", "output": folder, "progress": False, "config": MINMAX}
    return scalepoint.deploy(net, data[0], data, **{**defaults, **options})


def widths(model):
    quantizers = [module for module in model.modules() if isinstance(module, WeightFakeQuantize)]
    return {quantizer.name.removesuffix(".weight"): quantizer.spec.n_bits for quantizer in quantizers}


@pytest.fixture(scope="module")
def bits(net, data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bits") / "out"
    return deployed(net, data, folder, budget=Budget(bits=5), choices=("int4", "int8")), folder


def test_layers_where_it_removes_most_error_get_more_bits(bits):
    done, _ = bits
    allocation = done.allocation
    assert widths(done.model) == {layer.name: int(layer.chosen[3:]) for layer in allocation.layers}
    assert set(allocation.counts) == {"int4", "int8"}
    weights = sum(layer.weights for layer in allocation.layers)
    mean = sum(layer.weights * int(layer.chosen[3:]) for layer in allocation.layers) / weights
    assert allocation.reached == pytest.approx(mean)
    assert mean <= 5
    assert allocation.uniform["int8"][1] < allocation.error < allocation.uniform["int4"][1]


def test_the_report_shows_precision_front_and_tuning(bits):
    done, folder = bits
    report = Report.from_json((folder / "report.json").read_text())
    assert report.allocation == done.allocation
    assert [layer.name for layer in report.tuning.layers] == [layer.name for layer in done.tuned.layers]
    costs = [point.cost for point in report.allocation.front]
    errors = [point.error for point in report.allocation.front]
    assert costs == sorted(costs)
    assert errors == sorted(errors, reverse=True)
    page = (folder / "report.html").read_text()
    assert "Precision by layer" in page
    assert "<h2>Tuning</h2>" in page
    assert "all int8" in page
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(done.report.table(verbose=True))
    assert "Error against cost" in console.export_text()
    assert "bits per weight, 5 allowed" in "\n".join(report.summary())


def test_the_file_is_within_a_size_budget(net, data, tmp_path):
    """The file holds more than weights: the first is too large, and tells by how much."""
    done = deployed(net, data, tmp_path, budget="size=0.25")
    share = done.path.stat().st_size / done.float_path.stat().st_size
    assert share <= 0.25
    assert done.allocation.reached == pytest.approx(share)
    assert len(done.trials) == 1


def test_a_file_that_is_too_large_is_written_with_a_warning(net, data, tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "MAX_SIZE_TRIALS", 1)
    with pytest.warns(ScalepointWarning, match=r"budget: .*more than the requested 0\.3.*0\.\d+ of it is not weights"):
        done = deployed(net, data, tmp_path, budget="size=0.3")
    assert done.path.stat().st_size > 0.3 * done.float_path.stat().st_size


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"budget": Budget(bits=5), "max_drop": 1.0, "evaluate": lambda run: 0.0}, "Pass one of them"),
        ({"budget": "small"}, "written as size=0.2"),
        ({"budget": Budget(bits=5), "choices": ("int4", "int9")}, "'int9' is not a weight format"),
        ({"budget": Budget(bits=5), "choices": "int4"}, "must be a list"),
    ],
    ids=["with max_drop", "no budget", "no format", "one word"],
)
def test_an_invalid_budget_is_refused(net, data, tmp_path, options, why):
    with pytest.raises((UsageError, ConfigError), match=why):
        deployed(net, data, tmp_path, **options)


def test_an_iterator_is_refused(net, data, tmp_path):
    with raises(UsageError, "budget=", "iterator"):
        scalepoint.deploy(net, data[0], iter(data), budget=Budget(bits=5), output=tmp_path)


@pytest.mark.slow
def test_measurements_are_resumed_and_measured_again_for_other_choices(net, data, tmp_path, monkeypatch):
    counts = []
    measure = allocation.measure_widths
    monkeypatch.setattr(allocation, "measure_widths", lambda *a, **k: counts.append(1) or measure(*a, **k))

    class Stop(KeyboardInterrupt):
        pass

    def stop(*_, **__):
        raise Stop

    options = {"budget": Budget(bits=6), "choices": ("int4", "int8")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "export", stop)
        with pytest.raises(Stop):
            deployed(net, data, tmp_path / "out", **options)
        patch.undo()
        patch.setattr(stages, "publish", stop)
        with pytest.raises(Stop):
            deployed(net, data, tmp_path / "out", resume=True, **options)
        assert len(counts) == 1
        with pytest.warns(UserWarning, match="choices changed"), pytest.raises(Stop):
            deployed(net, data, tmp_path / "out", resume=True, **{**options, "choices": ("int8", "int4", "int2")})
    assert len(counts) == 2


def test_a_weight_only_config_needs_no_data(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval()
    config = QuantConfig.weight_only("int4", block_size=32)
    options = {"target": "onnxruntime", "config": config, "budget": Budget(bits=6), "choices": ("int4", "int8")}
    done = scalepoint.deploy(model, torch.randn(4, 64), [], output=tmp_path, progress=False, **options)
    assert done.allocation.counts == {"int4": 1, "int8": 1}
    assert done.verification.holds


@pytest.mark.parametrize("limit", ["budget", "max_drop"])
def test_a_net_that_ends_in_a_quantized_convolution_is_measured(net, data, tmp_path, limit):
    """The default target quantizes the output of the last layer: a quantizer that the output alone reads."""
    options = {"budget": "bits=8"} if limit == "budget" else {"max_drop": 1e-9, "max_trials": 3}
    expected = net(data[0])

    def evaluate(run):
        return -float((run(data[0]) - expected).abs().mean())

    options |= {"target": "onnxruntime", "evaluate": evaluate, "config": {"speed_first": False}}
    done = deployed(net, data, tmp_path / "out", **options)
    assert done.verification.holds
    assert [layer.name for layer in done.allocation.layers] == ["0", "2", "4"]
