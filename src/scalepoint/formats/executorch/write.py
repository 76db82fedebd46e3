"""Write a quantized model as an ExecuTorch program for XNNPACK.

model --Q/DQ of quantized_decomposed--> stored graph --torch.export--> program --to_edge_transform_and_lower--> .pte
"""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from scalepoint.compat import patches_enabled
from scalepoint.compat.executorch import without_idle_passes
from scalepoint.compat.torch_names import pytree
from scalepoint.errors import ExportError, install_hint
from scalepoint.formats.executorch.attention import decompose_attention
from scalepoint.formats.executorch.graph import infer_batch, prepare_program
from scalepoint.formats.executorch.stored import XNNPACK_FACTORIES, XnnpackStoredWeight
from scalepoint.formats.float32 import inputs_to_float32
from scalepoint.formats.format import ExportRequest
from scalepoint.formats.interface_names import output_names
from scalepoint.formats.stored_graph import build_float_graph, build_stored_graph
from scalepoint.graph.torch_export import export_logs_silenced, make_contiguous, widen_batch
from scalepoint.numerics import dtype_name
from scalepoint.support.files import replace_bytes

MAX_BATCH = 8  # ExecuTorch plans memory for this batch, or for the example's batch if that is larger
DESCRIPTION_METHOD = "scalepoint"  # constant method of the program that returns our metadata as JSON
INSTALL = install_hint("executorch")

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def write(model: fx.GraphModule, path: Path, request: ExportRequest) -> None:
    """Write the quantized model, and at `request.float_path` the float model of the same capture."""
    with executorch_imported():
        stored = build_stored_graph(model, XNNPACK_FACTORIES)
        write_program(stored, path, request.inputs, request.dynamic, {"made_for": dict(request.metadata)})
        if request.float_path is not None:
            float_model = build_float_graph(model, XNNPACK_FACTORIES)
            write_program(float_model, request.float_path, request.inputs, request.dynamic, {})


@contextmanager
def executorch_imported() -> Iterator[None]:
    """Import ExecuTorch, and silence the messages of ExecuTorch and torchao inside the block."""
    with export_logs_silenced():
        try:
            import executorch.exir  # noqa: F401, PLC0415
        except ImportError as error:
            raise ExportError(f"target 'executorch' needs ExecuTorch ({error}): {INSTALL}") from error
        yield


def write_program(
    model: fx.GraphModule, path: Path, inputs: Inputs, dynamic: bool, description: dict[str, Any]
) -> None:
    """Write a stored graph; `description` adds to the metadata in the file and may replace its keys."""
    # Example inputs in channels_last would fix that memory layout in the file.
    contiguous_inputs = pytree.tree_map(make_contiguous, inputs_to_float32(inputs))
    program = prepare_program(_export_with_dynamic_batch(decompose_attention(model), contiguous_inputs, dynamic))
    program_description = {
        "inputs": _describe_inputs(program),
        "outputs": _list_output_names(program),
        "layers": _list_layer_keys(model),
    }
    data = _lower_program(program, {**program_description, **description})
    replace_bytes(path, data)


def _export_with_dynamic_batch(model: fx.GraphModule, inputs: Inputs, dynamic: bool) -> ExportedProgram:
    """Export with a dynamic batch; with the batch of the example if torch.export finds it to be constant."""
    with suppress(Exception):  # torch.export raises exceptions of many types
        if dynamic:
            wide = widen_batch(*inputs)
            batch = torch.export.Dim("batch", max=_max_batch(wide))
            return _export(model, wide, pytree.tree_map(lambda value: _dynamic_axes(value, batch), wide))
    try:
        return _export(model, inputs, None)
    except Exception as error:
        raise ExportError(f"torch cannot export this model for ExecuTorch. {_summarize_error(error)}") from error


def _export(model: fx.GraphModule, inputs: Inputs, shapes: Any) -> ExportedProgram:
    dynamic_shapes = None if shapes is None else (*shapes[0], *shapes[1].values())
    with torch.no_grad():
        return torch.export.export(model, *inputs, dynamic_shapes=dynamic_shapes, strict=False)


def _max_batch(inputs: Inputs) -> int:
    sizes = [leaf.shape[0] for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.ndim > 1]
    return max((MAX_BATCH, *sizes))


def _dynamic_axes(value: Any, batch: Any) -> Any:
    return {0: batch} if isinstance(value, Tensor) and value.ndim > 1 else None


def _lower_program(program: ExportedProgram, description: dict[str, Any]) -> bytes:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner  # noqa: PLC0415

    from scalepoint.compat.executorch_partitioner import (  # noqa: PLC0415
        NotDelegatedError,
        SingleDecompositionPartitioner,
    )

    try:
        if not patches_enabled():
            return _program_bytes(program, XnnpackPartitioner(), description)
        with without_idle_passes():
            try:
                return _program_bytes(program, SingleDecompositionPartitioner(), description)
            except NotDelegatedError:
                return _program_bytes(program, XnnpackPartitioner(), description)
    except Exception as error:
        raise ExportError(f"ExecuTorch cannot lower this model. {_summarize_error(error)}") from error


def _summarize_error(error: Exception) -> str:
    first_line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first_line}"


def _program_bytes(program: ExportedProgram, partitioner: Any, description: dict[str, Any]) -> bytes:
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower  # noqa: PLC0415

    from scalepoint.formats.executorch.partitioning import SeparateOutputs  # noqa: PLC0415

    edge = to_edge_transform_and_lower(
        program,
        transform_passes=[infer_batch, SeparateOutputs()],
        partitioner=[partitioner],
        compile_config=EdgeCompileConfig(_check_ir_validity=False),
        constant_methods={DESCRIPTION_METHOD: json.dumps(description)},
    )
    return bytes(edge.to_executorch().buffer)


def _describe_inputs(program: ExportedProgram) -> list[dict[str, Any]]:
    """Return name, dtype and shape of every input tensor; None in a shape is the dynamic batch."""
    placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    user_inputs = program.graph_signature.user_inputs
    values = [(name, placeholders[name].meta["val"]) for name in user_inputs if name in placeholders]
    return [
        {
            "name": name,
            "dtype": dtype_name(value.dtype),
            "shape": [size if isinstance(size, int) else None for size in value.shape],
        }
        for name, value in values
        if isinstance(value, Tensor)
    ]


def _list_output_names(program: ExportedProgram) -> list[str]:
    outputs: Any = next(node for node in program.graph.nodes if node.op == "output").args[0]
    return output_names(program, sum(isinstance(value, fx.Node) for value in outputs))


def _list_layer_keys(model: nn.Module) -> dict[str, str]:
    """Map the keys of XNNPACK's named data to layers, so that a profile can name them.

    XNNPACK stores the scales of a quantized layer, or the weight of a float layer, under the SHA-256 of its bytes.
    """
    layers = {}
    for name, module in model.named_modules():
        layer = re.sub(r"\.stored_\w+$", "", name)
        if isinstance(module, XnnpackStoredWeight):
            scale = module.scale.to(torch.bfloat16) if module.block else module.scale
            layers[f"scale_{_digest(scale)}"] = layer
        else:
            weight = module._buffers.get("weight", module._parameters.get("weight"))
            if weight is not None and weight.ndim > 1 and weight.dtype == torch.float32:
                layers[_digest(weight)] = layer
                if weight.ndim == 4:  # XNNPACK stores convolution weights in channels_last order
                    layers[_digest(weight.permute(0, 2, 3, 1))] = layer
    return layers


def _digest(value: Tensor) -> str:
    # flatten() before view(): a last axis of size 1 may have any stride, and view(torch.uint8) would reject it.
    data = value.detach().contiguous().flatten()
    return hashlib.sha256(data.view(torch.uint8).numpy().tobytes()).hexdigest()
