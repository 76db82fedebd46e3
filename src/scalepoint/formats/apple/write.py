"""A quantized model becomes an .mlpackage, for one target.

    model --weights as codes, stubs as Q/DQ--> stored form --coremltools--> MIL program --> package, whole or not at all

Shapes are those of the example: the Neural Engine runs fixed ones. Passes of coremltools that would rewrite our scales
are left out. The package is written by us, so that the same model gives the same bytes.
"""

import json
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import fx

from scalepoint.errors import ExportError, ScalepointError
from scalepoint.formats.apple.operators import register_operators
from scalepoint.formats.apple.package import import_coremltools, without_warnings
from scalepoint.formats.apple.stored import (
    COREML_FACTORIES,
    CoreMlStoredPalette,
    CoreMlStoredWeight,
    build_coreml_graph,
    operation_label,
)
from scalepoint.formats.float32 import inputs_to_float32
from scalepoint.formats.format import ExportRequest
from scalepoint.formats.interface_names import output_names
from scalepoint.formats.pre_export import prepare_graph
from scalepoint.formats.stored_graph import build_float_graph
from scalepoint.graph.torch_export import export_graph, export_logs_silenced
from scalepoint.numerics import dtype_name
from scalepoint.support.files import replace_folder

AUTHOR = "com.apple.CoreML"
MODEL, WEIGHTS = "model.mlmodel", "weights"
SKIPPED_PASSES = (  # they rewrite scales, zero points or types of codes
    "common::int_op_canonicalization",
    "common::nullify_redundant_quantization_zero_point",
    "common::dequantize_quantize_pair_elimination",
    "common::distributive_quantized_binary_op_scale_normalization",
    "common::dequantize_to_constexpr",
    "common::merge_affine_dequantize_with_consecutive_ops",
)


def write(model: fx.GraphModule, path: Path, request: ExportRequest) -> None:
    """The quantized model, and the float one of the same capture where it is asked for."""
    stored = build_coreml_graph(model, request.float_dtype)
    _write_graph(stored, path, request, {**request.metadata, "scalepoint.float_dtype": dtype_name(request.float_dtype)})
    if request.float_path is not None:
        _write_graph(build_float_graph(model, COREML_FACTORIES), request.float_path, request, {})


def _write_graph(model: fx.GraphModule, path: Path, request: ExportRequest, metadata: Mapping[str, str]) -> None:
    is_new = any(
        isinstance(each, CoreMlStoredWeight | CoreMlStoredPalette) and each.needs_ios18 for each in model.modules()
    )
    import_coremltools()  # quietly, before anything else of it is imported
    try:
        with torch.no_grad():
            args, kwargs = inputs_to_float32(request.inputs)
            program = export_graph(prepare_graph(model), args, kwargs, False)
        register_operators(is_new, _find_sparse_weights(model))
        made = _convert_program(program, request.float_dtype, is_new)
    except ScalepointError:
        raise
    except Exception as error:  # coremltools raises every kind
        raise ExportError(f"coremltools cannot convert this model: {_first_line(error)}") from error
    try:
        spec = made.get_spec()
        spec.description.metadata.userDefined.update(metadata)
        replace_folder(path, lambda folder: _write_package(folder, spec, Path(made.weights_dir)))
    finally:
        shutil.rmtree(made.package_path, ignore_errors=True)  # coremltools keeps its own until the process ends


def _convert_program(program: Any, float_dtype: torch.dtype, is_new: bool) -> Any:
    tools = import_coremltools()
    kind = dtype_name(float_dtype)
    pipeline = tools.PassPipeline()
    pipeline.remove_passes(set(SKIPPED_PASSES) & set(pipeline.passes))
    with without_warnings(), export_logs_silenced():
        return tools.convert(
            program,
            outputs=_declare_outputs(program),
            convert_to="mlprogram",
            minimum_deployment_target=tools.target.iOS18 if is_new else tools.target.iOS17,
            compute_precision=tools.precision.FLOAT16 if kind == "float16" else tools.precision.FLOAT32,
            pass_pipeline=pipeline,
            skip_model_load=True,
        )


def _find_sparse_weights(model: fx.GraphModule) -> frozenset[str]:
    modules = model.named_modules()
    return frozenset(
        operation_label(path) for path, each in modules if isinstance(each, CoreMlStoredWeight) and each.is_sparse
    )


def _declare_outputs(program: Any) -> list[Any]:
    """Under the names that the model gives, floats as float32."""
    tools = import_coremltools()
    values = [each.meta["val"] for each in program.graph.output_node().args[0] if isinstance(each, fx.Node)]
    names = output_names(program, len(values))
    return [
        tools.TensorType(name=name, dtype=np.float32 if value.is_floating_point() else np.int32)
        for name, value in zip(names, values, strict=True)
    ]


def _write_package(folder: Path, spec: Any, weights: Path) -> None:
    """Manifest.json names the two items of a package, by identifiers that follow from their paths."""
    home = folder / "Data" / AUTHOR
    (home / WEIGHTS).mkdir(parents=True)
    (home / MODEL).write_bytes(spec.SerializeToString(deterministic=True))
    for each in sorted(weights.glob("*.bin")):
        (home / WEIGHTS / each.name).write_bytes(each.read_bytes())
    items = {
        str(uuid.uuid5(uuid.NAMESPACE_URL, name)).upper(): {
            "author": AUTHOR,
            "description": f"CoreML Model {about}",
            "name": name,
            "path": f"{AUTHOR}/{name}",
        }
        for name, about in ((MODEL, "Specification"), (WEIGHTS, "Weights"))
    }
    root = next(identifier for identifier, item in items.items() if item["name"] == MODEL)
    manifest = {"fileFormatVersion": "1.0.0", "itemInfoEntries": items, "rootModelIdentifier": root}
    (folder / "Manifest.json").write_text(json.dumps(manifest, indent=4), encoding="utf-8")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
