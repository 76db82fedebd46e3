"""Folders in ONNX Runtime GenAI: logits, executed operations, and generated text."""

import runpy

import numpy as np
import pytest
import torch

from scalepoint.formats.genai import ORT_GENAI as FORMAT
from scalepoint.runtimes import Status, find_runtime
from scalepoint.runtimes.process import exchange_files, run_task
from tests.formats.genai.tiny import FAMILIES, int_spec, quantize_folder, save_model, simulate, sqnr

RUNTIME = find_runtime("ort-genai")
FILE = runpy.run_path(str(RUNTIME.child))["File"]
TOKENS = torch.randint(3, 96, (1, 10), generator=torch.Generator().manual_seed(1))
LONG = "phi3, long angles"  # its context is shorter than the text


@pytest.fixture(scope="module")
def model_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("genai")
    save_model("gpt2", folder / "float")
    checkpoint = quantize_folder(folder / "float", int_spec(4))
    FORMAT.write(checkpoint, folder / "out")
    return folder / "out", simulate(checkpoint, folder / "simulated")


def test_the_exact_variant_has_the_logits_of_the_simulation(model_files):
    folder, model = model_files
    with torch.no_grad():
        expected = model(TOKENS).logits.numpy()
    variants = {variant.name: variant.options for variant in RUNTIME.variants}
    [(name, exact)] = FILE(str(folder), variants["exact"]).run({"input_ids": TOKENS.numpy()})
    assert name == "logits"
    assert sqnr(expected, exact) > 110
    [(_, rounded)] = FILE(str(folder), {}).run({"input_ids": TOKENS.numpy()})
    assert 25 < sqnr(expected, rounded) < 60
    [(_, plain)] = FILE(str(folder), variants["unoptimized"]).run({"input_ids": TOKENS.numpy()})
    assert sqnr(rounded, plain) > 60


def test_products_in_low_precision_are_listed(model_files):
    executed = FILE(str(model_files[0]), {}).executed()
    low = [node["op"] for node in executed if node["low"]]
    assert (low.count("MatMulNBits"), low.count("GatherBlockQuantized")) == (9, 1)
    assert not [node for node in executed if node["low"] is False]


@pytest.mark.skipif(
    not RUNTIME.is_installed, reason="onnxruntime-genai is not installed: pip install scalepoint[genai]"
)
def test_a_child_process_computes_logits_and_generates(model_files):
    with exchange_files({"input_ids": TOKENS.numpy()}) as files:
        answer = run_task(
            RUNTIME, {"task": "run", "path": str(model_files[0]), "options": {}, **files.paths, "executed": True}
        )
        assert answer.status is Status.OK
        assert files.outputs(answer)["logits"].shape == (1, 10, 96)
    request = {"tokens": TOKENS[0].tolist(), "count": 8, "repeats": 2}
    answer = run_task(
        RUNTIME, {"task": "generate", "paths": [str(model_files[0])], "options": {"exact": True}, **request}
    )
    assert answer.status is Status.OK
    with torch.no_grad():
        tokens = model_files[1].generate(TOKENS, max_new_tokens=8, min_new_tokens=8, do_sample=False)[0, 10:].tolist()
    assert answer.data["files"][0]["tokens"] == tokens


@pytest.mark.skipif(
    not RUNTIME.is_installed, reason="onnxruntime-genai is not installed: pip install scalepoint[genai]"
)
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != LONG])
def test_the_generated_text_is_that_of_the_simulation(tmp_path, name):
    save_model(name, tmp_path / "float")
    checkpoint = quantize_folder(tmp_path / "float", int_spec(4))
    FORMAT.write(checkpoint, tmp_path / "out")
    model = simulate(checkpoint, tmp_path / "simulated")
    with torch.no_grad():
        expected = model.generate(TOKENS, max_new_tokens=50, min_new_tokens=50, do_sample=False)[0, 10:].tolist()
    result = FILE(str(tmp_path / "out"), {"exact": True}).generate(TOKENS[0].tolist(), 50)
    assert result["tokens"] == expected
    assert result["prefill_seconds"] > 0
    assert result["decode_seconds"] > 0
    rounded = FILE(str(tmp_path / "out"), {}).generate(TOKENS[0].tolist(), 50)["tokens"]
    assert len(rounded) == 50
    assert np.max(rounded) < 96
    assert sorted(path.name for path in tmp_path.iterdir()) == ["float", "out", "simulated"]


@pytest.mark.skipif(
    not RUNTIME.is_installed, reason="onnxruntime-genai is not installed: pip install scalepoint[genai]"
)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_padded_batch_generates_the_same_as_each_text_by_itself(tmp_path, name):
    import onnxruntime_genai

    save_model(name, tmp_path / "float")
    FORMAT.write(quantize_folder(tmp_path / "float", int_spec(4)), tmp_path / "out")
    model = onnxruntime_genai.Model(str(tmp_path / "out"))

    def generate(prompts: np.ndarray) -> list[list[int]]:
        params = onnxruntime_genai.GeneratorParams(model)
        params.set_search_options(max_length=18, min_length=18, batch_size=len(prompts))
        generator = onnxruntime_genai.Generator(model, params)
        generator.append_tokens(prompts.astype(np.int32))
        while not generator.is_done():
            generator.generate_next_token()
        return [[int(token) for token in generator.get_sequence(row)] for row in range(len(prompts))]

    both = TOKENS.numpy().repeat(2, 0)
    both[1, 6:] = 2  # padding at the end
    long, short = generate(both)
    assert long == generate(both[:1])[0]
    assert short[10:] == generate(both[1:, :6])[0][6:14]
