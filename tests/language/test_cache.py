"""Keys and values in few bits: simulated, stored if the format can hold their scales, and run in the runtime."""

import pytest
import torch

from scalepoint import deploy_checkpoint
from scalepoint.checkpoints import Source
from scalepoint.checkpoints.text import load_sequences
from scalepoint.errors import CaptureError, UsageError
from scalepoint.formats import registry
from scalepoint.formats.checkpoint import CheckpointFormat
from scalepoint.patterns.fused import FusedAttention
from scalepoint.pipeline.checkpoint_job import prepare_checkpoint_job
from scalepoint.pipeline.checkpoint_stages import build_quantized_graph
from scalepoint.pipeline.kv_cache import count_key_value_heads
from scalepoint.quantize.quantizers import QuantStub
from scalepoint.runtimes import find_runtime
from scalepoint.targets import find_target
from tests.checkpoints.test_skeleton import save_model
from tests.errors import raises

FAST = ("ort-genai int4", "compressed-tensors fp8")
LEAST = {"gguf int8": 30, "gguf int4": 20, "ort-genai int8": 30, "ort-genai int4": 30, "compressed-tensors fp8": 100}


def deployed(folder, path, target, cache, **more):
    defaults = {"data": folder / "calibration.txt", "judge": folder / "judge.txt", "length": 32, "samples": 12}
    return deploy_checkpoint(
        folder, path, target=target, cache=cache, accuracy="fast", progress=False, **defaults, **more
    )


@pytest.mark.parametrize(
    "case", [case if case in FAST else pytest.param(case, marks=pytest.mark.slow) for case in LEAST]
)
def test_a_runtime_quantizes_the_cache_of_keys_and_values_like_the_simulation(wide, tmp_path, case):
    target, cache = case.split()
    runtime = find_runtime(find_target(target).runtime)
    if not runtime.is_installed:
        pytest.skip(f"{runtime.name} is not installed")
    done = deployed(wide, tmp_path / "out", target, cache)
    result = done.report.language
    assert (result.status, result.message) == ("ok", "")
    assert result.agreement_db > LEAST[case]
    assert result.continuation.split()[:5]


def test_scales_are_computed_from_the_largest_keys_and_values(wide, tmp_path, monkeypatch):
    checkpoints = []

    def write(checkpoint, path):
        path.mkdir()
        checkpoints.append(checkpoint.cache)

    form = CheckpointFormat("ort-genai", "", write, lambda *_: None)
    monkeypatch.setitem(registry._CHECKPOINT_FORMATS.builtin, "ort-genai", form)
    deployed(wide, tmp_path / "out", "ort-genai", "int8", verify=False)
    job = prepare_checkpoint_job(
        wide, tmp_path / "again", target="ort-genai", config=None, accuracy="fast", cache="int8"
    )
    model, weights = build_quantized_graph(job, [])
    weights.load(model.parameters())
    texts = load_sequences(wide / "calibration.txt", job.source, length=32, count=12, what="text")
    largest = _largest(model, torch.cat(texts))
    (cache,) = checkpoints
    assert cache.bits == 8
    assert len(cache.scales) == 2
    for expected, (key, value) in zip(largest, cache.scales, strict=True):
        for most, scale in zip(expected, (key, value), strict=True):
            assert scale.shape == (2, 32)
            torch.testing.assert_close(127.5 * scale, most, rtol=1e-3, atol=1e-4)


def _largest(model, tokens):
    """Return the largest keys and values of each block in the float model, (groups, channels)."""
    maxima = []

    def look(module, inputs):
        pair = [tensor.abs().amax((0, 2)).reshape(2, 2, -1)[:, 0] for tensor in inputs[1:3]]
        maxima.append(pair)

    for module in model.modules():
        if isinstance(module, FusedAttention):
            module.register_forward_pre_hook(look)
        if isinstance(module, QuantStub):
            module.enabled = False
        if hasattr(module, "weight_quant"):
            module.weight_quant.enabled = False
    with torch.no_grad():
        model(input_ids=tokens)
    return maxima


def test_a_target_without_a_quantized_cache_is_refused_and_the_error_lists_those_with_one(wide, tmp_path):
    with pytest.raises(UsageError, match="compressed-tensors, gguf, ort-genai"):
        deployed(wide, tmp_path / "out", "gptq", "int8")
    with pytest.raises(UsageError, match="int8, int4"):
        deployed(wide, tmp_path / "out", "gguf", "fp8")


def test_a_config_without_the_number_of_heads_is_refused(tmp_path):
    with raises(CaptureError, "config.json", "num_attention_heads or n_head"):
        count_key_value_heads(Source(tmp_path, {"model_type": "other"}, {}))


@pytest.mark.slow
def test_one_block_in_another_precision_is_refused(wide, tmp_path):
    config = {"overrides": [{"name": "model.layers.0.self_attn.attention", "input": "float"}]}
    job = prepare_checkpoint_job(
        wide, tmp_path / "out", target="ort-genai", config=config, accuracy="fast", cache="int8"
    )
    with raises(UsageError, "1 of 2 blocks", "precision"):
        build_quantized_graph(job, [])


@pytest.mark.slow
def test_heads_that_blocks_do_not_divide_are_refused(llama, tmp_path):
    folder, _ = llama  # of 16 channels
    with raises(UsageError, "16 channels", "block size 32"):
        deployed(folder, tmp_path / "out", "gguf", "int8")


def test_attention_whose_keys_are_not_in_the_graph_is_refused(tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime_genai")
    form = CheckpointFormat("ort-genai", "", lambda _, path: path.mkdir(), lambda *_: None)
    monkeypatch.setitem(registry._CHECKPOINT_FORMATS.builtin, "ort-genai", form)
    save_model("gemma2", tmp_path / "m")
    with pytest.raises(CaptureError, match="2 of 2 blocks"):
        deploy_checkpoint(
            tmp_path / "m", tmp_path / "out", target="ort-genai", cache="int8", accuracy="fast",
            data=[torch.randint(0, 40, (2, 16))], config={"weight": {"n_bits": 4, "block_size": 16}}, progress=False,
        )  # fmt: skip
