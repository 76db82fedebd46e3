"""Compare a Core AI file with its model bit by bit: codes and their dtype, scales, zero points, palette tables.

The compiler prints the program of the file. Constants are found by name, and the operation that reads the codes must
read the scales, zero points or tables of the same layer.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, fx

from scalepoint.errors import StoreError
from scalepoint.formats.apple.coreai.elements import FLOAT_TYPES, element_type, from_bytes, to_bytes
from scalepoint.formats.apple.coreai.lowering import (
    blockwise_shape,
    constant_name,
    scale_format,
    split_sparse,
    table_shape,
)
from scalepoint.formats.apple.coreai.package import read_metadata, read_program
from scalepoint.formats.apple.coreai.write import FLOAT_DTYPE_KEY
from scalepoint.formats.apple.describe_unequal import describe_unequal
from scalepoint.formats.apple.stored import StoredPalette, StoredStub, StoredWeight, build_coreai_graph
from scalepoint.spec.spec import to_dtype
from scalepoint.support.coreai_text import ProgramText

_CONSTANT = re.compile(r"^ *(%\S+) = coreai\.constant dense_resource<([^>]+)> : tensor<((?:\d+x)*)(\w+)>")
_OPERATION = re.compile(r"^ *(%\S+) = (coreai\.\w+) (%[^ ,]+(?:, %[^ ,]+)*)")
_SPARSE_OPERATIONS = ("coreai.build_sparse_with_bitmask", "coreai.sparse_with_bitmask_to_dense")
_WEIGHT_OPERATIONS = {"coreai.blockwise_shift_scale", "coreai.lut_to_dense", "coreai.lut_to_sparse_with_bitmask"}


class _Constant(NamedTuple):
    shape: tuple[int, ...]
    element_type: str


class _FileContent:
    """The named constants of a program, and the operations that read them."""

    def __init__(self, program: ProgramText) -> None:
        self.data = program.constants
        # By name. Constants of different shapes or types share a name if they have the same bytes.
        self.constants: dict[str, list[_Constant]] = {}
        self.names_by_value: dict[str, list[str]] = {}
        names_of_value: dict[str, tuple[str, ...]] = {}  # the constant that a value is, or from which it is computed
        self.operations: dict[str, list[tuple[str, tuple[str, ...]]]] = {}  # by operand: operation, all its operands
        for line in program.lines:
            if constant := _CONSTANT.match(line):
                value, name, sizes, element = constant.groups()
                constant_type = _Constant(tuple(map(int, sizes.split("x")[:-1])), element)
                self.constants.setdefault(name, []).append(constant_type)
                self.names_by_value.setdefault(self.data[name], []).append(name)
                names_of_value[value] = (name,)
            elif operation := _OPERATION.match(line):
                result, kind, values = operation.groups()
                operands = tuple(name for value in values.split(", ") for name in names_of_value.get(value, ()))
                if kind in _SPARSE_OPERATIONS:
                    names_of_value[result] = operands
                for name in operands:
                    self.operations.setdefault(name, []).append((kind, operands))

    def find(self, name: str, values: Tensor, fmt: str) -> str:
        """Return the name under which a constant is stored: the compiler stores equal constants once."""
        if name in self.constants:
            return name
        candidates = self.names_by_value.get(to_bytes(values, fmt).hex().upper(), ())
        expected = _Constant(tuple(values.shape), element_type(fmt))
        return next((other for other in candidates if expected in self.constants[other]), name)

    def get(self, name: str, expected: _Constant) -> _Constant | None:
        """Return the type of a constant, the expected one if several constants have this name."""
        types = self.constants.get(name, [])
        return expected if expected in types else next(iter(types), None)


def compare_with_model(path: Path, model: fx.GraphModule) -> list[str]:
    """Return one sentence for every tensor that differs between file and model; an empty list if all are equal."""
    scale_dtype = read_metadata(path).get(FLOAT_DTYPE_KEY, "float32")
    stored = build_coreai_graph(model, to_dtype(scale_dtype))
    try:
        content = _FileContent(read_program(path))
    except StoreError as error:
        return [str(error)]
    return list(_compare_modules(content, stored, scale_dtype))


def _compare_modules(content: _FileContent, stored: fx.GraphModule, scale_dtype: str) -> Iterator[str]:
    compared: set[str] = set()
    for path, module in stored.named_modules():
        if not isinstance(module, StoredWeight | StoredPalette | StoredStub):
            continue
        names = set()
        for buffer, (what, values, fmt) in _list_tensors(module, scale_dtype).items():
            name = content.find(constant_name(f"{path}.{buffer}"), values, fmt)
            names.add(name)
            yield from _compare_constant(content, path, name, what, values, fmt)
        compared |= names
        yield from _compare_operations(content, path, module, names)
    for name in content.constants:
        if name not in compared and any(op.endswith("quantize") for op, _ in content.operations.get(name, ())):
            yield f"{name}: the file quantizes with this constant, which the model does not have"


def _list_tensors(
    module: StoredWeight | StoredPalette | StoredStub, scale_dtype: str
) -> Mapping[str, tuple[str, Tensor, str]]:
    """Return the tensors of a module that are named in the file, by buffer: what they are, values, dtype."""
    if isinstance(module, StoredStub):
        tensors = {"scale": ("scales", module.scale, scale_dtype)}
        if module.has_zero_point:
            tensors["zero_point"] = ("zero points", module.zero_point, module.fmt)
        if module.minval is not None:
            tensors["minval"] = ("minima", module.minval, scale_dtype)
        return tensors
    codes = tuple(module.codes.shape)
    tensors = {"codes": ("codes", module.codes, module.fmt)}
    if isinstance(module, StoredWeight) and module.is_smaller_sparse:
        nonzero, mask = split_sparse(module.codes)
        tensors = {"codes": ("nonzero codes", nonzero, module.fmt), "mask": ("mask bits", mask, "uint1")}
    if isinstance(module, StoredPalette):
        if module.mask is not None:
            unpruned = module.codes[module.mask != 0]
            tensors = {
                "codes": ("indices of unpruned weights", unpruned, module.fmt),
                "mask": ("mask bits", module.mask, "uint1"),
            }
        shape = table_shape(codes, tuple(module.tables.shape), module.axis)
        return {**tensors, "tables": ("entries", module.tables.reshape(shape), scale_dtype)}
    shape = blockwise_shape(codes, tuple(module.scale.shape), module.axis)
    tensors["scale"] = ("scales", module.scale.reshape(shape), scale_format(module.scale, scale_dtype))
    if module.minval is not None:
        tensors["minval"] = ("minima", module.minval.reshape(shape), scale_dtype)
    if module.zero_point is not None:
        tensors["zero_point"] = ("zero points", module.zero_point.reshape(shape), module.fmt)
    return tensors


def _compare_constant(
    content: _FileContent, path: str, name: str, what: str, values: Tensor, fmt: str
) -> Iterator[str]:
    constant = content.get(name, _Constant(tuple(values.shape), element_type(fmt)))
    if constant is None:
        yield f"{path}: its {what} are not in the file"
        return
    if constant.element_type != element_type(fmt):
        yield f"{path}: its {what} are {constant.element_type} in the file, {fmt} in the model"
        return
    try:
        array = from_bytes(bytes.fromhex(content.data[name]), fmt, constant.shape)
    except ValueError as error:
        yield f"{path}: its {what} cannot be read from the file: {error}"
        return
    if fmt in FLOAT_TYPES:
        values = values.to(torch.float16 if fmt == "float16" else torch.float32)
    yield from describe_unequal(path, what, array, values)


def _compare_operations(
    content: _FileContent, path: str, module: StoredWeight | StoredPalette | StoredStub, names: set[str]
) -> Iterator[str]:
    """Check that an operation of each expected kind reads all constants of a module."""
    is_stub = isinstance(module, StoredStub)
    kinds = {kind for name in names for kind, operands in content.operations.get(name, ()) if names <= set(operands)}
    if is_stub and not kinds >= {"coreai.quantize", "coreai.dequantize"}:
        yield f"{path}: the file does not quantize with all of its constants"
    if not is_stub and not kinds & _WEIGHT_OPERATIONS:
        yield f"{path}: no operation of the file reads all of its constants"
