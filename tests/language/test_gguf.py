"""A checkpoint that is tuned, written as a GGUF file and measured in llama.cpp."""

import shutil

import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file

from scalepoint import deploy_checkpoint, perplexity
from scalepoint.checkpoints import Source
from scalepoint.checkpoints.text import load_sequences
from scalepoint.quantize import QuantConfig
from scalepoint.runtimes import find_runtime
from tests.formats.gguf.checkpoints import VOCABULARY_SIZE, save_byte_level_tokenizer
from tests.language.conftest import text, write_llama

gguf = pytest.importorskip("gguf", reason='needs the package gguf: pip install "scalepoint[gguf]"')
LLAMACPP = find_runtime("llamacpp")


def write_model(folder, **sizes):
    tokens = save_byte_level_tokenizer(folder).encode(text(200)).ids
    write_llama(folder, tokens, words=VOCABULARY_SIZE, **sizes)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama that learned a little; its rows are whole super-blocks."""
    return write_model(tmp_path_factory.mktemp("gguf"), hidden=256, inner=256, steps=40)


def deployed(folder, path, weight):
    config = QuantConfig(weight=weight, activation="float")
    defaults = {"data": folder / "calibration.txt", "judge": folder / "judge.txt", "length": 32, "samples": 16}
    done = deploy_checkpoint(folder, path, target="gguf", config=config, verify=False, progress=False, **defaults)
    reader = gguf.GGUFReader(next(path.glob("*.gguf")) if path.is_dir() else path)
    return done, {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}


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
    if LLAMACPP.is_installed:
        from scalepoint.runtimes.llamacpp.child import File

        file = File(str(tmp_path / "m.gguf"), {"threads": 1, "exact": True})
        tokens = load_sequences(folder / "judge.txt", Source.open(folder), length=32, count=16, what="text")
        score = perplexity(lambda batch: torch.from_numpy(file.run({"input_ids": batch.numpy()})[0][1]), tokens)
        assert score == pytest.approx(done.score, rel=1e-4)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory):
    """A Llama whose rows of 64 and 128 columns are shorter than a super-block."""
    return write_model(tmp_path_factory.mktemp("narrow"), hidden=64, inner=128, steps=0)


def fast(folder, path, target, weight):
    return deploy_checkpoint(
        folder, path, target=target, config=QuantConfig(weight=weight, activation="float"), accuracy="fast",
        verify=False, progress=False,
    )  # fmt: skip


@pytest.mark.skipif(not LLAMACPP.is_installed, reason=f"needs llama.cpp: {LLAMACPP.install}")
@pytest.mark.parametrize("name", ["phi3", pytest.param("My-Phi-3-mini", marks=pytest.mark.slow)])
def test_a_folder_named_like_a_family_makes_a_file_that_llamacpp_loads(narrow, tmp_path, name):
    """By such a name llama.cpp looks for tokens that this tokenizer does not have."""
    shutil.copytree(narrow, tmp_path / name)
    tokens = [torch.arange(1, 17)[None]]
    done = deploy_checkpoint(
        tmp_path / name, tmp_path / "out", target="gguf", accuracy="fast", judge=tokens, progress=False
    )
    assert done.report.language.status == "ok"
    assert done.path.name == f"{name}.gguf"


@pytest.mark.parametrize(("target", "name"), [("gguf", "*.gguf"), ("compressed-tensors", "*"), ("ort-genai", "*")])
def test_the_bits_of_a_weight_are_those_of_the_file(narrow, tmp_path, target, name):
    done = fast(narrow, tmp_path / "out", target, {"n_bits": 4, "block_size": 32})
    weights = sum(torch.Size(tensor.shape).numel() for tensor in Source.open(narrow).tensors.values())
    if target == "gguf":
        (file,) = (tmp_path / "out").glob(name)
        stored = sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(file).tensors)
    elif target == "ort-genai":
        model = onnx.load(tmp_path / "out" / "model.onnx")
        stored = sum(onnx.numpy_helper.to_array(initializer).nbytes for initializer in model.graph.initializer)
    else:
        stored = sum(tensor.nbytes for tensor in load_file(tmp_path / "out" / "model.safetensors").values())
    assert done.report.language.bits == pytest.approx(8 * stored / weights, rel=1e-3)
    assert not done.report.warnings


@pytest.mark.parametrize(
    ("target", "weight", "says"),
    [
        ("gguf", {"n_bits": 3, "block_size": 32}, "int3 codes of 14 layers are stored as Q4_0"),
        ("gguf", {"n_bits": 2, "block_size": 32}, "multiple of 256"),
        ("ort-genai", {"n_bits": 3, "block_size": 32}, "4-bit codes"),
    ],
)
def test_codes_that_are_stored_in_more_bits_are_reported(narrow, tmp_path, target, weight, says):
    done = fast(narrow, tmp_path / "out", target, weight)
    assert any(says in warning for warning in done.report.warnings)
    assert says in "\n".join(done.report.summary())
    assert done.report.language.bits > 4.5


def test_codes_that_fill_super_blocks_are_not_reported(folder, tmp_path):
    done = fast(folder, tmp_path / "m.gguf", "gguf", {"n_bits": 3, "block_size": 32})
    assert done.report.warnings == ()


PATHS = {
    "token_embd": "model.embed_tokens",
    "blk.0.ffn_up": "model.layers.0.mlp.up_proj",
    "blk.0.ffn_down": "model.layers.0.mlp.down_proj",
    "blk.0.attn_output": "model.layers.0.self_attn.o_proj",
}


def rounded_by_llama_cpp(kind, weight):
    blocks = kind.quantize_blocks(weight.numpy().reshape(-1, 32).copy())
    return torch.from_numpy(kind.dequantize_blocks(blocks)).view_as(weight)


def rounded_by_us(folder, path):
    """The tensors of a "fast" file, by name: the name of the type and the values."""
    deploy_checkpoint(folder, path, target="gguf", accuracy="fast", verify=False, progress=False)
    return {
        tensor.name: (tensor.tensor_type.name, torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type)))
        for tensor in gguf.GGUFReader(path).tensors
    }


def test_fast_rounds_no_worse_than_llama_cpp_does(folder, tmp_path):
    weights, stored = Source.open(folder), rounded_by_us(folder, tmp_path / "m.gguf")
    for name, module_path in PATHS.items():
        weight = weights.tensor(f"{module_path}.weight").to(torch.float32)
        kind, ours = stored[f"{name}.weight"]
        theirs = rounded_by_llama_cpp(getattr(gguf.quants, kind), weight)
        assert kind == ("Q8_0" if name == "token_embd" else "Q4_0")
        assert (ours - weight).square().sum() <= (theirs - weight).square().sum()


def test_an_embedding_of_q8_0_values_stays_unchanged(folder, tmp_path):
    source, name = shutil.copytree(folder, tmp_path / "source"), "model.embed_tokens.weight"
    tensors = load_file(source / "model.safetensors")
    table = rounded_by_llama_cpp(gguf.quants.Q8_0, tensors[name].to(torch.float32))
    save_file(tensors | {name: table}, source / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(rounded_by_us(source, tmp_path / "m.gguf")["token_embd.weight"][1], table)
