"""Folders in ONNX Runtime GenAI: logits, what runs, and text that is generated."""

import runpy

import numpy as np
import pytest
import torch

from scalepoint.formats.genai import ORT_GENAI as FORMAT
from scalepoint.runtimes import Status, find_runtime
from scalepoint.runtimes.process import exchange_files, run_task
from tests.formats.genai.tiny import FAMILIES, decibels, int_spec, make, quantized, simulate

RUNTIME = find_runtime("ort-genai")
FILE = runpy.run_path(str(RUNTIME.child))["File"]
WORDS = torch.randint(3, 96, (1, 10), generator=torch.Generator().manual_seed(1))
LONG = "phi3, long angles"  # whose context is shorter than the text


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("genai")
    make("gpt2", folder / "float")
    checkpoint = quantized(folder / "float", int_spec(4))
    FORMAT.write(checkpoint, folder / "out")
    return folder / "out", simulate(checkpoint, folder / "simulated")


def test_the_exact_variant_gives_the_logits_of_the_simulation(written):
    folder, model = written
    with torch.no_grad():
        wanted = model(WORDS).logits.numpy()
    variants = {each.name: each.options for each in RUNTIME.variants}
    [(name, exact)] = FILE(str(folder), variants["exact"]).run({"input_ids": WORDS.numpy()})
    assert name == "logits"
    assert decibels(wanted, exact) > 110
    [(_, rounded)] = FILE(str(folder), {}).run({"input_ids": WORDS.numpy()})
    assert 25 < decibels(wanted, rounded) < 60
    [(_, plain)] = FILE(str(folder), variants["unoptimized"]).run({"input_ids": WORDS.numpy()})
    assert decibels(rounded, plain) > 60


def test_it_tells_which_products_are_low(written):
    executed = FILE(str(written[0]), {}).executed()
    low = [each["op"] for each in executed if each["low"]]
    assert (low.count("MatMulNBits"), low.count("GatherBlockQuantized")) == (9, 1)
    assert not [each for each in executed if each["low"] is False]


@pytest.mark.skipif(not RUNTIME.is_here, reason="onnxruntime-genai is not installed: pip install scalepoint[genai]")
def test_it_runs_in_a_child_process(written):
    with exchange_files({"input_ids": WORDS.numpy()}) as files:
        answer = run_task(
            RUNTIME, {"task": "run", "path": str(written[0]), "options": {}, **files.files, "executed": True}
        )
        assert answer.status is Status.OK
        assert files.outputs(answer)["logits"].shape == (1, 10, 96)
    wanted = {"tokens": WORDS[0].tolist(), "count": 8, "repeats": 2}
    answer = run_task(RUNTIME, {"task": "generate", "paths": [str(written[0])], "options": {"exact": True}, **wanted})
    assert answer.status is Status.OK
    with torch.no_grad():
        made = written[1].generate(WORDS, max_new_tokens=8, min_new_tokens=8, do_sample=False)[0, 10:].tolist()
    assert answer.data["files"][0]["tokens"] == made


@pytest.mark.skipif(not RUNTIME.is_here, reason="onnxruntime-genai is not installed: pip install scalepoint[genai]")
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != LONG])
def test_it_generates_what_the_simulation_does(tmp_path, name):
    make(name, tmp_path / "float")
    checkpoint = quantized(tmp_path / "float", int_spec(4))
    FORMAT.write(checkpoint, tmp_path / "out")
    model = simulate(checkpoint, tmp_path / "simulated")
    with torch.no_grad():
        wanted = model.generate(WORDS, max_new_tokens=50, min_new_tokens=50, do_sample=False)[0, 10:].tolist()
    found = FILE(str(tmp_path / "out"), {"exact": True}).generate(WORDS[0].tolist(), 50)
    assert found["tokens"] == wanted
    assert found["prefill_seconds"] > 0
    assert found["decode_seconds"] > 0
    rounded = FILE(str(tmp_path / "out"), {}).generate(WORDS[0].tolist(), 50)["tokens"]
    assert len(rounded) == 50
    assert np.max(rounded) < 96
    assert sorted(each.name for each in tmp_path.iterdir()) == ["float", "out", "simulated"]


@pytest.mark.skipif(not RUNTIME.is_here, reason="onnxruntime-genai is not installed: pip install scalepoint[genai]")
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_texts_of_several_lengths_go_on_as_each_alone_does(tmp_path, name):
    import onnxruntime_genai

    make(name, tmp_path / "float")
    FORMAT.write(quantized(tmp_path / "float", int_spec(4)), tmp_path / "out")
    model = onnxruntime_genai.Model(str(tmp_path / "out"))

    def generate(words: np.ndarray) -> list[list[int]]:
        params = onnxruntime_genai.GeneratorParams(model)
        params.set_search_options(max_length=18, min_length=18, batch_size=len(words))
        generator = onnxruntime_genai.Generator(model, params)
        generator.append_tokens(words.astype(np.int32))
        while not generator.is_done():
            generator.generate_next_token()
        return [[int(token) for token in generator.get_sequence(row)] for row in range(len(words))]

    both = WORDS.numpy().repeat(2, 0)
    both[1, 6:] = 2  # filled up at its end
    long, short = generate(both)
    assert long == generate(both[:1])[0]
    assert short[10:] == generate(both[1:, :6])[0][6:14]
