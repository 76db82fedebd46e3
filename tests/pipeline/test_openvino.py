"""A metric is judged in the runtime of its target, whichever that is."""

import pytest
import torch
from torch import nn

import scalepoint
from scalepoint.runtimes import find_runtime

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.skipif(not find_runtime("openvino").is_installed, reason="openvino is not installed"),
]


def test_evaluate_runs_the_file_in_openvino(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.Flatten(), nn.Linear(8 * 144, 4))
    x = torch.randn(4, 3, 16, 16)
    runs = []

    def evaluate(run):
        runtime = run.session.runtime.name if hasattr(run, "session") else "torch"
        runs.append((runtime, run(x).detach()))
        return 1.0

    done = scalepoint.deploy(
        model.eval(), x, [x], target="openvino", output=tmp_path, evaluate=evaluate, smoke=True, progress=False
    )
    assert [runtime for runtime, _ in runs] == ["torch", "openvino"]
    assert done.report.accuracy[0].value == 1.0
    noise = (runs[1][1] - done.model(x)).square().sum() / done.model(x).square().sum()
    assert noise < 1e-2
