"""What a .pte file says of itself: a method of the program gives it, as a constant."""

import json
import re
import subprocess
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from scalepoint.errors import StoreError
from scalepoint.files import TemporaryFolder
from scalepoint.formats.executorch.writing import ABOUT, INSTALL
from scalepoint.formats.format import About, FileInput
from scalepoint.formats.metadata import made_for

MAGIC = b"ET12"
_NUMBER = re.compile(r"(: -?)inf\b")  # as flatc writes it


def files_of(path: Path) -> Sequence[Path]:
    return [path]


def about(path: Path) -> About:
    """Its inputs, and what it was made for; of files that others wrote only the size."""
    said = _said(path)
    metadata = said.get("made_for", {})
    return About(
        size=path.stat().st_size,
        inputs=tuple(FileInput(each["name"], each["dtype"], tuple(each["shape"])) for each in said.get("inputs", ())),
        made_for=made_for(metadata),
        quantizers=said.get("quantizers", {}),
        metadata=metadata,
    )


def _said(path: Path) -> dict[str, Any]:
    plans = {plan["name"]: plan for plan in program(path)["execution_plan"]}
    if ABOUT not in plans:
        return {}
    values = plans[ABOUT]["values"]
    texts = [each["val"]["string_val"] for each in values if each.get("val_type") == "String"]
    found: dict[str, Any] = json.loads(texts[0])
    return found


def program(path: Path) -> dict[str, Any]:
    """The program in the file, as its public schema has it, without weights."""
    with path.open("rb") as file:
        head = file.read(64)
    if head[4:8] != MAGIC:
        raise StoreError(f"{path} is no ExecuTorch program")
    size = int.from_bytes(head[16:24], "little")
    with path.open("rb") as file:
        data = file.read(size)
    if len(data) < size:
        raise StoreError(f"{path} is only a part of an ExecuTorch program: {len(data):,} of at least {size:,} bytes")
    return decoded(data, "exir/_serialize/program.fbs")


def decoded(data: bytes, schema: str) -> dict[str, Any]:
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
            check=False,
        )
        written = binary.with_suffix(".json")
        if done.returncode or not written.is_file():
            raise StoreError(f"a flatbuffer that flatc cannot read: {(done.stderr or done.stdout).strip()[:200]}")
        found: dict[str, Any] = json.loads(_NUMBER.sub(r"\1Infinity", written.read_text(encoding="utf-8")))
        return found
