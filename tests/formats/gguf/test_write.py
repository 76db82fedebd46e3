"""GGUF files of every architecture: read back by the gguf package, and run in llama.cpp where it is installed."""

import json

import numpy as np
import pytest
import torch

from scalepoint.checkpoints import QuantizedCheckpoint, Source
from scalepoint.errors import ExportError, StoreError
from scalepoint.formats.gguf import GGUF
from scalepoint.formats.gguf.architectures import ARCHITECTURES
from scalepoint.formats.registry import find_checkpoint_format, list_checkpoint_formats
from scalepoint.runtimes import find_runtime
from scalepoint.runtimes.process import exchange_files, run_task
from tests.formats.gguf.checkpoints import FAMILIES, SIZES, decibels, make, quantized, simulation, spec_of
from tests.formats.gguf.test_block_types import CASES

gguf = pytest.importorskip("gguf", reason='needs the package gguf: pip install "scalepoint[gguf]"')
LLAMACPP = find_runtime("llamacpp")
needs_llamacpp = pytest.mark.skipif(not LLAMACPP.is_installed, reason=f"needs llama.cpp: {LLAMACPP.install}")
INT4 = spec_of("int4", 32)
FAST = ("llama", "mixtral", "gpt2")
each_family = pytest.mark.parametrize(
    "family", [pytest.param(family, marks=() if family in FAST else pytest.mark.slow) for family in FAMILIES]
)
TOKENS = torch.randint(0, 300, (1, 24), generator=torch.Generator().manual_seed(0))


def contents(path):
    """Fields and tensors, dequantized."""
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    values = {
        each.name: torch.tensor(gguf.dequantize(each.data, each.tensor_type)).reshape(each.shape[::-1].tolist())
        for each in reader.tensors
    }
    return fields, values, {each.name: each.tensor_type.name for each in reader.tensors}


def logits(path, tokens, **options):
    with exchange_files({"input_ids": tokens.numpy()}) as files:
        request = {"task": "run", "path": str(path), "options": {"threads": 1, **options}}
        answer = run_task(LLAMACPP, {**request, **files.files})
        assert answer.status == "ok", answer.message
        return torch.from_numpy(files.outputs(answer)["logits"])


def test_ours_is_found_by_name():
    assert "gguf" in list_checkpoint_formats()
    assert find_checkpoint_format("gguf") is GGUF


def test_a_llama_has_its_codes_names_and_sizes(tmp_path):
    checkpoint = quantized(make("llama", tmp_path / "m"), INT4, 32)
    GGUF.write(checkpoint, tmp_path / "m.gguf")
    fields, values, types = contents(tmp_path / "m.gguf")
    assert fields["general.architecture"] == "llama"
    assert fields["llama.block_count"] == 2
    assert fields["llama.attention.head_count_kv"] == 2
    assert fields["llama.rope.dimension_count"] == 64
    assert fields["llama.context_length"] == 128
    assert fields["general.file_type"] == 2
    assert len(fields["tokenizer.ggml.tokens"]) == SIZES["vocab_size"]
    down = checkpoint.quantized["model.layers.1.mlp.down_proj.weight"].dequantize()
    assert torch.equal(values["blk.1.ffn_down.weight"], down)
    query = checkpoint.quantized["model.layers.0.self_attn.q_proj.weight"].dequantize()
    turned = query.reshape(4, 2, 32, 256).transpose(1, 2).reshape(256, 256)
    assert torch.equal(values["blk.0.attn_q.weight"], turned)
    assert types["blk.0.attn_q.weight"] == "Q4_0"
    assert {types[name] for name in ("token_embd.weight", "blk.0.attn_norm.weight")} == {"F32"}


def test_half_and_bfloat16_weights_stay_what_they_are(tmp_path):
    for dtype, name in ((torch.float16, "F16"), (torch.bfloat16, "BF16")):
        source = make("llama", tmp_path / name, dtype=dtype)
        GGUF.write(QuantizedCheckpoint(source, {}), tmp_path / "m.gguf")
        _, values, types = contents(tmp_path / "m.gguf")
        assert types["output.weight"] == name
        assert types["output_norm.weight"] == "F32"
        assert torch.equal(values["output.weight"], source.tensor("lm_head.weight", torch.float32))


def test_experts_stand_in_one_tensor(tmp_path):
    checkpoint = quantized(make("qwen3_moe", tmp_path / "m"), INT4, 32)
    GGUF.write(checkpoint, tmp_path / "m.gguf")
    fields, values, types = contents(tmp_path / "m.gguf")
    found = values["blk.1.ffn_down_exps.weight"]
    for expert in range(4):
        wanted = checkpoint.quantized[f"model.layers.1.mlp.experts.{expert}.down_proj.weight"].dequantize()
        assert torch.equal(found[expert], wanted)
    assert fields["qwen3moe.expert_used_count"] == 2
    assert types["blk.0.ffn_gate_inp.weight"] == "F32"


def test_changed_floats_are_written_in_place_of_the_source(tmp_path):
    source = make("llama, tied", tmp_path / "m")
    norm = torch.full((256,), 3.0)
    GGUF.write(QuantizedCheckpoint(source, {}, {"model.norm.weight": norm}), tmp_path / "m.gguf")
    _, values, _ = contents(tmp_path / "m.gguf")
    assert torch.equal(values["output_norm.weight"], norm)
    assert "output.weight" not in values


def test_every_architecture_of_the_table_is_tried():
    tried = {fields.get("model_type", name) for name, fields in FAMILIES.items()}
    assert tried == ARCHITECTURES.keys()


@each_family
def test_every_architecture_is_written_and_its_codes_read_back(family, tmp_path):
    checkpoint = quantized(make(family, tmp_path / "m"), INT4, 32)
    GGUF.check(checkpoint.source, INT4, None)
    GGUF.write(checkpoint, tmp_path / "m.gguf")
    _, values, types = contents(tmp_path / "m.gguf")
    written = torch.cat([values[name].flatten() for name, kind in types.items() if kind == "Q4_0"])
    wanted = torch.cat([packed.dequantize().flatten() for packed in checkpoint.quantized.values()])
    assert torch.equal(written.sort().values, wanted.sort().values)


@needs_llamacpp
@each_family
def test_llamacpp_computes_with_our_codes_what_the_simulation_does(family, tmp_path):
    """With the weights as what they stand for; its GELU is a table of float16."""
    checkpoint = quantized(make(family, tmp_path / "m"), INT4, 32)
    GGUF.write(checkpoint, tmp_path / "m.gguf")
    with torch.no_grad():
        wanted = simulation(checkpoint, tmp_path / "s")(TOKENS).logits
    has_table = "gelu" in str(checkpoint.source.config)
    assert decibels(logits(tmp_path / "m.gguf", TOKENS, exact=True), wanted) > (60 if has_table else 105)


@needs_llamacpp
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.slow if place % 3 else ())
        for place, case in enumerate(case for case in CASES if CASES[case][3] == 512)
    ],
)
def test_llamacpp_reads_super_blocks_as_we_mean_them(case, tmp_path):
    kind, spec, block, _ = CASES[case]
    checkpoint = quantized(make("llama", tmp_path / "m"), spec, min(block, 256))
    GGUF.write(checkpoint, tmp_path / "m.gguf")
    _, _, types = contents(tmp_path / "m.gguf")
    assert types["blk.0.ffn_up.weight"] == kind
    with torch.no_grad():
        wanted = simulation(checkpoint, tmp_path / "s")(TOKENS).logits
    assert decibels(logits(tmp_path / "m.gguf", TOKENS, exact=True), wanted) > 100
    assert decibels(logits(tmp_path / "m.gguf", TOKENS), wanted) > 20


def rounded(module, inputs):
    """As its kernels do: int8 in blocks of 32, the largest is 127, scales in float16."""
    blocks = inputs[0].unflatten(-1, (-1, 32))
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    codes = (blocks / scale.clamp(min=1e-30)).round()
    return ((codes * scale.half().float()).flatten(-2),)


@needs_llamacpp
@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_kernels_of_llamacpp_round_inputs_to_8_bits(family, dtype, tmp_path):
    """It rounds the inputs of quantized layers to 8 bits: a simulation that does so too agrees far better, up to
    inputs that lie between two codes."""
    checkpoint = quantized(make(family, tmp_path / "m"), spec_of(dtype, 32), 32)
    GGUF.write(checkpoint, tmp_path / "m.gguf")
    found = logits(tmp_path / "m.gguf", TOKENS, cache="f32")
    model = simulation(checkpoint, tmp_path / "s")
    with torch.no_grad():
        plain = decibels(found, model(TOKENS).logits)
        for name, module in model.named_modules():
            if f"{name}.weight" in checkpoint.quantized:
                module.register_forward_pre_hook(rounded)
        alike = decibels(found, model(TOKENS).logits)
    assert plain > 25
    assert alike > plain + 10


def refusal(config):
    """What is said of a changed config."""
    return pytest.raises(ExportError, match=config)


@pytest.mark.parametrize(
    ("family", "fields", "says"),
    [
        ("llama", {"model_type": "mamba"}, r"models of the type 'mamba' .*: it writes gemma, .*, llama, "),
        ("llama", {"hidden_act": "relu"}, "its activation is relu, llama.cpp computes silu"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope of type 'dynamic'"),
        ("llama", {"rms_norm_eps": None}, "config.json has no rms_norm_eps"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window is on"),
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob=False, llama.cpp always takes True"),
        ("qwen3_moe", {"norm_topk_prob": None}, "norm_topk_prob=False, llama.cpp always takes True"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "some layers have no experts"),
        ("gemma2", {"query_pre_attn_scalar": 32}, "llama.cpp divides by the root of 64"),
        ("gemma2", {"layer_types": ["full_attention", "full_attention"]}, "every 2th layer"),
        ("gemma", {"tie_word_embeddings": False}, "its head is not the embedding"),
        ("olmoe", {"num_key_value_heads": 2}, "its queries share keys"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "attention scores are scaled in another way"),
    ],
)
def test_what_llamacpp_would_compute_differently_is_refused(family, fields, says, tmp_path):
    source = make(family, tmp_path / "m")
    changed = Source(source.folder, {**source.config, **fields}, source.tensors)
    with refusal(says):
        GGUF.write(QuantizedCheckpoint(changed, {}), tmp_path / "m.gguf")
    assert not list(tmp_path.glob("*.gguf"))
    assert not list(tmp_path.glob(".tmp*"))


@pytest.mark.parametrize(
    ("weight", "activation", "says"),
    [
        (spec_of("float8_e4m3fn", 32), None, "GGUF cannot hold weights of float8_e4m3fn"),
        (spec_of("uint8", 32, qscheme="asymmetric"), None, "GGUF cannot hold weights of uint8"),
        (INT4, spec_of("int8", 32), "leave activations float"),
    ],
)
def test_a_config_that_gguf_cannot_hold_is_refused_before_any_work(weight, activation, says, tmp_path):
    source = make("llama, tied", tmp_path / "m")
    with refusal(says):
        GGUF.check(source, weight, activation)


def test_what_stays_float_is_told_before(tmp_path):
    source = make("gpt2", tmp_path / "m", n_embd=48, n_inner=64)
    held = {name for name in source.tensors if GGUF.can_quantize(source, name)}
    assert held == {f"transformer.h.{layer}.mlp.c_proj.weight" for layer in (0, 1)}
    source = make("qwen2_moe", tmp_path / "e")
    assert not GGUF.can_quantize(source, "model.layers.0.mlp.gate.weight")
    assert not GGUF.can_quantize(source, "model.layers.0.mlp.shared_expert_gate.weight")
    assert GGUF.can_quantize(source, "model.layers.0.mlp.experts.3.gate_proj.weight")


def test_an_unknown_tensor_is_named(tmp_path):
    source = make("llama, tied", tmp_path / "m")
    checkpoint = QuantizedCheckpoint(source, {}, {"model.layers.0.self_attn.sinks": torch.ones(4)})
    with refusal("self_attn.sinks: llama.cpp knows no such tensor of LLAMA"):
        GGUF.write(checkpoint, tmp_path / "m.gguf")


def test_experts_of_different_kinds_are_refused(tmp_path):
    checkpoint = quantized(make("olmoe", tmp_path / "m"), INT4, 32)
    del checkpoint.quantized["model.layers.0.mlp.experts.2.up_proj.weight"]
    with refusal("experts.2.up_proj.weight is float, other experts of its layer are quantized"):
        GGUF.write(checkpoint, tmp_path / "m.gguf")


def test_a_disk_that_fails_leaves_nothing(tmp_path, monkeypatch):
    source = make("llama, tied", tmp_path / "m")
    path = tmp_path / "m.gguf"
    path.write_bytes(b"before")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "ascontiguousarray", full)
    with pytest.raises(StoreError, match="No space left on device"):
        GGUF.write(QuantizedCheckpoint(source, {}), path)
    assert path.read_bytes() == b"before"
    assert not list(tmp_path.glob(".tmp*"))


def test_the_chat_template_and_special_tokens_are_told(tmp_path):
    source = make("llama, tied", tmp_path / "m")
    about = json.loads((source.folder / "tokenizer_config.json").read_text())
    GGUF.write(QuantizedCheckpoint(source, {}), tmp_path / "m.gguf")
    fields, _, _ = contents(tmp_path / "m.gguf")
    assert fields["tokenizer.chat_template"] == about["chat_template"]
    assert fields["tokenizer.ggml.eos_token_id"] == 0
    assert fields["tokenizer.ggml.add_bos_token"] is False
