"""Write a quantized model as a Core AI package (.aimodel).

    model --weights as codes, stubs as Q/DQ--> stored graph --torch.export--> program --coreai-torch--> text
    text --constants numbered, float32 to float16--> bytecode in a package folder

coreai-torch converts in float32. The text is converted to float16 afterwards, so that everything that is not quantized
has one type. Inputs and outputs stay float32. The same model gives the same bytes in every process.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from scalepoint.errors import ExportError, ScalepointError
from scalepoint.formats.apple.coreai.decompositions import check_operations, decompose_program
from scalepoint.formats.apple.coreai.file_info import DESCRIPTION_KEY
from scalepoint.formats.apple.coreai.lowering import register_operators
from scalepoint.formats.apple.coreai.package import coreai_imported, write_package
from scalepoint.formats.apple.stored import COREAI_FACTORIES, StoredWeight, build_coreai_graph
from scalepoint.formats.float32 import inputs_to_float32
from scalepoint.formats.format import ExportRequest
from scalepoint.formats.interface_names import input_names, output_names
from scalepoint.formats.pre_export import prepare_graph
from scalepoint.formats.stored_graph import build_float_graph
from scalepoint.graph.origin import get_origin
from scalepoint.graph.torch_export import export_graph
from scalepoint.numerics import dtype_name
from scalepoint.support.coreai_text import (
    ProgramText,
    convert_floats,
    find_quantizers,
    parse_program,
    rename_constants,
)
from scalepoint.support.files import replace_folder

FLOAT_DTYPE_KEY = "scalepoint.float_dtype"
NARROWED = {torch.int64: "int32", torch.float64: "float32"}  # dtypes that Core AI does not have


def write(model: fx.GraphModule, path: Path, request: ExportRequest) -> None:
    """Write the quantized model, and at `request.float_path` the float model of the same capture."""
    metadata = {**request.metadata, FLOAT_DTYPE_KEY: dtype_name(request.float_dtype)}
    _write_graph(build_coreai_graph(model, request.float_dtype), path, request, metadata)
    if request.float_path is not None:
        _write_graph(build_float_graph(model, COREAI_FACTORIES), request.float_path, request, {})


def check(model: fx.GraphModule, request: ExportRequest) -> None:
    """Raise TargetError if the model has an operation that cannot be written. Runs before calibration."""
    with coreai_imported() as coreai_torch, torch.no_grad():
        program = _export(build_float_graph(model, COREAI_FACTORIES), request)
        check_operations(decompose_program(coreai_torch, program))


def _export(model: fx.GraphModule, request: ExportRequest) -> ExportedProgram:
    """Export with the named free axes. All other sizes are fixed, because the Neural Engine runs fixed shapes."""
    args, kwargs = inputs_to_float32(request.inputs)
    axes = get_origin(model).axes
    is_dynamic = request.dynamic and bool(axes)
    return export_graph(prepare_graph(model), args, kwargs, is_dynamic, lambda name, _: axes.get(name, ()))


def _write_graph(model: fx.GraphModule, path: Path, request: ExportRequest, metadata: Mapping[str, str]) -> None:
    try:
        with coreai_imported() as coreai_torch, torch.no_grad():
            program = _export(model, request)
            text = rename_constants(_convert_program(coreai_torch, program, _find_sparse_codes(model)))
            if request.float_dtype == torch.float16:
                text = convert_floats(text, "f32", "f16", keeps_interface=True)
            content = {**metadata, DESCRIPTION_KEY: _describe(program, text)}
            replace_folder(path, lambda folder: write_package(folder, text, content))
    except ScalepointError:
        raise
    except Exception as error:  # coreai raises exceptions of many types
        raise ExportError(f"coreai-torch cannot convert this model: {_summarize(error)}") from error


def _find_sparse_codes(model: fx.GraphModule) -> frozenset[str]:
    return frozenset(
        f"{path}.codes"
        for path, module in model.named_modules()
        if isinstance(module, StoredWeight) and module.is_smaller_sparse
    )


def _convert_program(coreai_torch: Any, program: ExportedProgram, sparse_codes: frozenset[str]) -> ProgramText:
    names = input_names(program)
    decomposed = decompose_program(coreai_torch, program)
    check_operations(decomposed)
    for node in decomposed.graph.nodes:
        if node.op == "placeholder":  # coreai-torch looks constants up by target; names differ in capital letters
            node.target = node.name
        # coreai-torch reads class names as text from the module stack, which ours does not have.
        for key in ("nn_module_stack", "stack_trace", "torch_fn", "source_fn_stack"):
            node.meta.pop(key, None)
    converter = coreai_torch.TorchConverter(mode=coreai_torch.TorchConverter.Mode.RELEASE)
    register_operators(converter, decomposed, sparse_codes)
    outputs = [node for node in program.graph.output_node().args[0] if isinstance(node, fx.Node)]
    converter.add_exported_program(decomposed, input_names=names, output_names=output_names(program, len(outputs)))
    return parse_program(str(converter.to_coreai()))


def _describe(program: ExportedProgram, text: ProgramText) -> str:
    """Return the inputs and quantizers as JSON, for `read_info`."""
    values = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    inputs = [
        {
            "name": name,
            "dtype": NARROWED.get(values[name].dtype, dtype_name(values[name].dtype)),
            "shape": [size if isinstance(size, int) else None for size in values[name].shape],
        }
        for name in input_names(program)
    ]
    return json.dumps({"inputs": inputs, "quantizers": {name: name for name in find_quantizers(text)}})


def _summarize(error: Exception) -> str:
    """Return the first two lines: the compiler writes the cause into the second."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    return " ".join(lines[:2]) or type(error).__name__
