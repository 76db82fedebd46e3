"""export: a quantized model becomes an ONNX file with real integer weights, for one target.

model --weights as codes, stubs as Q/DQ--> stored form --torch.onnx--> graph --passes--> checked --atomically--> file
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import fx

from scalepoint.errors import ExportError, ScalepointError
from scalepoint.formats.onnx.form import float_form, stored_form
from scalepoint.formats.onnx.saving import save_graph
from scalepoint.formats.onnx.stored import Stored
from scalepoint.graph.capture import as_inputs
from scalepoint.graph.export import export as export_program
from scalepoint.graph.export import quiet
from scalepoint.numerics import dtype_name
from scalepoint.quantize.record import has_record, record_of
from scalepoint.targets import Target, find_target
from scalepoint.targets.target import float_dtype_of

IR_VERSIONS = {18: 8, 19: 9, 20: 9, 21: 10, 22: 10, 23: 11, 24: 12, 25: 13}
OPSETS = {torch.float32: 18, torch.float16: 19, torch.bfloat16: 22}  # 16-bit scales, 16-bit convolutions
PLAIN_OPSET = 22  # from 23 on torch writes attention as one operator, which few compilers read; types alone need more


def export(
    model: fx.GraphModule,
    path: str | Path,
    example_inputs: Any,
    *,
    kwargs: Mapping[str, Any] | None = None,
    target: str | Target | None = None,
    float_path: str | Path | None = None,
    float_dtype: str | torch.dtype | None = None,
    dynamic: bool = True,
) -> Path:
    """Write the model to `path`, which appears whole or not at all; returns it.

    `target` is that of the model unless given. `float_path` receives the float model of the same capture, to compare.
    `float_dtype` ("float16", "bfloat16") is the type of what is not quantized and of the scales, for compilers that
    run the types of the file; inputs and outputs stay float32.
    """
    path = Path(path)
    own = record_of(model).target if has_record(model) else None
    chosen = find_target(target) if target is not None else own
    if chosen is not None and own is not None and chosen.name != own.name:
        raise ExportError(
            f"the quantizers of this model were placed for {own.name!r}: transform and insert for {chosen.name!r} anew"
        )
    kind = _float_type(float_dtype, chosen)
    stored = stored_form(model, kind, () if chosen is None else chosen.domains)
    opset = max([OPSETS[kind], *(module.opset for module in stored.modules() if isinstance(module, Stored))])
    form = _Form(as_inputs(example_inputs, kwargs), opset, dtype_name(kind), dynamic)
    _write(stored, path, form, {} if chosen is None else chosen.labels)
    if float_path is not None:
        _write(float_form(model), Path(float_path), form, {})
    return path


class _Form(NamedTuple):
    """How a graph is written."""

    inputs: tuple[tuple[Any, ...], dict[str, Any]]
    opset: int
    float_dtype: str
    dynamic: bool


def _float_type(given: str | torch.dtype | None, target: Target | None) -> torch.dtype:
    if target is not None:
        return target.check_float_dtype(given)
    kind = float_dtype_of(given)
    if kind not in OPSETS:
        raise ExportError(f"float_dtype={dtype_name(kind)}: use {' or '.join(map(dtype_name, OPSETS))}")
    return kind


def _write(model: fx.GraphModule, path: Path, form: _Form, labels: Mapping[str, str]) -> None:
    graph = _to_onnx(model, form)
    graph.metadata_props.update(labels)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_graph(graph, path)


def _to_onnx(model: fx.GraphModule, form: _Form) -> Any:
    from scalepoint.formats.onnx.operators import translations  # noqa: PLC0415  # onnx is imported by an export only
    from scalepoint.formats.onnx.passes import finish  # noqa: PLC0415

    opset = min(form.opset, PLAIN_OPSET)
    try:
        with torch.no_grad():
            exported = export_program(model, *form.inputs, form.dynamic)
        with quiet():
            program = torch.onnx.export(
                exported,
                opset_version=opset,
                custom_translation_table=translations(opset),
                verbose=False,
            )
    except ScalepointError:
        raise
    except Exception as error:
        reason = str(error).strip().splitlines()
        raise ExportError(f"torch.onnx.export failed: {type(error).__name__}: {reason[0] if reason else ''}") from error
    if program is None:
        raise ExportError("torch.onnx.export gave nothing")
    program.model.opset_imports[""] = form.opset
    finish(program.model, IR_VERSIONS[form.opset], form.float_dtype)
    return program.model
