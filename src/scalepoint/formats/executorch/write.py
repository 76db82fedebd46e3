"""A quantized model becomes an ExecuTorch program for XNNPACK.

model --Q/DQ of quantized_decomposed--> stored form --torch.export--> program --to_edge_transform_and_lower--> .pte
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
from torch.utils import _pytree as pytree

from scalepoint.errors import ExportError, install_hint
from scalepoint.formats.executorch.attention import decompose_attention
from scalepoint.formats.executorch.graph import infer_batch, prepare_program
from scalepoint.formats.executorch.passes import without_idle_passes
from scalepoint.formats.executorch.stored import XNNPACK_FACTORIES, XnnpackStoredWeight
from scalepoint.formats.float32 import inputs_to_float32
from scalepoint.formats.format import ExportRequest
from scalepoint.formats.interface_names import output_names
from scalepoint.formats.stored_graph import build_float_graph, build_stored_graph
from scalepoint.graph.torch_export import export_logs_silenced, make_contiguous, widen_batch
from scalepoint.support.files import replace_file

MAX_BATCH = 8  # memory is planned for it, or for the example's where that is larger
DESCRIPTION_METHOD = "scalepoint"  # a method of the program that gives what the file says of itself
INSTALL = install_hint("executorch")

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def write(model: fx.GraphModule, path: Path, request: ExportRequest) -> None:
    """The quantized model, and the float one of the same capture where it is asked for."""
    said = {"made_for": dict(request.metadata)}
    with executorch_imported():
        write_program(build_stored_graph(model, XNNPACK_FACTORIES), path, request.inputs, request.dynamic, said)
        if request.float_path is not None:
            write_program(
                build_float_graph(model, XNNPACK_FACTORIES), request.float_path, request.inputs, request.dynamic, {}
            )


@contextmanager
def executorch_imported() -> Iterator[None]:
    """ExecuTorch imported, and nothing of what it and torchao have to say of themselves."""
    with export_logs_silenced():
        try:
            import executorch.exir  # noqa: F401, PLC0415
        except ImportError as error:
            raise ExportError(f"target 'executorch' needs ExecuTorch ({error}): {INSTALL}") from error
        yield


def write_program(
    model: fx.GraphModule, path: Path, inputs: Inputs, dynamic: bool, description: dict[str, Any]
) -> None:
    """A graph in its stored form; `about` adds to what the file says of itself."""
    plain = pytree.tree_map(make_contiguous, inputs_to_float32(inputs))  # the layout of an example would be the file's
    program = prepare_program(_export_with_dynamic_batch(decompose_attention(model), plain, dynamic))
    own = {
        "inputs": _describe_inputs(program),
        "outputs": _list_output_names(program),
        "layers": _list_layer_keys(model),
    }
    data = _lower_program(program, {**own, **description})
    replace_file(path, lambda temporary: _write_file(temporary, data))


def _export_with_dynamic_batch(model: fx.GraphModule, inputs: Inputs, dynamic: bool) -> ExportedProgram:
    """With a free batch where torch finds one."""
    with suppress(Exception):  # torch.export raises every kind: what it takes for a constant stays one
        if dynamic:
            wide = widen_batch(*inputs)
            batch = torch.export.Dim("batch", max=_max_batch(wide))
            return _export(model, wide, pytree.tree_map(lambda each: _dynamic_axes(each, batch), wide))
    try:
        return _export(model, inputs, None)
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), "")
        raise ExportError(f"torch cannot export this model for ExecuTorch. {type(error).__name__}: {first}") from error


def _export(model: fx.GraphModule, inputs: Inputs, shapes: Any) -> ExportedProgram:
    given = None if shapes is None else (*shapes[0], *shapes[1].values())
    with torch.no_grad():
        return torch.export.export(model, *inputs, dynamic_shapes=given, strict=False)


def _max_batch(inputs: Inputs) -> int:
    sizes = [leaf.shape[0] for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.ndim > 1]
    return max((MAX_BATCH, *sizes))


def _dynamic_axes(value: Any, batch: Any) -> Any:
    return {0: batch} if isinstance(value, Tensor) and value.ndim > 1 else None


def _lower_program(program: ExportedProgram, description: dict[str, Any]) -> bytes:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner  # noqa: PLC0415

    from scalepoint.formats.executorch.partitioning import DecomposeOnce, NotDelegatedError  # noqa: PLC0415

    try:
        with without_idle_passes():
            try:
                return _program_bytes(program, DecomposeOnce(), description)
            except NotDelegatedError:
                return _program_bytes(program, XnnpackPartitioner(), description)
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), "")
        raise ExportError(f"ExecuTorch cannot lower this model. {type(error).__name__}: {first}") from error


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
    """Name, type and shape of every tensor; None is the batch."""
    own = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    values = [(name, own[name].meta["val"]) for name in program.graph_signature.user_inputs if name in own]
    return [
        {
            "name": name,
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": [size if isinstance(size, int) else None for size in value.shape],
        }
        for name, value in values
        if isinstance(value, Tensor)
    ]


def _list_output_names(program: ExportedProgram) -> list[str]:
    gives: Any = next(node for node in program.graph.nodes if node.op == "output").args[0]
    return output_names(program, sum(isinstance(each, fx.Node) for each in gives))


def _list_layer_keys(model: nn.Module) -> dict[str, str]:
    """The keys under which XNNPACK keeps the scales of a layer, or its weight where that is float -> the layer."""
    found = {}
    for name, module in model.named_modules():
        path = re.sub(r"\.stored_\w+$", "", name)
        if isinstance(module, XnnpackStoredWeight):
            scale = module.scale.to(torch.bfloat16) if module.block else module.scale
            found[f"scale_{_digest(scale)}"] = path
        else:
            weight = module._buffers.get("weight", module._parameters.get("weight"))
            if weight is not None and weight.ndim > 1 and weight.dtype == torch.float32:
                found[_digest(weight)] = path
                if weight.ndim == 4:
                    found[_digest(weight.permute(0, 2, 3, 1))] = path
    return found


def _digest(value: Tensor) -> str:
    data = value.detach().contiguous().flatten()  # whose last axis may have an extent of one and any stride
    return hashlib.sha256(data.view(torch.uint8).numpy().tobytes()).hexdigest()


def _write_file(path: Path, data: bytes) -> None:
    path.write_bytes(data)
