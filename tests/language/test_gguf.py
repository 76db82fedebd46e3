"""A checkpoint through tuning into a GGUF file, judged in llama.cpp."""

import pytest
import torch

from scalepoint import deploy_checkpoint, perplexity
from scalepoint.checkpoints import Source
from scalepoint.language.text import sequences
from scalepoint.quantize import QuantConfig
from scalepoint.runtimes import find_runtime
from tests.formats.gguf.checkpoints import WORDS, byte_level
from tests.language.conftest import text, write_llama

gguf = pytest.importorskip("gguf", reason='needs the package gguf: pip install "scalepoint[gguf]"')
LLAMACPP = find_runtime("llamacpp")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama that learned a little; its rows are whole super-blocks."""
    made = tmp_path_factory.mktemp("gguf")
    tokens = byte_level(made).encode(text(200)).ids
    write_llama(made, tokens, words=WORDS, hidden=256, inner=256, steps=40)
    return made


def deployed(folder, path, weight):
    config = QuantConfig(weight=weight, activation="float")
    asked = {"data": folder / "calibration.txt", "judge": folder / "judge.txt", "length": 32, "samples": 16}
    done = deploy_checkpoint(folder, path, target="gguf", config=config, verify=False, progress=False, **asked)
    reader = gguf.GGUFReader(next(path.glob("*.gguf")) if path.is_dir() else path)
    return done, {each.name: each.tensor_type.name for each in reader.tensors}


@pytest.mark.parametrize(
    ("weight", "kind"),
    [
        ({"n_bits": 4, "block_size": 32}, "Q4_0"),
        pytest.param({"n_bits": 3, "block_size": 32}, "Q3_K", marks=pytest.mark.slow),
        pytest.param({"n_bits": 4, "block_size": 32, "symmetric": False}, "Q4_1", marks=pytest.mark.slow),
        pytest.param({"n_bits": 2, "block_size": 16}, "Q2_K", marks=pytest.mark.slow),
    ],
)
def test_tuned_codes_take_the_smallest_blocks(folder, tmp_path, weight, kind):
    done, types = deployed(folder, tmp_path / "m.gguf", weight)
    assert {types[f"blk.{block}.ffn_up.weight"] for block in (0, 1)} == {kind}
    assert done.score < 2 * done.float_score
    if LLAMACPP.is_here:
        from scalepoint.runtimes.llamacpp.child import File

        file = File(str(tmp_path / "m.gguf"), {"threads": 1, "exact": True})
        tokens = sequences(folder / "judge.txt", Source.open(folder), length=32, count=16, what="text")
        found = perplexity(lambda own: torch.from_numpy(file.run({"input_ids": own.numpy()})[0][1]), tokens)
        assert found == pytest.approx(done.score, rel=1e-4)


def test_fast_rounds_no_worse_than_llama_cpp_does(folder, tmp_path):
    path, names = tmp_path / "m.gguf", ("ffn_up", "ffn_down", "attn_output")
    deploy_checkpoint(folder, path, target="gguf", accuracy="fast", verify=False, progress=False)
    weights = Source.open(folder)
    stored = {each.name: each for each in gguf.GGUFReader(path).tensors}
    for name, place in zip(names, ("mlp.up_proj", "mlp.down_proj", "self_attn.o_proj"), strict=True):
        tensor = stored[f"blk.0.{name}.weight"]
        weight = weights.tensor(f"model.layers.0.{place}.weight").to(torch.float32)
        blocks = gguf.quants.Q4_0.quantize_blocks(weight.numpy().reshape(-1, 32).copy())
        theirs = torch.from_numpy(gguf.quants.Q4_0.dequantize_blocks(blocks)).view_as(weight)
        ours = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type)).view_as(weight)
        assert tensor.tensor_type.name == "Q4_0"
        assert (ours - weight).square().sum() <= (theirs - weight).square().sum()
