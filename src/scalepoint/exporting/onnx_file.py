"""export: a quantized model becomes an ONNX file with real integer weights, for one target.

model --weights as codes, stubs as Q/DQ--> stored form --torch.onnx--> graph --passes--> checked --atomically--> file
"""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx

from scalepoint.errors import ExportError, ScalepointError
from scalepoint.exporting.form import StoredWeight, float_form, stored_form
from scalepoint.files import replace_file
from scalepoint.graph.capture import as_inputs
from scalepoint.graph.export import export as export_program
from scalepoint.graph.export import quiet
from scalepoint.targets import Target, find_target

IR_VERSIONS = {18: 8, 19: 9, 20: 9, 21: 10, 22: 10, 23: 11, 24: 12, 25: 13}
LARGEST_IN_ONE_FILE = 1_900_000_000  # protobuf stops at 2 GB


def export(
    model: fx.GraphModule,
    path: str | Path,
    example_inputs: Any,
    *,
    kwargs: Mapping[str, Any] | None = None,
    target: str | Target | None = None,
    float_path: str | Path | None = None,
    dynamic: bool = True,
) -> Path:
    """Write the model to `path`, which appears whole or not at all; returns it.

    `target` is that of the model unless given. `float_path` receives the float model of the same capture, to compare.
    """
    path = Path(path)
    chosen = find_target(target) if target is not None else model.meta.get("target")
    own = model.meta.get("target")
    if chosen is not None and own is not None and chosen.name != own.name:
        raise ExportError(
            f"the quantizers of this model were placed for {own.name!r}: transform and insert for {chosen.name!r} anew"
        )
    stored = stored_form(model)
    opset = max([18, *(module.opset for module in stored.modules() if isinstance(module, StoredWeight))])
    _write(stored, path, as_inputs(example_inputs, kwargs), opset, dynamic=dynamic)
    if float_path is not None:
        _write(float_form(model), Path(float_path), as_inputs(example_inputs, kwargs), opset, dynamic=dynamic)
    return path


def _write(
    model: fx.GraphModule, path: Path, inputs: tuple[tuple[Any, ...], dict[str, Any]], opset: int, *, dynamic: bool
) -> None:
    graph = _to_onnx(model, inputs, opset, dynamic=dynamic)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_graph(graph, path)


def _to_onnx(
    model: fx.GraphModule, inputs: tuple[tuple[Any, ...], dict[str, Any]], opset: int, *, dynamic: bool
) -> Any:
    from scalepoint.exporting.operators import translations  # noqa: PLC0415  # onnx is imported by an export only
    from scalepoint.exporting.passes import finish  # noqa: PLC0415

    try:
        with torch.no_grad():
            exported = export_program(model, *inputs, dynamic)
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
    finish(program.model, IR_VERSIONS[opset])
    return program.model


def save_graph(graph: Any, path: Path) -> None:
    """One file, or a data file beside it when it would be too large; the .onnx file comes last."""
    import onnx  # noqa: PLC0415
    import onnx_ir as ir  # noqa: PLC0415

    size = sum(value.const_value.nbytes for value in graph.graph.initializers.values())
    if size < LARGEST_IN_ONE_FILE:
        proto = ir.serde.serialize_model(graph)
        try:
            onnx.checker.check_model(proto, full_check=True)
        except Exception as error:  # the checker and shape inference have kinds of their own
            raise ExportError(f"the exported graph is not sound: {error}") from error
        data = proto.SerializeToString(deterministic=True)
        replace_file(path, lambda temporary: _put(temporary, data))
        return
    digest = hashlib.sha256(f"{path.name}{size}".encode()).hexdigest()[:8]
    external = f"{path.stem}.{digest}.data"
    folder = path.parent / f".tmp-{os.getpid()}-{path.stem}"
    folder.mkdir(exist_ok=True)
    try:
        ir.save(graph, folder / path.name, external_data=external)
        onnx.checker.check_model(str(folder / path.name))
        os.replace(folder / external, path.parent / external)
        os.replace(folder / path.name, path)
    finally:
        for left in folder.glob("*"):
            left.unlink()
        folder.rmdir()


def _put(path: Path, data: bytes) -> None:
    path.write_bytes(data)
