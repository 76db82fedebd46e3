"""A quantized model becomes a .tflite file, by the public schema.

model --codes and Q/DQ--> stored form --one run without values--> program --the walk--> tensors and operators --> file

Inputs and outputs have the shapes that the model gives them, pictures with their channels first; inside they stand
last, as the kernels take them. The batch is free where no operation is told its size.
"""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from scalepoint.errors import ExportError, ScalepointError, ScalepointWarning
from scalepoint.formats.float32 import inputs_to_float32
from scalepoint.formats.format import ExportRequest
from scalepoint.formats.interface_names import output_names
from scalepoint.formats.litert import data_movement, elementwise, lookups, pools, products, reductions
from scalepoint.formats.litert.decompositions import decompose_program
from scalepoint.formats.litert.schema import import_schema
from scalepoint.formats.litert.stored import LITERT_FACTORIES
from scalepoint.formats.litert.values import FixedBatchError, Value
from scalepoint.formats.litert.walk import OPERATION_WRITERS, Walk
from scalepoint.formats.pre_export import prepare_graph
from scalepoint.formats.stored_graph import build_float_graph, build_stored_graph
from scalepoint.graph.torch_export import export_graph, export_logs_silenced
from scalepoint.graph.user_traceback import user_level
from scalepoint.support.files import replace_file

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
OPERATION_MODULES = (lookups, data_movement, elementwise, pools, products, reductions)  # each brings forms


def write(model: fx.GraphModule, path: Path, request: ExportRequest) -> None:
    """The quantized model, and the float one of the same capture where it is asked for."""
    _warn_about_fixed_batch(
        _write_file(build_stored_graph(model, LITERT_FACTORIES), path, request, {"made_for": dict(request.metadata)})
    )
    if request.float_path is not None:
        write_float(model, request.float_path, request)


def write_float(model: fx.GraphModule, path: Path, request: ExportRequest) -> None:
    """A graph with or without quantizers, in float."""
    _write_file(build_float_graph(model, LITERT_FACTORIES), path, request, {})


def write_with_layer_outputs(model: fx.GraphModule, path: Path, request: ExportRequest) -> None:
    """The same file with the codes at every constant quantizer as further outputs: to be run, not kept."""
    _write_file(build_stored_graph(model, LITERT_FACTORIES), path, request, {}, exposed=True)


def check(model: fx.GraphModule, request: ExportRequest) -> None:
    """Refuse a model that has an operation without a form, before anything is calibrated."""
    _walk_program(build_float_graph(model, LITERT_FACTORIES), request)


def _write_file(
    model: fx.GraphModule, path: Path, request: ExportRequest, about: Mapping[str, Any], *, exposed: bool = False
) -> Walk:
    walk, program = _walk_program(model, request)
    values = [each for each in walk.outputs if isinstance(each, Value | Tensor)]
    names = output_names(program, len(values))
    outputs: dict[str, int] = {}
    for name, value in zip(names, values, strict=True):
        outputs[name] = _separate_output(walk, name, value, {*outputs.values(), *_output_indices(walk)})
    codes = {}
    for name, value in walk.quantizers.items() if exposed else ():
        codes[name] = walk.take(value)
    said = {**about, "outputs": [*outputs, *codes], "quantizers": {name: name for name in codes}}
    inputs = {name: walk.take(value) for name, value in walk.inputs.items()}
    data = walk.file.serialize(inputs, {**outputs, **codes}, json.dumps(said).encode())
    replace_file(path, lambda temporary: _write_bytes(temporary, data))
    return walk


def _warn_about_fixed_batch(walk: Walk) -> None:
    """Why the batch is fixed, where it was to be free."""
    if walk.why_fixed:
        message = (
            f"the batch of the .tflite file is {walk.batch}, that of the example, as it cannot be free: "
            f"{walk.why_fixed}. Give an example of the batch that the device feeds"
        )
        warnings.warn(ScalepointWarning(message), stacklevel=user_level())


def _output_indices(walk: Walk) -> set[int]:
    return {place for value in walk.inputs.values() for place in value.stored.values()}


def _separate_output(walk: Walk, name: str, value: Any, taken: set[int]) -> int:
    """A float tensor that is this output alone, under its name."""
    value = walk.dequantized(value)
    place = walk.take(value)
    if place in taken or isinstance(value, Tensor):
        shape = value.shape
        source = (
            value
            if isinstance(value, Value)
            else Value(tuple(shape), str(value.dtype).removeprefix("torch."), {tuple(range(len(shape))): place})
        )
        place = walk.take(walk.reshaped(source, source.shape))
    tensor = walk.file.graph.tensors[place]
    tensor.name = walk.file.unused_name(name).encode()
    return place


def _walk_program(model: fx.GraphModule, request: ExportRequest) -> tuple[Walk, ExportedProgram]:
    """With a free batch where every operation allows one, else with that of the example."""
    import_schema()
    inputs = pytree.tree_map(_contiguous, inputs_to_float32(request.inputs))
    model = prepare_graph(model)
    why_fixed = ""
    if request.dynamic:
        try:
            return _export_and_walk(model, inputs, True)
        except FixedBatchError as error:
            why_fixed = str(error)
    walk, program = _export_and_walk(model, inputs, False)
    walk.why_fixed = why_fixed
    return walk, program


def _export_and_walk(model: fx.GraphModule, inputs: Inputs, dynamic: bool) -> tuple[Walk, ExportedProgram]:
    try:
        with torch.no_grad(), export_logs_silenced():
            program = decompose_program(export_graph(model, *inputs, dynamic, _dynamic_axes))
            walk = Walk(program, _batch_size(inputs))
            walk.run()
            return walk, program
    except (ScalepointError, FixedBatchError):
        raise
    except Exception as error:  # torch raises every kind
        first = next(iter(str(error).strip().splitlines()), "")
        raise ExportError(f"torch cannot export this model for LiteRT. {type(error).__name__}: {first}") from error


def _dynamic_axes(name: str, value: Tensor) -> tuple[int, ...]:
    """The batch: shapes of a .tflite file are planned, lengths of sentences are those of the example."""
    return (0,) if value.ndim > 1 else ()


def _contiguous(value: Any) -> Any:
    return value.contiguous() if isinstance(value, Tensor) and value.layout == torch.strided else value


def _batch_size(inputs: Inputs) -> int:
    """Of the example."""
    leaves = [each for each in pytree.tree_leaves(inputs) if isinstance(each, Tensor) and each.ndim]
    return int(leaves[0].shape[0]) if leaves else 1


def _write_bytes(path: Path, data: bytes) -> None:
    path.write_bytes(data)


__all__ = ["OPERATION_WRITERS", "check", "write", "write_with_layer_outputs"]
