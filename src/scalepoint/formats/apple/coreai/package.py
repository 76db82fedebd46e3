"""The .aimodel folder: main.mlirb (the program), main.hash (its SHA-256) and metadata.json.

The folder is written here and not by coreai, which would put the time and keys in random order into metadata.json.
A program is read by print_program.py in a child process, because the compiler ends its process if a file is damaged.
"""

import hashlib
import json
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scalepoint.errors import DocumentError, ExportError, StoreError, install_hint
from scalepoint.graph.torch_export import export_logs_silenced
from scalepoint.support.coreai_text import ProgramText, parse_program
from scalepoint.support.untrusted import check_file, read_bytes, read_json

PROGRAM_FILE, HASH_FILE, METADATA_FILE = "main.mlirb", "main.hash", "metadata.json"
MAX_PROGRAM_BYTES = 8_000_000_000
PRINT_PROGRAM = Path(__file__).with_name("print_program.py")
READ_SECONDS = 600
CUSTOM_METADATA = "creatorDefinedMetadata"


@contextmanager
def coreai_imported() -> Iterator[Any]:
    """Import coreai-torch and silence its warnings and prints; raise ExportError if it is missing."""
    with export_logs_silenced(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import coreai_torch  # noqa: PLC0415  # only Core AI files need it
        except ImportError as error:
            raise ExportError(
                f"Core AI files are written by coreai-torch, which is not installed: {install_hint('coreai')}"
            ) from error
        yield coreai_torch


def write_package(folder: Path, program: ProgramText, metadata: Mapping[str, str]) -> None:
    """Write the three files of a package. The program is parsed and verified by the compiler."""
    from coreai import _version  # noqa: PLC0415
    from coreai._compiler.ir import Module  # noqa: PLC0415
    from coreai.authoring import AIProgram, Context  # noqa: PLC0415

    folder.mkdir(exist_ok=True)
    with Context()._mlir_context:
        module = AIProgram._from_mlir_module(Module.parse(str(program)))
        module._save_bytecode(folder / PROGRAM_FILE)
    digest = hashlib.sha256((folder / PROGRAM_FILE).read_bytes()).digest()
    (folder / HASH_FILE).write_bytes(digest)
    content = {
        "assetVersion": "2.0",
        CUSTOM_METADATA: dict(sorted(metadata.items())),
        "producer": f"{_version.PACKAGE_NAME} {_version.__version__}",
    }
    (folder / METADATA_FILE).write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")


def read_metadata(path: Path) -> dict[str, str]:
    """Return the metadata that the writer has stored."""
    try:
        content = read_json(path / METADATA_FILE, folder=path)
    except DocumentError as error:
        raise StoreError(f"{path} is not a Core AI package, or it is incomplete: {error.args[0]}") from error
    custom = content.get(CUSTOM_METADATA, {}) if isinstance(content, dict) else None
    if not isinstance(custom, dict) or not all(isinstance(value, str) for value in custom.values()):
        raise StoreError(f"{path}: {METADATA_FILE} is not that of a Core AI package")
    return custom


def check_hash(path: Path) -> None:
    """Raise StoreError if the program is not the one that was written."""
    try:
        for name in (PROGRAM_FILE, HASH_FILE):
            check_file(path / name, folder=path)
        digest = hashlib.sha256(read_bytes(path / PROGRAM_FILE, MAX_PROGRAM_BYTES, folder=path)).digest()
        expected = read_bytes(path / HASH_FILE, len(digest), folder=path)
    except DocumentError as error:
        raise StoreError(f"{path} is not a Core AI package, or it is incomplete: {error.args[0]}") from error
    if digest != expected:
        raise StoreError(
            f"{path} is damaged: the SHA-256 of {PROGRAM_FILE} is not the one in {HASH_FILE}. Write the file again"
        )


def read_program(path: Path) -> ProgramText:
    """Return the program of a package, printed by the compiler in a child process."""
    check_hash(path)
    command = [sys.executable, "-I", str(PRINT_PROGRAM), str(path.resolve())]
    try:
        result = subprocess.run(command, capture_output=True, timeout=READ_SECONDS, check=False)  # noqa: S603
    except subprocess.TimeoutExpired as error:
        raise StoreError(f"{path} cannot be read within {READ_SECONDS} s") from error
    if result.returncode:
        last_line = result.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise StoreError(f"Core AI's compiler cannot read {path}: {last_line or f'exit code {result.returncode}'}")
    return parse_program(result.stdout.decode())
