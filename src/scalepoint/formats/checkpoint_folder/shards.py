"""Safetensors in shards, written a tensor at a time: nothing is held but the tensor at hand and very small ones.

8 bytes   length of the header
header    JSON: name -> type, shape, place in the body; the room for it is kept free, and filled with blanks
body      the tensors without gaps; those whose bytes are no multiple of 8 come last, so that all lie aligned
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

MAX_SHARD_BYTES = 2_000_000_000  # bytes
MAX_HEADER_BYTES = 1 << 20
ENTRY_BYTES = 160  # bytes of an entry besides its name
SAFETENSORS_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass
class _Shard:
    file: BinaryIO
    room: int  # for the header
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    late: dict[str, Tensor] = field(default_factory=dict)  # what would leave the next one unaligned
    size: int = 0
    header: int = ENTRY_BYTES

    def write(self, name: str, tensor: Tensor) -> None:
        data = tensor.contiguous().reshape(-1).view(torch.uint8)
        start, self.size = self.size, self.size + data.numel()
        self.entries[name] = {
            "dtype": SAFETENSORS_TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, self.size],
        }
        self.file.write(data.numpy().data)

    def close(self) -> None:
        for name, tensor in sorted(self.late.items(), key=lambda item: -item[1].dtype.itemsize):
            self.write(name, tensor)
        header = json.dumps({"__metadata__": {"format": "pt"}, **self.entries}, separators=(",", ":")).encode()
        self.file.seek(0)
        self.file.write(self.room.to_bytes(8, "little") + header.ljust(self.room))
        self.file.close()


class ShardWriter:
    """The weights of a folder: `add` all, then `finish`. `bound` is what all names and their entries may take."""

    def __init__(self, folder: Path, bound: int, limit: int = MAX_SHARD_BYTES) -> None:
        self.folder, self.limit = folder, limit
        self.room = -(-min(bound + 2 * ENTRY_BYTES, MAX_HEADER_BYTES) // 8) * 8
        self.places: dict[str, int] = {}
        self.total = 0
        self.count = 0
        self._shard: _Shard | None = None

    def add(self, name: str, tensor: Tensor) -> None:
        entry, nbytes = len(json.dumps(name)) + ENTRY_BYTES, tensor.numel() * tensor.dtype.itemsize
        shard = self._shard
        if shard is not None and (shard.header + entry > self.room or self.total_of(shard) + nbytes > self.limit):
            self._close()
        shard = self._shard = self._shard or self._open()
        shard.header += entry
        if nbytes % 8:
            shard.late[name] = tensor
        else:
            shard.write(name, tensor)
        self.places[name] = self.count
        self.total += nbytes

    def finish(self) -> None:
        """Give the files their names, and the folder its index when there are several."""
        self._close()
        if self.count == 1:
            (self.folder / _shard_name(1)).rename(self.folder / "model.safetensors")
            return
        names = [f"model-{number:05d}-of-{self.count:05d}.safetensors" for number in range(1, self.count + 1)]
        for number, name in enumerate(names, 1):
            (self.folder / _shard_name(number)).rename(self.folder / name)
        places = {name: names[number - 1] for name, number in sorted(self.places.items())}
        index = {"metadata": {"total_size": self.total}, "weight_map": places}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

    def abort(self) -> None:
        """Close what is open; the folder is thrown away."""
        if self._shard is not None:
            self._shard.file.close()

    @staticmethod
    def total_of(shard: _Shard) -> int:
        return shard.size + sum(each.numel() * each.dtype.itemsize for each in shard.late.values())

    def _open(self) -> _Shard:
        self.count += 1
        file = (self.folder / _shard_name(self.count)).open("wb")
        file.seek(8 + self.room)
        return _Shard(file, self.room)

    def _close(self) -> None:
        if self._shard is not None:
            self._shard.close()
            self._shard = None


def _shard_name(number: int) -> str:
    return f"shard-{number}.part"
