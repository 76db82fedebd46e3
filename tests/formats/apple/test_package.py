"""What stands in an .mlpackage: all that the model has, bit by bit, in the width that was asked for."""

import shutil
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from scalepoint import export
from scalepoint.errors import CoverageError, ExportError, StoreError, TargetError
from scalepoint.formats import find_format
from scalepoint.formats.apple.package import MODEL_FOLDER, read_operations, read_spec
from scalepoint.quantize import QuantConfig
from scalepoint.quantize.shortcut import quantize
from scalepoint.spec import QuantizationSpec
from scalepoint.support.files import digest
from tests.errors import raises
from tests.formats.apple.conftest import WAYS, net, pictures, quantized

COREML = find_format("coreml")
FAST = ("int8", "weights uint4 a channel", "weights int8, 2:4", "palettes of 3 bits a group", "weights int4 in blocks")


def written(folder: Path, way: str = "int8", **options) -> tuple[Path, torch.fx.GraphModule]:
    """A package, and the model that it was made of, which is that of all who ask for the same."""
    if "float_path" in options:
        model = quantized(way)
        return export(model, folder / "m.mlpackage", pictures(), **options), model
    home, model = kept(way, **options)
    return Path(shutil.copytree(Path(home.name) / "m.mlpackage", folder / "m.mlpackage")), model


@cache
def kept(way: str, **options) -> tuple[tempfile.TemporaryDirectory, torch.fx.GraphModule]:
    home, model = tempfile.TemporaryDirectory(prefix="written-"), quantized(way)
    export(model, Path(home.name) / "m.mlpackage", pictures(), **options)
    return home, model


def test_nothing_is_left_where_temporary_files_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    path, _ = written(tmp_path, float_path=tmp_path / "float.mlpackage")
    assert path.exists()
    assert [each.name for each in (tmp_path / "temporary").iterdir() if each.suffix == ".mlpackage"] == []


@pytest.mark.parametrize("way", [way if way in FAST else pytest.param(way, marks=pytest.mark.slow) for way in WAYS])
def test_every_code_scale_and_zero_point_is_read_back_as_it_is_in_the_model(tmp_path: Path, way: str) -> None:
    path, model = written(tmp_path, way)
    assert COREML.compare(path, model) == []
    kinds = {op.op_type for op in read_operations(path)}
    is_old = way in ("int8", "int8 activations", "weights int8")
    assert ("constexpr_affine_dequantize" in kinds) == is_old
    assert ("constexpr_blockwise_shift_scale" in kinds) == (way.startswith("weights") and not is_old)
    assert ("constexpr_sparse_blockwise_shift_scale" in kinds) == ("2:4" in way)
    assert ("constexpr_lut_to_dense" in kinds) == way.startswith("palettes")
    assert ("quantize" in kinds) == way.startswith("int8")
    assert read_spec(path).specificationVersion == (8 if is_old else 9)  # iOS 17, iOS 18


def test_float32_is_held_too_where_it_is_asked_for(tmp_path: Path) -> None:
    path, model = written(tmp_path, float_dtype="float32", float_path=tmp_path / "f.mlpackage")
    assert COREML.compare(path, model) == []
    said = COREML.about(path)
    assert [(each.name, each.dtype, each.shape) for each in said.inputs] == [("input", "float32", (2, 3, 16, 16))]
    assert said.made_for == {"target": "coreml"}
    assert said.size < COREML.about(tmp_path / "f.mlpackage").size


@pytest.mark.slow
def test_four_bits_take_half_the_room_of_eight(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)).eval()
    x, sizes = torch.randn(1, 256), {}
    for dtype in ("int8", "int4"):
        made = quantize(model, x, QuantConfig.weight_only(dtype, None), target="coreml", freeze_weights=True)
        path = export(made, tmp_path / f"{dtype}.mlpackage", x)
        sizes[dtype] = (path / MODEL_FOLDER / "weights" / "weight.bin").stat().st_size
    assert sizes["int8"] == pytest.approx(2 * 256 * 256, rel=0.05)
    assert sizes["int4"] == pytest.approx(256 * 256, rel=0.07)


def test_palettes_take_the_room_of_their_indices_and_a_changed_entry_is_named(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)).eval(), torch.randn(1, 256)
    made = quantize(model, x, QuantConfig.palettes(3, group_size=64), target="coreml", freeze_weights=True)
    path = export(made, tmp_path / "m.mlpackage", x)
    size = (path / MODEL_FOLDER / "weights" / "weight.bin").stat().st_size
    assert size == pytest.approx(2 * 256 * 256 * 3 / 8, rel=0.07)
    assert COREML.compare(path, made) == []
    entry = next(each for each in made.modules() if hasattr(each, "weight_quant")).weight_quant.scale
    entry[1, 2] += 2e-3
    told = COREML.compare(path, made)
    assert any("1 of 32 entries are others in the file" in each for each in told)


@pytest.mark.slow
def test_a_pruned_weight_leaves_its_zeros_away(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)).eval(), torch.randn(1, 256)
    weight = {"n_bits": 8, "per_channel": True, "sparsity": "2:4"}
    config = QuantConfig(activation="float", weight=weight)
    made = quantize(model, x, config, target="coreml", freeze_weights=True)
    path = export(made, tmp_path / "m.mlpackage", x)
    size = (path / MODEL_FOLDER / "weights" / "weight.bin").stat().st_size
    assert size == pytest.approx(2 * 256 * 256 * (1 / 2 + 1 / 8), rel=0.07)  # half of the codes, a bit for each


def test_a_changed_scale_is_named(tmp_path: Path) -> None:
    path, model = written(tmp_path, float_dtype="float32")
    spec = read_spec(path)
    block = next(iter(spec.mlProgram.functions["main"].block_specializations.values()))
    name = next(op for op in block.operations if op.type == "quantize").inputs["scale"].arguments[0].name
    const = next(op for op in block.operations if op.type == "const" and op.outputs[0].name == name)
    values = const.attributes["val"].immediateValue.tensor.floats.values
    values[0] *= 1.0001
    (path / MODEL_FOLDER / "model.mlmodel").write_bytes(spec.SerializeToString())
    (told,) = COREML.compare(path, model)
    assert told.startswith("input_quant: 1 of 1 scale are others in the file")


def test_a_changed_code_is_named(tmp_path: Path) -> None:
    path, model = written(tmp_path)
    op = next(
        op for op in read_operations(path) if op.name.startswith("layer_4_5_") and op.op_type.startswith("constexpr")
    )
    codes = op.quantized_data.val.tobytes()
    file = path / MODEL_FOLDER / "weights" / "weight.bin"
    data = bytearray(file.read_bytes())
    assert data.count(codes) == 1
    data[data.index(codes) + 7] ^= 1
    file.write_bytes(data)
    (told,) = COREML.compare(path, model)
    assert told.startswith("4_5.stored_conv: 1 of 1152 codes are others in the file")


@pytest.mark.slow
def test_the_same_model_gives_the_same_bytes(tmp_path: Path) -> None:
    model = quantized()
    one, two = (export(model, tmp_path / name / "m.mlpackage", pictures()) for name in "ab")
    assert digest(one) == digest(two)


def test_what_is_cut_off_is_no_package(tmp_path: Path) -> None:
    path, _ = written(tmp_path)
    file = path / MODEL_FOLDER / "model.mlmodel"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(StoreError, match="Core ML package"):
        COREML.about(path)


def test_without_coremltools_an_export_says_how_it_is_installed(tmp_path: Path, monkeypatch) -> None:
    model = quantized()
    monkeypatch.setitem(__import__("sys").modules, "coremltools", None)
    with pytest.raises(ExportError, match=r"pip install 'scalepoint\[coreml\]'"):
        export(model, tmp_path / "m.mlpackage", pictures())
    assert not (tmp_path / "m.mlpackage").exists()


def test_what_core_ml_cannot_hold_is_refused_before_any_work_with_the_nearest_choice() -> None:
    fp8 = QuantConfig(weight=QuantizationSpec(dtype="float8_e4m3fn"))
    with raises(TargetError, "'coreml'", "float8_e4m3fn as weight", "nearest"):
        quantize(net(), pictures(), fp8, target="coreml")
    clipped = QuantConfig(activation=QuantizationSpec(qscheme="symmetric_with_clipping"))
    with raises(TargetError, "int8", "symmetric_with_clipping as activation"):
        quantize(net(), pictures(), clipped, target="coreml")
    volumes = nn.Sequential(nn.Conv3d(3, 8, 3), nn.ReLU()).eval()
    x = torch.randn(1, 3, 8, 8, 8)
    with raises(CoverageError, "three axes", "weight_only('int8')"):
        quantize(volumes, x, target="coreml")
