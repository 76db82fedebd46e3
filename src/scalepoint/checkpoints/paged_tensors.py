"""Tensors that use memory only while they contain values.

    make    reserve address space without memory: shape, dtype and address are normal, all values read as zero
    fill    write values in place
    drop    release the memory; all values read as zero again

With them a model of any size can be captured, transformed and given quantizers, and its weights loaded block by block.
"""

import ctypes
import mmap
from collections.abc import Iterable

import torch
from torch import Tensor

from scalepoint.errors import UsageError

_HAS_PAGES = hasattr(mmap, "MADV_DONTNEED")  # not on Windows: there the memory of a tensor stays until it is deleted


def release_freed_memory() -> None:
    """Return freed memory to the system: glibc would keep most of what the work on a large block used."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):  # musl, macOS and Windows have no malloc_trim and do not need it
        return


def _reserve(size: int) -> mmap.mmap:
    """Reserve address space. Memory is used once a value is written."""
    if not _HAS_PAGES:
        return mmap.mmap(-1, size)
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0))


class PagedTensors:
    """Creates paged tensors, and loads and drops their values; tensors are identified by their address."""

    def __init__(self) -> None:
        self._pages: dict[int, mmap.mmap] = {}

    def make(self, shape: Iterable[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Create a tensor without memory."""
        size = torch.Size(shape)
        if not size.numel():
            return torch.empty(size, dtype=dtype)
        try:
            pages = _reserve(size.numel() * dtype.itemsize)
        except OSError as error:
            raise UsageError(
                f"no address space for a weight of shape {tuple(size)} ({error}): raise the limit of `ulimit -v`, or "
                "change vm.overcommit_memory=2"
            ) from error
        tensor = torch.frombuffer(pages, dtype=dtype).view(size)
        self._pages[tensor.data_ptr()] = pages
        return tensor

    def fill(self, tensor: Tensor, value: Tensor) -> None:
        """Write values into a tensor."""
        with torch.no_grad():
            tensor.copy_(value)

    def drop(self, tensor: Tensor) -> None:
        """Release the memory of a tensor."""
        if not _HAS_PAGES:
            tensor.detach().zero_()
            return
        self._pages[tensor.data_ptr()].madvise(mmap.MADV_DONTNEED)
        # Writing zero elements increments the version counter, so caches that depend on the values are invalidated.
        tensor.detach()[..., :0].zero_()
