"""Write a quantized model as a Core ML package (.mlpackage).

    model --weights as codes, stubs as Q/DQ--> stored graph --coremltools--> MIL program --> package folder

The shapes of the example inputs are fixed in the file, because the Neural Engine runs only fixed shapes. Passes of
coremltools that would rewrite our scales are skipped. We write the package folder ourselves: coremltools would put
random identifiers into it, and the same model must give the same bytes.
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
from scalepoint.formats.apple.coreml.operators import register_operators
from scalepoint.formats.apple.coreml.package import import_coremltools, without_warnings
from scalepoint.formats.apple.stored import (
    COREML_FACTORIES,
    StoredPalette,
    StoredWeight,
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
MODEL_FILE, WEIGHTS_FOLDER = "model.mlmodel", "weights"
SKIPPED_PASSES = (  # they rewrite scales, zero points or dtypes of codes
    "common::int_op_canonicalization",
    "common::nullify_redundant_quantization_zero_point",
    "common::dequantize_quantize_pair_elimination",
    "common::distributive_quantized_binary_op_scale_normalization",
    "common::dequantize_to_constexpr",
    "common::merge_affine_dequantize_with_consecutive_ops",
)


def write(model: fx.GraphModule, path: Path, request: ExportRequest) -> None:
    """Write the quantized model, and at `request.float_path` the float model of the same capture."""
    stored = build_coreml_graph(model, request.float_dtype)
    _write_graph(stored, path, request, {**request.metadata, "scalepoint.float_dtype": dtype_name(request.float_dtype)})
    if request.float_path is not None:
        _write_graph(build_float_graph(model, COREML_FACTORIES), request.float_path, request, {})


def _write_graph(model: fx.GraphModule, path: Path, request: ExportRequest, metadata: Mapping[str, str]) -> None:
    for_ios18 = any(
        isinstance(module, StoredWeight | StoredPalette) and module.needs_ios18 for module in model.modules()
    )
    import_coremltools()  # first, because this import silences its warnings
    try:
        with torch.no_grad():
            args, kwargs = inputs_to_float32(request.inputs)
            program = export_graph(prepare_graph(model), args, kwargs, False)
        register_operators(for_ios18, _find_sparse_weights(model))
        converted = _convert_program(program, request.float_dtype, for_ios18)
    except ScalepointError:
        raise
    except Exception as error:  # coremltools raises exceptions of many types
        raise ExportError(f"coremltools cannot convert this model: {_first_line(error)}") from error
    try:
        spec = converted.get_spec()
        spec.description.metadata.userDefined.update(metadata)
        replace_folder(path, lambda folder: _write_package(folder, spec, Path(converted.weights_dir)))
    finally:
        # coremltools would keep its temporary package until the process ends.
        shutil.rmtree(converted.package_path, ignore_errors=True)


def _convert_program(program: Any, float_dtype: torch.dtype, for_ios18: bool) -> Any:
    coremltools = import_coremltools()
    pipeline = coremltools.PassPipeline()
    pipeline.remove_passes(set(SKIPPED_PASSES) & set(pipeline.passes))
    with without_warnings(), export_logs_silenced():
        return coremltools.convert(
            program,
            outputs=_declare_outputs(program),
            convert_to="mlprogram",
            minimum_deployment_target=coremltools.target.iOS18 if for_ios18 else coremltools.target.iOS17,
            compute_precision=(
                coremltools.precision.FLOAT16 if float_dtype == torch.float16 else coremltools.precision.FLOAT32
            ),
            pass_pipeline=pipeline,
            skip_model_load=True,
        )


def _find_sparse_weights(model: fx.GraphModule) -> frozenset[str]:
    return frozenset(
        operation_label(path)
        for path, module in model.named_modules()
        if isinstance(module, StoredWeight) and module.is_sparse
    )


def _declare_outputs(program: Any) -> list[Any]:
    """Declare every output under its name in the model, as float32 or int32."""
    coremltools = import_coremltools()
    values = [node.meta["val"] for node in program.graph.output_node().args[0] if isinstance(node, fx.Node)]
    names = output_names(program, len(values))
    return [
        coremltools.TensorType(name=name, dtype=np.float32 if value.is_floating_point() else np.int32)
        for name, value in zip(names, values, strict=True)
    ]


def _write_package(folder: Path, spec: Any, weights: Path) -> None:
    """Write model, weights and Manifest.json, which lists the two items of a package by identifier.

    The identifiers are derived from the names of the items; coremltools would choose random ones.
    """
    data_folder = folder / "Data" / AUTHOR
    (data_folder / WEIGHTS_FOLDER).mkdir(parents=True)
    (data_folder / MODEL_FILE).write_bytes(spec.SerializeToString(deterministic=True))
    for weight_file in sorted(weights.glob("*.bin")):
        (data_folder / WEIGHTS_FOLDER / weight_file.name).write_bytes(weight_file.read_bytes())
    items = {
        _item_identifier(name): {
            "author": AUTHOR,
            "description": f"CoreML Model {description}",
            "name": name,
            "path": f"{AUTHOR}/{name}",
        }
        for name, description in ((MODEL_FILE, "Specification"), (WEIGHTS_FOLDER, "Weights"))
    }
    manifest = {
        "fileFormatVersion": "1.0.0",
        "itemInfoEntries": items,
        "rootModelIdentifier": _item_identifier(MODEL_FILE),
    }
    (folder / "Manifest.json").write_text(json.dumps(manifest, indent=4), encoding="utf-8")


def _item_identifier(name: str) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_URL, name)).upper()


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
