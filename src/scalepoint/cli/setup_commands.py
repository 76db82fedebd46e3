"""The commands `scalepoint targets`, `scalepoint cache` and `scalepoint doctor`."""

# ruff: noqa: PLC0415  # what needs torch is imported when a command runs
import os
import platform
import shutil
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

import scalepoint
from scalepoint.cli import flags
from scalepoint.cli.exit_codes import Code
from scalepoint.cli.output import Listing, say, show, show_json
from scalepoint.errors import TargetError, UsageError, did_you_mean, install_hint
from scalepoint.support.cpu import ISA_CAP, probe_amx_once
from scalepoint.support.jsonable import to_jsonable

REQUIRED_PACKAGES = (
    "torch",
    "numpy",
    "pydantic",
    "yaml",
    "safetensors",
    "rich",
    "typer",
    "onnx",
    "onnx_ir",
    "onnxscript",
    "ml_dtypes",
)
DISTRIBUTION_NAMES = {
    "yaml": "pyyaml",
    "PIL": "pillow",
    "onnx_ir": "onnx-ir",
    "ml_dtypes": "ml-dtypes",
    "ai_edge_litert": "ai-edge-litert",
    "coreai_torch": "coreai-torch",
    "compressed_tensors": "compressed-tensors",
    "onnxruntime_genai": "onnxruntime-genai",
}
OPTIONAL_PACKAGES = (  # package, its purpose, the extra of scalepoint that installs it
    ("openvino", "runs files of the target openvino", "openvino"),
    ("executorch", "writes and runs .pte files", "executorch"),
    ("ai_edge_litert", "writes and runs .tflite files", "litert"),
    ("coremltools", "writes and reads files of the target coreml", "coreml"),
    ("coreai_torch", "writes and runs files of the target coreai", "coreai"),
    ("transformers", "reads checkpoints of language models, hf:FOLDER, and runs packed folders", "transformers"),
    ("compressed_tensors", "lets transformers load folders of the target compressed-tensors", "transformers"),
    ("onnxruntime_genai", "runs folders of the target ort-genai", "genai"),
    ("gguf", "writes GGUF files", "gguf"),
)
MIN_FREE_BYTES = 2e9
ISA_CAP_TEXT = "".join(f"{name}={value}" for name, value in ISA_CAP.items())


def targets(
    target: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="A target, to see everything that it declares.", show_default=False),
    ] = None,
    json: flags.Json = False,
    debug: flags.Debug = False,
) -> int:
    """List the deployment targets, and whether their runtimes are installed.

    With NAME, show what a target fuses, accepts and refuses.
    """
    return _show_all_targets(json) if target is None else _show_target(target, json)


def _show_all_targets(json: bool) -> int:
    from scalepoint.runtimes import find_runtime

    descriptions, broken = [], []
    for name in list_target_names():
        try:
            descriptions.append(describe_target(name))
        except TargetError as error:
            broken.append({"name": name, "why": str(error.args[0])})
    rows = []
    for description in descriptions:
        runtime = description["runtime"]
        state = "none known" if runtime is None else "ok" if find_runtime(runtime).is_installed else "missing"
        rows.append({**{key: description[key] for key in ("name", "summary", "default", "accepts")}, "runtime": state})
    if json:
        show_json("targets", {"exit_code": 0, "targets": rows, "broken": broken})
    else:
        cells = [(row["name"], row["summary"], row["default"], row["runtime"]) for row in rows]
        show(Listing(("target", "description", "default", "runtime"), cells))
    for entry in broken:
        say(f"not usable: {entry['why']}", "yellow")
    return Code.DONE


def list_target_names() -> list[str]:
    """Return the names of all targets: for models and for language models, also those of other packages."""
    from scalepoint.targets import list_targets

    return [*list_targets(), *list_targets(language=True)]


def describe_target(name: str) -> dict[str, Any]:
    """Return everything that a target declares, and the rules that `scalepoint check` applies for it."""
    from scalepoint.checking import describe_rules
    from scalepoint.quantize.coverage_rows import describe_spec
    from scalepoint.targets import describe, find_target

    if name not in list_target_names():
        raise UsageError(f"there is no target {name!r}: {did_you_mean(name, list_target_names())}")
    target = find_target(name)
    activation = "float" if target.is_language else describe_spec(target.activation)
    return {
        "name": target.name,
        "summary": target.summary,
        "default": f"w {describe_spec(target.weight)}, x {activation}",
        "accepts": sorted({str(row) for row in target.accepts}) or ["everything"],
        "runtime": target.runtime,
        "sections": to_jsonable((*describe(target), *describe_rules(target.name))),
    }


def _show_target(name: str, json: bool) -> int:
    description = describe_target(name)
    if json:
        content = {key: description[key] for key in ("name", "summary", "sections")}
        show_json("targets", {"exit_code": 0, **content})
        return Code.DONE
    show(Text(f"{name}: {description['summary']}"))
    for section in description["sections"]:
        parts = (Listing(section["columns"], section["rows"]),) if section["rows"] else ()
        notes = (Text(section["note"]),) if section["note"] else ()
        show(Text(f"\n{section['title']}", style="bold"), *parts, *notes)
    return Code.DONE


def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Delete all measurements.")] = False,
    json: flags.Json = False,
    debug: flags.Debug = False,
) -> int:
    """Show or delete the measured times of layers that decide what runs in int8 on this machine.

    Each file is for one CPU model, runtime, runtime version and number of threads.
    """
    from scalepoint.targets.measurement_cache import (
        clear_measurements,
        list_measurement_files,
        load_measurements,
        user_cache_folder,
    )

    rows = []
    for path in list_measurement_files():
        measurements = load_measurements(path)
        counts = {"layers": len(measurements.layers), "networks": len(measurements.networks)}
        rows.append({"file": path.name, **counts, "bytes": path.stat().st_size})
    deleted = clear_measurements() if clear else 0
    folder = str(user_cache_folder())
    if json:
        show_json("cache", {"folder": folder, "files": rows, "deleted": deleted})
        return Code.DONE
    show(
        Listing(
            ("file", "layers", "networks", "bytes"), [tuple(row.values()) for row in rows], number_columns=(1, 2, 3)
        )
    )
    show(Text(f"{len(rows)} files {'deleted from' if clear else 'in'} {folder}"))
    return Code.DONE


@dataclass(frozen=True)
class DoctorLine:
    """Result of one check of `scalepoint doctor`. The fields are keys of its JSON output."""

    name: str
    state: str  # "ok" or "missing"
    detail: str = ""
    way_out: str = ""  # what to do if it is missing
    is_needed: bool = False


def doctor(json: flags.Json = False, debug: flags.Debug = False) -> int:
    """Check this machine: versions, instruction set, runtimes and disk space.

    For everything that is missing, show how to install it.
    """
    lines = [
        DoctorLine("scalepoint", "ok", scalepoint.__version__),
        DoctorLine("python", "ok", f"{platform.python_version()} ({sys.executable})"),
        DoctorLine("system", "ok", f"{platform.system()} {platform.release()} {platform.machine()}"),
        *(_check_package(name, is_needed=True) for name in REQUIRED_PACKAGES),
        _check_package("onnxruntime", "runs target onnxruntime", is_needed=True),
        *(_check_package(name, f"{purpose} (optional)", extra=extra) for name, purpose, extra in OPTIONAL_PACKAGES),
        _check_llamacpp(),
        _check_package("tensorrt", "optional: `scalepoint check` works without it"),
        _check_package("PIL", "reads folders of images (optional)"),
        _check_instruction_set(),
        *_check_amx(),
        DoctorLine(
            "cores", "ok", f"{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()}"
        ),
        _check_disk("disk here", Path.cwd()),
        _check_disk("disk for temporary files", Path(os.environ.get("TMPDIR") or tempfile.gettempdir())),
    ]
    problems = [line for line in lines if line.state != "ok" and line.is_needed]
    code = Code.UNVERIFIED if problems else Code.DONE
    if json:
        show_json("doctor", {"exit_code": int(code), "lines": lines})
        return code
    show(
        Listing(
            ("part", "state", "details", "what to do"),
            [(line.name, line.state, line.detail, line.way_out) for line in lines],
        )
    )
    missing = ", ".join(line.name for line in problems)
    show(Text(f"required, but missing: {missing}" if problems else "everything that is required is installed"))
    if problems:
        say("failed: the last column shows how to install what is missing", "red")
    return code


def _check_package(name: str, note: str = "", is_needed: bool = False, extra: str = "") -> DoctorLine:
    """Check whether a package is installed. It is not imported, because a broken package would raise anything."""
    distribution = DISTRIBUTION_NAMES.get(name, name)
    try:
        is_installed = find_spec(name) is not None
    except (ImportError, ValueError):
        is_installed = False
    if not is_installed:
        command = install_hint(extra) if extra else f"pip install {distribution}"
        return DoctorLine(distribution, "missing", note, command, is_needed)
    try:
        return DoctorLine(distribution, "ok", version(distribution), is_needed=is_needed)
    except PackageNotFoundError:
        return DoctorLine(distribution, "ok", "version unknown", is_needed=is_needed)


def _check_llamacpp() -> DoctorLine:
    """Check llama.cpp, which is a library in a folder and not a Python package."""
    from scalepoint.runtimes.llamacpp import LLAMACPP
    from scalepoint.runtimes.llamacpp.child import RELEASE, find_library

    path = find_library()
    if path is None:
        return DoctorLine("llama.cpp", "missing", "runs GGUF files (optional)", LLAMACPP.install)
    return DoctorLine("llama.cpp", "ok", f"{RELEASE} ({path.parent})")


def _check_instruction_set() -> DoctorLine:
    try:
        from scalepoint.support.cpu import instruction_set

        instructions = instruction_set()
    except Exception as error:
        return DoctorLine(
            "int8 instructions",
            "missing",
            f"not known: {type(error).__name__}: {error}",
            "reinstall torch: pip install torch",
        )
    note = "" if instructions != "avx2" else "; no VNNI: int8 gains less speed here, and the pair-safe scale is used"
    return DoctorLine("int8 instructions", "ok", f"{instructions}{note}")


def _check_amx() -> list[DoctorLine]:
    """Check AMX if the CPU announces it: on some virtual machines announced AMX instructions fail."""
    status = probe_amx_once()
    if not status.is_announced:
        return []
    if status.works_with_cap:
        hint = f"nothing here; in other programs set {ISA_CAP_TEXT} before the process starts" if status.signals else ""
        return [DoctorLine("AMX", "ok", str(status), hint)]
    return [DoctorLine("AMX", "missing", str(status), "use another machine, or one whose system does not announce AMX")]


def _check_disk(name: str, folder: Path) -> DoctorLine:
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return DoctorLine(name, "missing", str(error), "set TMPDIR to an existing folder")
    detail = f"{free / 1e9:.1f} GB free in {folder}"
    if free >= MIN_FREE_BYTES:
        return DoctorLine(name, "ok", detail)
    return DoctorLine(name, "missing", detail, f"free some space: at least {MIN_FREE_BYTES / 1e9:.0f} GB")
