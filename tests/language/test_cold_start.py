"""Every runtime of language models, its child process started exactly as users start it (see tests/warm)."""

import sys

import pytest

from scalepoint import deploy_checkpoint
from scalepoint.runtimes import find_runtime, process
from scalepoint.targets import find_target
from tests.pace import fast


@pytest.mark.parametrize("target", fast(["gguf", "ort-genai", "compressed-tensors"], "gguf"))
def test_a_checkpoint_runs_in_a_child_that_was_started_as_users_start_it(llama, target, tmp_path):
    runtime = find_runtime(find_target(target).runtime)
    if not runtime.is_installed:
        pytest.skip(f"needs {runtime.name}: {runtime.install}")
    command = process.child_command(runtime)
    assert command[:2] == [sys.executable, "-I"]
    assert not any("warm" in part for part in command)
    folder, _ = llama
    output = tmp_path / ("model.gguf" if target == "gguf" else "out")
    text = {"data": folder / "calibration.txt", "judge": folder / "judge.txt", "length": 32, "samples": 4}
    done = deploy_checkpoint(folder, output, target=target, accuracy="fast", progress=False, **text)
    result = done.report.language
    assert (result.runtime, result.status) == (runtime.name, "ok")
