"""The child process of every runtime, started as users start it: a new Python without preloaded modules.

Most tests fork the child from a process that has already loaded the runtime (`tests/warm`). These tests do not.
"""

import sys

import pytest
import torch
from torch import nn

from scalepoint import export, verify
from scalepoint.quantize.quantize_model import quantize
from scalepoint.runtimes import find_runtime, process
from scalepoint.targets import find_target
from scalepoint.verification import Status
from tests.pace import fast

SUFFIXES = {"onnxruntime": "onnx", "openvino": "onnx", "litert": "tflite", "executorch": "pte", "coreml": "mlpackage"}


@pytest.mark.parametrize("target", fast(SUFFIXES, "onnxruntime", "openvino", "litert"))
def test_a_file_runs_in_a_new_python_process(target, tmp_path):
    command = process.child_command(find_runtime(find_target(target).runtime))
    assert command[:2] == [sys.executable, "-I"]
    assert not any("warm" in part for part in command)
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    quantized = quantize(model, (x,), target=target, forward_loop=[x], progress=False)
    path = export(quantized, tmp_path / f"model.{SUFFIXES[target]}", (x,))
    result = verify(path, quantized, (x,), layers=False)
    assert result.status == Status.OK
    assert result.sqnr > result.bound
