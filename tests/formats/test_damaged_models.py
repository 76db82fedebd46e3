"""Reading damaged model files of every format, truncated or with changed bytes, raises only ScalepointErrors."""

import os
import random
import shutil
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

import scalepoint
from scalepoint.errors import ScalepointError, StoreError
from scalepoint.formats import find_format
from scalepoint.formats.apple.coreml.package import MODEL_FOLDER
from scalepoint.quantize import quantize

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
FORMATS = {  # suffix, target, file inside of the package
    "litert": (".tflite", "litert", Path()),
    "executorch": (".pte", "executorch", Path()),
    "coreml": (".mlpackage", "coreml", MODEL_FOLDER / "model.mlmodel"),
    "coreai": (".aimodel", "coreai", Path("metadata.json")),
    "onnx": (".onnx", "onnxruntime", Path()),
}
TRIALS = {"few": (25, 40), "all": (1500, 1500)}  # numbers of truncated lengths and of changed bytes
amounts = pytest.mark.parametrize("amount", ["few", pytest.param("all", marks=pytest.mark.slow)])


def _skip_without_package(name: str) -> None:
    packages = {"coreai": "coreai_torch", "coreml": "coremltools", "executorch": "executorch"}
    if name in packages:
        pytest.importorskip(packages[name])


def write_model(name: str, folder: Path) -> tuple[Path, Path]:
    """Write a model. Returns its path, and the file to damage, which may be inside of a package."""
    suffix, target, inside = FORMATS[name]
    _skip_without_package(name)
    torch.manual_seed(0)
    x = torch.randn(2, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    quantized = quantize(model, x, forward_loop=[x], freeze_weights=True, target=target)
    path = folder / f"model{suffix}"
    scalepoint.export(quantized, path, x, metadata={"labels": ["a", "b"]})
    return path, path / inside if inside.parts else path


def read(name: str, path: Path) -> Any:
    """Read the description of a damaged file; None for a ScalepointError. Any other error fails the test."""
    try:
        return find_format(name).about(path)
    except ScalepointError:
        return None


@amounts
@pytest.mark.parametrize("name", FORMATS)
def test_reading_a_damaged_model_file_raises_only_scalepoint_errors(name: str, amount: str, tmp_path: Path) -> None:
    lengths, flips = TRIALS[amount]
    path, file = write_model(name, tmp_path)
    original, chance = file.read_bytes(), random.Random(0)  # noqa: S311  # no secret
    expected = find_format(name).about(path)
    for end in range(0, len(original), max(1, len(original) // lengths)):
        file.write_bytes(original[:end])
        assert read(name, path) != expected, end
    head = min(len(original), 4000)  # offsets and sizes are at the beginning
    for number in range(flips):
        content = bytearray(original)
        position = chance.randrange(head if number % 2 else len(original))
        content[position] = chance.choice((0, 1, 127, 128, 255, chance.randrange(256)))
        file.write_bytes(bytes(content))
        read(name, path)


def fifo(path: Path) -> None:
    os.mkfifo(path)


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(5 * 10**9)


def zero(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("spoil", [fifo, sparse, zero])
@pytest.mark.parametrize("name", FORMATS)
def test_a_path_that_is_not_a_regular_file_is_refused_without_reading_it(name: str, spoil: Any, tmp_path: Path) -> None:
    _skip_without_package(name)
    suffix, _, inside = FORMATS[name]
    path = tmp_path / f"model{suffix}"
    (path / inside).parent.mkdir(parents=True, exist_ok=True)
    spoil(path / inside if inside.parts else path)
    with pytest.raises(StoreError):
        find_format(name).about(path)


@pytest.mark.parametrize("where", ["../outside", "{tmp}/outside", "link", "pipe", "missing"])
def test_the_size_of_an_onnx_file_excludes_files_outside_its_folder(where: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "outside").write_bytes(bytes(1000))
    (home / "link").symlink_to(tmp_path / "outside")
    os.mkfifo(home / "pipe")
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[250], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=where.format(tmp=tmp_path))
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [250])
    graph = helper.make_graph([helper.make_node("Identity", ["w"], ["y"])], "g", [], [y], [tensor])
    (home / "a.onnx").write_bytes(helper.make_model(graph).SerializeToString())
    with pytest.raises(StoreError, match="weights in"):
        find_format("onnx").about(home / "a.onnx")
    shutil.copy(tmp_path / "outside", home / "beside")
    tensor.external_data[0].value = "beside"
    inside = helper.make_model(helper.make_graph(graph.node, "g", [], [y], [tensor])).SerializeToString()
    (home / "a.onnx").write_bytes(inside)
    assert onnx.load_from_string(inside).graph.output
    assert find_format("onnx").about(home / "a.onnx").size == len(inside) + 1000
