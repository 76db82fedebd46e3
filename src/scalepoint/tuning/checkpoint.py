"""What a run of tune has chosen so far, in a folder: a killed run goes on after its last layer, bit for bit.

tuning.json            the mark of what it was made from; a row a finished layer; replaced whole after each
layer-0007.safetensors codes, scales and shift of one layer
"""

import hashlib
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, fx

from scalepoint.documents import parse_json
from scalepoint.errors import DocumentError, ScalepointWarning
from scalepoint.files import digest, locked, replace_file, replace_text, sweep
from scalepoint.quantize.fingerprint import fingerprint
from scalepoint.tuning.problem import Solution
from scalepoint.tuning.report import TunedLayer

FILE = "tuning.json"
LARGEST = 64_000_000


class Entry(BaseModel):
    """One finished layer."""

    model_config = ConfigDict(extra="forbid", strict=True)

    file: str
    sha256: str
    row: dict[str, Any]


class Pages(BaseModel):
    """The journal as it is written."""

    model_config = ConfigDict(extra="forbid", strict=True)

    format: int = 1
    mark: str
    layers: dict[str, Entry] = {}


class Chosen:
    """A solution as it is applied: codes and scales, and the shift of the bias."""

    def __init__(self, solution: Solution | None, shift: Tensor | None, row: TunedLayer) -> None:
        self.solution, self.shift, self.row = solution, shift, row


class Checkpoint:
    """The finished layers of a run, kept in a folder, or nowhere when there is none."""

    def __init__(self, folder: Path | None, mark: str, *, resume: bool) -> None:
        self.folder, self.pages = folder, Pages(mark=mark)
        if folder is not None:
            with locked(folder):
                sweep(folder)
            self.pages = _read(folder / FILE, mark) if resume else self.pages

    def find(self, name: str) -> Chosen | None:
        """What was chosen for a layer, when it is there and whole."""
        entry = self.pages.layers.get(name)
        if entry is None or self.folder is None:
            return None
        path = self.folder / Path(entry.file).name
        try:
            if digest(path) != entry.sha256:
                raise OSError("its checksum does not fit")
            tensors, row = load_file(path), TunedLayer(**entry.row)
        except (OSError, SafetensorError, TypeError) as error:
            _warn(f"{path} cannot be used ({error}): {name} is tuned again")
            return None
        if "codes" not in tensors:
            return Chosen(None, None, row)
        solution = Solution(tensors["codes"], tensors["codes"], tensors["scale"])
        return Chosen(solution, tensors.get("shift"), row)

    def keep(self, name: str, chosen: Chosen) -> None:
        if self.folder is None:
            return
        tensors = {"is_left": torch.zeros(1)}
        if chosen.solution is not None:
            tensors = {"codes": chosen.solution.codes.contiguous(), "scale": chosen.solution.scale.contiguous()}
            tensors |= {} if chosen.shift is None else {"shift": chosen.shift.contiguous()}
        path = self.folder / f"layer-{len(self.pages.layers):04}.safetensors"
        replace_file(path, lambda temporary: save_file(tensors, temporary))
        self.pages.layers[name] = Entry(file=path.name, sha256=digest(path), row=vars(chosen.row))
        replace_text(self.folder / FILE, json.dumps(self.pages.model_dump(), indent=1) + "\n")


def mark_of(model: fx.GraphModule, batches: Sequence[tuple[Any, ...]], config: str) -> str:
    """Of the calibrated model, the data and the config."""
    found = hashlib.sha256(json.dumps([fingerprint(model), config]).encode())
    for inputs in batches:
        for value in inputs:
            if isinstance(value, Tensor):
                flat = value.detach().cpu().contiguous().reshape(-1)
                found.update(f"{value.dtype} {list(value.shape)}".encode())
                found.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
            else:
                found.update(repr(value).encode())
    return found.hexdigest()


def _read(path: Path, mark: str) -> Pages:
    try:
        pages = Pages.model_validate(parse_json(path.read_text(), LARGEST))
    except FileNotFoundError:
        _warn(f"{path.parent} holds no unfinished tuning: starting from the beginning")
        return Pages(mark=mark)
    except (OSError, UnicodeDecodeError, DocumentError, ValidationError) as error:
        _warn(f"{path} is damaged ({str(error).splitlines()[0]}): starting from the beginning")
        return Pages(mark=mark)
    if pages.mark != mark:
        _warn(f"{path}: the model, the data or the config changed since: starting from the beginning")
        return Pages(mark=mark)
    return pages


def _warn(message: str) -> None:
    warnings.warn(ScalepointWarning(message), stacklevel=3)
