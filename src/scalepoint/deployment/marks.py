"""Short marks of what a stage was made from, so that a resumed run notices what is other than before."""

import hashlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from itertools import islice
from types import CellType, CodeType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from scalepoint.numerics import dtype_name
from scalepoint.plain import plain
from scalepoint.quantize.feeding import batches_of
from scalepoint.quantize.fingerprint import fingerprint
from scalepoint.spec import QuantizationSpec
from scalepoint.targets import Target

FEW = 4  # batches of the data that are looked at
LENGTH = 16
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def mark(*parts: object) -> str:
    """A digest of what JSON can say of the parts."""
    return hashlib.sha256(repr(plain(parts)).encode()).hexdigest()[:LENGTH]


def mark_of_model(model: nn.Module) -> str:
    """Its tensors, its modules and what their forward does."""
    classes = {type(module) for module in model.modules()}
    forwards = {f"{each.__module__}.{each.__qualname__}": mark_of_code(each.forward) for each in classes}
    modules = {name: type(module).__qualname__ for name, module in model.named_modules()}
    return mark(fingerprint(model), sorted(forwards.items()), modules, _without_addresses(repr(model)))


def mark_of_target(target: Target) -> str:
    """Everything it declares: patterns, rules, what it accepts, how it stores biases, its options."""
    return mark(_told(target))


def mark_of_code(function: Any) -> str:
    """What a function does, as far as its own code and what it was made with say; what it reads is not seen."""
    return mark(_told_of_code(function))


def _told(value: Any) -> Any:  # noqa: PLR0911  # a table of cases
    """What tells one declaration from another, as plain values."""
    if isinstance(value, QuantizationSpec):
        return value.to_dict()
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if is_dataclass(value):
        return [type(value).__qualname__, {each.name: _told(getattr(value, each.name)) for each in fields(value)}]
    if isinstance(value, Mapping):
        return {str(key): _told(each) for key, each in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(repr(_told(each)) for each in value)
    if isinstance(value, list | tuple):
        return [_told(each) for each in value]
    return _told_of_code(value) if callable(value) else _without_addresses(repr(value))


def _without_addresses(text: str) -> str:
    """The text of a repr() without memory addresses, which are different in every process."""
    return ADDRESS.sub("", text)


def _told_of_code(function: Any) -> Any:
    if isinstance(function, partial):
        return [_told_of_code(function.func), _told(function.args), _told(function.keywords)]
    inner = inspect.unwrap(function)
    called = inner if hasattr(inner, "__code__") else vars(type(inner)).get("__call__")  # of an object its method
    code = getattr(called, "__code__", None)
    cells = getattr(called, "__closure__", None) or ()
    held = [_told_of_cell(cell) for cell in cells]
    return [getattr(inner, "__qualname__", type(inner).__qualname__), _code(code) if code else "", held]


def _told_of_cell(cell: CellType) -> Any:
    """What a function was made with, where that is plain to see: numbers, names, other functions of the same kind."""
    try:
        value = cell.cell_contents
    except ValueError:  # not there yet
        return ""
    if isinstance(value, str | int | float | bool | QuantizationSpec | type | frozenset | None):
        return _told(value)
    return [_told(each) for each in value if isinstance(each, str | int | float)] if isinstance(value, tuple) else ""


def _code(code: CodeType) -> list[object]:
    return [code.co_code.hex(), code.co_names, [_constant(each) for each in code.co_consts]]


def _constant(value: Any) -> Any:
    """A constant of the bytecode. `x in {"a", "b"}` makes a frozenset, whose repr() follows the hash seed of the
    process: its elements are sorted."""
    if isinstance(value, CodeType):
        return _code(value)
    if isinstance(value, frozenset):
        return ["frozenset", *sorted(repr(_constant(each)) for each in value)]
    return [_constant(each) for each in value] if isinstance(value, tuple) else repr(value)


def mark_of_values(value: Any) -> str:
    """Tensors and arrays by type, shape and bytes."""
    found = hashlib.sha256()
    for leaf in pytree.tree_leaves(dict(value) if isinstance(value, Mapping) else value):
        if isinstance(leaf, Tensor) and (leaf.is_nested or leaf.is_meta or leaf.layout != torch.strided):
            continue  # `feed` refuses it, and says which batch it is
        array = leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf
        if isinstance(array, Tensor):
            found.update(f"{dtype_name(array.dtype)} {list(array.shape)}".encode())
            flat = array.contiguous().reshape(-1)
            found.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
        elif isinstance(array, np.ndarray):
            found.update(f"{array.dtype} {array.shape}".encode() + array.tobytes())
        else:
            found.update(_without_addresses(repr(leaf)).encode())
    return found.hexdigest()[:LENGTH]


class Watched:
    """Calibration data on its way to the model, and its mark: a function by its code, batches by the first few; None of
    what can be read only once."""

    def __init__(self, source: Any, look: Callable[[Any], None] | None = None, max_batches: int | None = None) -> None:
        """`look` is called with every batch, before the model is; the mark is made of `max_batches` at most."""
        self.few = FEW if max_batches is None else min(FEW, max_batches)
        is_batches = isinstance(source, Iterable) and not isinstance(source, Tensor | Mapping | str | bytes)
        self.source = source
        self.data: Any = source
        if is_batches and not callable(source):
            if not isinstance(source, Iterator):
                self.data = _Passing(source, look, self.few)
            elif look is not None:
                self.data = _looked_at(source, look)

    @property
    def mark(self) -> str | None:
        """After the data was read. Batches that the mark needs and that were not read yet are read now."""
        if isinstance(self.data, _Passing):
            return self.data.mark if self.data.is_complete else self.mark_now()
        return mark_of_code(self.source) if callable(self.source) else None

    def mark_now(self) -> str | None:
        """The same, from a look at the first batches."""
        if isinstance(self.data, _Passing):
            for _ in islice(batches_of(self.data), self.few):
                pass
            return self.data.mark
        return self.mark


def _looked_at(batches: Iterator[Any], look: Callable[[Any], None]) -> Iterator[Any]:
    """The batches, each given to `look` before it is used."""
    for batch in batches:
        look(batch)
        yield batch


class _Passing:
    """Batches that leave a mark of the first few."""

    def __init__(self, batches: Any, look: Callable[[Any], None] | None, few: int) -> None:
        self.batches, self.few = batches, few
        self.look = look
        self.mark: str | None = None
        self.is_complete = False  # whether all batches that the mark is made of were read

    def __iter__(self) -> Iterator[Any]:
        marks: list[str] = []
        for batch in self.batches:
            if self.look is not None:
                self.look(batch)
            if len(marks) < self.few:
                marks.append(mark_of_values(batch))
                self.mark = mark(marks, self._size())
                self.is_complete = len(marks) == self.few
            yield batch
        self.is_complete = True

    def __len__(self) -> int:
        return len(self.batches)

    def _size(self) -> int | None:
        try:
            return len(self.batches)
        except TypeError:
            return None
