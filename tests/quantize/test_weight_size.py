"""bits_per_weight counts the bytes of files: codes, scales, zero points, tables and masks."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

from scalepoint import export, transform
from scalepoint.errors import UsageError
from scalepoint.quantize import Override, QuantConfig, bits_per_weight, insert_qdq, quantize
from scalepoint.quantize.weight_size import count_weight_bits
from scalepoint.spec import PerGroupedChannelGranularity
from scalepoint.spec.palette import palette_spec
from scalepoint.targets import find_target
from tests.errors import raises

INT8, INT4_BLOCKS = QuantConfig.weight_only("int8", None), QuantConfig.weight_only("int4", block_size=32)
PRUNED = QuantConfig(activation="float", weight={"n_bits": 8, "per_channel": True, "sparsity": "2:4"})
WEIGHTS = 64 * 64 + 32 * 64


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)).eval()


def quantized(config: QuantConfig, target: str) -> torch.fx.GraphModule:
    return quantize(net(), torch.randn(1, 64), config, target=target, freeze_weights=True)


def count_onnx_bits(path: Path) -> int:
    """Bits of all initializers, except for biases and zero points that are 0 everywhere."""
    bits = 0
    for tensor in onnx.load(path).graph.initializer:
        is_zero_point = "zero_point" in tensor.name
        if "bias" in tensor.name or (is_zero_point and not numpy_helper.to_array(tensor).astype(np.int32).any()):
            continue
        bits += 8 * len(tensor.raw_data)
    return bits


@pytest.mark.parametrize(
    ("config", "by_layer"),
    [
        (INT8, {"0": 8 + 32 / 64, "2": 8 + 32 / 64}),
        (INT4_BLOCKS, {"0": 5.0, "2": 5.0}),
        (QuantConfig.weight_only("uint4", block_size=32), {"0": 5.125, "2": 5.125}),
        (
            INT8.model_copy(update={"overrides": (Override(name="2", weight=INT4_BLOCKS.weight),)}),
            {"0": 8.5, "2": 5.0},
        ),
        (INT8.model_copy(update={"overrides": (Override(name="2", weight="float"),)}), {"0": 8.5}),
    ],
    ids=["int8", "int4 in blocks", "uint4 in blocks", "mixed", "partly float"],
)
def test_bits_are_those_of_the_initializers_of_an_onnx_file(config, by_layer, tmp_path: Path) -> None:
    model = quantized(config, "onnxruntime")
    result = bits_per_weight(model)
    assert result.per_module_map == by_layer
    assert result.total_weights == (WEIGHTS if "2" in by_layer else 64 * 64)
    assert result.bpw == result.total_bits / result.total_weights
    float_bits = 32 * (WEIGHTS - result.total_weights)
    assert result.total_bits + float_bits == count_onnx_bits(export(model, tmp_path / "m.onnx", torch.randn(1, 64)))


@pytest.mark.parametrize(
    "config",
    [
        INT8,
        QuantConfig.palettes(4, group_size=16),
        QuantConfig.palettes(3),
        QuantConfig.palettes(4, group_size=16, table_dtype="int8"),
        QuantConfig.weight_only("uint4", None),
        PRUNED,
        QuantConfig.palettes(4).model_copy(update={"overrides": (Override(name="2", weight=INT8.weight),)}),
    ],
    ids=["int8", "palettes in groups", "one palette", "int8 tables", "uint4", "pruned", "palette and int8"],
)
def test_bits_are_those_of_the_constants_of_a_core_ai_file(config, tmp_path: Path) -> None:
    pytest.importorskip("coreai_torch", reason="pip install scalepoint[coreai]")
    from scalepoint.formats.apple.coreai.package import read_program

    model = quantized(config, "coreai")
    constants = read_program(export(model, tmp_path / "m.aimodel", torch.randn(1, 64))).constants
    bits = sum(4 * len(digits) for name, digits in constants.items() if not name.endswith("bias"))
    assert bits_per_weight(model).total_bits == bits


def test_zeros_of_pruned_weights_are_counted_if_the_file_stores_them(tmp_path: Path) -> None:
    model = quantized(PRUNED, "onnxruntime")
    assert bits_per_weight(model).bpw == 8.5
    assert bits_per_weight(model).total_bits == count_onnx_bits(export(model, tmp_path / "m.onnx", torch.randn(1, 64)))


@pytest.mark.parametrize("cluster_dim", [1, 2, 4])
def test_entries_of_vector_palettes_have_one_number_per_weight_that_shares_an_index(cluster_dim: int) -> None:
    config = QuantConfig.palettes(4, group_size=16, cluster_dim=cluster_dim)
    model = quantize(net(), torch.randn(1, 64), config, target="reference", freeze_weights=True)
    tables = [module.weight_quant.scale for module in model.modules() if hasattr(module, "weight_quant")]
    assert sum(table.numel() for table in tables) == 6 * 16 * cluster_dim
    expected = WEIGHTS * 4 / cluster_dim + 32 * sum(table.numel() for table in tables)
    assert bits_per_weight(model).total_bits == expected
    granularity = PerGroupedChannelGranularity(axis=0, group_size=16)
    spec = palette_spec(4, 16, cluster_dim).replace(granularity=granularity)
    half_tables = 16 * (4 * 16 * cluster_dim)  # float16 in files for Core ML
    assert count_weight_bits(spec, (64, 64), find_target("coreml")) == 4096 * 4 / cluster_dim + half_tables


def test_a_shared_weight_is_counted_once_and_calibration_is_not_needed() -> None:
    model = net()
    model.append(nn.Linear(32, 64)).append(model[0])
    result = transform(model, torch.randn(1, 64), target="reference")
    prepared = insert_qdq(result.model, result.matches, INT8, target="reference")
    assert bits_per_weight(prepared).total_weights == WEIGHTS + 64 * 32


def test_a_float_model_has_no_bits_per_quantized_weight() -> None:
    with raises(UsageError, "no weight", "quantize"):
        bits_per_weight(net())
