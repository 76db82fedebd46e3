"""What a run of tune has chosen so far, in a folder: a killed run goes on after its last piece, bit for bit.

tuning.json            the mark of what it was made from; an entry a finished piece; replaced whole after each
piece-0007.safetensors what the layers and activation quantizers of one piece hold
"""

import hashlib
import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from scalepoint import distributed
from scalepoint.errors import DocumentError, ScalepointWarning, StoreError
from scalepoint.results import TunedLayer, TunedPiece
from scalepoint.support.files import digest, locked, remove_leftovers, replace_file, replace_text
from scalepoint.support.untrusted import check_file, open_tensors, read_json
from scalepoint.tuning.state import States
from scalepoint.tuning.walk import StreamWalk

JOURNAL_NAME = "tuning.json"
MAX_JOURNAL_BYTES = 64_000_000
_PIECE_FILE = re.compile(r"piece-\d{4,}\.safetensors$")


class PieceEntry(BaseModel):
    """One finished piece."""

    model_config = ConfigDict(extra="forbid", strict=True)

    file: str
    sha256: str
    done: dict[str, Any]


class TuningJournal(BaseModel):
    """The journal as it is written."""

    model_config = ConfigDict(extra="forbid", strict=True)

    format: int = 2
    mark: str
    pieces: dict[str, PieceEntry] = {}


@dataclass(frozen=True)
class PieceResult:
    """What became of one piece."""

    piece: TunedPiece | None
    rows: tuple[TunedLayer, ...]
    left: dict[str, str]


class Checkpoint:
    """The finished pieces of a run, kept in a folder, or nowhere when there is none."""

    def __init__(self, folder: Path | None, mark: str, *, resume: bool) -> None:
        self.folder, self.journal = folder, TuningJournal(mark=mark)
        if folder is not None:
            distributed.run_on_main("the folder of tuning", lambda: _remove_leftovers(folder))
            self.journal = (
                _read_journal(folder / JOURNAL_NAME, mark) if resume and distributed.is_main() else self.journal
            )

    @classmethod
    def open_finished(cls, folder: Path) -> "Checkpoint":
        """The checkpoint of a run that has ended. Only rank 0 reads it."""
        pages = TuningJournal(mark="")
        if distributed.is_main():
            try:
                pages = _parse_journal(folder / JOURNAL_NAME)
            except (OSError, DocumentError, ValidationError) as error:
                raise StoreError(f"{folder} holds no finished tuning: {str(error).splitlines()[0]}") from error
        found = cls(None, pages.mark, resume=False)
        found.folder, found.journal = folder, pages
        return found

    def load_piece(self, name: str) -> tuple[States, PieceResult] | None:
        """What was chosen in a piece; None if it is missing or damaged. Rank 0 reads it for all ranks."""
        if self.folder is None:
            return None
        own = self._found(name) if distributed.is_main() else None
        done = distributed.run_on_main(name, lambda: own and own[1], PieceResult | None)
        tensors = distributed.broadcast_tensors({} if own is None else flatten_states(own[0]), name)
        return None if done is None else (_unflatten_states(tensors), done)

    def _found(self, name: str) -> tuple[States, PieceResult] | None:
        entry = self.journal.pieces.get(name)
        if entry is None or self.folder is None:
            return None
        path = self.folder / Path(entry.file).name
        try:
            check_file(path, folder=self.folder)
            if digest(path) != entry.sha256:
                raise OSError("its checksum does not fit")
            tensors, done = load_file(path), TypeAdapter(PieceResult).validate_python(entry.done)
        except (OSError, SafetensorError, DocumentError, ValidationError) as error:
            _warn(f"{path} cannot be used ({str(error).splitlines()[0]}): {name} is tuned again")
            return None
        return _unflatten_states(tensors), done

    def modules_by_file(self) -> dict[Path, list[str]]:
        """The modules whose state is kept, by file."""
        assert self.folder is not None  # noqa: S101  # asked only of what is in a folder
        found: dict[Path, list[str]] = {}
        for entry in self.journal.pieces.values():
            path = self.folder / Path(entry.file).name
            with open_tensors(path, folder=self.folder) as file:
                found[path] = [key.partition("|")[0] for key in file.keys() if key.endswith("|")]  # noqa: SIM118
        return found

    def store_piece(self, name: str, states: States, done: PieceResult) -> None:
        if self.folder is None or not distributed.is_main():
            return
        tensors = flatten_states(states)
        path = self.folder / f"piece-{len(self.journal.pieces):04}.safetensors"
        replace_file(path, lambda temporary: save_file(tensors, temporary))
        said = TypeAdapter(PieceResult).dump_python(done, mode="json")
        self.journal.pieces[name] = PieceEntry(file=path.name, sha256=digest(path), done=said)
        replace_text(self.folder / JOURNAL_NAME, json.dumps(self.journal.model_dump(), indent=1) + "\n")


def flatten_states(states: States) -> dict[str, Tensor]:
    """States by place and name, also those of places that have none."""
    found = {f"{place}|": torch.zeros(1, dtype=torch.float32) for place in states}
    return found | {
        f"{place}|{own}": value.contiguous() for place, state in states.items() for own, value in state.items()
    }


def _unflatten_states(tensors: Mapping[str, Tensor]) -> States:
    states: States = {}
    for key, value in tensors.items():
        place, _, own = key.partition("|")
        states.setdefault(place, {}).update({own: value} if own else {})
    return states


def _remove_leftovers(folder: Path) -> None:
    with locked(folder):
        pieces = (_PIECE_FILE.search(each.name) for each in folder.iterdir())
        remove_leftovers(folder, (JOURNAL_NAME, *(found[0] for found in pieces if found)))


def compute_fingerprint(model: object, walk: StreamWalk, config: str) -> str:
    """Fingerprint of the calibrated model, the data of all ranks and the config."""
    with distributed.phase("marking the data") as step:
        step.value = [_fingerprint_batch(walk, index) for index in range(walk.batch_count)]
    batches = distributed.interleave(step.values)
    return hashlib.sha256(json.dumps([model, config, batches]).encode()).hexdigest()


def _fingerprint_batch(walk: StreamWalk, index: int) -> str:
    found = hashlib.sha256()
    for node in walk.placeholders:
        value = walk.get_value(node, index, noisy=False)
        if isinstance(value, Tensor):
            flat = value.detach().cpu().contiguous().reshape(-1)
            found.update(f"{value.dtype} {list(value.shape)}".encode())
            found.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
        else:
            found.update(repr(value).encode())
    return found.hexdigest()


def _parse_journal(path: Path) -> TuningJournal:
    return TuningJournal.model_validate(read_json(path, MAX_JOURNAL_BYTES, folder=path.parent))


def _read_journal(path: Path, mark: str) -> TuningJournal:
    try:
        pages = _parse_journal(path)
    except FileNotFoundError:
        _warn(f"{path.parent} holds no unfinished tuning: starting from the beginning")
        return TuningJournal(mark=mark)
    except (OSError, DocumentError, ValidationError) as error:
        _warn(f"{path} is damaged ({str(error).splitlines()[0]}): starting from the beginning")
        return TuningJournal(mark=mark)
    if pages.mark != mark:
        _warn(f"{path}: the model, the data or the config changed since: starting from the beginning")
        return TuningJournal(mark=mark)
    return pages


def _warn(message: str) -> None:
    warnings.warn(ScalepointWarning(message), stacklevel=3)
