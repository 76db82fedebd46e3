"""The runtime llama.cpp: its detection and its child program."""

import numpy as np
import pytest
import torch

from scalepoint.checkpoints import QuantizedCheckpoint, Source
from scalepoint.errors import VerificationError
from scalepoint.formats.gguf import GGUF
from scalepoint.runtimes import find_runtime
from scalepoint.runtimes.llamacpp.child import DEFAULT_FOLDER, FOLDER_VARIABLE, File, Llama, find_library
from scalepoint.runtimes.process import Status, run_task
from scalepoint.runtimes.serving import RuntimeSession
from tests.formats.gguf.checkpoints import block_spec, quantize_checkpoint, save_checkpoint, simulate

LLAMACPP = find_runtime("llamacpp")
needs_llamacpp = pytest.mark.skipif(not LLAMACPP.is_installed, reason=f"needs llama.cpp: {LLAMACPP.install}")


@pytest.fixture(scope="module")
def model_files(tmp_path_factory):
    pytest.importorskip("gguf", reason='needs the package gguf: pip install "scalepoint[gguf]"')
    folder = tmp_path_factory.mktemp("llamacpp")
    checkpoint = QuantizedCheckpoint(save_checkpoint("llama", folder / "m"), {})
    GGUF.write(checkpoint, folder / "m.gguf")
    return folder / "m.gguf", simulate(checkpoint, folder / "s")


def test_a_folder_without_the_library_counts_as_not_installed(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    assert find_library() is None
    assert not LLAMACPP.is_installed
    answer = run_task(LLAMACPP, {"task": "run"})
    assert answer.status is Status.UNAVAILABLE
    assert f"npm install --prefix {DEFAULT_FOLDER} @node-llama-cpp/" in answer.message
    with pytest.raises(VerificationError, match="llamacpp is not installed"):
        RuntimeSession(LLAMACPP, tmp_path / "m.gguf")


@needs_llamacpp
def test_rows_of_tokens_give_logits_for_every_token(model_files):
    path, model = model_files
    tokens = torch.randint(0, 300, (3, 16))
    session = RuntimeSession(LLAMACPP, path, threads=1)
    (logits,) = session({"input_ids": tokens.numpy()})
    (row_logits,) = session({"input_ids": tokens[1:2].numpy()})
    session.close()
    with torch.no_grad():
        expected = model(tokens).logits
    assert logits.shape == (3, 16, 320)
    assert np.array_equal(logits[1], row_logits[0])
    assert torch.allclose(torch.from_numpy(logits), expected, atol=0.05 * float(expected.std()))


@needs_llamacpp
@pytest.mark.parametrize("dtype", [None, "int8", "int4"])
def test_the_generated_text_is_that_of_the_simulation(model_files, dtype, tmp_path):
    path, model = model_files
    if dtype is not None:
        checkpoint = quantize_checkpoint(Source.open(path.parent / "m"), block_spec(dtype, 32), 32)
        path, model = tmp_path / "m.gguf", simulate(checkpoint, tmp_path / "s")
        GGUF.write(checkpoint, path)
    prompt = [5, 80, 123, 7]
    result = File(str(path), {"threads": 1, "exact": True}).generate(prompt, 50)
    expected = model.generate(
        torch.tensor([prompt]), max_new_tokens=50, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert result["tokens"] == expected[0, 4:].tolist()
    assert result["prefill_seconds"] > 0
    assert result["decode_seconds"] > 0


@needs_llamacpp
def test_an_invalid_file_is_refused_with_the_error_of_llamacpp(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"no such thing")
    request = {"task": "run", "path": str(path), "options": {"threads": 1}, "inputs": "", "outputs": ""}
    answer = run_task(LLAMACPP, request)
    assert answer.status is Status.FAILED
    assert "llama.cpp cannot load" in answer.message
    assert "invalid magic" in answer.message


@needs_llamacpp
def test_the_quantizer_of_llamacpp_can_be_run(model_files, tmp_path):
    path, _ = model_files
    Llama().quantize(str(path), str(tmp_path / "q.gguf"), "Q4_0")
    assert (tmp_path / "q.gguf").stat().st_size < 0.4 * path.stat().st_size
    (_, logits), *_ = File(str(tmp_path / "q.gguf"), {"threads": 1}).run({"input_ids": np.array([[1, 2, 3]])})
    assert logits.shape == (1, 3, 320)
