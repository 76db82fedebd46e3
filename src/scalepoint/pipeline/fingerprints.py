"""Fingerprints: short digests of models, targets, code and data.

The cache of stages (`cache.py`) compares them, so that a resumed run detects changed inputs. Equal content must give
equal fingerprints in every process, so they must not depend on memory addresses or PYTHONHASHSEED.
"""

import hashlib
import inspect
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from types import CellType, CodeType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from scalepoint.compat.torch_names import pytree
from scalepoint.numerics import dtype_name
from scalepoint.quantize.fingerprint import fingerprint_model as fingerprint_parameters
from scalepoint.spec import QuantizationSpec
from scalepoint.support.jsonable import to_jsonable
from scalepoint.targets import Target

DIGITS = 16  # hexadecimal digits of a fingerprint
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def fingerprint(*parts: object) -> str:
    """Return the digest of plain values."""
    return hashlib.sha256(repr(to_jsonable(parts)).encode()).hexdigest()[:DIGITS]


def fingerprint_model(model: nn.Module) -> str:
    """Return the digest of a model: its tensors, its module tree, and the code of every forward."""
    classes = {type(module) for module in model.modules()}
    forwards = {f"{cls.__module__}.{cls.__qualname__}": fingerprint_code(cls.forward) for cls in classes}
    modules = {name: type(module).__qualname__ for name, module in model.named_modules()}
    return fingerprint(
        fingerprint_parameters(model), sorted(forwards.items()), modules, _without_addresses(repr(model))
    )


def fingerprint_target(target: Target) -> str:
    """Return the digest of a target's declaration: patterns, rules, supported types, options."""
    return fingerprint(_describe(target))


def fingerprint_code(function: Any) -> str:
    """Return the digest of a function's bytecode, constants and plain closure values, but not of the data it reads."""
    return fingerprint(_describe_code(function))


def fingerprint_tensors(value: Any) -> str:
    """Return the digest of the tensors and arrays in a nested value: dtype, shape and bytes."""
    digest = hashlib.sha256()
    for leaf in pytree.tree_leaves(dict(value) if isinstance(value, Mapping) else value):
        if isinstance(leaf, Tensor) and (leaf.is_nested or leaf.is_meta or leaf.layout != torch.strided):
            continue  # calibration rejects such a tensor, with the number of its batch
        array = leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf
        if isinstance(array, Tensor):
            digest.update(f"{dtype_name(array.dtype)} {list(array.shape)}".encode())
            flat = array.contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
        elif isinstance(array, np.ndarray):
            digest.update(f"{array.dtype} {array.shape}".encode() + array.tobytes())
        else:
            digest.update(_without_addresses(repr(leaf)).encode())
    return digest.hexdigest()[:DIGITS]


def _describe(value: Any) -> Any:  # a table of cases
    """Convert a declaration to plain values. Different declarations have different values."""
    if isinstance(value, QuantizationSpec):
        return value.to_dict()
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if is_dataclass(value):
        values = {field.name: _describe(getattr(value, field.name)) for field in fields(value)}
        return [type(value).__qualname__, values]
    if isinstance(value, Mapping):
        return {str(key): _describe(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(repr(_describe(item)) for item in value)
    if isinstance(value, list | tuple):
        return [_describe(item) for item in value]
    return _describe_code(value) if callable(value) else _without_addresses(repr(value))


def _without_addresses(text: str) -> str:
    """Remove memory addresses, which differ in every process, from the text of a repr()."""
    return ADDRESS.sub("", text)


def _describe_code(function: Any) -> Any:
    if isinstance(function, partial):
        return [_describe_code(function.func), _describe(function.args), _describe(function.keywords)]
    inner = inspect.unwrap(function)
    python_function = inner if hasattr(inner, "__code__") else vars(type(inner)).get("__call__")  # a callable object
    code = getattr(python_function, "__code__", None)
    closure = [_describe_cell(cell) for cell in getattr(python_function, "__closure__", None) or ()]
    return [getattr(inner, "__qualname__", type(inner).__qualname__), _describe_bytecode(code) if code else "", closure]


def _describe_cell(cell: CellType) -> Any:
    """Describe a closure value if it is a plain one; "" for anything else."""
    try:
        value = cell.cell_contents
    except ValueError:  # the variable is not assigned yet
        return ""
    if isinstance(value, str | int | float | bool | QuantizationSpec | type | frozenset | None):
        return _describe(value)
    if isinstance(value, tuple):
        return [_describe(item) for item in value if isinstance(item, str | int | float)]
    return ""


def _describe_bytecode(code: CodeType) -> list[object]:
    return [code.co_code.hex(), code.co_names, [_describe_constant(constant) for constant in code.co_consts]]


def _describe_constant(value: Any) -> Any:
    """Describe a constant of the bytecode."""
    if isinstance(value, CodeType):
        return _describe_bytecode(value)
    if isinstance(value, frozenset):  # from `x in {"a", "b"}`; the order in its repr() depends on the hash seed
        return ["frozenset", *sorted(repr(_describe_constant(item)) for item in value)]
    return [_describe_constant(item) for item in value] if isinstance(value, tuple) else repr(value)
