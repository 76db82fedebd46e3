"""Short marks of what a stage was made from, so that a resumed run notices what is other than before."""

import hashlib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from scalepoint.numerics import dtype_name
from scalepoint.plain import plain
from scalepoint.quantize.fingerprint import fingerprint
from scalepoint.targets import Target

FEW = 4  # batches of the data that are looked at
LENGTH = 16


def mark(*parts: object) -> str:
    """A digest of what JSON can say of the parts."""
    return hashlib.sha256(repr(plain(parts)).encode()).hexdigest()[:LENGTH]


def mark_of_model(model: nn.Module) -> str:
    """Its tensors, its modules and what their forward does."""
    classes = {type(module) for module in model.modules()}
    forwards = {f"{each.__module__}.{each.__qualname__}": mark_of_code(each.forward) for each in classes}
    modules = {name: type(module).__qualname__ for name, module in model.named_modules()}
    return mark(fingerprint(model), sorted(forwards.items()), modules, repr(model))


def mark_of_target(target: Target) -> str:
    return mark(target.name, dict(target.options), target.activation.to_dict(), target.weight.to_dict())


def mark_of_code(function: Any) -> str:
    """What a function does, as far as its own code says; what it reads is not seen."""
    inner = inspect.unwrap(function)
    called = inner if hasattr(inner, "__code__") else vars(type(inner)).get("__call__")  # of an object its method
    code = getattr(called, "__code__", None)
    return mark(getattr(inner, "__qualname__", type(inner).__qualname__), _code(code) if code else "")


def _code(code: CodeType) -> list[object]:
    constants = [_code(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    return [code.co_code.hex(), code.co_names, constants]


def mark_of_values(value: Any) -> str:
    """Tensors and arrays by type, shape and bytes."""
    found = hashlib.sha256()
    for leaf in pytree.tree_leaves(dict(value) if isinstance(value, Mapping) else value):
        array = leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf
        if isinstance(array, Tensor):
            found.update(f"{dtype_name(array.dtype)} {list(array.shape)}".encode())
            flat = array.contiguous().reshape(-1)
            found.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
        elif isinstance(array, np.ndarray):
            found.update(f"{array.dtype} {array.shape}".encode() + array.tobytes())
        else:
            found.update(repr(leaf).encode())
    return found.hexdigest()[:LENGTH]


class Seen:
    """Batches on their way to the model: the first few leave a mark."""

    def __init__(self, data: Any) -> None:
        self.data = data
        self.mark: str | None = None

    def __iter__(self) -> Iterator[Any]:
        marks: list[str] = []
        for batch in self.data:
            if len(marks) < FEW:
                marks.append(mark_of_values(batch))
                self.mark = mark(marks, self._size())
            yield batch

    def __len__(self) -> int:
        return len(self.data)

    def _size(self) -> int | None:
        try:
            return len(self.data)
        except TypeError:
            return None


def watched(data: Any) -> Any:
    """Batches that can be read again, with the mark that they leave; anything else as it is."""
    is_batches = isinstance(data, Iterable) and not isinstance(data, Iterator | Tensor | Mapping | str | bytes)
    return Seen(data) if is_batches and not callable(data) else data


def mark_of_data(data: Any) -> str | None:
    """Of calibration data: a function by its code, batches by the first few; None of what can be read only once."""
    seen = watched(data)
    if isinstance(seen, Seen):
        for _ in islice(seen, FEW):
            pass
        return seen.mark
    return mark_of_code(data) if callable(data) else None
