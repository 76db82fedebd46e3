"""Writes a quantized model as a .tflite file, by the public schema.

    model -> stored graph (codes and Q/DQ) -> exported program -> GraphWriter -> tensors and operators -> file

Inputs and outputs have the shapes of the model, images with channels first; inside the file channels are last, as
LiteRT's kernels take them. The batch is dynamic unless an operation needs its size as a constant.
"""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from scalepoint.compat.torch_names import pytree
from scalepoint.errors import ExportError, ScalepointError, ScalepointWarning
from scalepoint.formats.float32 import inputs_to_float32
from scalepoint.formats.format import ExportRequest
from scalepoint.formats.interface_names import output_names
from scalepoint.formats.litert import data_movement, elementwise, lookups, pools, products, reductions
from scalepoint.formats.litert.decompositions import decompose_program
from scalepoint.formats.litert.graph_writer import GraphWriter
from scalepoint.formats.litert.schema import import_schema
from scalepoint.formats.litert.stored import LITERT_FACTORIES
from scalepoint.formats.litert.values import FixedBatchError, Value
from scalepoint.formats.pre_export import prepare_graph
from scalepoint.formats.stored_graph import build_float_graph, build_stored_graph
from scalepoint.graph.torch_export import export_graph, export_logs_silenced
from scalepoint.graph.user_traceback import user_level
from scalepoint.support.files import replace_bytes

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
# Importing these modules registers their operations in OPERATION_WRITERS.
OPERATION_MODULES = (lookups, data_movement, elementwise, pools, products, reductions)


def write(model: fx.GraphModule, path: Path, request: ExportRequest) -> None:
    """Write the quantized model, and with request.float_path also the float model of the same capture."""
    stored = build_stored_graph(model, LITERT_FACTORIES)
    writer = _write_file(stored, path, request, {"made_for": dict(request.metadata)})
    if writer.fixed_batch_reason:
        _warn_about_fixed_batch(writer)
    if request.float_path is not None:
        write_float(model, request.float_path, request)


def write_float(model: fx.GraphModule, path: Path, request: ExportRequest) -> None:
    """Write a graph, with or without quantizers, in float."""
    _write_file(build_float_graph(model, LITERT_FACTORIES), path, request, {})


def write_with_layer_outputs(model: fx.GraphModule, path: Path, request: ExportRequest) -> None:
    """Write the file with the codes of every constant quantizer as additional outputs, for a comparison by layer."""
    _write_file(build_stored_graph(model, LITERT_FACTORIES), path, request, {}, with_codes=True)


def check(model: fx.GraphModule, request: ExportRequest) -> None:
    """Raise TargetError if the model has an operation that cannot be written. Runs before calibration."""
    _write_graph(build_float_graph(model, LITERT_FACTORIES), request)


def _write_file(
    model: fx.GraphModule,
    path: Path,
    request: ExportRequest,
    description: Mapping[str, Any],
    *,
    with_codes: bool = False,
) -> GraphWriter:
    writer = _write_graph(model, request)
    values = [output for output in writer.outputs if isinstance(output, Value | Tensor)]
    input_tensors = {tensor for value in writer.inputs.values() for tensor in value.tensors.values()}
    outputs: dict[str, int] = {}
    for name, value in zip(output_names(writer.program, len(values)), values, strict=True):
        outputs[name] = _add_output(writer, name, value, input_tensors | set(outputs.values()))
    codes: dict[str, int] = {}
    if with_codes:
        codes = {name: writer.materialize(value) for name, value in writer.quantizers.items()}
    description = {**description, "outputs": [*outputs, *codes], "quantizers": {name: name for name in codes}}
    inputs = {name: writer.materialize(value) for name, value in writer.inputs.items()}
    data = writer.file.serialize(inputs, {**outputs, **codes}, json.dumps(description).encode())
    replace_bytes(path, data)
    return writer


def _warn_about_fixed_batch(writer: GraphWriter) -> None:
    message = (
        f"the batch of the .tflite file is {writer.batch_size}, that of the example inputs, because it cannot be "
        f"dynamic: {writer.fixed_batch_reason}. Give example inputs with the batch size that the device uses"
    )
    warnings.warn(ScalepointWarning(message), stacklevel=user_level())


def _add_output(writer: GraphWriter, name: str, value: Any, used_tensors: set[int]) -> int:
    """Return the index of a float tensor with this name, after a copy if the tensor is a constant or already used."""
    value = writer.dequantize(value)
    index = writer.materialize(value)
    if index in used_tensors or isinstance(value, Tensor):
        index = writer.materialize(writer.reshape(writer.as_value(value), value.shape))
    writer.file.graph.tensors[index].name = writer.file.unused_name(name).encode()
    return index


def _write_graph(model: fx.GraphModule, request: ExportRequest) -> GraphWriter:
    """Write all operations, with a dynamic batch if every operation allows it, else with the batch of the example."""
    import_schema()
    inputs = pytree.tree_map(_contiguous, inputs_to_float32(request.inputs))
    model = prepare_graph(model)
    fixed_batch_reason = ""
    if request.dynamic:
        try:
            return _export_and_write(model, inputs, dynamic=True)
        except FixedBatchError as error:
            fixed_batch_reason = str(error)
    writer = _export_and_write(model, inputs, dynamic=False)
    writer.fixed_batch_reason = fixed_batch_reason
    return writer


def _export_and_write(model: fx.GraphModule, inputs: Inputs, *, dynamic: bool) -> GraphWriter:
    try:
        with torch.no_grad(), export_logs_silenced():
            program = decompose_program(export_graph(model, *inputs, dynamic, _dynamic_axes))
            writer = GraphWriter(program, _batch_size(inputs))
            writer.run()
            return writer
    except (ScalepointError, FixedBatchError):
        raise
    except Exception as error:  # torch raises errors of any type
        first_line = next(iter(str(error).strip().splitlines()), "")
        raise ExportError(f"torch cannot export this model for LiteRT. {type(error).__name__}: {first_line}") from error


def _dynamic_axes(name: str, value: Tensor) -> tuple[int, ...]:
    """Make only the batch dynamic. LiteRT plans shapes in advance, so sequence lengths are those of the example."""
    return (0,) if value.ndim > 1 else ()


def _contiguous(value: Any) -> Any:
    return value.contiguous() if isinstance(value, Tensor) and value.layout == torch.strided else value


def _batch_size(inputs: Inputs) -> int:
    leaves = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.ndim]
    return int(leaves[0].shape[0]) if leaves else 1
