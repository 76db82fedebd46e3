"""GPTQ folders are read back value by value, by the definition of the format."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file

from scalepoint.errors import ExportError, TargetError
from scalepoint.formats import find_checkpoint_format
from scalepoint.spec import ExtendedQuantizationSpec, QuantizationSpec
from tests.errors import raises
from tests.formats.checkpoint_folder.tiny import FAMILIES, quantize, save_model

FORMAT = find_checkpoint_format("gptq")
ROWS = {"type": "per_channel", "axis": 0}
BLOCKS = {"type": "per_block", "block_size": 32, "axis": 1}
SPECS = {
    "int4": QuantizationSpec(dtype="int4", granularity=BLOCKS),
    "int4 rows": QuantizationSpec(dtype="int4", granularity=ROWS),
    "int2": QuantizationSpec(dtype="int2", granularity=BLOCKS),
    "int3": ExtendedQuantizationSpec(dtype="int3", granularity=BLOCKS),
    "int8": QuantizationSpec(dtype="int8", granularity=BLOCKS),
    "uint4": QuantizationSpec(dtype="uint4", qscheme="asymmetric", granularity=BLOCKS),
    "uint8": QuantizationSpec(dtype="uint8", qscheme="asymmetric", granularity=ROWS),
}
INT4 = SPECS["int4"]


def bits_at(words, start, bits):
    """Read a row of 32-bit words as one long integer, whose lowest word is the first."""
    return sum((word & 0xFFFFFFFF) << 32 * index for index, word in enumerate(words)) >> start & (1 << bits) - 1


def read_weight(folder, layer, settings):
    """The dequantized weight (out, in)."""
    file = load_file(folder / "model.safetensors")
    qweight, qzeros, scales, index = (file[f"{layer}.{part}"] for part in ("qweight", "qzeros", "scales", "g_idx"))
    assert (qweight.dtype, qzeros.dtype, scales.dtype, index.dtype) == (
        torch.int32,
        torch.int32,
        torch.float16,
        torch.int32,
    )
    bits = settings["bits"]
    offset = 1 if settings["checkpoint_format"] == "gptq" else 0
    zeros = [[bits_at(row, bits * n, bits) + offset for n in range(scales.shape[1])] for row in qzeros.tolist()]
    columns = qweight.T.tolist()
    weight = torch.zeros(scales.shape[1], len(index))
    for n, words in enumerate(columns):
        for k, group in enumerate(index.tolist()):
            weight[n, k] = (bits_at(words, bits * k, bits) - zeros[group][n]) * float(scales[group, n])
    return weight


def layer_settings(config, layer):
    """The settings that GPTQModel and vLLM find for a layer; None for a float layer."""
    for pattern, overrides in config["dynamic"].items():
        if re.match(pattern[2:], layer):
            return None if pattern.startswith("-:") else {**config, **overrides}
    return config


@pytest.mark.parametrize("name", SPECS)
def test_reading_by_the_definition_gives_the_quantized_values(tmp_path, name):
    source = save_model("llama", tmp_path / "in")
    FORMAT.check(source, SPECS[name], None)
    checkpoint = quantize(source, SPECS[name], scale_dtype=torch.float16)
    FORMAT.write(checkpoint, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert json.loads((tmp_path / "out" / "quantize_config.json").read_text()) == config
    assert (config["quant_method"], config["desc_act"], config["lm_head"]) == ("gptq", False, True)
    assert config["sym"] == name.startswith("int")
    assert config["checkpoint_format"] == ("gptq" if config["sym"] else "gptq_v2")
    layer = "model.layers.1.self_attn.k_proj"
    assert torch.equal(
        read_weight(tmp_path / "out", layer, config), checkpoint.quantized[f"{layer}.weight"].dequantize()
    )


def test_zero_points_of_symmetric_int4_are_stored_as_sevens(tmp_path):
    FORMAT.write(quantize(save_model("llama", tmp_path / "in"), INT4, scale_dtype=torch.float16), tmp_path / "out")
    zeros = load_file(tmp_path / "out" / "model.safetensors")["model.layers.0.mlp.up_proj.qzeros"]
    assert set(zeros.flatten().tolist()) == {0x77777777}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_written(tmp_path, family):
    source = save_model(family, tmp_path / "in")
    FORMAT.check(source, INT4, None)
    checkpoint = quantize(source, INT4, scale_dtype=torch.float16)
    FORMAT.write(checkpoint, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    stored = load_file(tmp_path / "out" / "model.safetensors")
    for name, weight in checkpoint.quantized.items():
        layer = name.removesuffix(".weight")
        rows, columns = weight.codes.shape
        assert stored[f"{layer}.qweight"].shape == (columns // 8, rows)
        assert layer_settings(config, layer) == config
    first = next(iter(checkpoint.quantized)).removesuffix(".weight")
    assert torch.equal(
        read_weight(tmp_path / "out", first, config), checkpoint.quantized[f"{first}.weight"].dequantize()
    )
    for name in checkpoint.float_names:
        assert torch.equal(stored[name], source.tensor(name))


def test_the_config_lists_layers_of_other_widths_and_float_layers(tmp_path):
    def choose(layer):
        return None if "layers.0.mlp" in layer or layer == "lm_head" else SPECS["int8" if "k_proj" in layer else "int4"]

    source = save_model("llama", tmp_path / "in")
    checkpoint = quantize(source, INT4, scale_dtype=torch.float16, choose=choose)
    FORMAT.write(checkpoint, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["lm_head"] is False
    assert layer_settings(config, "model.layers.0.mlp.up_proj") is None
    assert layer_settings(config, "model.layers.1.mlp.up_proj") == config
    layer = "model.layers.1.self_attn.k_proj"
    values = checkpoint.quantized[f"{layer}.weight"].dequantize()
    assert torch.equal(read_weight(tmp_path / "out", layer, layer_settings(config, layer)), values)


def test_a_zero_point_of_0_after_symmetric_layers_is_rejected(tmp_path):
    source = save_model("llama", tmp_path / "in")
    checkpoint = quantize(
        source, INT4, scale_dtype=torch.float16, choose=lambda layer: SPECS["uint4" if "up" in layer else "int4"]
    )
    checkpoint.quantized["model.layers.0.mlp.up_proj.weight"].zero_point[0, 0] = 0
    with raises(ExportError, "up_proj", "zero point of 0"):
        FORMAT.write(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("weight", "activation", "message"),
    [
        (INT4, QuantizationSpec(dtype="int8"), "gptq.*int8.*compressed-tensors"),
        (QuantizationSpec(dtype="float8_e4m3fn", granularity=ROWS), None, "2, 3, 4, 8 bits"),
        (ExtendedQuantizationSpec(dtype="int5", granularity=ROWS), None, "2, 3, 4, 8 bits"),
        (QuantizationSpec(dtype="int4"), None, r"per row"),
        (QuantizationSpec(dtype="int4", qformulation="minval", granularity=ROWS), None, r"qformulation='zp'"),
        (QuantizationSpec(dtype="int4", granularity={**BLOCKS, "block_size": 48}), None, "64, 32, 16"),
        (None, None, r"pass a spec"),
    ],
    ids=["activations", "float8", "int5", "one scale", "minval", "blocks of 48", "nothing"],
)
def test_unsupported_precisions_are_rejected_before_any_work(tmp_path, weight, activation, message):
    with pytest.raises(TargetError, match=message):
        FORMAT.check(save_model("llama", tmp_path), weight, activation)


def test_outputs_that_do_not_fill_whole_words_are_rejected(tmp_path, monkeypatch):
    monkeypatch.setitem(FAMILIES, "97 outputs", lambda: _with_97_outputs(FAMILIES["llama"]()))
    with raises(TargetError, "lm_head", "97 outputs", "multiple of 8"):
        FORMAT.check(save_model("97 outputs", tmp_path), INT4, None)


def _with_97_outputs(config):
    config.vocab_size = 97
    return config
