"""Write safetensors in shards, one tensor at a time. Only tensors whose size is not a multiple of 8 stay in memory.

8 bytes   length of the header
header    JSON: name -> dtype, shape, offsets in the body; space for it is reserved, and padded with blanks
body      the tensors without gaps; those whose size is not a multiple of 8 come last, so that all are aligned
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

MAX_SHARD_BYTES = 2_000_000_000
MAX_HEADER_BYTES = 1 << 20
ENTRY_BYTES = 160  # upper bound for a tensor's entry in the header, without its name
SAFETENSORS_DTYPES = {
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
    """A shard that is being written."""

    file: BinaryIO
    header_space: int  # bytes that are reserved for the header
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    unaligned: dict[str, Tensor] = field(default_factory=dict)  # written last: the next tensor would not be aligned
    body_bytes: int = 0
    header_bytes: int = ENTRY_BYTES  # upper bound of what the entries need

    @property
    def total_bytes(self) -> int:
        """The size of the body once all tensors are written."""
        return self.body_bytes + sum(tensor.numel() * tensor.dtype.itemsize for tensor in self.unaligned.values())

    def write(self, name: str, tensor: Tensor) -> None:
        data = tensor.contiguous().reshape(-1).view(torch.uint8)
        start, end = self.body_bytes, self.body_bytes + data.numel()
        self.entries[name] = {
            "dtype": SAFETENSORS_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        self.file.write(data.numpy().data)
        self.body_bytes = end

    def close(self) -> None:
        # Wide dtypes first: then every tensor starts at a multiple of the size of its elements.
        for name, tensor in sorted(self.unaligned.items(), key=lambda item: -item[1].dtype.itemsize):
            self.write(name, tensor)
        header = json.dumps({"__metadata__": {"format": "pt"}, **self.entries}, separators=(",", ":")).encode()
        self.file.seek(0)
        self.file.write(self.header_space.to_bytes(8, "little") + header.ljust(self.header_space))
        self.file.close()


class ShardWriter:
    """Writes the weights of a folder: `add` every tensor, then `finish`.

    Args:
        folder: An existing folder.
        max_header_bytes: An upper bound for the header if all tensors were in one file. Each shard reserves so much,
            or 1 MiB if that is less.
        max_shard_bytes: The size of a shard at which the next one is started.
    """

    def __init__(self, folder: Path, max_header_bytes: int, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
        self.folder, self.max_shard_bytes = folder, max_shard_bytes
        # Rounded up to a multiple of 8, so that the body is aligned. Two more entries: metadata and braces.
        self.header_space = -(-min(max_header_bytes + 2 * ENTRY_BYTES, MAX_HEADER_BYTES) // 8) * 8
        self.shard_numbers: dict[str, int] = {}  # by tensor, from 1
        self.total_bytes = 0
        self.count = 0
        self._shard: _Shard | None = None

    def add(self, name: str, tensor: Tensor) -> None:
        """Write a tensor to the current shard, or to a new one if the current shard is full."""
        entry_bytes = len(json.dumps(name)) + ENTRY_BYTES
        tensor_bytes = tensor.numel() * tensor.dtype.itemsize
        if self._shard is not None:
            is_header_full = self._shard.header_bytes + entry_bytes > self.header_space
            if is_header_full or self._shard.total_bytes + tensor_bytes > self.max_shard_bytes:
                self._close()
        shard = self._shard = self._shard or self._open()
        shard.header_bytes += entry_bytes
        if tensor_bytes % 8:
            shard.unaligned[name] = tensor
        else:
            shard.write(name, tensor)
        self.shard_numbers[name] = self.count
        self.total_bytes += tensor_bytes

    def finish(self) -> None:
        """Give the files their final names, and write the index if there are several."""
        self._close()
        if self.count == 1:
            (self.folder / _temporary_name(1)).rename(self.folder / "model.safetensors")
            return
        file_names = [f"model-{number:05d}-of-{self.count:05d}.safetensors" for number in range(1, self.count + 1)]
        for number, file_name in enumerate(file_names, 1):
            (self.folder / _temporary_name(number)).rename(self.folder / file_name)
        weight_map = {name: file_names[number - 1] for name, number in sorted(self.shard_numbers.items())}
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
        (self.folder / "model.safetensors.index.json").write_bytes(json.dumps(index, indent=2).encode() + b"\n")

    def abort(self) -> None:
        """Close the open shard; the caller deletes the folder."""
        if self._shard is not None:
            self._shard.file.close()

    def _open(self) -> _Shard:
        self.count += 1
        file = (self.folder / _temporary_name(self.count)).open("wb")
        file.seek(8 + self.header_space)
        return _Shard(file, self.header_space)

    def _close(self) -> None:
        if self._shard is not None:
            self._shard.close()
            self._shard = None


def _temporary_name(number: int) -> str:
    """Return the name of a shard while the number of shards is not known."""
    return f"shard-{number}.part"
