"""A quantized model becomes an ONNX file with real integer weights, for one target.

model --weights as codes, stubs as Q/DQ--> stored form --torch.onnx--> graph --passes--> checked --atomically--> file
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.export import ExportedProgram

from scalepoint.errors import ScalepointError
from scalepoint.formats.form import float_form, stored_form
from scalepoint.formats.format import Writing
from scalepoint.formats.onnx.blocks import onnx_parts
from scalepoint.formats.onnx.experts import grouped_products
from scalepoint.formats.onnx.refusal import refusal
from scalepoint.formats.onnx.rewrites import rewritten
from scalepoint.formats.onnx.saving import save_graph
from scalepoint.formats.onnx.stored import Stored
from scalepoint.formats.pre_export import prepare_graph
from scalepoint.formats.single import single_inputs
from scalepoint.graph.origin import get_origin
from scalepoint.graph.program import Known, Program, warn_of_tracing
from scalepoint.graph.torch_export import export_graph, export_logs_silenced
from scalepoint.numerics import dtype_name
from scalepoint.support.torch_state import gc_paused
from scalepoint.targets.target import RewriteRule

IR_VERSIONS = {18: 8, 19: 9, 20: 9, 21: 10, 22: 10, 23: 11, 24: 12, 25: 13}
OPSETS = {torch.float32: 18, torch.float16: 19, torch.bfloat16: 22}  # 16-bit scales, 16-bit convolutions
PLAIN_OPSET = 22  # from 23 on torch writes attention as one operator, which few compilers read; types alone need more


def write(model: fx.GraphModule, path: Path, writing: Writing) -> None:
    """The quantized model, and the float one of the same capture where it is asked for."""
    with gc_paused():
        _write_all(model, path, writing)


def _write_all(model: fx.GraphModule, path: Path, writing: Writing) -> None:
    target, kind = writing.target, writing.float_dtype
    parts = onnx_parts(() if target is None else target.domains)
    stored = stored_form(model, parts, kind)
    opset = max([OPSETS[kind], *(module.opset for module in stored.modules() if isinstance(module, Stored))])
    form = _Form(single_inputs(writing.inputs), opset, dtype_name(kind), writing.dynamic, Known())
    own = form if target is None else form._replace(spellings=target.spellings)
    _write(stored, path, own, writing.metadata)
    if writing.float_path is not None:
        _write(float_form(model, parts), writing.float_path, form, {})


class _Form(NamedTuple):
    """How a graph is written."""

    inputs: tuple[tuple[Any, ...], dict[str, Any]]
    opset: int
    float_dtype: str
    dynamic: bool
    known: Known  # of sizes: the float graph has those of the quantized one
    spellings: tuple[RewriteRule, ...] = ()  # of what a target is given: the float file is as anybody writes it


def _write(model: fx.GraphModule, path: Path, form: _Form, metadata: Mapping[str, str]) -> None:
    graph = _to_onnx(model, form)
    graph.metadata_props.update(metadata)
    try:
        save_graph(graph, path)
    except ScalepointError:
        raise
    except RuntimeError as error:  # a constant that torch.export has left without data
        raise refusal(error, None) from error


def _to_onnx(model: fx.GraphModule, form: _Form) -> Any:
    from scalepoint.formats.onnx.interface import name_interface  # noqa: PLC0415
    from scalepoint.formats.onnx.operators import translations  # noqa: PLC0415  # onnx is imported by an export only
    from scalepoint.formats.onnx.passes import finish  # noqa: PLC0415
    from scalepoint.formats.onnx.spellings import respell  # noqa: PLC0415
    from scalepoint.formats.onnx.translation import translated  # noqa: PLC0415

    opset = min(form.opset, PLAIN_OPSET)
    exported: ExportedProgram | None = None
    try:
        with torch.no_grad():
            exported = export_graph(prepare_graph(model), *form.inputs, form.dynamic, known=form.known, has_code=False)
        with export_logs_silenced():
            graph = translated(rewritten(exported), opset, {**translations(opset), **grouped_products(opset)})
    except ScalepointError:
        raise
    except Exception as error:
        raise refusal(error, exported) from error
    if isinstance(exported, Program) and exported.why_traced is not None:
        warn_of_tracing(exported.why_traced)
    graph.opset_imports[""] = form.opset
    respell(graph, form.spellings)
    finish(graph, IR_VERSIONS[form.opset], form.float_dtype)
    name_interface(graph, exported, get_origin(model).axes)
    return graph
