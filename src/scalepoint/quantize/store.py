"""Saves and loads quantized models: a folder with the tensors (safetensors) and a manifest (JSON) of everything else.

    write tensors-<hash>.safetensors  ->  replace scalepoint.json, which names it  ->  delete the old tensors

Replacing the manifest commits the new model: a process that is killed leaves either the old model or the new one.
Loading builds the graph again from the float model, or from the graph in the folder. Nothing is unpickled, and a float
model that has changed is refused.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, fx, nn

from scalepoint import distributed
from scalepoint.errors import DocumentError, StoreError, UsageError, short_repr
from scalepoint.graph.deserialization import rebuild
from scalepoint.graph.serialization import GraphData, get_description
from scalepoint.migration_report import MigrationReport
from scalepoint.patterns import Pattern, TransformationPlan
from scalepoint.quantize.config import QuantConfig
from scalepoint.quantize.fingerprint import fingerprint_model
from scalepoint.quantize.insert import insert_qdq
from scalepoint.quantize.qat import freeze_bn_stats
from scalepoint.quantize.quantizers import QuantizerBase, QuantStub
from scalepoint.quantize.record import has_record, record_of, update_record
from scalepoint.quantize.smooth import ensure_norm_tensors, find_smoothing_observers
from scalepoint.spec import QParamsCalculatorBase
from scalepoint.support.files import (
    LOCK_FILE,
    compute_digest,
    describe_needed_space,
    finish_file,
    folder_locked,
    is_disk_full,
    make_empty_folder,
    remove_leftovers,
    remove_path,
    replace_text,
    temporary_path,
)
from scalepoint.support.output_folder import check_path
from scalepoint.support.torch_state import serialized
from scalepoint.support.untrusted import open_tensors, read_json
from scalepoint.targets import Target
from scalepoint.targets.local_times import LocalTimes
from scalepoint.transformation import apply_transformation_plan, get_transformation_plan, plan_captured_graph
from scalepoint.version import __version__

MANIFEST, TENSORS = "scalepoint.json", "tensors"
FORMAT_VERSION = 1
MAX_MANIFEST_BYTES = 256_000_000
# Older versions refuse these fields, because they do not know them. A field without a value is left out.
NEWER_FIELDS = ("dynamic_axes", "constant", "tuned_threads", "local_times")
CONSTANT_PREFIX = "constant:"  # of the names of tensors that only the saved graph contains
MAX_LISTED_DIFFERENCES = 5
TENSOR_FILE_NAME = re.compile(r"tensors-[0-9a-f]{16}\.safetensors")


@serialized
def save(model: nn.Module, folder: str | Path, *, with_graph: bool | None = False) -> Path:
    """Write a quantized model to a folder. If something fails, the folder keeps what it had before.

    With several ranks the first one writes. If parameters are sharded (fully_shard), all ranks have to call it.

    Args:
        model: The quantized model.
        folder: The folder to write.
        with_graph: Also write the captured graph as data, so that `load(folder)` needs neither the float model nor its
            class. None does so if the graph can be written this way.

    Returns:
        The folder.
    """
    folder = Path(folder)
    check_path(folder, "folder")
    if not isinstance(model, fx.GraphModule) or not has_record(model):
        raise UsageError("only a model that insert_qdq returned can be saved")
    if folder.exists() and not folder.is_dir():
        raise StoreError(f"{folder} is a file: pass a folder")
    graph, constants = _get_graph_data(model, with_graph)
    tensors, aliases = _separate_aliases({**gather_sharded_tensors(model.state_dict()), **constants})
    if distributed.is_main():
        _replace_model(folder, tensors, _make_manifest(model) | graph | {"aliases": aliases})
    return folder


def _replace_model(folder: Path, tensors: dict[str, Tensor], manifest: dict[str, Any]) -> None:
    """Write the tensors and then the manifest, which makes them the model of the folder."""
    with folder_locked(folder):
        old_name = _find_tensor_file(folder)
        remove_leftovers(folder, (MANIFEST, TENSORS))
        temporary_folder = temporary_path(folder / TENSORS)  # a folder: safetensors writes a temporary file of its own
        path = temporary_file = temporary_folder / "file"
        is_committed = False
        try:
            make_empty_folder(temporary_folder)
            _write_tensors(tensors, temporary_file)
            file_digest = compute_digest(temporary_file)
            path = folder / f"tensors-{file_digest[:16]}.safetensors"
            os.replace(temporary_file, path)
            manifest = manifest | {"tensors": {"file": path.name, "sha256": file_digest}}
            replace_text(folder / MANIFEST, _serialize_with_checksum(manifest))
            is_committed = True
        except OSError as error:
            size = sum(tensor.nbytes for tensor in tensors.values())
            needed_space = f". {describe_needed_space(temporary_folder, size)}" if is_disk_full(error) else ""
            raise StoreError(
                f"cannot write into {folder}: {error.strerror or error}. The previous contents are intact{needed_space}"
            ) from error
        finally:
            remove_path(temporary_folder)
            if not is_committed and path.name != old_name:
                path.unlink(missing_ok=True)
        if old_name is not None and old_name != path.name:
            (folder / old_name).unlink(missing_ok=True)


def list_model_files(folder: Path) -> list[Path]:
    """Return the files that `save` wrote to the folder."""
    names = [LOCK_FILE, MANIFEST]
    tensor_file = _find_tensor_file(folder)
    if tensor_file is not None:
        names.append(tensor_file)
    return [folder / name for name in names if (folder / name).is_file()]


def _get_graph_data(model: fx.GraphModule, with_graph: bool | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the captured graph for the manifest, and the tensors that it needs besides those of the model."""
    if with_graph is False:
        return {}, {}
    description = get_description(model)
    if description.data is None:
        if with_graph:
            raise UsageError(f"with_graph=True: the graph of this model cannot be saved as data: {description.why_not}")
        return {}, {}
    data = description.data
    state = model.state_dict()
    missing = [path for path in data.tensors if path not in state and path not in description.constants]
    if missing:
        if with_graph:
            raise UsageError(f"with_graph=True: the graph needs {missing[0]}, which the quantized model does not have")
        return {}, {}
    constants = {f"{CONSTANT_PREFIX}{path}": value for path, value in description.constants.items()}
    return {"graph": data.model_dump(exclude_defaults=True)}, constants


def gather_sharded_tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict with complete tensors, gathered from the ranks (fully_shard). Every rank must call it."""
    gathered: dict[int, Any] = {}  # by id: tied parameters stay tied
    for tensor in state.values():
        if hasattr(tensor, "full_tensor") and id(tensor) not in gathered:
            gathered[id(tensor)] = tensor.full_tensor()
    return {name: gathered.get(id(tensor), tensor) for name, tensor in state.items()}


def _write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        save_file(tensors, path)
        finish_file(path)
    except SafetensorError as error:  # safetensors reports a full disk this way
        raise OSError(None, str(error)) from error


def _find_tensor_file(folder: Path) -> str | None:
    """Return the name of the tensor file of the model in the folder; None without a valid model."""
    try:
        return _get_tensor_file_name(_read_manifest(folder))
    except StoreError:
        return None


@serialized
def load(
    folder: str | Path,
    float_model: nn.Module | None = None,
    example_inputs: Any = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    target: str | Target | None = None,
    patterns: Iterable[Pattern] | None = None,
) -> fx.GraphModule:
    """Load a model that `save` wrote, in eval mode. No calibration is needed.

    Args:
        folder: The folder that `save` wrote.
        float_model: The float model it was made from. Not needed if the folder was saved with its graph; then training
            can continue as well.
        example_inputs: Inputs like those of the first capture. Not needed with a saved graph.
        kwargs: Keyword inputs of the model.
        target: A target of your own, which the folder does not contain.
        patterns: Patterns of your own, which the folder does not contain.

    Returns:
        The quantized model.

    Raises:
        StoreError: The folder is incomplete, damaged, or does not belong to this model.
    """
    folder = Path(folder)
    manifest = _read_manifest(folder)
    pattern_list = None if patterns is None else tuple(patterns)
    tensors = _read_tensors(folder, manifest)
    # The plan depends on patterns; those of the saved target are used unless the caller passes some.
    plan_target = target if target is not None or patterns is not None else manifest["target"]
    if float_model is None:
        plan = plan_captured_graph(_rebuild_graph(folder, manifest, tensors), pattern_list, plan_target)
    else:
        plan = get_transformation_plan(
            float_model, example_inputs, pattern_list, target=plan_target, kwargs=kwargs, leave=manifest["leave"],
            dynamic_axes=manifest["dynamic_axes"],
        )  # fmt: skip
        _check_same_float_model(manifest["float"], fingerprint_model(plan.model))
    _apply_saved_plan(plan, manifest["plan"])
    result = apply_transformation_plan(plan)
    insert_target = target if target is not None else manifest["target"]
    model = insert_qdq(
        result.model,
        result.matches,
        _parse_config(manifest),
        target=insert_target,
        copy=False,
        local_times=_parse_local_times(manifest),
    )
    _restore(model, manifest, {name: value for name, value in tensors.items() if not name.startswith(CONSTANT_PREFIX)})
    return model.eval()


def has_saved_graph(folder: Path) -> bool:
    """Return whether `load(folder)` needs no float model."""
    return _read_manifest(folder)["graph"] is not None


def _rebuild_graph(folder: Path, manifest: dict[str, Any], tensors: dict[str, Tensor]) -> fx.GraphModule:
    """Build the graph in the folder again, with its tensors."""
    if manifest["graph"] is None:
        raise StoreError(
            f"{folder} was saved without its graph: pass the float model, load(folder, float_model, example_inputs), "
            "or save it with with_graph=True"
        )
    try:
        data = GraphData.model_validate(manifest["graph"])
    except ValueError as error:
        raise StoreError(f"the graph in {folder} was not written by scalepoint: {error}") from error
    return rebuild(data, {name.removeprefix(CONSTANT_PREFIX): value for name, value in tensors.items()})


def _parse_config(manifest: dict[str, Any]) -> QuantConfig:
    try:
        return QuantConfig.from_dict(manifest["config"])
    except ValueError as error:
        raise StoreError(f"the config of the manifest cannot be read: {error}") from error


def _parse_local_times(manifest: dict[str, Any]) -> LocalTimes | None:
    """Return the times that decided the placement of the saved model: they give the same placement on any machine."""
    try:
        return None if manifest["local_times"] is None else LocalTimes.from_dict(manifest["local_times"])
    except ValueError as error:
        raise StoreError(f"the times of the manifest cannot be read: {error}") from error


class TensorFile(BaseModel):
    """Name and checksum of the tensor file."""

    file: str
    sha256: str


class Manifest(BaseModel):
    """The contents of scalepoint.json. Field names are the keys of saved files and must not change."""

    model_config = ConfigDict(extra="forbid", strict=True)

    format: int
    versions: dict[str, str]
    target: str | None
    leave: list[str]
    dynamic_axes: dict[str, dict[str, str]] = {}
    plan: list[Annotated[list[str], Field(min_length=2, max_length=2)]]
    config: dict[str, Any]
    float: dict[str, str]
    calculators: dict[str, str]
    fixed: dict[str, list[Any]]
    skipped: dict[str, str]
    smoothed: dict[str, Any]
    is_norm_frozen: bool
    migrated: dict[str, Any] = {}
    calibrated: Annotated[list[int], Field(min_length=2, max_length=2)] | None = None
    constant: str = ""
    tuned_threads: int | None = None
    local_times: dict[str, Any] | None = None
    graph: dict[str, Any] | None = None
    aliases: dict[str, str]
    tensors: TensorFile


def _make_manifest(model: fx.GraphModule) -> dict[str, Any]:
    """Return all fields but those of the tensor file and of the graph."""
    record = record_of(model)
    quantizers = {name: module for name, module in model.named_modules() if isinstance(module, QuantizerBase)}
    stubs = {name: module for name, module in quantizers.items() if isinstance(module, QuantStub)}
    dynamic_axes = {
        name: {str(axis): label for axis, label in labels.items()} for name, labels in record.origin.axes.items()
    }
    fields = {
        "format": FORMAT_VERSION,
        "versions": {"scalepoint": __version__, "torch": str(torch.__version__)},
        "target": None if record.target is None else record.target.name,
        "leave": list(record.origin.leave),
        "dynamic_axes": dynamic_axes or None,
        "plan": [list(row) for row in record.plan],
        "config": record.config.to_dict(),
        "float": dict(record.fingerprint),
        "calculators": {
            name: QParamsCalculatorBase.key_of(type(module.calculator)) for name, module in quantizers.items()
        },
        "fixed": {name: list(stub.fixed_calibration) for name, stub in stubs.items() if stub.fixed_calibration},
        "skipped": {name: stub.skip_reason for name, stub in stubs.items() if stub.skip_reason},
        "smoothed": {
            observer.name: observer.alpha for observer in find_smoothing_observers(model) if observer.alpha is not None
        },
        "is_norm_frozen": record.is_norm_frozen,
        "migrated": {} if record.migrated is None else record.migrated.to_dict(),
        "calibrated": None if record.calibrated is None else list(record.calibrated),
        "constant": record.constant or None,
        "tuned_threads": record.tuned_threads,
        "local_times": None if record.local_times is None else record.local_times.to_dict(),
    }
    return {name: value for name, value in fields.items() if value is not None or name not in NEWER_FIELDS}


def _serialize_with_checksum(manifest: dict[str, Any]) -> str:
    body = json.dumps(manifest, sort_keys=True)
    return json.dumps({"sha256": hashlib.sha256(body.encode()).hexdigest(), "manifest": manifest}, indent=1)


def _read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest and check its format version, its checksum and its fields."""
    path = folder / MANIFEST
    try:
        document = read_json(path, MAX_MANIFEST_BYTES, folder=folder)
    except FileNotFoundError:
        raise StoreError(f"{folder} contains no saved model: there is no {MANIFEST}") from None
    except DocumentError as error:
        raise StoreError(error.args[0]) from error
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error}") from error
    manifest = document.get("manifest") if isinstance(document, dict) else None
    if not isinstance(manifest, dict):
        raise StoreError(f"{path} is not a manifest of scalepoint")
    if manifest.get("format") != FORMAT_VERSION:
        versions = manifest.get("versions")
        writer = versions.get("scalepoint", "?") if isinstance(versions, dict) else "?"
        raise StoreError(
            f"{path} has format {short_repr(manifest.get('format'))}, written by scalepoint {writer}; this version "
            f"reads format {FORMAT_VERSION}"
        )
    if hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest() != document.get("sha256"):
        raise StoreError(f"{path} was changed or damaged after it was written: its checksum does not match")
    try:
        return Manifest.model_validate(manifest).model_dump()
    except ValueError as error:
        raise StoreError(f"{path} was not written by scalepoint: {error}") from error


def _read_tensors(folder: Path, manifest: dict[str, Any]) -> dict[str, Tensor]:
    path = folder / _get_tensor_file_name(manifest)
    if not path.is_file():
        raise StoreError(f"{path} is missing: the folder was changed after it was written")
    try:
        with open_tensors(path, folder=folder) as file:  # checks the header before reading the data
            if compute_digest(path) != manifest["tensors"]["sha256"]:
                raise StoreError(f"{path} was changed or damaged after it was written: its checksum does not match")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dict
    except DocumentError as error:
        raise StoreError(error.args[0]) from error
    except SafetensorError as error:
        raise StoreError(f"{path} was changed or damaged after it was written: {error}") from error
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error}") from error
    missing = [original for original in manifest["aliases"].values() if original not in tensors]
    if missing:
        raise StoreError(f"{path} does not contain {missing[0]}, which the manifest names")
    return tensors | {name: tensors[original] for name, original in manifest["aliases"].items()}


def _get_tensor_file_name(manifest: dict[str, Any]) -> str:
    """Return the name of the tensor file. A name that save does not give, such as a path, is refused."""
    name = manifest["tensors"]["file"]
    if not TENSOR_FILE_NAME.fullmatch(name):
        raise StoreError(
            f"the manifest names {short_repr(name)} as its tensors, but scalepoint does not write such files"
        )
    return str(name)


def _separate_aliases(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Store equal views of the same memory once.

    Returns:
        The tensors to store, and alias -> stored name for the others.
    """
    stored_names: dict[tuple[Any, ...], str] = {}
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for name, value in state.items():
        key = (value.data_ptr(), value.shape, value.stride(), value.dtype) if value.numel() else (name,)
        if key in stored_names:
            aliases[name] = stored_names[key]
        else:
            stored_names[key] = name
            tensors[name] = value.detach().cpu().contiguous()
    # safetensors refuses tensors that share memory: further views of a memory block are copied.
    used_storages: set[int] = set()
    for name, value in tensors.items():
        storage = value.untyped_storage().data_ptr()
        if value.numel() and storage in used_storages:
            tensors[name] = value.clone()
        used_storages.add(storage)
    return tensors, aliases


def _apply_saved_plan(plan: TransformationPlan, saved_plan: list[list[str]]) -> None:
    """Apply the matches of the saved model, and no others. A match that is missing is an error."""
    saved = [tuple(row) for row in saved_plan]
    current = [(match.name, match.pattern.name) for match in plan.matches]
    missing = [row for row in saved if row not in current]
    if missing:
        name, pattern = missing[0]
        raise StoreError(
            f"the float model is different: {pattern} at {name} is missing ({len(missing)} of {len(saved)} matches)"
        )
    for match in plan.matches:
        match.apply = (match.name, match.pattern.name) in saved


def _check_same_float_model(saved: dict[str, str], current: dict[str, str]) -> None:
    differences = [f"{name} is missing" for name in saved if name not in current]
    differences += [f"{name} is new" for name in current if name not in saved]
    for name in saved.keys() & current.keys():
        if saved[name] != current[name]:
            before, after = _format_fingerprint(saved[name]), _format_fingerprint(current[name])
            differences.append(f"{name} was {before}, is {after}")
    if differences:
        listed = "; ".join(sorted(differences)[:MAX_LISTED_DIFFERENCES])
        raise StoreError(
            f"this is not the float model that was quantized, {len(differences)} tensors differ: {listed}. Pass the "
            "same model, or quantize this one"
        )


def _format_fingerprint(fingerprint: str) -> str:
    dtype, _, shape_and_checksum = fingerprint.partition(" ")
    shape, _, checksum = shape_and_checksum.rpartition(" ")
    return f"{dtype} {shape} with checksum {checksum}"


def _restore(model: fx.GraphModule, manifest: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    _restore_quantizers(model, manifest)
    for observer in find_smoothing_observers(model):
        if observer.name in manifest["smoothed"]:
            observer.enabled, observer.alpha = False, manifest["smoothed"][observer.name]
            # Adds the weight that smoothing gave to a norm without one.
            ensure_norm_tensors(observer.layer_norm, torch.ones((), dtype=torch.float32))
    if manifest["is_norm_frozen"]:
        freeze_bn_stats(model)
    _restore_migrations(model, manifest["migrated"], tensors)
    calibrated = tuple(manifest["calibrated"]) if manifest["calibrated"] else None
    update_record(model, calibrated=calibrated, constant=manifest["constant"], tuned_threads=manifest["tuned_threads"])
    try:
        missing, unexpected = model.load_state_dict(tensors, strict=False)
    except RuntimeError as error:  # torch raises it for other shapes
        raise StoreError(f"the saved tensors do not fit: {error}") from error
    if missing or unexpected:
        raise StoreError(f"the saved tensors do not fit: missing {missing[:3]}, unexpected {unexpected[:3]}")


def _restore_migrations(model: fx.GraphModule, saved: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Restore the report of the migrations, and the parameters that they added to the float model."""
    from scalepoint.quantize.migrations.layers import give_parameter, give_quantizer  # noqa: PLC0415

    try:
        migrated = MigrationReport.from_dict(saved)
        for name in () if migrated is None else migrated.added:
            path, _, attribute = name.rpartition(".")
            module = model.get_submodule(path)
            give_parameter(module, attribute.removeprefix("own_"), torch.zeros_like(tensors[name]))
            if attribute.endswith("weight"):
                give_quantizer(model, module)
    except (ValueError, KeyError, AttributeError) as error:
        raise StoreError(f"the migrations in the manifest do not fit this model: {error}") from error
    update_record(model, migrated=migrated)


def _restore_quantizers(model: fx.GraphModule, manifest: dict[str, Any]) -> None:
    modules = dict(model.named_modules())
    for name, key in manifest["calculators"].items():
        quantizer = modules.get(name)
        if not isinstance(quantizer, QuantizerBase):
            raise StoreError(f"the saved model has a quantizer at {name}, this one does not: the target has changed")
        try:
            quantizer.set_calculator(key)
        except ValueError as error:
            raise StoreError(f"{name}: {error}") from error
    for name, module in modules.items():
        if isinstance(module, QuantStub):
            module.skip_reason = manifest["skipped"].get(name, "")
            module.fixed_calibration = manifest["fixed"].get(name)
