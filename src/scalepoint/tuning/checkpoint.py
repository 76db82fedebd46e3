"""The finished pieces of a `tune` run, in a folder: an interrupted run continues after its last piece, bit for bit.

tuning.json            fingerprint of the run's inputs, and one entry per finished piece; replaced after each piece
piece-0007.safetensors state of the layers and activation quantizers of one piece
"""

import hashlib
import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from scalepoint import distributed
from scalepoint.errors import DocumentError, ScalepointWarning, StoreError
from scalepoint.results import TunedLayer, TunedPiece
from scalepoint.support.files import compute_digest, folder_locked, remove_leftovers, replace_file, replace_text
from scalepoint.support.untrusted import check_file, open_tensors, read_json
from scalepoint.tuning.state import States
from scalepoint.tuning.walk import StreamWalk

JOURNAL_NAME = "tuning.json"
MAX_JOURNAL_BYTES = 64_000_000
_PIECE_FILE = re.compile(r"piece-\d{4,}\.safetensors$")


class PieceEntry(BaseModel):
    """The entry of one finished piece in the journal."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)

    file: str
    sha256: str
    result: dict[str, Any] = Field(alias="done")  # a PieceResult


class TuningJournal(BaseModel):
    """The contents of tuning.json. Aliases are the keys in the file."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)

    format: int = 2
    fingerprint: str = Field(alias="mark")  # of the model, the data and the config
    pieces: dict[str, PieceEntry] = {}


@dataclass(frozen=True)
class PieceResult:
    """What the report says about one piece.

    Attributes:
        piece: The row of the piece; None if no layer of it was tuned.
        rows: One row per tuned layer.
        skipped: Layers that were not tuned -> the reason. Called "left" in tuning.json.
    """

    piece: TunedPiece | None
    rows: tuple[TunedLayer, ...]
    skipped: Annotated[
        dict[str, str], Field(validation_alias=AliasChoices("left", "skipped"), serialization_alias="left")
    ]


class StoredPiece(NamedTuple):
    """What the folder contains about one finished piece."""

    states: States
    result: PieceResult


class Checkpoint:
    """The finished pieces of a run. Without a folder nothing is stored. Only rank 0 reads and writes the folder."""

    def __init__(self, folder: Path | None, journal: TuningJournal) -> None:
        self.folder, self.journal = folder, journal

    @classmethod
    def start(cls, folder: Path | None, fingerprint: str, *, resume: bool) -> "Checkpoint":
        """Return the checkpoint of a run with these inputs; with `resume` it has the pieces that are finished."""
        journal = TuningJournal(fingerprint=fingerprint)
        if folder is not None:
            distributed.run_on_main("the folder of tuning", lambda: _remove_temporary_files(folder))
            if resume and distributed.is_main():
                journal = _read_journal(folder / JOURNAL_NAME, fingerprint)
        return cls(folder, journal)

    @classmethod
    def open_finished(cls, folder: Path) -> "Checkpoint":
        """Return the checkpoint of a finished run."""
        journal = TuningJournal(fingerprint="")
        if distributed.is_main():
            try:
                journal = _parse_journal(folder / JOURNAL_NAME)
            except (OSError, DocumentError, ValidationError) as error:
                raise StoreError(
                    f"{folder} does not contain a finished tuning: {str(error).splitlines()[0]}"
                ) from error
        return cls(folder, journal)

    def load_piece(self, name: str) -> StoredPiece | None:
        """Load a finished piece; None if it is missing or damaged. Rank 0 reads it and sends it to the other ranks."""
        if self.folder is None:
            return None
        stored = self._read_piece(name) if distributed.is_main() else None
        local_result = None if stored is None else stored.result
        local_tensors = {} if stored is None else flatten_states(stored.states)
        phase_name = f"piece {name}"
        result = distributed.run_on_main(phase_name, lambda: local_result, PieceResult | None)
        tensors = distributed.broadcast_tensors(local_tensors, phase_name)
        return None if result is None else StoredPiece(_unflatten_states(tensors), result)

    def _read_piece(self, name: str) -> StoredPiece | None:
        entry = self.journal.pieces.get(name)
        if entry is None or self.folder is None:
            return None
        path = self.folder / Path(entry.file).name
        try:
            check_file(path, folder=self.folder)
            if compute_digest(path) != entry.sha256:
                raise OSError("its checksum does not match")
            tensors, result = load_file(path), TypeAdapter(PieceResult).validate_python(entry.result)
        except (OSError, SafetensorError, DocumentError, ValidationError) as error:
            _warn(f"{path} cannot be used ({str(error).splitlines()[0]}): {name} is tuned again")
            return None
        return StoredPiece(_unflatten_states(tensors), result)

    def modules_by_file(self) -> dict[Path, list[str]]:
        """Return the paths of the modules whose state is stored, by file."""
        assert self.folder is not None  # noqa: S101  # called only for a checkpoint in a folder
        modules: dict[Path, list[str]] = {}
        for entry in self.journal.pieces.values():
            path = self.folder / Path(entry.file).name
            with open_tensors(path, folder=self.folder) as file:
                # Every module has one tensor "path|", see flatten_states.
                modules[path] = [key.partition("|")[0] for key in file.keys() if key.endswith("|")]  # noqa: SIM118
        return modules

    def store_piece(self, name: str, states: States, result: PieceResult) -> None:
        if self.folder is None or not distributed.is_main():
            return
        tensors = flatten_states(states)
        path = self.folder / f"piece-{len(self.journal.pieces):04}.safetensors"
        replace_file(path, lambda temporary: save_file(tensors, temporary))
        fields = TypeAdapter(PieceResult).dump_python(result, mode="json", by_alias=True)
        self.journal.pieces[name] = PieceEntry(file=path.name, sha256=compute_digest(path), result=fields)
        # The journal is written last: a run that is killed before has an unlisted file, which the next run replaces.
        replace_text(self.folder / JOURNAL_NAME, json.dumps(self.journal.model_dump(by_alias=True), indent=1) + "\n")


def flatten_states(states: States) -> dict[str, Tensor]:
    """Return states as tensors named "path|key". Every path has a tensor "path|" too, also a module without state."""
    tensors = {f"{path}|": torch.zeros(1, dtype=torch.float32) for path in states}
    for path, state in states.items():
        tensors |= {f"{path}|{key}": value.contiguous() for key, value in state.items()}
    return tensors


def _unflatten_states(tensors: Mapping[str, Tensor]) -> States:
    states: States = {}
    for name, value in tensors.items():
        path, _, key = name.partition("|")
        states.setdefault(path, {}).update({key: value} if key else {})
    return states


def _remove_temporary_files(folder: Path) -> None:
    """Delete temporary files of killed runs."""
    with folder_locked(folder):
        matches = (_PIECE_FILE.search(path.name) for path in folder.iterdir())
        remove_leftovers(folder, (JOURNAL_NAME, *(match[0] for match in matches if match)))


def compute_fingerprint(model: object, walk: StreamWalk, config: str) -> str:
    """Return a fingerprint of the calibrated model, the data of all ranks and the config.

    Args:
        model: A fingerprint of the model, as JSON values.
        walk: The walk that has read the data.
        config: The config as JSON.
    """
    with distributed.phase("fingerprints of the data") as step:
        step.value = [_fingerprint_batch(walk, index) for index in range(walk.batch_count)]
    batches = distributed.interleave(step.values)
    return hashlib.sha256(json.dumps([model, config, batches]).encode()).hexdigest()


def _fingerprint_batch(walk: StreamWalk, index: int) -> str:
    sha256 = hashlib.sha256()
    for node in walk.placeholders:
        value = walk.get_value(node, index, noisy=False)
        if isinstance(value, Tensor):
            flat = value.detach().cpu().contiguous().reshape(-1)
            sha256.update(f"{value.dtype} {list(value.shape)}".encode())
            sha256.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
        else:
            sha256.update(repr(value).encode())
    return sha256.hexdigest()


def _parse_journal(path: Path) -> TuningJournal:
    return TuningJournal.model_validate(read_json(path, MAX_JOURNAL_BYTES, folder=path.parent))


def _read_journal(path: Path, fingerprint: str) -> TuningJournal:
    """Return the journal to continue with; an empty one, with a warning, if the run must start from the beginning."""
    try:
        journal = _parse_journal(path)
    except FileNotFoundError:
        _warn(f"{path.parent} does not contain an unfinished tuning: starting from the beginning")
        return TuningJournal(fingerprint=fingerprint)
    except (OSError, DocumentError, ValidationError) as error:
        _warn(f"{path} is damaged ({str(error).splitlines()[0]}): starting from the beginning")
        return TuningJournal(fingerprint=fingerprint)
    if journal.fingerprint != fingerprint:
        _warn(f"{path}: the model, the data or the config changed since it was written: starting from the beginning")
        return TuningJournal(fingerprint=fingerprint)
    return journal


def _warn(message: str) -> None:
    warnings.warn(ScalepointWarning(message), stacklevel=3)
