"""Tensors that take memory only while something is in them.

    make    address space without pages: shape, type and address are those of any tensor, its values read as zeros
    fill    write values in place: whoever holds the tensor sees them
    drop    give the pages back; it reads as zeros again

So a model of any size can be captured, transformed and given quantizers, and its weights come and go block by block.
"""

import ctypes
import mmap
from collections.abc import Iterable

import torch
from torch import Tensor

from scalepoint.errors import UsageError

_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)


def release_freed_memory() -> None:
    """Give back what the C library keeps of freed memory, where it is one that does; what worked on a block of a large
    model would else stay around in pieces."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):  # musl, macOS, Windows: they need no telling
        return


class PagedTensors:
    """Hollow tensors, known by their address."""

    def __init__(self) -> None:
        self._pages: dict[int, mmap.mmap] = {}

    def make(self, shape: Iterable[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """An empty one."""
        size = torch.Size(shape)
        if not size.numel():
            return torch.empty(size, dtype=dtype)
        try:
            pages = mmap.mmap(-1, size.numel() * dtype.itemsize, flags=_FLAGS)
        except OSError as error:
            raise UsageError(
                f"no address space for a weight of {tuple(size)} ({error}): the limit is that of `ulimit -v`, or of "
                "vm.overcommit_memory=2"
            ) from error
        tensor = torch.frombuffer(pages, dtype=dtype).view(size)
        self._pages[tensor.data_ptr()] = pages
        return tensor

    def fill(self, tensor: Tensor, value: Tensor) -> None:
        """Write values into it."""
        with torch.no_grad():
            tensor.copy_(value)

    def drop(self, tensor: Tensor) -> None:
        """Take its memory away."""
        self._pages[tensor.data_ptr()].madvise(mmap.MADV_DONTNEED)
        tensor.detach()[..., :0].zero_()  # nothing is written, but who kept something of it notices
