"""Model files of every format, damaged: cut off anywhere, with any byte changed. No error but ours."""

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
from scalepoint.formats.apple.package import MODEL_FOLDER
from scalepoint.quantize import quantize

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
FORMATS = {  # suffix, target, the file in it
    "litert": (".tflite", "litert", Path()),
    "executorch": (".pte", "executorch", Path()),
    "coreml": (".mlpackage", "coreml", MODEL_FOLDER / "model.mlmodel"),
    "onnx": (".onnx", "onnxruntime", Path()),
}
MANY = {"few": (25, 40), "all": (1500, 1500)}  # lengths and bytes that are tried
how_many = pytest.mark.parametrize("much", ["few", pytest.param("all", marks=pytest.mark.slow)])


def made(name: str, folder: Path) -> tuple[Path, Path]:
    """A model file or package, and the file that is damaged in it."""
    suffix, target, inside = FORMATS[name]
    torch.manual_seed(0)
    x = torch.randn(2, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    quantized = quantize(model, x, forward_loop=[x], freeze_weights=True, target=target)
    path = folder / f"model{suffix}"
    scalepoint.export(quantized, path, x, metadata={"labels": ["a", "b"]})
    return path, path / inside if inside.parts else path


def read(name: str, path: Path) -> Any:
    """What a damaged file says of itself, or None for an error of ours; any other error fails the test."""
    try:
        return find_format(name).about(path)
    except ScalepointError:
        return None


@how_many
@pytest.mark.parametrize("name", FORMATS)
def test_a_damaged_model_file_gives_no_error_but_ours(name: str, much: str, tmp_path: Path) -> None:
    lengths, flips = MANY[much]
    path, file = made(name, tmp_path)
    whole, chance = file.read_bytes(), random.Random(0)  # noqa: S311  # no secret
    expected = find_format(name).about(path)
    for end in range(0, len(whole), max(1, len(whole) // lengths)):
        file.write_bytes(whole[:end])
        assert read(name, path) != expected, end
    head = min(len(whole), 4000)  # offsets and sizes lie at the beginning
    for number in range(flips):
        content = bytearray(whole)
        place = chance.randrange(head if number % 2 else len(whole))
        content[place] = chance.choice((0, 1, 127, 128, 255, chance.randrange(256)))
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
def test_what_is_no_regular_file_is_refused_unread(name: str, spoil: Any, tmp_path: Path) -> None:
    suffix, _, inside = FORMATS[name]
    path = tmp_path / f"model{suffix}"
    (path / inside).parent.mkdir(parents=True, exist_ok=True)
    spoil(path / inside if inside.parts else path)
    with pytest.raises(StoreError):
        find_format(name).about(path)


@pytest.mark.parametrize("where", ["../outside", "{tmp}/outside", "link", "pipe", "missing"])
def test_the_size_of_an_onnx_file_counts_no_file_outside_of_its_folder(where: str, tmp_path: Path) -> None:
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
