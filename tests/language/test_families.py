"""Every family through the whole pipeline, into every format that supports it."""

import warnings

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from scalepoint import deploy_checkpoint, perplexity
from scalepoint.checkpoints import Source
from scalepoint.checkpoints.skeleton import build_skeleton
from scalepoint.errors import TargetError
from scalepoint.formats import registry
from scalepoint.formats.checkpoint import CheckpointFormat
from scalepoint.runtimes import find_runtime
from scalepoint.targets import find_target
from tests.checkpoints.test_skeleton import KINDS, save_model
from tests.formats.gguf.checkpoints import VOCABULARY_SIZE, save_byte_level_tokenizer

FOUR = {"weight": {"n_bits": 4, "block_size": 8}, "activation": "float"}
FAST = ("qwen3_moe",)
BYTES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY_SIZE, "max_position_embeddings": 64, "bos_token_id": 0,
    "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=() if kind in FAST else pytest.mark.slow) for kind in KINDS])
def test_the_simulation_of_a_tuned_model_equals_its_weights(tmp_path, monkeypatch, kind):
    quantized = {}

    def write(checkpoint, path):
        path.mkdir()
        quantized.update(checkpoint.quantized)

    form = CheckpointFormat("gptq", "", write, lambda *_: None)
    monkeypatch.setitem(registry._CHECKPOINT_FORMATS.builtin, "gptq", form)
    model = save_model(kind, tmp_path / kind)
    torch.manual_seed(1)
    tokens = [torch.randint(0, 40, (1, 24)) for _ in range(14)]
    done = deploy_checkpoint(
        tmp_path / kind, tmp_path / "out", target="gptq", config=FOUR, data=tokens[:12], judge=tokens[12:],
        verify=False, progress=False,
    )  # fmt: skip
    with torch.no_grad():
        assert done.float_score == pytest.approx(perplexity(lambda batch: model(batch).logits, tokens[12:]), rel=1e-4)
        tree, weights = build_skeleton(Source.open(tmp_path / kind))
        weights.load(tree.parameters())
        for parameter in tree.parameters():
            name = weights.name_of(parameter)
            if name in quantized:
                values = quantized[name].dequantize()
                parameter.copy_(values if values.shape == parameter.shape and kind != "gpt2" else values.T)
        assert done.score == pytest.approx(perplexity(lambda batch: tree(batch).logits, tokens[12:]), rel=1e-4)
    layers = [name for name in Source.open(tmp_path / kind).tensors if "_proj" in name or ".mlp." in name]
    assert set(quantized) >= {name for name in layers if name.endswith("proj.weight")}


def test_a_layer_that_the_format_cannot_store_stays_float(tmp_path):
    save_model("qwen3_moe", tmp_path / "source")
    config = {"weight": {"n_bits": 4, "block_size": 8}}
    done = deploy_checkpoint(
        tmp_path / "source", tmp_path / "out", target="gptq", config=config, accuracy="fast", progress=False
    )
    rows = {row.name: row.precision for row in done.coverage.operations}
    routers = [name for name in rows if name.endswith("mlp.gate") or ".mlp.gate." in name]
    assert routers
    assert {rows[name] for name in routers} == {"float"}
    assert rows["model.layers.0.mlp.experts.0.up_proj"] != "float"


def write_model(kind, folder, **more):
    """A folder of random weights with a tokenizer."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**BYTES, **more})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for value in model.parameters():
                value.add_(0.1 * torch.randn_like(value))
        model.save_pretrained(folder)
    save_byte_level_tokenizer(folder)
    return model


def tokens_of(count):
    torch.manual_seed(1)
    return [torch.randint(1, 300, (1, 24)) for _ in range(count)]


@pytest.mark.parametrize("kind", ["cohere", pytest.param("cohere2", marks=pytest.mark.slow)])
def test_weights_are_loaded_also_if_the_graph_reads_them_in_a_later_piece(tmp_path, kind):
    """Norms of Cohere are arithmetic on a parameter, which stands at the head of the graph."""
    model, tokens = write_model(kind, tmp_path / "m", head_dim=16), tokens_of(4)
    done = deploy_checkpoint(
        tmp_path / "m", tmp_path / "out", target="compressed-tensors", data=tokens[:2], judge=tokens[2:],
        config={"weight": {"n_bits": 4, "block_size": 32}}, progress=False,
    )  # fmt: skip
    with torch.no_grad():
        expected = perplexity(lambda batch: model(batch).logits, tokens[2:])
    assert done.float_score == pytest.approx(expected, rel=1e-4)
    assert done.float_score != pytest.approx(BYTES["vocab_size"], rel=1e-5)
    assert done.report.language.status == "ok"


def test_a_family_whose_packed_weights_transformers_cannot_load_is_refused_before_any_work(tmp_path):
    more = {"num_key_value_heads": None, "intermediate_size": None}
    write_model("falcon", tmp_path / "m", **more)
    with pytest.raises(TargetError, match=r"falcon.*float8_e4m3fn.*gptq"):
        deploy_checkpoint(tmp_path / "m", tmp_path / "out", target="compressed-tensors", accuracy="fast")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "target",
    [
        pytest.param("compressed-tensors", marks=pytest.mark.slow),
        "gguf",
        pytest.param("ort-genai", marks=pytest.mark.slow),
    ],
)
def test_an_untied_head_is_written_even_if_the_config_says_that_it_is_tied(tmp_path, target):
    runtime = find_runtime(find_target(target).runtime)
    if not runtime.is_installed:
        pytest.skip(f"{runtime.name} is not installed")
    write_model("llama", tmp_path / "m", tie_word_embeddings=True)
    file = tmp_path / "m" / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = 0.2 * torch.randn_like(tensors["model.embed_tokens.weight"])
    save_file(tensors, file, metadata={"format": "pt"})
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32).eval()
    tokens = tokens_of(4)
    overrides = [{"name": "lm_head", "weight": {"n_bits": 8, "block_size": 32}}]
    done = deploy_checkpoint(
        tmp_path / "m", tmp_path / "out", target=target, accuracy="fast", judge=tokens, progress=False,
        config={"weight": {"n_bits": 8, "block_size": 32}, "overrides": overrides},
    )  # fmt: skip
    with torch.no_grad():
        expected = perplexity(lambda batch: model(batch).logits, tokens)
    assert done.float_score == pytest.approx(expected, rel=1e-4)
    assert done.score == pytest.approx(expected, rel=0.05)
    assert done.report.language.status == "ok"
