"""The whole pipeline into every format, and the results in each runtime.

These tests are slow. The fast ones run in llama.cpp (test_gguf) and in ONNX Runtime GenAI (test_cache).
"""

import pytest

from scalepoint import deploy_checkpoint
from scalepoint.errors import TargetError
from scalepoint.pipeline.checkpoint_job import prepare_checkpoint_job
from scalepoint.runtimes import find_runtime
from scalepoint.targets import find_target

SLOW = pytest.mark.slow
OPTIONS = {"length": 32, "samples": 24, "progress": False}
CASES = {
    "compressed-tensors": {"weight": {"n_bits": 4, "block_size": 32}},
    "ort-genai": {"weight": {"n_bits": 4, "block_size": 32}},
    "gguf": {"weight": {"n_bits": 4, "block_size": 32}},
    "gguf asymmetric": {"weight": {"n_bits": 4, "block_size": 32, "symmetric": False}},
}
LEAST = {"transformers": 40, "ort-genai": 25, "llamacpp": 20}  # kernels of the last two round activations to int8


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case == "compressed-tensors" else SLOW) for case in CASES]
)
def test_the_runtime_agrees_with_the_simulation(llama, tmp_path, case):
    folder, _ = llama
    target = case.partition(" ")[0]
    runtime = find_runtime(find_target(target).runtime)
    if not runtime.is_installed:
        pytest.skip(f"{runtime.name} is not installed")
    texts = {"data": folder / "calibration.txt", "judge": folder / "judge.txt"}
    done = deploy_checkpoint(folder, tmp_path / "out", target=target, config=CASES[case], **texts, **OPTIONS)
    result = done.report.language
    assert result.size < 0.6 * result.float_size
    assert (result.status, result.message) == ("ok", "")
    assert result.agreement_db > LEAST[runtime.name]
    assert done.score == pytest.approx(done.report.accuracy[0].simulated_value, rel=0.03)
    assert result.continuation.split()[:5]
    assert "generated" in str(done.report)
    assert result.float_decode > 0
    assert f"float model: {result.float_prefill:.0f} and {result.float_decode:.0f} in transformers" in " ".join(
        done.report.summary()
    )


@pytest.mark.slow
@pytest.mark.parametrize("target", ["gptq", "awq"])
def test_a_file_that_no_installed_runtime_reads_is_written_with_a_note(llama, tmp_path, target):
    folder, _ = llama
    done = deploy_checkpoint(
        folder, tmp_path / "out", target=target, data=folder / "calibration.txt", accuracy="fast",
        config={"weight": {"n_bits": 4, "block_size": 32, "symmetric": target == "gptq"}}, **OPTIONS,
    )  # fmt: skip
    assert done.report.language.status != ""
    assert (done.path / "config.json").is_file()


@pytest.mark.parametrize("target", ["compressed-tensors", "gptq", "awq"])
def test_blocks_are_by_default_as_large_as_the_layers_allow(llama, tmp_path, target):
    folder, _ = llama  # of 64 inputs: the target's blocks of 128 do not divide them
    done = prepare_checkpoint_job(folder, tmp_path / "out", target=target, config=None, accuracy="fast")
    assert done.config.spec_for("weight", (), ()).granularity.block_size == 64
    assert find_target(target).weight.granularity.block_size == 128
    with pytest.raises(TargetError, match="64, 32, 16"):
        prepare_checkpoint_job(
            folder,
            tmp_path / "out",
            target=target,
            config={"weight": find_target(target).weight},
            accuracy="fast",
        )
