"""Folders of packed weights in transformers: logits and generated text are those of the simulation."""

import os
import runpy

import numpy as np
import pytest
import torch

from scalepoint.formats import find_checkpoint_format
from scalepoint.runtimes import Status, find_runtime
from scalepoint.runtimes.process import exchange_files, run_task
from scalepoint.spec import ExtendedQuantizationSpec, QuantizationSpec
from tests.formats.checkpoint_folder.tiny import FAMILIES, compute_logits, load_reference, quantize, save_model

RUNTIME = find_runtime("transformers")
BLOCKS = {"type": "per_block", "block_size": 32, "axis": 1}
UINT4 = QuantizationSpec(dtype="uint4", qscheme="asymmetric", granularity=BLOCKS)
SPECS = {
    "gptq": QuantizationSpec(dtype="int4", granularity=BLOCKS),
    "gptq, 3 bits": ExtendedQuantizationSpec(dtype="int3", granularity=BLOCKS),
    "gptq, 8 bits": QuantizationSpec(dtype="int8", granularity={"type": "per_channel", "axis": 0}),
    "gptq, zero points": UINT4,
    "awq": UINT4,
    "compressed-tensors": QuantizationSpec(dtype="int4", granularity=BLOCKS),
}
TOKENS = torch.arange(3, 19)[None]


@pytest.fixture(scope="module")
def file_class():
    environment, threads = dict(os.environ), torch.get_num_threads()
    yield runpy.run_path(str(RUNTIME.child))["File"]
    os.environ.clear()
    os.environ |= environment
    torch.set_num_threads(threads)


def write(name, family, folder):
    checkpoint_format = find_checkpoint_format(name.partition(",")[0])
    if checkpoint_format.name == "compressed-tensors":
        pytest.importorskip("compressed_tensors", reason="pip install scalepoint[transformers]")
    source = save_model(family, folder / "in", torch.float32)
    checkpoint = quantize(source, SPECS[name], scale_dtype=torch.float16)
    checkpoint_format.write(checkpoint, folder / "out")
    return folder / "out", load_reference(checkpoint, folder / "reference")


def check(file_class, folder, model):
    file = file_class(str(folder), {"threads": 1})
    [(name, logits)] = file.run({"input_ids": TOKENS.numpy()})
    assert (name, logits.dtype) == ("logits", np.float32)
    assert np.array_equal(logits, compute_logits(model).numpy())
    result = file.generate(TOKENS[0].tolist(), 20)
    assert result["tokens"] == generate_greedily(model, TOKENS, 20)
    assert min(result["prefill_seconds"], result["decode_seconds"]) > 0
    assert file.executed() == []


def generate_greedily(model, tokens, count):
    """Generate with the simulation, without a KV cache."""
    for _ in range(count):
        with torch.no_grad():
            tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], 1)
    return tokens[0, -count:].tolist()


@pytest.mark.parametrize("name", SPECS)
def test_logits_and_text_are_those_of_the_simulation(tmp_path, file_class, name):
    check(file_class, *write(name, "llama", tmp_path))


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"llama"}))
def test_every_family_runs_from_a_gptq_folder(tmp_path, file_class, family):
    check(file_class, *write("gptq", family, tmp_path))


def test_layers_with_their_own_precision_are_unpacked_with_it(tmp_path, file_class):
    source = save_model("mistral", tmp_path / "in", torch.float32)
    specs = {"k_proj": SPECS["gptq, 3 bits"], "v_proj": SPECS["gptq, 8 bits"], "o_proj": None}
    checkpoint = quantize(
        source,
        SPECS["gptq"],
        scale_dtype=torch.float16,
        choose=lambda layer: specs.get(layer.rpartition(".")[2], SPECS["gptq"]),
    )
    find_checkpoint_format("gptq").write(checkpoint, tmp_path / "out")
    check(file_class, tmp_path / "out", load_reference(checkpoint, tmp_path / "reference"))


@pytest.mark.slow
def test_a_folder_runs_in_a_child_process(tmp_path):
    folder, model = write("awq", "qwen2", tmp_path)
    with exchange_files({"input_ids": TOKENS.numpy()}) as files:
        request = {"task": "run", "path": str(folder), "options": {"threads": 1}, **files.paths, "executed": True}
        answer = run_task(RUNTIME, request)
        assert (answer.status, answer.message) == (Status.OK, "")
        assert np.array_equal(files.outputs(answer)["logits"], compute_logits(model).numpy())


def test_code_of_a_folder_is_never_run(tmp_path, file_class):
    folder, _ = write("gptq", "qwen2", tmp_path)
    config = (folder / "config.json").read_text()
    remote = '{"auto_map": {"AutoModelForCausalLM": "mine.Model", "AutoConfig": "mine.Config"},'
    (folder / "config.json").write_text(config.replace("{", remote, 1).replace('"qwen2"', '"mine"'))
    (folder / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ValueError, match="trust_remote_code"):
        file_class(str(folder), {})
    assert not (tmp_path / "ran").exists()
