"""GGUF files of every architecture: read back by the gguf package, and run in llama.cpp if it is installed."""

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
from tests.formats.gguf.checkpoints import (
    FAMILIES,
    SIZES,
    block_spec,
    quantize_checkpoint,
    save_checkpoint,
    simulate,
    sqnr,
)
from tests.formats.gguf.test_block_types import CASES

gguf = pytest.importorskip("gguf", reason='needs the package gguf: pip install "scalepoint[gguf]"')
LLAMACPP = find_runtime("llamacpp")
needs_llamacpp = pytest.mark.skipif(not LLAMACPP.is_installed, reason=f"needs llama.cpp: {LLAMACPP.install}")
INT4 = block_spec("int4", 32)
FAST = ("llama", "mixtral", "gpt2")
for_each_family = pytest.mark.parametrize(
    "family", [pytest.param(family, marks=() if family in FAST else pytest.mark.slow) for family in FAMILIES]
)
TOKENS = torch.randint(0, 300, (1, 24), generator=torch.Generator().manual_seed(0))


def read_file(path):
    """Return the metadata, the dequantized tensors and the types of tensors, each by name."""
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    values = {}
    for tensor in reader.tensors:
        dequantized = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
        values[tensor.name] = dequantized.reshape(tensor.shape[::-1].tolist())
    return fields, values, {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}


def run_llamacpp(path, tokens, **options):
    """Return the logits that llama.cpp computes."""
    with exchange_files({"input_ids": tokens.numpy()}) as files:
        request = {"task": "run", "path": str(path), "options": {"threads": 1, **options}}
        answer = run_task(LLAMACPP, {**request, **files.paths})
        assert answer.status == "ok", answer.message
        return torch.from_numpy(files.outputs(answer)["logits"])


def test_the_format_is_registered_under_its_name():
    assert "gguf" in list_checkpoint_formats()
    assert find_checkpoint_format("gguf") is GGUF


def test_the_file_of_a_llama_has_its_codes_names_and_sizes(tmp_path):
    checkpoint = quantize_checkpoint(save_checkpoint("llama", tmp_path / "m"), INT4, 32)
    GGUF.write(checkpoint, tmp_path / "m.gguf")
    fields, values, types = read_file(tmp_path / "m.gguf")
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
    interleaved = query.reshape(4, 2, 32, 256).transpose(1, 2).reshape(256, 256)
    assert torch.equal(values["blk.0.attn_q.weight"], interleaved)
    assert types["blk.0.attn_q.weight"] == "Q4_0"
    assert {types[name] for name in ("token_embd.weight", "blk.0.attn_norm.weight")} == {"F32"}


def test_float16_and_bfloat16_weights_keep_their_dtype(tmp_path):
    for dtype, name in ((torch.float16, "F16"), (torch.bfloat16, "BF16")):
        source = save_checkpoint("llama", tmp_path / name, dtype=dtype)
        GGUF.write(QuantizedCheckpoint(source, {}), tmp_path / "m.gguf")
        _, values, types = read_file(tmp_path / "m.gguf")
        assert types["output.weight"] == name
        assert types["output_norm.weight"] == "F32"
        assert torch.equal(values["output.weight"], source.tensor("lm_head.weight", torch.float32))


def test_experts_are_stored_in_one_tensor(tmp_path):
    checkpoint = quantize_checkpoint(save_checkpoint("qwen3_moe", tmp_path / "m"), INT4, 32)
    GGUF.write(checkpoint, tmp_path / "m.gguf")
    fields, values, types = read_file(tmp_path / "m.gguf")
    experts = values["blk.1.ffn_down_exps.weight"]
    for index in range(4):
        expected = checkpoint.quantized[f"model.layers.1.mlp.experts.{index}.down_proj.weight"].dequantize()
        assert torch.equal(experts[index], expected)
    assert fields["qwen3moe.expert_used_count"] == 2
    assert types["blk.0.ffn_gate_inp.weight"] == "F32"


def test_changed_float_tensors_replace_those_of_the_source(tmp_path):
    source = save_checkpoint("llama, tied", tmp_path / "m")
    norm = torch.full((256,), 3.0)
    GGUF.write(QuantizedCheckpoint(source, {}, {"model.norm.weight": norm}), tmp_path / "m.gguf")
    _, values, _ = read_file(tmp_path / "m.gguf")
    assert torch.equal(values["output_norm.weight"], norm)
    assert "output.weight" not in values


def test_every_architecture_of_the_table_is_tested():
    tested = {fields.get("model_type", name) for name, fields in FAMILIES.items()}
    assert tested == ARCHITECTURES.keys()


@for_each_family
def test_the_codes_of_every_architecture_are_read_back(family, tmp_path):
    checkpoint = quantize_checkpoint(save_checkpoint(family, tmp_path / "m"), INT4, 32)
    GGUF.check(checkpoint.source, INT4, None)
    GGUF.write(checkpoint, tmp_path / "m.gguf")
    _, values, types = read_file(tmp_path / "m.gguf")
    in_file = torch.cat([values[name].flatten() for name, type_name in types.items() if type_name == "Q4_0"])
    expected = torch.cat([weight.dequantize().flatten() for weight in checkpoint.quantized.values()])
    assert torch.equal(in_file.sort().values, expected.sort().values)


@needs_llamacpp
@for_each_family
def test_llamacpp_with_dequantized_weights_matches_the_simulation(family, tmp_path):
    """Models with GELU match less exactly, because llama.cpp looks GELU up in a float16 table."""
    checkpoint = quantize_checkpoint(save_checkpoint(family, tmp_path / "m"), INT4, 32)
    GGUF.write(checkpoint, tmp_path / "m.gguf")
    with torch.no_grad():
        expected = simulate(checkpoint, tmp_path / "s")(TOKENS).logits
    has_gelu = "gelu" in str(checkpoint.source.config)
    assert sqnr(run_llamacpp(tmp_path / "m.gguf", TOKENS, exact=True), expected) > (60 if has_gelu else 105)


@needs_llamacpp
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.slow if index % 3 else ())
        for index, case in enumerate(case for case in CASES if CASES[case][3] == 512)
    ],
)
def test_llamacpp_with_super_blocks_matches_the_simulation(case, tmp_path):
    type_name, spec, block_size, _ = CASES[case]
    checkpoint = quantize_checkpoint(save_checkpoint("llama", tmp_path / "m"), spec, min(block_size, 256))
    GGUF.write(checkpoint, tmp_path / "m.gguf")
    _, _, types = read_file(tmp_path / "m.gguf")
    assert types["blk.0.ffn_up.weight"] == type_name
    with torch.no_grad():
        expected = simulate(checkpoint, tmp_path / "s")(TOKENS).logits
    assert sqnr(run_llamacpp(tmp_path / "m.gguf", TOKENS, exact=True), expected) > 100
    assert sqnr(run_llamacpp(tmp_path / "m.gguf", TOKENS), expected) > 20


def round_inputs(module, inputs):
    """Round inputs like the kernels of llama.cpp: int8 in blocks of 32, the largest is 127, scales in float16."""
    blocks = inputs[0].unflatten(-1, (-1, 32))
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    codes = (blocks / scale.clamp(min=1e-30)).round()
    return ((codes * scale.half().float()).flatten(-2),)


@needs_llamacpp
@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_kernels_of_llamacpp_round_inputs_to_8_bits(family, dtype, tmp_path):
    """A simulation that rounds inputs too agrees far better; inputs halfway between two codes may still differ."""
    checkpoint = quantize_checkpoint(save_checkpoint(family, tmp_path / "m"), block_spec(dtype, 32), 32)
    GGUF.write(checkpoint, tmp_path / "m.gguf")
    actual = run_llamacpp(tmp_path / "m.gguf", TOKENS, cache="f32")
    model = simulate(checkpoint, tmp_path / "s")
    with torch.no_grad():
        with_float_inputs = sqnr(actual, model(TOKENS).logits)
        for name, module in model.named_modules():
            if f"{name}.weight" in checkpoint.quantized:
                module.register_forward_pre_hook(round_inputs)
        with_rounded_inputs = sqnr(actual, model(TOKENS).logits)
    assert with_float_inputs > 25
    assert with_rounded_inputs > with_float_inputs + 10


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("llama", {"model_type": "mamba"}, r"models of type 'mamba' .*, only gemma, .*, llama, "),
        ("llama", {"hidden_act": "relu"}, "its activation is relu, llama.cpp computes silu"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope of type 'dynamic'"),
        ("llama", {"rms_norm_eps": None}, "config.json has no rms_norm_eps"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window is on"),
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob=False, llama.cpp always uses True"),
        ("qwen3_moe", {"norm_topk_prob": None}, "norm_topk_prob=False, llama.cpp always uses True"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "some layers have no experts"),
        ("gemma2", {"query_pre_attn_scalar": 32}, "llama.cpp divides by the root of 64"),
        ("gemma2", {"layer_types": ["full_attention", "full_attention"]}, "every 2th layer"),
        ("gemma", {"tie_word_embeddings": False}, "its head is not the embedding"),
        ("olmoe", {"num_key_value_heads": 2}, "its queries share keys"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "attention scores are scaled differently"),
    ],
)
def test_models_that_llamacpp_would_compute_differently_are_rejected(family, fields, message, tmp_path):
    source = save_checkpoint(family, tmp_path / "m")
    changed = Source(source.folder, {**source.config, **fields}, source.tensors)
    with pytest.raises(ExportError, match=message):
        GGUF.write(QuantizedCheckpoint(changed, {}), tmp_path / "m.gguf")
    assert not list(tmp_path.glob("*.gguf"))
    assert not list(tmp_path.glob(".tmp*"))


@pytest.mark.parametrize(
    ("weight", "activation", "message"),
    [
        (block_spec("float8_e4m3fn", 32), None, "GGUF cannot store weights of float8_e4m3fn"),
        (block_spec("uint8", 32, qscheme="asymmetric"), None, "GGUF cannot store weights of uint8"),
        (INT4, block_spec("int8", 32), "leave activations float"),
    ],
)
def test_unsupported_precisions_are_rejected_before_any_work(weight, activation, message, tmp_path):
    source = save_checkpoint("llama, tied", tmp_path / "m")
    with pytest.raises(ExportError, match=message):
        GGUF.check(source, weight, activation)


def test_can_quantize_excludes_narrow_rows_and_routers(tmp_path):
    source = save_checkpoint("gpt2", tmp_path / "m", n_embd=48, n_inner=64)
    quantizable = {name for name in source.tensors if GGUF.can_quantize(source, name)}
    assert quantizable == {f"transformer.h.{layer}.mlp.c_proj.weight" for layer in (0, 1)}
    source = save_checkpoint("qwen2_moe", tmp_path / "e")
    assert not GGUF.can_quantize(source, "model.layers.0.mlp.gate.weight")
    assert not GGUF.can_quantize(source, "model.layers.0.mlp.shared_expert_gate.weight")
    assert GGUF.can_quantize(source, "model.layers.0.mlp.experts.3.gate_proj.weight")


def test_the_error_names_an_unknown_tensor(tmp_path):
    source = save_checkpoint("llama, tied", tmp_path / "m")
    checkpoint = QuantizedCheckpoint(source, {}, {"model.layers.0.self_attn.sinks": torch.ones(4)})
    with pytest.raises(ExportError, match=r"self_attn\.sinks: llama\.cpp has no such tensor"):
        GGUF.write(checkpoint, tmp_path / "m.gguf")


def test_a_layer_with_float_and_quantized_experts_is_rejected(tmp_path):
    checkpoint = quantize_checkpoint(save_checkpoint("olmoe", tmp_path / "m"), INT4, 32)
    del checkpoint.quantized["model.layers.0.mlp.experts.2.up_proj.weight"]
    with pytest.raises(ExportError, match=r"experts\.2\.up_proj\.weight is float, other experts"):
        GGUF.write(checkpoint, tmp_path / "m.gguf")


def test_a_full_disk_leaves_the_old_file_unchanged(tmp_path, monkeypatch):
    source = save_checkpoint("llama, tied", tmp_path / "m")
    path = tmp_path / "m.gguf"
    path.write_bytes(b"before")

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "ascontiguousarray", fail)
    with pytest.raises(StoreError, match="No space left on device"):
        GGUF.write(QuantizedCheckpoint(source, {}), path)
    assert path.read_bytes() == b"before"
    assert not list(tmp_path.glob(".tmp*"))


def test_the_file_has_the_chat_template_and_special_tokens(tmp_path):
    source = save_checkpoint("llama, tied", tmp_path / "m")
    settings = json.loads((source.folder / "tokenizer_config.json").read_text())
    GGUF.write(QuantizedCheckpoint(source, {}), tmp_path / "m.gguf")
    fields, _, _ = read_file(tmp_path / "m.gguf")
    assert fields["tokenizer.chat_template"] == settings["chat_template"]
    assert fields["tokenizer.ggml.eos_token_id"] == 0
    assert fields["tokenizer.ggml.add_bos_token"] is False
