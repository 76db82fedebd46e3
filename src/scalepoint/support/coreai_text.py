"""The text form of a Core AI program: its operations, and its constants as bytes by name.

    %8 = coreai.constant dense_resource<layer.fc.codes> : tensor<100x128xsi4>
    ...
    layer.fc.codes: "0x10000000341376..."          4 bytes of alignment, then the elements, bits packed low first

The compiler gives every large constant a name that differs from process to process, so `rename_constants` numbers
them. `convert_floats` changes float32 into float16 or back. The child program of the runtime loads this file too, so it
imports nothing of scalepoint.
"""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

MAIN_GRAPH = " @main("  # other graphs are called by it: compositions such as attention
OWN_PREFIX = "layer."  # constants that the writer has named; the compiler's names start differently
ALIGNMENT = "10000000"  # 16 bytes, as 4 little-endian bytes in hexadecimal digits
FLOAT32_OPERANDS = {"coreai.interpolate": (2, 3)}  # scales and offsets, constants that must stay float32
NUMPY_TYPES: dict[str, Any] = {"f16": np.float16, "f32": np.float32}
_RESOURCE = re.compile(r'^ *"?([^\s":]+)"?: "0x[0-9A-F]{8}([0-9A-F]*)"', re.MULTILINE)
_CONSTANT = re.compile(r"^( *%\S+ = coreai\.constant )(dense\S*<.*>)( : tensor<(?:[\d?]+x)*)(\w+)(>.*)$")
_USE = re.compile(r"dense_resource<([^>]+)>")
_NUMBER = re.compile(r"0x[0-9A-F]+|-?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?")
_FLOAT32_OPERATION = re.compile(rf"^ *%\S+ = ({'|'.join(map(re.escape, FLOAT32_OPERANDS))}) ([^{{:]*)(.*)$")
_QUANTIZE = re.compile(r"^ *(%\S+) = coreai\.quantize %[^,]+, (%[^,]+),.*-> (tensor<[^>]*>)")
_TENSOR_TYPE = re.compile(r"tensor<[^>]*>")
_PRODUCT = re.compile(
    r"^ *(%\S+) = coreai\.(?:decomposable\.)?(?:conv[123]d|conv_transpose\w*|(?:broadcasting_)?batch_matmul) "
    r"%[^ ,]+, (%[^ ,]+).* -> (tensor<[^>]*>)"
)
_ANY_OPERATION = re.compile(r"^ *(%\S+) = coreai\.([\w.]+) (%[^ ,]+)")
# Operations that a weight goes through between its codes and its product. Codes are their first operand.
_WEIGHT_OPERATIONS = frozenset(
    (
        "blockwise_shift_scale", "lut_to_dense", "lut_to_sparse_with_bitmask", "build_sparse_with_bitmask",
        "sparse_with_bitmask_to_dense", "transpose", "reshape", "cast",
    )
)  # fmt: skip
_ARGUMENT = re.compile(r"(%arg\d+): (tensor<[^>]*>)")


@dataclass(frozen=True)
class ProgramText:
    """Operations, one line each, and the elements of named constants in hexadecimal digits."""

    lines: tuple[str, ...]
    constants: dict[str, str]

    def __str__(self) -> str:
        operations = "\n".join(self.lines)
        if not self.constants:
            return f"{operations}\n"
        constants = ",\n".join(f'      {name}: "0x{ALIGNMENT}{digits}"' for name, digits in self.constants.items())
        return f"{operations}\n{{-#\n  dialect_resources: {{\n    builtin: {{\n{constants}\n    }}\n  }}\n#-}}\n"


def parse_program(text: str) -> ProgramText:
    """Parse the text that the compiler prints."""
    operations, _, resources = text.partition("\n{-#\n")
    return ProgramText(tuple(operations.rstrip().split("\n")), dict(_RESOURCE.findall(resources)))


def rename_constants(program: ProgramText) -> ProgramText:
    """Number the constants that the compiler has named, in the order of their use."""
    names: dict[str, str] = {}
    for line in program.lines:
        for name in _USE.findall(line):
            if name not in names:
                names[name] = name if name.startswith(OWN_PREFIX) else f"constant.{len(names)}"
    lines = tuple(_USE.sub(lambda use: f"dense_resource<{names[use[1]]}>", line) for line in program.lines)
    constants = {new: program.constants[old] for old, new in names.items()}
    return ProgramText(lines, dict(sorted(constants.items())))


def find_quantizers(program: ProgramText) -> dict[str, tuple[str, str]]:
    """Return the value and type of every quantizer's codes, by "NAME/QuantizeLinear".

    A quantizer is named after its scale. The compiler stores equal scales once: those of several operations are left
    out, because they have no clear name.
    """
    scales: dict[str, str] = {}
    codes_by_scale: dict[str, list[tuple[str, str]]] = {}
    for line in program.lines:
        if (constant := _CONSTANT.match(line)) and (use := _USE.search(line)):
            scales[constant[1].split()[0]] = use[1]
        elif quantizer := _QUANTIZE.match(line):
            value, scale, code_type = quantizer.groups()
            codes_by_scale.setdefault(scales.get(scale, ""), []).append((value, code_type))
    return {
        f"{scale.removeprefix(OWN_PREFIX).removesuffix('.scale')}/QuantizeLinear": codes[0]
        for scale, codes in codes_by_scale.items()
        if len(codes) == 1 and scale.endswith(".scale")
    }


def product_name(path: str) -> str:
    """Return the name of the output that shows the product of a layer, without its bias."""
    return re.sub(r"[^A-Za-z0-9_.]", "_", path) + "/product"


def find_products(program: ProgramText) -> dict[str, tuple[str, str]]:
    """Return the value and type of the products whose weight is stored as codes, by `product_name`.

    Products of layers that run several times, or whose codes the compiler stores once for several layers, are left out.
    """
    layers: dict[str, str] = {}  # by value: the layer whose codes it is, or is computed from
    products: dict[str, list[tuple[str, str]]] = {}
    is_main = False
    for line in program.lines:
        if line.startswith("  coreai.graph "):
            is_main, layers = MAIN_GRAPH in line, {}
        if not is_main:
            continue
        if (constant := _CONSTANT.match(line)) and (use := _USE.search(line)):
            if use[1].startswith(OWN_PREFIX) and use[1].endswith(".codes"):
                layers[constant[1].split()[0]] = use[1].removeprefix(OWN_PREFIX).removesuffix(".codes")
        elif product := _PRODUCT.match(line):
            value, weight, tensor_type = product.groups()
            if weight in layers:
                products.setdefault(layers[weight], []).append((value, tensor_type))
        elif (operation := _ANY_OPERATION.match(line)) and operation[2] in _WEIGHT_OPERATIONS:
            value, _, source = operation.groups()
            if source in layers:
                layers[value] = layers[source]
    return {product_name(path): calls[0] for path, calls in products.items() if len(calls) == 1}


def with_layers_as_outputs(program: ProgramText) -> ProgramText:
    """Return a program that also returns the codes of its quantizers, and the products of its layers."""
    quantizers = find_quantizers(program) | find_products(program)
    if not quantizers:
        return program
    results = "".join(f', {code_type} {{coreai.name = "{name}"}}' for name, (_, code_type) in quantizers.items())
    values = "".join(f", {value}" for value, _ in quantizers.values())
    types = "".join(f", {code_type}" for _, code_type in quantizers.values())
    lines: list[str] = []
    is_main = False
    for line in program.lines:
        if line.startswith("  coreai.graph "):
            is_main = MAIN_GRAPH in line
        if is_main and line.startswith("  coreai.graph "):
            start, _, end = line.rpartition('"})')
            lines.append(f'{start}"}}{results}){end}')
        elif is_main and line.startswith("    coreai.output "):
            outputs, _, output_types = line.partition(" : ")
            lines.append(f"{outputs}{values} : {output_types}{types}")
        else:
            lines.append(line)
    return ProgramText(tuple(lines), program.constants)


def convert_floats(program: ProgramText, source: str, result: str, *, keeps_interface: bool) -> ProgramText:
    """Convert every tensor of one float type to another.

    Values beyond the largest float16 become that number, except infinity.

    Args:
        program: The program.
        source: "f32" or "f16".
        result: The other one.
        keeps_interface: Leave inputs and outputs as they are, with casts next to them.
    """
    return _FloatConverter(program, source, result, keeps_interface=keeps_interface).convert()


class _FloatConverter:
    """Converts the lines of one program, one after the other.

    Attributes:
        type_pattern: Matches the element type `source` in tensor<2x3xf32>.
        shared_names: Constants whose bytes are also those of a constant of another type.
        float32_values: Operands that must stay float32: the operations get an unconverted copy.
        keeps_types: Whether inputs and outputs of the current graph keep their types.
        cast_inputs: Inputs of the current graph -> the values that they are cast to.
        lines, constants: The result so far.
    """

    def __init__(self, program: ProgramText, source: str, result: str, *, keeps_interface: bool) -> None:
        self.program, self.source, self.result, self.keeps_interface = program, source, result, keeps_interface
        self.type_pattern = re.compile(rf"(?<=[x<]){source}(?=[,>])")
        self.shared_names = _find_names_of_other_types(program.lines, source)
        self.float32_values = _find_float32_operands(program.lines) if source == "f32" else frozenset()
        self.keeps_types = False
        self.cast_inputs: dict[str, str] = {}
        self.lines: list[str] = []
        self.constants = dict(program.constants)

    def convert(self) -> ProgramText:
        for line in self.program.lines:
            if line.startswith("  coreai.graph "):
                self._add_graph_header(line)
            elif (constant := _CONSTANT.match(line)) is not None:
                self._add_constant(line, constant)
            elif line.startswith("    coreai.output ") and self.keeps_types:
                self._add_cast_outputs(_replace_operands(line, self.cast_inputs))
            elif self.float32_values and (operation := _FLOAT32_OPERATION.match(line)):
                self._add_float32_operation(line, operation)
            else:
                self.lines.append(self._replace_types(_replace_operands(line, self.cast_inputs)))
        return ProgramText(tuple(self.lines), self.constants)

    def _replace_types(self, text: str) -> str:
        return self.type_pattern.sub(self.result, text)

    def _add_graph_header(self, line: str) -> None:
        self.keeps_types = self.keeps_interface and MAIN_GRAPH in line
        self.cast_inputs = {}
        if not self.keeps_types:
            self.lines.append(self._replace_types(line))
            return
        self.lines.append(line)
        for name, tensor_type in _ARGUMENT.findall(line):
            if self.type_pattern.search(tensor_type):
                cast = self.cast_inputs[name] = f"{name}_{self.result}"
                types = f"{tensor_type} to {self._replace_types(tensor_type)}"
                self.lines.append(f"    {cast} = coreai.cast {name} : {types}")

    def _add_constant(self, line: str, constant: re.Match[str]) -> None:
        if constant[1].split()[0] in self.float32_values:
            self.lines.append(_copy_constant(line, constant, self.constants))
        if constant[4] != self.source:
            self.lines.append(line)
            return
        name = _find_resource(constant[2])
        if name is None:
            self.lines.append(self._replace_types(_convert_inline_constant(constant, self.source, self.result)))
            return
        # The compiler stores equal bytes once, so several lines may have this name.
        new_name = f"{name}.{self.result}" if name in self.shared_names else name
        self.constants[new_name] = _convert_bytes(self.program.constants[name], self.source, self.result)
        self.lines.append(self._replace_types(line.replace(f"<{name}>", f"<{new_name}>")))

    def _add_float32_operation(self, line: str, operation: re.Match[str]) -> None:
        """Convert the types of an operation but those of its float32 operands, which are the copied constants."""
        float32_indices = FLOAT32_OPERANDS[operation[1]]
        operands = operation[2].strip().split(", ")
        names = [_float32_name(name) if index in float32_indices else name for index, name in enumerate(operands)]
        attributes, _, types = operation[3].partition(" : (")
        operand_types, _, result_type = types.partition(") -> ")
        converted = [
            tensor_type if index in float32_indices else self._replace_types(tensor_type)
            for index, tensor_type in enumerate(_TENSOR_TYPE.findall(operand_types))
        ]
        start = line[: operation.start(2)]
        signature = f"({', '.join(converted)}) -> {self._replace_types(result_type)}"
        self.lines.append(f"{start}{', '.join(names)} {attributes} : {signature}")

    def _add_cast_outputs(self, line: str) -> None:
        """Add casts of all converted outputs, and the line that returns them."""
        values, _, types = line.strip().removeprefix("coreai.output ").partition(" : ")
        names = values.split(", ")
        for index, tensor_type in enumerate(_TENSOR_TYPE.findall(types)):
            if self.type_pattern.search(tensor_type):
                cast_types = f"{self._replace_types(tensor_type)} to {tensor_type}"
                self.lines.append(f"    %output{index} = coreai.cast {names[index]} : {cast_types}")
                names[index] = f"%output{index}"
        self.lines.append(f"    coreai.output {', '.join(names)} : {types}")


def _find_resource(value: str) -> str | None:
    """Return the name of the bytes of a constant; None if its elements are inline."""
    return value.removeprefix("dense_resource<").removesuffix(">") if value.startswith("dense_resource<") else None


def _find_names_of_other_types(lines: tuple[str, ...], source: str) -> frozenset[str]:
    """Return the names whose bytes are also those of constants of another type than `source`."""
    constants = filter(None, map(_CONSTANT.match, lines))
    names = {_find_resource(constant[2]) for constant in constants if constant[4] != source}
    return frozenset(name for name in names if name is not None)


def _find_float32_operands(lines: tuple[str, ...]) -> frozenset[str]:
    """Return the values that FLOAT32_OPERANDS names."""
    operations = filter(None, map(_FLOAT32_OPERATION.match, lines))
    return frozenset(
        operation[2].strip().split(", ")[index] for operation in operations for index in FLOAT32_OPERANDS[operation[1]]
    )


def _float32_name(value: str) -> str:
    """Return the name of the unconverted copy: %35 -> %float32_35 (a name that starts with a digit has only digits)."""
    return f"%float32_{value.removeprefix('%')}"


def _copy_constant(line: str, match: re.Match[str], constants: dict[str, str]) -> str:
    """Return the definition of a second, unconverted constant with the same elements."""
    value, use = match[1].split()[0], _USE.search(line)
    if use is not None:
        constants[f"{use[1]}.f32"] = constants[use[1]]
        line = line.replace(f"<{use[1]}>", f"<{use[1]}.f32>")
    return line.replace(f"{value} = ", f"{_float32_name(value)} = ", 1)


def _replace_operands(line: str, names: dict[str, str]) -> str:
    return re.sub(r"%arg\d+", lambda use: names.get(use[0], use[0]), line) if names else line


def _convert_inline_constant(match: re.Match[str], source: str, result: str) -> str:
    """Convert the elements of a constant: hexadecimal digits or numbers."""
    start, value, *rest = match.groups()
    if value.startswith('dense<"0x'):
        digits = value.removeprefix('dense<"0x').removesuffix('">')
        value = f'dense<"0x{_convert_bytes(digits, source, result)}">'
    else:
        value = _NUMBER.sub(lambda number: _format(_parse(number[0], source), result), value)
    return "".join((start, value, *rest))


def _convert_bytes(digits: str, source: str, result: str) -> str:
    values = np.frombuffer(bytes.fromhex(digits), NUMPY_TYPES[source])
    data: bytes = _round(values, result).tobytes()
    return data.hex().upper()


def _round(values: Any, result: str) -> Any:
    """Convert to a float type: finite values stay finite."""
    dtype = NUMPY_TYPES[result]
    largest = np.finfo(dtype).max
    with np.errstate(over="ignore"):
        return np.where(np.isfinite(values), np.clip(values, -largest, largest), values).astype(dtype)


def _parse(number: str, source: str) -> Any:
    """Read a number; infinity and NaN are printed as their bits."""
    dtype = NUMPY_TYPES[source]
    if number.startswith("0x"):
        return np.frombuffer(int(number, 16).to_bytes(np.dtype(dtype).itemsize, "little"), dtype)[0]
    return np.asarray(float(number), dtype)


def _format(value: Any, result: str) -> str:
    converted = _round(value, result)
    if np.isfinite(converted):
        return f"{float(converted):.9e}"
    bits: bytes = converted.tobytes()[::-1]
    return f"0x{bits.hex().upper()}"
