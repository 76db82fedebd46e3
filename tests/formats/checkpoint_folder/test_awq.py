"""AWQ folders are read back by the definition of the format, and by the converter of compressed-tensors."""

import json

import pytest
import torch
from safetensors.torch import load_file

from scalepoint.errors import ExportError, TargetError
from scalepoint.formats import find_checkpoint_format
from scalepoint.spec import QuantizationSpec
from tests.errors import raises
from tests.formats.checkpoint_folder.tiny import FAMILIES, quantize, save_model

FORMAT = find_checkpoint_format("awq")
ROWS = {"type": "per_channel", "axis": 0}
BLOCKS = {"type": "per_block", "block_size": 32, "axis": 1}
SPECS = {
    "uint4": QuantizationSpec(dtype="uint4", qscheme="asymmetric", granularity=BLOCKS),
    "int4": QuantizationSpec(dtype="int4", granularity=BLOCKS),
    "uint4 rows": QuantizationSpec(dtype="uint4", qscheme="asymmetric", granularity=ROWS),
}
UINT4 = SPECS["uint4"]
LAYER = "model.layers.1.self_attn.k_proj"


def nibble(word, output):
    """The code of an output in its word, which has the even outputs first."""
    index = [0, 4, 1, 5, 2, 6, 3, 7][output % 8]
    return word >> 4 * index & 15


def read_weight(folder, layer):
    """The dequantized weight (out, in)."""
    file = load_file(folder / "model.safetensors")
    qweight, qzeros, scales = (file[f"{layer}.{part}"] for part in ("qweight", "qzeros", "scales"))
    assert (qweight.dtype, qzeros.dtype, scales.dtype) == (torch.int32, torch.int32, torch.float16)
    group_size = len(qweight) // len(scales)
    weight = torch.zeros(scales.shape[1], len(qweight))
    for k, words in enumerate(qweight.tolist()):
        zeros = qzeros[k // group_size].tolist()
        for n in range(scales.shape[1]):
            code = nibble(words[n // 8], n) - nibble(zeros[n // 8], n)
            weight[n, k] = code * float(scales[k // group_size, n])
    return weight


@pytest.mark.parametrize("name", SPECS)
def test_reading_by_the_definition_gives_the_quantized_values(tmp_path, name):
    source = save_model("llama", tmp_path / "in")
    FORMAT.check(source, SPECS[name], None)
    checkpoint = quantize(source, SPECS[name], scale_dtype=torch.float16)
    FORMAT.write(checkpoint, tmp_path / "out")
    assert torch.equal(read_weight(tmp_path / "out", LAYER), checkpoint.quantized[f"{LAYER}.weight"].dequantize())
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config == {
        "quant_method": "awq",
        "bits": 4,
        "group_size": -1 if "rows" in name else 32,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": [],
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_written(tmp_path, family):
    source = save_model(family, tmp_path / "in")
    FORMAT.check(source, UINT4, None)
    checkpoint = quantize(source, UINT4, scale_dtype=torch.float16)
    FORMAT.write(checkpoint, tmp_path / "out")
    first = next(iter(checkpoint.quantized)).removesuffix(".weight")
    assert torch.equal(read_weight(tmp_path / "out", first), checkpoint.quantized[f"{first}.weight"].dequantize())
    float_layers = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"][
        "modules_to_not_convert"
    ]
    quantized_layers = [name.removesuffix(".weight") for name in checkpoint.quantized]
    # Loaders look for these names anywhere in the path of a layer.
    assert not any(float_layer in layer for layer in quantized_layers for float_layer in float_layers)


def test_the_converter_of_compressed_tensors_reads_the_codes(tmp_path):
    converters = pytest.importorskip("compressed_tensors.entrypoints.convert.converters")
    compressors = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    source = save_model("llama", tmp_path / "in")
    checkpoint = quantize(
        source, UINT4, scale_dtype=torch.float16, choose=lambda layer: UINT4 if "k_proj" in layer else None
    )
    FORMAT.write(checkpoint, tmp_path / "out")
    converter = converters.AutoAWQConverter.from_pretrained(str(tmp_path / "out"))
    tensors = converter.process(load_file(tmp_path / "out" / "model.safetensors"))
    weight = checkpoint.quantized[f"{LAYER}.weight"]
    codes = compressors.unpack_from_int32(tensors[f"{LAYER}.weight_packed"], 4, weight.codes.shape)
    zeros = compressors.unpack_from_int32(tensors[f"{LAYER}.weight_zero_point"], 4, weight.scale.shape, packed_dim=0)
    assert torch.equal(codes.int() + 8, weight.codes.int())
    assert torch.equal(zeros.int() + 8, weight.zero_point)
    assert torch.equal(tensors[f"{LAYER}.weight_scale"].float(), weight.scale)


def test_the_config_lists_float_layers(tmp_path):
    source = save_model("llama", tmp_path / "in")
    checkpoint = quantize(
        source, UINT4, scale_dtype=torch.float16, choose=lambda layer: None if "layers.0" in layer else UINT4
    )
    FORMAT.write(checkpoint, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert len(config["modules_to_not_convert"]) == 7
    assert all(name.startswith("model.layers.0.") for name in config["modules_to_not_convert"])


def test_two_block_sizes_in_one_folder_are_rejected(tmp_path):
    source = save_model("llama", tmp_path / "in")
    wide = UINT4.replace(granularity={**BLOCKS, "block_size": 64})
    checkpoint = quantize(
        source, UINT4, scale_dtype=torch.float16, choose=lambda layer: wide if "down" in layer else UINT4
    )
    with raises(ExportError, "blocks of 32", "down_proj of 64", "awq"):
        FORMAT.write(checkpoint, tmp_path / "out")


@pytest.mark.parametrize(
    ("weight", "activation", "message"),
    [
        (UINT4, QuantizationSpec(dtype="int8"), r"awq needs float activations"),
        (QuantizationSpec(dtype="int8", granularity=ROWS), None, "awq.*int8.*4 bits"),
        (None, None, r"pass a spec"),
    ],
    ids=["activations", "int8", "nothing"],
)
def test_unsupported_precisions_are_rejected_before_any_work(tmp_path, weight, activation, message):
    with pytest.raises(TargetError, match=message):
        FORMAT.check(save_model("llama", tmp_path), weight, activation)
