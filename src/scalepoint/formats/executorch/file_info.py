"""Read inputs, quantizers and metadata of a .pte file: a constant method of the program holds them as JSON."""

import re
import subprocess
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from scalepoint.errors import DocumentError, StoreError
from scalepoint.formats.executorch.write import DESCRIPTION_METHOD, INSTALL
from scalepoint.formats.format import FileInfo, FileInput
from scalepoint.formats.metadata import FileDescription, read_description, read_target_options
from scalepoint.support.documents import parse_json
from scalepoint.support.files import TemporaryFolder
from scalepoint.support.untrusted import LARGEST_FLATBUFFER, check_file, read_head, read_part, read_text

MAGIC = b"ET12"
MAX_JSON_BYTES = 2**32  # of a program as JSON
_FLATC_INFINITY = re.compile(r"(: -?)inf\b")  # flatc writes inf, JSON parsers expect Infinity


def list_files(path: Path) -> Sequence[Path]:
    return [path]


def read_info(path: Path) -> FileInfo:
    """Read inputs, quantizers, metadata and size; only the size if another program wrote the file."""
    size = _measure_size(path)
    try:
        description = _read_description(read_program(path))
    except StoreError as error:
        raise StoreError(f"{path}: {error.args[0]}") from error
    return FileInfo(
        size=size,
        inputs=tuple(FileInput(declared.name, declared.dtype, declared.shape) for declared in description.inputs),
        made_for=read_target_options(description.made_for),
        quantizers=description.quantizers,
        metadata=description.made_for,
    )


def _measure_size(path: Path) -> int:
    try:
        return check_file(path)
    except DocumentError as error:
        raise StoreError(error.args[0]) from error
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error


class _ProgramValue(BaseModel):
    val_type: str = ""
    val: dict[str, Any] = {}


class _ExecutionPlan(BaseModel):
    name: str
    values: tuple[_ProgramValue, ...]


class _Program(BaseModel):
    """The fields of ExecuTorch's program schema that we read."""

    execution_plan: tuple[_ExecutionPlan, ...]


def _read_description(program: dict[str, Any]) -> FileDescription:
    try:
        plans = {plan.name: plan for plan in _Program.model_validate(program).execution_plan}
    except ValidationError as error:
        raise StoreError(f"the file is damaged: {error.error_count()} fields do not fit ExecuTorch's schema") from error
    if DESCRIPTION_METHOD not in plans:
        return FileDescription()
    texts = [value.val.get("string_val") for value in plans[DESCRIPTION_METHOD].values if value.val_type == "String"]
    if not texts or not isinstance(texts[0], str):
        raise StoreError("the file is damaged: its description is not a string")
    return read_description(texts[0])


def read_program(path: Path) -> dict[str, Any]:
    """Read the program in a .pte file as a dictionary in ExecuTorch's schema, without weights."""
    head, file_size = read_head(path, 64), check_file(path)
    if head[4:8] != MAGIC:
        raise StoreError("not an ExecuTorch program")
    size = int.from_bytes(head[16:24], "little")
    if file_size < size:
        raise StoreError(f"incomplete ExecuTorch program: {file_size:,} of at least {size:,} bytes")
    if size > LARGEST_FLATBUFFER:
        raise StoreError(f"a program of {size:,} bytes is too large: the limit is {LARGEST_FLATBUFFER:,}")
    return decode_flatbuffer(read_part(path, 0, size), "exir/_serialize/program.fbs")


def decode_flatbuffer(data: bytes, schema: str) -> dict[str, Any]:
    """Decode a flatbuffer with flatc and a schema, which both come with ExecuTorch."""
    spec = find_spec("executorch")
    if spec is None or not spec.submodule_search_locations:
        raise StoreError(f"reading a .pte file needs ExecuTorch: {INSTALL}")
    package = Path(next(iter(spec.submodule_search_locations)))
    with TemporaryFolder() as folder:
        binary = folder / "data.bin"
        binary.write_bytes(data)
        options = ["--json", "--defaults-json", "--strict-json", "--raw-binary", "-o", str(folder)]
        result = subprocess.run(  # noqa: S603  # a program of an installed package, no shell
            [str(package / "data/bin/flatc"), *options, str(package / schema), "--", str(binary)],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        json_file = binary.with_suffix(".json")
        if result.returncode or not json_file.is_file():
            raise StoreError(f"flatc cannot read the flatbuffer: {(result.stderr or result.stdout).strip()[:200]}")
        try:
            text = read_text(json_file, MAX_JSON_BYTES)
            table = parse_json(_FLATC_INFINITY.sub(r"\1Infinity", text), MAX_JSON_BYTES)
        except DocumentError as error:  # flatc copies the bytes of damaged strings unchanged
            raise StoreError(f"the file is damaged: {error.args[0]}") from error
        if not isinstance(table, dict):
            raise StoreError("the file is damaged: its program is not a table")
        return table
