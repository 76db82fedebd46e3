"""What a .pte file says of itself: a method of the program gives it, as a constant."""

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
MAX_TEXT_BYTES = 2**32  # bytes of a program as JSON
_INFINITY = re.compile(r"(: -?)inf\b")  # as flatc writes it


def list_files(path: Path) -> Sequence[Path]:
    return [path]


def read_info(path: Path) -> FileInfo:
    """Its inputs, and what it was made for; of files that others wrote only the size."""
    size = _measure_size(path)
    try:
        said = _read_description(read_program(path))
    except StoreError as error:
        raise StoreError(f"{path}: {error.args[0]}") from error
    return FileInfo(
        size=size,
        inputs=tuple(FileInput(each.name, each.dtype, each.shape) for each in said.inputs),
        made_for=read_target_options(said.made_for),
        quantizers=said.quantizers,
        metadata=said.made_for,
    )


def _measure_size(path: Path) -> int:
    try:
        return check_file(path)
    except DocumentError as error:
        raise StoreError(error.args[0]) from error
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error


class _Value(BaseModel):
    val_type: str = ""
    val: dict[str, Any] = {}


class _Plan(BaseModel):
    name: str
    values: tuple[_Value, ...]


class _Program(BaseModel):
    """The part of a program that is looked at here."""

    execution_plan: tuple[_Plan, ...]


def _read_description(program: dict[str, Any]) -> FileDescription:
    try:
        plans = {plan.name: plan for plan in _Program.model_validate(program).execution_plan}
    except ValidationError as error:
        raise StoreError(f"it is damaged: {error.error_count()} fields are not as ExecuTorch writes them") from error
    if DESCRIPTION_METHOD not in plans:
        return FileDescription()
    texts = [each.val.get("string_val") for each in plans[DESCRIPTION_METHOD].values if each.val_type == "String"]
    if not texts or not isinstance(texts[0], str):
        raise StoreError("it is damaged: the description in it is not a text")
    return read_description(texts[0])


def read_program(path: Path) -> dict[str, Any]:
    """The program in the file, as its public schema has it, without weights."""
    head, there = read_head(path, 64), check_file(path)
    if head[4:8] != MAGIC:
        raise StoreError("it is no ExecuTorch program")
    size = int.from_bytes(head[16:24], "little")
    if there < size:
        raise StoreError(f"only a part of an ExecuTorch program: {there:,} of at least {size:,} bytes")
    if size > LARGEST_FLATBUFFER:
        raise StoreError(f"a program of {size:,} bytes: at most {LARGEST_FLATBUFFER:,} are read")
    return decode_flatbuffer(read_part(path, 0, size), "exir/_serialize/program.fbs")


def decode_flatbuffer(data: bytes, schema: str) -> dict[str, Any]:
    """A flatbuffer by a schema of ExecuTorch's, through the compiler that comes with it."""
    spec = find_spec("executorch")
    if spec is None or not spec.submodule_search_locations:
        raise StoreError(f"a .pte file is read by ExecuTorch: {INSTALL}")
    home = Path(next(iter(spec.submodule_search_locations)))
    with TemporaryFolder() as folder:
        binary = folder / "data.bin"
        binary.write_bytes(data)
        options = ["--json", "--defaults-json", "--strict-json", "--raw-binary", "-o", str(folder)]
        done = subprocess.run(  # noqa: S603  # a program of an installed package, no shell
            [str(home / "data/bin/flatc"), *options, str(home / schema), "--", str(binary)],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        written = binary.with_suffix(".json")
        if done.returncode or not written.is_file():
            raise StoreError(f"a flatbuffer that flatc cannot read: {(done.stderr or done.stdout).strip()[:200]}")
        try:
            text = read_text(written, MAX_TEXT_BYTES)
            found = parse_json(_INFINITY.sub(r"\1Infinity", text), MAX_TEXT_BYTES)
        except DocumentError as error:  # flatc copies the bytes of a damaged text as they are
            raise StoreError(f"it is damaged: {error.args[0]}") from error
        if not isinstance(found, dict):
            raise StoreError("it is damaged: the program is not a table")
        return found
