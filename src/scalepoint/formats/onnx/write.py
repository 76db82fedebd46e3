"""Writes a quantized model as an ONNX file with integer weights, for one target.

model -> stored graph (codes and Q/DQ) -> torch.onnx -> ONNX graph -> rewrites and passes -> checked -> file
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from scalepoint.compat.fast_export import FakeInputCache, RecordedProgram
from scalepoint.errors import ScalepointError
from scalepoint.formats.float32 import inputs_to_float32
from scalepoint.formats.format import ExportRequest
from scalepoint.formats.layers import InputFirstFloatWeight
from scalepoint.formats.onnx.export_errors import explain_export_error
from scalepoint.formats.onnx.operators import operator_translations
from scalepoint.formats.onnx.pre_export import rewrite_program
from scalepoint.formats.onnx.save import save_graph
from scalepoint.formats.onnx.stored_weights import (
    OnnxStored,
    OnnxStoredBlockTable,
    OnnxStoredStub,
    OnnxStoredTable,
    OnnxStoredWeight,
    OnnxUnpackedWeight,
)
from scalepoint.formats.onnx.tensorrt_blocks import (
    TENSORRT_DOMAIN,
    StoredDynamicBlocks,
    StoredMxWeight,
    StoredTwoLevelWeight,
)
from scalepoint.formats.pre_export import prepare_graph
from scalepoint.formats.stored_graph import ModuleFactories, build_float_graph, build_stored_graph
from scalepoint.graph.origin import get_origin
from scalepoint.graph.torch_export import export_graph, export_logs_silenced, warn_about_second_trace
from scalepoint.numerics import E4M3, E8M0, dtype_name
from scalepoint.quantize.operations import EMBEDDING
from scalepoint.quantize.quantized_layers import QuantizedLayer
from scalepoint.quantize.quantizers import QuantStub
from scalepoint.spec import PerBlockGranularity
from scalepoint.support.torch_state import gc_paused
from scalepoint.targets.target import RewriteRule

# opset -> version of the ONNX file format
IR_VERSIONS = {18: 8, 19: 9, 20: 9, 21: 10, 22: 10, 23: 11, 24: 12, 25: 13}
OPSETS = {torch.float32: 18, torch.float16: 19, torch.bfloat16: 22}  # the first with such scales and convolutions
# From opset 23 on torch writes attention as one operator, which few compilers support. Newer opsets are only declared,
# for their types.
MAX_TRANSLATION_OPSET = 22


def write(model: fx.GraphModule, path: Path, request: ExportRequest) -> None:
    """Write the quantized model, and with request.float_path also the float model of the same capture."""
    target, dtype = request.target, request.float_dtype
    with gc_paused():
        factories = onnx_module_factories(() if target is None else target.domains)
        stored = build_stored_graph(model, factories, dtype)
        opset = max([OPSETS[dtype], *(module.opset for module in stored.modules() if isinstance(module, OnnxStored))])
        inputs = inputs_to_float32(request.inputs)
        options = _GraphOptions(inputs, opset, dtype_name(dtype), request.dynamic, FakeInputCache())
        target_options = options if target is None else options._replace(rewrites=target.rewrites)
        _write_graph(stored, path, target_options, request.metadata)
        if request.float_path is not None:
            _write_graph(build_float_graph(model, factories), request.float_path, options, {})


def onnx_module_factories(domains: Collection[str] = ()) -> ModuleFactories:
    """Return the factories of the stored graph, for a compiler with operators of these domains."""
    return ModuleFactories(
        weight=lambda source: _build_weight(source, domains),
        stub=lambda stub, factor: _build_stub(stub, factor, domains),
        float_layer=lambda source: InputFirstFloatWeight(source, as_view=True),
    )


def _build_weight(source: QuantizedLayer, domains: Collection[str]) -> nn.Module:
    spec = source.weight_quant.spec
    if source.kind == EMBEDDING:
        has_blocks = isinstance(spec.granularity, PerBlockGranularity)
        return OnnxStoredBlockTable(source) if has_blocks else OnnxStoredTable(source)
    if source.computes_in_float and not source.weight_quant.zero_point.any():
        return OnnxUnpackedWeight(source)
    if source.kind == "linear" and spec.scale_dtype == E4M3:
        return StoredTwoLevelWeight(source)
    if source.kind == "linear" and spec.scale_dtype == E8M0 and spec.dtype == E4M3 and TENSORRT_DOMAIN in domains:
        return StoredMxWeight(source)
    return OnnxStoredWeight(source)


def _build_stub(stub: QuantStub, factor: float, domains: Collection[str]) -> nn.Module:
    is_dynamic = stub.calculator.always_called and not stub.is_learned
    return StoredDynamicBlocks(stub, domains) if is_dynamic else OnnxStoredStub(stub, factor)


class _GraphOptions(NamedTuple):
    """The options with which a graph is written."""

    inputs: tuple[tuple[Any, ...], dict[str, Any]]
    opset: int
    float_dtype: str
    dynamic: bool
    fake_input_cache: FakeInputCache  # shared by the float graph and the quantized graph
    rewrites: tuple[RewriteRule, ...] = ()  # of the target; none for the float file


def _write_graph(model: fx.GraphModule, path: Path, options: _GraphOptions, metadata: Mapping[str, str]) -> None:
    graph = _convert_to_onnx(model, options)
    graph.metadata_props.update(metadata)
    try:
        save_graph(graph, path)
    except ScalepointError:
        raise
    except RuntimeError as error:  # torch.export left a constant without data
        raise explain_export_error(error, None) from error


def _convert_to_onnx(model: fx.GraphModule, options: _GraphOptions) -> Any:
    # These modules import onnx, which only an export needs.
    from scalepoint.compat.torch_onnx import translate_program  # noqa: PLC0415
    from scalepoint.formats.onnx.names import name_interface  # noqa: PLC0415
    from scalepoint.formats.onnx.passes import run_passes  # noqa: PLC0415
    from scalepoint.formats.onnx.shape_arithmetic import fold_shape_arithmetic  # noqa: PLC0415
    from scalepoint.formats.onnx.target_rewrites import apply_rewrites  # noqa: PLC0415

    opset = min(options.opset, MAX_TRANSLATION_OPSET)
    exported: ExportedProgram | None = None
    try:
        with torch.no_grad():
            exported = export_graph(
                prepare_graph(model),
                *options.inputs,
                options.dynamic,
                fake_input_cache=options.fake_input_cache,
                has_code=False,
            )
        with export_logs_silenced():
            graph = translate_program(rewrite_program(exported), opset, operator_translations(opset))
    except ScalepointError:
        raise
    except Exception as error:
        raise explain_export_error(error, exported) from error
    if isinstance(exported, RecordedProgram) and exported.trace_error is not None:
        warn_about_second_trace(exported.trace_error)
    graph.opset_imports[""] = options.opset
    fold_shape_arithmetic(graph)
    apply_rewrites(graph, options.rewrites)
    run_passes(graph, IR_VERSIONS[options.opset], options.float_dtype)
    origin = get_origin(model)
    name_interface(graph, exported, origin.axes, origin.interface_names)
    return graph
