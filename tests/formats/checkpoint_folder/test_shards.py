"""The safetensors library reads shards that were written one tensor at a time."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from scalepoint.formats.checkpoint_folder.shards import ENTRY_BYTES, ShardWriter

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "three bytes": torch.tensor([1, 2, 3], dtype=torch.int8),
    "b": torch.arange(4, dtype=torch.int64),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "one": torch.tensor([0.5]),
    "fp8": torch.ones(2, 4).to(torch.float8_e4m3fn),
    "empty": torch.zeros(0, 3),
    "transposed": torch.arange(6, dtype=torch.int32).reshape(2, 3).T,
}


def write(folder, max_shard_bytes=1000, max_header_bytes=None):
    shards = ShardWriter(folder, max_header_bytes or len(TENSORS) * (ENTRY_BYTES + 20), max_shard_bytes)
    for name, tensor in TENSORS.items():
        shards.add(name, tensor)
    shards.finish()
    return shards


def are_equal(first, second):
    return first.dtype == second.dtype and first.shape == second.shape and torch.equal(first.float(), second.float())


def test_tensors_of_one_file_are_read_back_unchanged(tmp_path):
    write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    loaded = load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == TENSORS.keys()
    assert all(are_equal(loaded[name], tensor) for name, tensor in TENSORS.items())
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize(
    ("max_shard_bytes", "max_header_bytes"), [(40, None), (1000, 2 * ENTRY_BYTES)], ids=["by bytes", "by the header"]
)
def test_several_files_have_an_index(tmp_path, max_shard_bytes, max_header_bytes):
    shards = write(tmp_path, max_shard_bytes, max_header_bytes)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) == shards.count > 1
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert set(index["weight_map"].values()) == set(files)
    total_size = sum(tensor.numel() * tensor.dtype.itemsize for tensor in TENSORS.values())
    assert index["metadata"]["total_size"] == total_size
    for name, file in index["weight_map"].items():
        assert are_equal(load_file(tmp_path / file)[name], TENSORS[name])


def test_every_tensor_is_aligned_for_its_dtype(tmp_path):
    write(tmp_path)
    data = (tmp_path / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + size])
    for name, tensor in TENSORS.items():
        assert (8 + size + entries[name]["data_offsets"][0]) % tensor.dtype.itemsize == 0, name
