"""Safetensors written a tensor at a time: what others read of it."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from scalepoint.formats.checkpoint_folder.shards import ENTRY_BYTES, ShardWriter

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "odd": torch.tensor([1, 2, 3], dtype=torch.int8),
    "b": torch.arange(4, dtype=torch.int64),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "one": torch.tensor([0.5]),
    "fp8": torch.ones(2, 4).to(torch.float8_e4m3fn),
    "empty": torch.zeros(0, 3),
    "turned": torch.arange(6, dtype=torch.int32).reshape(2, 3).T,
}


def write(folder, limit=1000, bound=None):
    shards = ShardWriter(folder, bound or len(TENSORS) * (ENTRY_BYTES + 20), limit)
    for name, tensor in TENSORS.items():
        shards.add(name, tensor)
    shards.finish()
    return shards


def equal(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one.float(), other.float())


def test_one_file_is_read_as_it_was_written(tmp_path):
    write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    read = load_file(tmp_path / "model.safetensors")
    assert read.keys() == TENSORS.keys()
    assert all(equal(read[name], tensor) for name, tensor in TENSORS.items())
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize(("limit", "bound"), [(40, None), (1000, 2 * ENTRY_BYTES)], ids=["by bytes", "by the header"])
def test_several_files_have_an_index(tmp_path, limit, bound):
    shards = write(tmp_path, limit, bound)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) == shards.count > 1
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert set(index["weight_map"].values()) == set(files)
    assert index["metadata"]["total_size"] == sum(each.numel() * each.dtype.itemsize for each in TENSORS.values())
    for name, file in index["weight_map"].items():
        assert equal(load_file(tmp_path / file)[name], TENSORS[name])


def test_every_tensor_lies_where_its_type_may_be_read(tmp_path):
    write(tmp_path)
    data = (tmp_path / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + size])
    for name, tensor in TENSORS.items():
        assert (8 + size + entries[name]["data_offsets"][0]) % tensor.dtype.itemsize == 0, name
