"""A net whose layers all stay float because int8 is slower: its data is checked, and the verdict says so."""

import pytest
import torch
from torch import nn

import scalepoint
from scalepoint.errors import CalibrationError, NonFiniteError
from scalepoint.quantize import QuantConfig, quantize
from scalepoint.targets import onnxruntime_target

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

TARGET = onnxruntime_target(cpu="avx2")
EXAMPLE = torch.linspace(-1, 1, 3 * 16 * 16).reshape(1, 3, 16, 16)


def small_net():
    torch.manual_seed(0)
    body = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)).eval()


def deployed(data, folder, **options):
    options = {"placement": "predicted", "progress": False, **options}
    return scalepoint.deploy(small_net(), EXAMPLE, data, target=TARGET, output=folder, **options)


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        pytest.param([EXAMPLE * float("nan")], NonFiniteError, "batch 0", id="NaN"),
        pytest.param([], CalibrationError, "empty", id="no batch"),
        pytest.param(iter([]), CalibrationError, "empty", id="an iterator that is at its end"),
        pytest.param(lambda model: None, CalibrationError, "never called", id="a function that calls nothing"),
        pytest.param([torch.zeros(1, 4, 16, 16)], CalibrationError, "unlike the example", id="channels"),
        pytest.param([EXAMPLE.double()], CalibrationError, "unlike the example", id="dtype"),
    ],
)
def test_bad_data_is_an_error_also_where_every_layer_stays_float(data, error, words, tmp_path):
    with pytest.raises(error, match=words):
        deployed(data, tmp_path / "out", smoke=True)


@pytest.mark.parametrize("data", [[EXAMPLE], iter([EXAMPLE]), lambda model: [model(EXAMPLE) for _ in range(3)]])
def test_good_data_of_any_kind_passes_the_check(data):
    quantize(small_net(), EXAMPLE, QuantConfig(speed_first=True), forward_loop=data, target=TARGET)


def test_batches_with_nan_can_be_left_out_of_the_check(tmp_path):
    deployed([EXAMPLE * float("nan"), EXAMPLE], tmp_path / "out", smoke=True, on_nan="skip")


def test_nan_that_the_model_computes_is_found(tmp_path):
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = small_net()

        def forward(self, x):
            return self.inner(x).sub(10).sqrt()

    with pytest.raises(NonFiniteError, match="its inputs are finite"):
        scalepoint.deploy(
            Broken().eval(),
            EXAMPLE,
            [EXAMPLE],
            target=TARGET,
            output=tmp_path / "out",
            placement="predicted",
            progress=False,
            smoke=True,
        )


def test_the_verdict_says_that_nothing_was_quantized_and_how_to_force_it(tmp_path):
    done = deployed([EXAMPLE], tmp_path / "out")
    verdict = done.report.verdict()
    assert verdict.startswith("Nothing was quantized: int8 is slower than float for every layer here")
    assert "placement='int8'" in verdict
    assert "Verified" not in verdict
    assert any("placement='int8'" in step for step in done.report.next_steps())
    forced = deployed([EXAMPLE], tmp_path / "forced", placement="int8", smoke=True)
    assert "Nothing was quantized" not in forced.report.verdict()


def test_weights_quantized_on_request_need_no_data_and_check_what_they_get():
    config = QuantConfig.weight_only("int8", block_size=None)
    quantize(small_net(), EXAMPLE, config, forward_loop=[], target=TARGET)
    with pytest.raises(NonFiniteError):
        quantize(small_net(), EXAMPLE, config, forward_loop=[EXAMPLE * float("nan")], target=TARGET)
