"""llama.cpp as a runtime: honest about whether it is here, and a child like the others."""

import numpy as np
import pytest
import torch

from scalepoint.checkpoints import QuantizedCheckpoint, Source
from scalepoint.errors import VerificationError
from scalepoint.formats.gguf import GGUF
from scalepoint.runtimes import find_runtime
from scalepoint.runtimes.llamacpp.child import DEFAULT, PLACE, File, Llama, library
from scalepoint.runtimes.process import Status, run_task
from scalepoint.runtimes.serving import RuntimeSession
from tests.formats.gguf.checkpoints import make, quantized, simulation, spec_of

LLAMACPP = find_runtime("llamacpp")
needs_llamacpp = pytest.mark.skipif(not LLAMACPP.is_here, reason=f"needs llama.cpp: {LLAMACPP.install}")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    pytest.importorskip("gguf", reason='needs the package gguf: pip install "scalepoint[gguf]"')
    folder = tmp_path_factory.mktemp("llamacpp")
    checkpoint = QuantizedCheckpoint(make("llama", folder / "m"), {})
    GGUF.write(checkpoint, folder / "m.gguf")
    return folder / "m.gguf", simulation(checkpoint, folder / "s")


def test_a_folder_without_the_library_has_no_llamacpp(tmp_path, monkeypatch):
    monkeypatch.setenv(PLACE, str(tmp_path))
    assert library() is None
    assert not LLAMACPP.is_here
    answer = run_task(LLAMACPP, {"task": "run"})
    assert answer.status is Status.UNAVAILABLE
    assert f"npm install --prefix {DEFAULT} @node-llama-cpp/" in answer.message
    with pytest.raises(VerificationError, match="llamacpp is not installed"):
        RuntimeSession(LLAMACPP, tmp_path / "m.gguf")


@needs_llamacpp
def test_rows_of_tokens_give_logits_for_every_token(written):
    path, model = written
    tokens = torch.randint(0, 300, (3, 16))
    served = RuntimeSession(LLAMACPP, path, threads=1)
    (found,) = served({"input_ids": tokens.numpy()})
    (again,) = served({"input_ids": tokens[1:2].numpy()})
    served.close()
    with torch.no_grad():
        wanted = model(tokens).logits
    assert found.shape == (3, 16, 320)
    assert np.array_equal(found[1], again[0])
    assert torch.allclose(torch.from_numpy(found), wanted, atol=0.05 * float(wanted.std()))


@needs_llamacpp
@pytest.mark.parametrize("dtype", [None, "int8", "int4"])
def test_it_generates_what_the_simulation_does(written, dtype, tmp_path):
    path, model = written
    if dtype is not None:
        checkpoint = quantized(Source.open(path.parent / "m"), spec_of(dtype, 32), 32)
        path, model = tmp_path / "m.gguf", simulation(checkpoint, tmp_path / "s")
        GGUF.write(checkpoint, path)
    given = [5, 80, 123, 7]
    found = File(str(path), {"threads": 1, "exact": True}).generate(given, 50)
    wanted = model.generate(
        torch.tensor([given]), max_new_tokens=50, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert found["tokens"] == wanted[0, 4:].tolist()
    assert found["prefill_seconds"] > 0
    assert found["decode_seconds"] > 0


@needs_llamacpp
def test_a_file_that_it_cannot_read_is_told_in_its_words(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"no such thing")
    request = {"task": "run", "path": str(path), "options": {"threads": 1}, "inputs": "", "outputs": ""}
    answer = run_task(LLAMACPP, request)
    assert answer.status is Status.FAILED
    assert "llama.cpp refuses" in answer.message
    assert "invalid magic" in answer.message


@needs_llamacpp
def test_its_own_quantizer_can_be_run_beside_ours(written, tmp_path):
    path, _ = written
    Llama().quantize(str(path), str(tmp_path / "q.gguf"), "Q4_0")
    assert (tmp_path / "q.gguf").stat().st_size < 0.4 * path.stat().st_size
    (_, found), *_ = File(str(tmp_path / "q.gguf"), {"threads": 1}).run({"input_ids": np.array([[1, 2, 3]])})
    assert found.shape == (1, 3, 320)
