"""The content of an .mlpackage equals the model bit by bit, in the requested dtypes."""

import shutil
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from scalepoint import export, verify
from scalepoint.errors import CoverageError, ExportError, StoreError, TargetError
from scalepoint.formats import find_format
from scalepoint.formats.apple.coreml.package import MODEL_FOLDER, read_operations, read_spec
from scalepoint.quantize import QuantConfig
from scalepoint.quantize.quantize_model import quantize
from scalepoint.spec import QuantizationSpec
from scalepoint.support.files import compute_digest
from tests.errors import raises
from tests.formats.apple.conftest import CONFIGS, net, pictures, quantized

COREML = find_format("coreml")
FAST = (
    "int8",
    "weights uint4 per channel",
    "weights int8, 2:4",
    "palettes of 3 bits per group",
    "weights int4 in blocks",
)


def exported(folder: Path, config: str = "int8", **options) -> tuple[Path, torch.fx.GraphModule]:
    """A package in `folder` and its model. Packages without a float file are exported once and copied."""
    if "float_path" in options:
        model = quantized(config)
        return export(model, folder / "m.mlpackage", pictures(), **options), model
    cache_folder, model = _export_once(config, **options)
    return Path(shutil.copytree(Path(cache_folder.name) / "m.mlpackage", folder / "m.mlpackage")), model


@cache
def _export_once(config: str, **options) -> tuple[tempfile.TemporaryDirectory, torch.fx.GraphModule]:
    folder, model = tempfile.TemporaryDirectory(prefix="exported-"), quantized(config)
    export(model, Path(folder.name) / "m.mlpackage", pictures(), **options)
    return folder, model


def test_no_temporary_package_remains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    path, _ = exported(tmp_path, float_path=tmp_path / "float.mlpackage")
    assert path.exists()
    assert not list((tmp_path / "temporary").glob("*.mlpackage"))


@pytest.mark.parametrize(
    "config", [config if config in FAST else pytest.param(config, marks=pytest.mark.slow) for config in CONFIGS]
)
def test_every_code_scale_and_zero_point_in_the_file_equals_the_model(tmp_path: Path, config: str) -> None:
    path, model = exported(tmp_path, config)
    assert COREML.compare(path, model) == []
    kinds = {op.op_type for op in read_operations(path)}
    for_ios17 = config in ("int8", "int8 activations", "weights int8")
    assert ("constexpr_affine_dequantize" in kinds) == for_ios17
    assert ("constexpr_blockwise_shift_scale" in kinds) == (config.startswith("weights") and not for_ios17)
    assert ("constexpr_sparse_blockwise_shift_scale" in kinds) == ("2:4" in config)
    assert ("constexpr_lut_to_dense" in kinds) == config.startswith("palettes")
    assert ("quantize" in kinds) == config.startswith("int8")
    assert read_spec(path).specificationVersion == (8 if for_ios17 else 9)


def test_float_dtype_float32_keeps_unquantized_tensors_in_float32(tmp_path: Path) -> None:
    path, model = exported(tmp_path, float_dtype="float32", float_path=tmp_path / "f.mlpackage")
    assert COREML.compare(path, model) == []
    info = COREML.about(path)
    inputs = [(declared.name, declared.dtype, declared.shape) for declared in info.inputs]
    assert inputs == [("input", "float32", (2, 3, 16, 16))]
    assert info.made_for == {"target": "coreml"}
    assert info.size < COREML.about(tmp_path / "f.mlpackage").size


@pytest.mark.slow
def test_four_bit_weights_take_half_the_space_of_eight_bit_weights(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)).eval()
    x, sizes = torch.randn(1, 256), {}
    for dtype in ("int8", "int4"):
        quantized_model = quantize(model, x, QuantConfig.weight_only(dtype, None), target="coreml", freeze_weights=True)
        path = export(quantized_model, tmp_path / f"{dtype}.mlpackage", x)
        sizes[dtype] = (path / MODEL_FOLDER / "weights" / "weight.bin").stat().st_size
    assert sizes["int8"] == pytest.approx(2 * 256 * 256, rel=0.05)
    assert sizes["int4"] == pytest.approx(256 * 256, rel=0.07)


def test_palettes_take_the_space_of_their_indices_and_compare_finds_a_changed_entry(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)).eval(), torch.randn(1, 256)
    config = QuantConfig.palettes(3, group_size=64)
    quantized_model = quantize(model, x, config, target="coreml", freeze_weights=True)
    path = export(quantized_model, tmp_path / "m.mlpackage", x)
    size = (path / MODEL_FOLDER / "weights" / "weight.bin").stat().st_size
    assert size == pytest.approx(2 * 256 * 256 * 3 / 8, rel=0.07)
    assert COREML.compare(path, quantized_model) == []
    layer = next(module for module in quantized_model.modules() if hasattr(module, "weight_quant"))
    layer.weight_quant.scale[1, 2] += 2e-3
    differences = COREML.compare(path, quantized_model)
    assert any("1 of 32 entries differ in the file" in difference for difference in differences)


@pytest.mark.slow
def test_a_pruned_weight_is_stored_without_its_zeros(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)).eval(), torch.randn(1, 256)
    weight = {"n_bits": 8, "per_channel": True, "sparsity": "2:4"}
    config = QuantConfig(activation="float", weight=weight)
    quantized_model = quantize(model, x, config, target="coreml", freeze_weights=True)
    path = export(quantized_model, tmp_path / "m.mlpackage", x)
    size = (path / MODEL_FOLDER / "weights" / "weight.bin").stat().st_size
    assert size == pytest.approx(2 * 256 * 256 * (1 / 2 + 1 / 8), rel=0.07)  # half of the codes, and a mask


def test_a_layer_whose_weights_are_all_pruned_is_stored(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)).eval(), torch.randn(2, 16)
    config = QuantConfig(activation="float", weight={"n_bits": 8, "per_channel": True, "sparsity": 0.999})
    narrow = quantize(model, x, config, target="coreml", freeze_weights=True)
    result = verify(export(narrow, tmp_path / "m.mlpackage", x), narrow, x)
    assert result.holds, result.message
    assert result.differences == ()


def test_compare_names_a_changed_scale(tmp_path: Path) -> None:
    path, model = exported(tmp_path, float_dtype="float32")
    spec = read_spec(path)
    block = next(iter(spec.mlProgram.functions["main"].block_specializations.values()))
    name = next(op for op in block.operations if op.type == "quantize").inputs["scale"].arguments[0].name
    const = next(op for op in block.operations if op.type == "const" and op.outputs[0].name == name)
    values = const.attributes["val"].immediateValue.tensor.floats.values
    values[0] *= 1.0001
    (path / MODEL_FOLDER / "model.mlmodel").write_bytes(spec.SerializeToString())
    (difference,) = COREML.compare(path, model)
    assert difference.startswith("input_quant: 1 of 1 scale differ in the file")


def test_compare_names_the_layer_of_a_changed_code(tmp_path: Path) -> None:
    path, model = exported(tmp_path)
    op = next(
        op for op in read_operations(path) if op.name.startswith("layer_4_5_") and op.op_type.startswith("constexpr")
    )
    codes = op.quantized_data.val.tobytes()
    file = path / MODEL_FOLDER / "weights" / "weight.bin"
    data = bytearray(file.read_bytes())
    assert data.count(codes) == 1
    data[data.index(codes) + 7] ^= 1
    file.write_bytes(data)
    (difference,) = COREML.compare(path, model)
    assert difference.startswith("4_5.stored_conv: 1 of 1152 codes differ in the file")


@pytest.mark.slow
def test_the_same_model_gives_the_same_bytes(tmp_path: Path) -> None:
    model = quantized()
    first, second = (export(model, tmp_path / name / "m.mlpackage", pictures()) for name in "ab")
    assert compute_digest(first) == compute_digest(second)


def test_a_truncated_package_is_rejected(tmp_path: Path) -> None:
    path, _ = exported(tmp_path)
    file = path / MODEL_FOLDER / "model.mlmodel"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(StoreError, match="Core ML package"):
        COREML.about(path)


def test_export_without_coremltools_says_how_to_install_it(tmp_path: Path, monkeypatch) -> None:
    model = quantized()
    monkeypatch.setitem(__import__("sys").modules, "coremltools", None)
    with pytest.raises(ExportError, match=r"pip install 'scalepoint\[coreml\]'"):
        export(model, tmp_path / "m.mlpackage", pictures())
    assert not (tmp_path / "m.mlpackage").exists()


def test_unsupported_configs_are_rejected_before_any_work_with_the_nearest_supported_choice() -> None:
    fp8 = QuantConfig(weight=QuantizationSpec(dtype="float8_e4m3fn"))
    with raises(TargetError, "'coreml'", "float8_e4m3fn as weight", "nearest"):
        quantize(net(), pictures(), fp8, target="coreml")
    clipped = QuantConfig(activation=QuantizationSpec(qscheme="symmetric_with_clipping"))
    with raises(TargetError, "int8", "symmetric_with_clipping as activation"):
        quantize(net(), pictures(), clipped, target="coreml")
    volumes = nn.Sequential(nn.Conv3d(3, 8, 3), nn.ReLU()).eval()
    x = torch.randn(1, 3, 8, 8, 8)
    with raises(CoverageError, "3-d convolution", "weight_only('int8')"):
        quantize(volumes, x, target="coreml")
