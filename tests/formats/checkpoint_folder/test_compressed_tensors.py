"""transformers loads compressed-tensors folders with exactly the quantized values; unsupported specs are rejected."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from scalepoint.checkpoints import QuantizedCheckpoint
from scalepoint.errors import ExportError, TargetError
from scalepoint.formats import find_checkpoint_format
from scalepoint.spec import ExtendedQuantizationSpec, QuantizationSpec
from tests.errors import raises
from tests.formats.checkpoint_folder.tiny import (
    FAMILIES,
    SIZES,
    compute_logits,
    load_model,
    load_reference,
    quantize,
    round_float4,
    round_to_nearest,
    save_model,
)

FORMAT = find_checkpoint_format("compressed-tensors")
ROWS = {"type": "per_channel", "axis": 0}
TOKENS = {"granularity": {"type": "per_token"}, "qparam_calculator_cls": "dynamic"}


def blocks(size):
    return {"type": "per_block", "block_size": size, "axis": 1}


SPECS = {
    "int4": QuantizationSpec(dtype="int4", granularity=blocks(32)),
    "uint4 with zero points": QuantizationSpec(dtype="uint4", qscheme="asymmetric", granularity=blocks(32)),
    "int4 rows": QuantizationSpec(dtype="int4", granularity=ROWS),
    "uint4 rows with zero points": QuantizationSpec(dtype="uint4", qscheme="asymmetric", granularity=ROWS),
    "int2": QuantizationSpec(dtype="int2", granularity=blocks(16)),
    "int3": ExtendedQuantizationSpec(dtype="int3", granularity=blocks(32)),
    "uint3 with zero points": ExtendedQuantizationSpec(dtype="uint3", qscheme="asymmetric", granularity=blocks(32)),
    "int8": QuantizationSpec(dtype="int8", granularity=ROWS),
    "uint8 with zero points": QuantizationSpec(dtype="uint8", qscheme="asymmetric", granularity=blocks(64)),
    "float8": QuantizationSpec(dtype="float8_e4m3fn", granularity=ROWS),
    "float8, one scale": QuantizationSpec(dtype="float8_e4m3fn"),
    "nvfp4": QuantizationSpec(dtype="float4_e2m1fn", scale_dtype="float8_e4m3fn", granularity=blocks(16)),
    "mxfp4": QuantizationSpec(dtype="float4_e2m1fn", granularity=blocks(32)),
}
INT4 = SPECS["int4"]
needs_loader = pytest.mark.usefixtures("loader")


@pytest.fixture
def loader():
    pytest.importorskip("compressed_tensors", reason="pip install scalepoint[transformers]")


def check_loads(checkpoint: QuantizedCheckpoint, path) -> None:
    """Check that transformers loads a folder with the dequantized weights and their logits, bit by bit."""
    FORMAT.write(checkpoint, path / "out")
    model, reference = load_model(path / "out"), load_reference(checkpoint, path / "reference")
    logits = compute_logits(model)  # transformers unpacks the weights in the first forward pass
    weights = dict(model.named_parameters())
    for name, weight in reference.named_parameters():
        assert torch.equal(weights[name], weight), name
    assert torch.equal(logits, compute_logits(reference))


@needs_loader
@pytest.mark.parametrize("name", SPECS)
def test_every_format_loads_with_the_quantized_values(tmp_path, name):
    source = save_model("llama", tmp_path / "in")
    FORMAT.check(source, SPECS[name], None)
    check_loads(quantize(source, SPECS[name]), tmp_path)


@needs_loader
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"llama", "gpt2"}))
def test_every_family_loads(tmp_path, family):
    source = save_model(family, tmp_path / "in")
    FORMAT.check(source, INT4, None)
    check_loads(quantize(source, INT4), tmp_path)


@needs_loader
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"gpt2"}))
def test_every_family_loads_with_a_float_head(tmp_path, family):
    source = save_model(family, tmp_path / "in")
    heads = ("lm_head", "embed_out")
    check_loads(
        quantize(source, INT4, choose=lambda layer: None if layer in heads or layer.endswith("gate") else INT4),
        tmp_path,
    )


@needs_loader
@pytest.mark.parametrize("name", ["int8", "int3", "float8", "mxfp4"])
def test_experts_load_in_every_format_that_supports_them(tmp_path, name):
    source = save_model("olmoe", tmp_path / "in")
    FORMAT.check(source, SPECS[name], None)
    check_loads(quantize(source, SPECS[name]), tmp_path)


@needs_loader
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_sources_of_other_dtypes_load(tmp_path, dtype):
    check_loads(quantize(save_model("llama", tmp_path / "in", dtype), INT4), tmp_path)


@needs_loader
def test_mixed_widths_and_float_layers_become_groups_and_an_ignore_list(tmp_path):
    def choose(layer):
        return None if "layers.0.mlp" in layer else SPECS["int8" if "k_proj" in layer else "int4"]

    source = save_model("mistral", tmp_path / "in")
    check_loads(quantize(source, INT4, choose=choose), tmp_path)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert [group["targets"] for group in config["config_groups"].values()] == [
        ["Linear"],
        ["model.layers.0.self_attn.k_proj", "model.layers.1.self_attn.k_proj"],
    ]
    assert {name for name in config["ignore"] if "layers" in name} == {
        f"model.layers.0.mlp.{part}_proj" for part in ("gate", "up", "down")
    }


@needs_loader
def test_a_folder_with_integers_and_floats_loads(tmp_path):
    source = save_model("mistral", tmp_path / "in")
    choose = {"k_proj": SPECS["float8"], "v_proj": SPECS["mxfp4"]}
    checkpoint = quantize(source, INT4, choose=lambda layer: choose.get(layer.rpartition(".")[2], INT4))
    check_loads(checkpoint, tmp_path)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"


@needs_loader
def test_experts_may_have_another_width_than_other_layers(tmp_path):
    source = save_model("qwen3_moe", tmp_path / "in")
    checkpoint = quantize(source, INT4, choose=lambda layer: _choose_spec(layer, SPECS["int8"], INT4))
    check_loads(checkpoint, tmp_path)
    with_int4_experts = quantize(source, INT4, choose=lambda layer: _choose_spec(layer, INT4, SPECS["int8"]))
    check_loads(with_int4_experts, tmp_path)


def _choose_spec(layer, expert_spec, other_spec):
    if layer.endswith("gate"):
        return None
    return expert_spec if ".experts." in layer else other_spec


def test_experts_that_differ_are_rejected(tmp_path):
    source = save_model("olmoe", tmp_path / "in")
    checkpoint = quantize(source, INT4, choose=lambda layer: SPECS["int8"] if "experts.1." in layer else INT4)
    with raises(ExportError, "experts.0.", "experts.1.", "different ways"):
        FORMAT.write(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def round_input(x, activation, scale):
    """Round the input of a layer in float32, by its spec, as the runtime does."""
    is_float, is_asymmetric = activation.dtype.is_floating_point, activation.qscheme == "asymmetric"
    low, high = (-448.0, 448.0) if is_float else (-128.0, 127.0)
    zero_point = torch.zeros(())
    if scale is None and is_asymmetric:
        minimum, maximum = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
        scale = (maximum - minimum) / 255
        zero_point = (low - minimum / scale).clamp(low, high).round()
    elif scale is None:
        scale = x.abs().amax(-1, keepdim=True) / ((high - low) / 2)
    codes = (x / scale + zero_point).clamp(low, high)
    codes = codes.to(torch.float8_e4m3fn).to(torch.float32) if is_float else codes.round()
    return (codes - zero_point) * scale


ACTIVATIONS = {
    "int8 per token": ("int8", QuantizationSpec(dtype="int8", **TOKENS), None),
    "int8 per token with zero points": ("int8", QuantizationSpec(dtype="int8", qscheme="asymmetric", **TOKENS), None),
    "int8 stored": ("int8", QuantizationSpec(dtype="int8"), 0.03),
    "float8 per token": ("float8", QuantizationSpec(dtype="float8_e4m3fn", **TOKENS), None),
    "float8 stored": ("float8, one scale", QuantizationSpec(dtype="float8_e4m3fn"), 0.01),
}


@needs_loader
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_quantized_inputs_match_the_simulation(tmp_path, name):
    weight, activation, scale = ACTIVATIONS[name]
    source = save_model("llama", tmp_path / "in", torch.float32)
    FORMAT.check(source, SPECS[weight], activation)
    checkpoint = quantize(source, SPECS[weight], activation)
    activation_scale = None if scale is None else torch.tensor(scale)
    weights = {key: replace(weight, activation_scale=activation_scale) for key, weight in checkpoint.quantized.items()}
    checkpoint = replace(checkpoint, quantized=weights)
    FORMAT.write(checkpoint, tmp_path / "out")
    simulated = load_reference(checkpoint, tmp_path / "reference")
    float_logits = compute_logits(simulated)
    for module in simulated.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda _, args: (round_input(args[0], activation, activation_scale),))
    logits = compute_logits(load_model(tmp_path / "out"))
    torch.testing.assert_close(logits, compute_logits(simulated), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(logits, float_logits, rtol=1e-5, atol=1e-6)  # else inputs were not rounded


@needs_loader
def test_float4_inputs_of_nvfp4_match_the_simulation(tmp_path):
    activation = QuantizationSpec(
        dtype="float4_e2m1fn",
        scale_dtype="float8_e4m3fn",
        granularity={"type": "per_token_block", "block_size": 16},
        qparam_calculator_cls="dynamic",
    )
    source = save_model("llama", tmp_path / "in")
    FORMAT.check(source, SPECS["nvfp4"], activation)
    outer = torch.tensor(2.0**-9)
    checkpoint = quantize(source, SPECS["nvfp4"], activation)
    weights = {name: replace(weight, activation_scale=outer) for name, weight in checkpoint.quantized.items()}
    FORMAT.write(replace(checkpoint, quantized=weights), tmp_path / "out")
    model, layer = load_model(tmp_path / "out"), "model.layers.1.mlp.down_proj"
    compute_logits(model)  # unpacks the weights
    x = torch.randn(1, 8, 128, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    blocks = x.float().unflatten(-1, (-1, 16))
    scale = (blocks.abs().amax(-1, keepdim=True) / 6 / outer).to(torch.float8_e4m3fn).float() * outer
    rounded = (round_float4(blocks / scale) * scale).flatten(-2)
    expected = rounded @ weights[f"{layer}.weight"].dequantize().T
    with torch.no_grad():
        torch.testing.assert_close(model.get_submodule(layer)(x).float(), expected, rtol=1e-2, atol=2e-3)


def test_tokenizer_and_generation_config_are_copied(tmp_path):
    source = save_model("llama", tmp_path / "in")
    FORMAT.write(quantize(source, INT4), tmp_path / "out")
    for name in ("tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "in" / name).read_bytes()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {**config, "quantization_config": None} == {**source.config, "quantization_config": None}


def test_changed_float_tensors_replace_those_of_the_source(tmp_path):
    source = save_model("llama", tmp_path / "in")
    norm = "model.norm.weight"
    changed = {norm: torch.full_like(source.tensor(norm), 2.0), "extra.bias": torch.ones(4)}
    FORMAT.write(replace(quantize(source, INT4), changed=changed), tmp_path / "out")
    from safetensors.torch import load_file

    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(stored[norm], changed[norm])
    assert torch.equal(stored["extra.bias"], changed["extra.bias"])
    assert "model.layers.0.mlp.up_proj.weight" not in stored


UNSUPPORTED = {
    "float8 activations of integers": ("int4", QuantizationSpec(dtype="float8_e4m3fn"), r"int8 weights with int8"),
    "int4 with int8 inputs": ("int4", QuantizationSpec(dtype="int8"), r"int-quantized has int8 weights"),
    "int8 inputs of float8": ("float8", QuantizationSpec(dtype="int8"), r"float8_e4m3fn for both"),
    "static with zero points": ("int8", QuantizationSpec(dtype="int8", qscheme="asymmetric"), r"without zero points"),
    "input scales per channel": ("int8", QuantizationSpec(dtype="int8", granularity=ROWS), r"one scale per token"),
    "inputs of mxfp4": ("mxfp4", QuantizationSpec(dtype="int8"), r"float activations"),
    "other inputs of nvfp4": ("nvfp4", QuantizationSpec(dtype="int8"), r"blocks of 16"),
    "zero points of int8 weights": ("uint8 rows", QuantizationSpec(dtype="int8"), r"no zero points"),
    "blocks of 48": ("int4 by 48", None, r"48.*64 inputs.*64, 32, 16"),
    "one scale for int4": ("int4, one scale", None, r"PerChannelGranularity"),
    "minval": ("minval", None, r"qformulation='zp'"),
    "float8_e5m2": ("e5m2", None, r"no float8_e5m2 weights"),
    "blocks along the outputs": ("int4 along outputs", None, r"along the inputs"),
    "nvfp4 in blocks of 32": ("nvfp4 by 32", None, r"blocks of 16"),
    "nothing": ("none", None, r"pass a spec"),
}
UNSUPPORTED_SPECS = {
    "none": None,
    "uint8 rows": QuantizationSpec(dtype="uint8", qscheme="asymmetric", granularity=ROWS),
    "int4 by 48": QuantizationSpec(dtype="int4", granularity=blocks(48)),
    "int4, one scale": QuantizationSpec(dtype="int4"),
    "minval": QuantizationSpec(dtype="int4", qformulation="minval", granularity=ROWS),
    "e5m2": QuantizationSpec(dtype="float8_e5m2", granularity=ROWS),
    "int4 along outputs": QuantizationSpec(
        dtype="int4", granularity={"type": "per_block", "block_size": 32, "axis": 0}
    ),
    "nvfp4 by 32": QuantizationSpec(dtype="float4_e2m1fn", scale_dtype="float8_e4m3fn", granularity=blocks(32)),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_precisions_are_rejected_before_any_work(llama, name):
    weight, activation, message = UNSUPPORTED[name]
    with pytest.raises(TargetError, match=message):
        FORMAT.check(llama, {**SPECS, **UNSUPPORTED_SPECS}[weight], activation)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_model("llama", tmp_path_factory.mktemp("llama"))


def test_conv1d_layers_are_rejected(tmp_path):
    with raises(TargetError, "gpt2", "Conv1D", "gptq or gguf"):
        FORMAT.check(save_model("gpt2", tmp_path), INT4, None)


@pytest.mark.parametrize("name", ["uint4 with zero points", "nvfp4"])
def test_experts_with_zero_points_or_outer_scales_are_rejected(tmp_path, name):
    with pytest.raises(TargetError, match=r"has experts.*symmetric integers"):
        FORMAT.check(save_model("olmoe", tmp_path), SPECS[name], None)


def test_float4_weights_of_a_float16_source_are_rejected(tmp_path):
    with raises(TargetError, "not bfloat16", "Save the checkpoint as bfloat16"):
        FORMAT.check(save_model("llama", tmp_path, torch.float16), SPECS["mxfp4"], None)


def test_codes_that_do_not_fill_whole_words_are_rejected(tmp_path, monkeypatch):
    monkeypatch.setitem(SIZES, "intermediate_size", 68)
    source = save_model("mistral", tmp_path)
    spec = ExtendedQuantizationSpec(dtype="int3", granularity=ROWS)
    with raises(TargetError, "down_proj", "68 inputs", "multiple of 32"):
        FORMAT.check(source, spec, None)


def test_a_quantized_source_is_rejected(tmp_path, llama):
    FORMAT.write(quantize(llama, SPECS["int8"]), tmp_path / "out")
    from scalepoint.checkpoints import Source

    with pytest.raises(TargetError, match="already quantized"):
        FORMAT.check(Source.open(tmp_path / "out"), INT4, None)


@pytest.mark.parametrize(
    ("name", "message"),
    [("model.embed_tokens.weight", "is an embedding"), ("lm_head.weight", "is tied"), ("gate.weight", "routes")],
)
def test_weights_that_loaders_need_in_float_cannot_be_quantized(tmp_path, name, message):
    source = save_model("qwen2", tmp_path / "in")
    weights = {name: round_to_nearest(source.tensor("model.embed_tokens.weight"), INT4, torch.bfloat16)}
    assert not FORMAT.can_quantize(source, name)
    assert FORMAT.can_quantize(source, "model.layers.0.mlp.up_proj.weight")
    with pytest.raises(ExportError, match=message):
        FORMAT.write(QuantizedCheckpoint(source, weights), tmp_path / "out")


def test_scales_that_are_not_exact_in_the_source_dtype_are_rejected(tmp_path, llama):
    checkpoint = quantize(llama, INT4, scale_dtype=torch.float32)
    with raises(ExportError, "lm_head", "bfloat16"):
        FORMAT.write(checkpoint, tmp_path / "out")
