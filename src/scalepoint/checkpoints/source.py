"""A folder as transformers writes it, read a tensor at a time: config.json, safetensors in any number of shards.

open  config and the headers of all shards; every shard must be there and whole
read  one tensor, of its own memory; nothing of the folder stays mapped
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from torch import Tensor

from scalepoint.errors import DocumentError, StoreError, did_you_mean
from scalepoint.support.files import digest
from scalepoint.support.untrusted import check_file, open_tensors, read_json

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE_SHARD = "model.safetensors"
MAX_INDEX_BYTES = 64_000_000
COMPARED_ROWS = 4096  # of a matrix that are compared at once
MAX_FILE_BYTES = 256_000_000  # of a tokenizer
OPENED_BY_TRANSFORMERS = (".json", ".model", ".txt", ".jinja", ".safetensors")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
HEAD_LAYERS = ("lm_head", "embed_out")
TOKEN_EMBEDDINGS = ("embed_tokens", "embed_in", "wte", "word_embeddings", "embeddings", "tokens_embed")
TIE_KEY = "tie_word_embeddings"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies, and what it is."""

    shard: Path
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


class Source:
    """A language model's checkpoint in a folder: config, tensors read one by one, tokenizer files."""

    def __init__(self, folder: Path, config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> None:
        self.folder, self.config, self.tensors = folder, config, tensors

    @classmethod
    def open(cls, folder: str | Path) -> Self:
        """Look at everything but the weights; StoreError names what is missing or broken."""
        folder = Path(folder)
        if not folder.is_dir():
            raise StoreError(f"{folder}: no such folder. A checkpoint is a folder with {CONFIG} and safetensors files")
        check_files(folder)
        config = _read_json(folder / CONFIG)
        found: dict[str, StoredTensor] = {}
        for shard, names in _list_shards(folder).items():
            tensors = _read_header(shard)
            if missing := sorted(set(names or ()) - tensors.keys()):
                raise StoreError(
                    f"{shard.name} lacks {missing[0]} ({len(missing)} in all), which {INDEX} looks for there"
                )
            found |= {name: tensors[name] for name in (names or tensors)}
        if config.get(TIE_KEY) is not False and cls(folder, config, found).has_own_head():
            config = {**config, TIE_KEY: False}
        return cls(folder, config, found)

    def has_own_head(self) -> bool:
        """Whether the file holds a head with other values than the embedding.

        transformers uses such a head even if config.json ties it to the embedding.
        """
        heads, embeddings = (self._weights_of(names) for names in (HEAD_LAYERS, TOKEN_EMBEDDINGS))
        if len(heads) != 1 or len(embeddings) != 1:
            return False
        if self.tensors[heads[0]].shape != self.tensors[embeddings[0]].shape:
            return True
        return not self._are_equal(heads[0], embeddings[0])

    def _are_equal(self, first: str, second: str) -> bool:
        """Compare two matrices of one shape some rows at a time: a head can be larger than a block of the model."""
        one, other = self.tensors[first], self.tensors[second]
        try:
            with (
                open_tensors(one.shard, folder=self.folder) as first_file,
                open_tensors(other.shard, folder=self.folder) as second_file,
            ):
                rows = first_file.get_slice(first), second_file.get_slice(second)
                return all(
                    torch.equal(*(each[start : start + COMPARED_ROWS].to(torch.float32) for each in rows))
                    for start in range(0, one.shape[0] if one.shape else 0, COMPARED_ROWS)
                )
        except (OSError, SafetensorError, DocumentError) as error:
            raise StoreError(f"{one.shard}: {first} cannot be read: {error}") from error

    def _weights_of(self, layers: Iterable[str]) -> list[str]:
        """The weights of layers whose names end so."""
        return [name for name in self.tensors if name.endswith(".weight") and name.split(".")[-2] in layers]

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type", ""))

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(each.nbytes for each in self.tensors.values())

    @property
    def tokenizer_files(self) -> list[Path]:
        """What is copied beside the weights as it is."""
        return [path for name in TOKENIZER_FILES if (path := self.folder / name).is_file()]

    @cached_property
    def mark(self) -> str:
        """A checksum of the config and of all weights."""
        shards = sorted({each.shard for each in self.tensors.values()})
        seen = hashlib.sha256(json.dumps(dict(self.config), sort_keys=True).encode())
        for shard in shards:
            seen.update(f"{shard.name} {digest(shard)}".encode())
        return seen.hexdigest()

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor in memory of its own, in its type or in another."""
        stored = self.tensors.get(name)
        if stored is None:
            raise StoreError(f"{self.folder} has no tensor {name!r}: {did_you_mean(name, self.tensors)}")
        try:
            with open_tensors(stored.shard, folder=self.folder) as file:
                return file.get_tensor(name).to(dtype or stored.dtype, copy=True)  # type: ignore[no-any-return]
        except (OSError, SafetensorError, DocumentError) as error:
            raise StoreError(f"{stored.shard}: {name} cannot be read: {error}") from error


def check_files(folder: Path) -> None:
    """Check the files that transformers opens by itself: regular, of a sane size, and no links out of the folder."""
    for path in sorted(folder.iterdir()):
        if path.suffix not in OPENED_BY_TRANSFORMERS or path.is_dir():
            continue
        try:
            check_file(path, None if path.suffix == ".safetensors" else MAX_FILE_BYTES, folder=folder)
        except (OSError, DocumentError) as error:
            raise StoreError(
                error.args[0] if isinstance(error, DocumentError) else f"{path}: {error.strerror}"
            ) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path, MAX_INDEX_BYTES, folder=path.parent)
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}. A checkpoint folder has a {path.name}") from error
    except DocumentError as error:
        raise StoreError(error.args[0]) from error
    if not isinstance(found, dict):
        raise StoreError(f"{path} is no JSON object")
    return found


def _list_shards(folder: Path) -> dict[Path, list[str] | None]:
    """Every shard, and what is looked for in it: None for all that it has."""
    if (folder / INDEX).is_file():
        places = _read_json(folder / INDEX).get("weight_map")
        if not (isinstance(places, dict) and places and all(isinstance(each, str) for each in places.values())):
            raise StoreError(f"{folder / INDEX} has no weight_map of names to files")
        found: dict[Path, list[str] | None] = {}
        for name, file in sorted(places.items()):
            if Path(file).name != file:
                raise StoreError(f"{folder / INDEX}: {file!r} is not the name of a file in the folder")
            listed = found.setdefault(folder / file, [])
            assert listed is not None  # noqa: S101  # made here
            listed.append(name)
        return found
    if (folder / SINGLE_SHARD).is_file():
        return {folder / SINGLE_SHARD: None}
    others = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".gguf"))
    hint = (
        f" It has {others[0]}: save it as safetensors first (save_pretrained), pickles are never read."
        if others
        else ""
    )
    raise StoreError(f"{folder} has neither {SINGLE_SHARD} nor {INDEX}.{hint}")


def _read_header(shard: Path) -> dict[str, StoredTensor]:
    """What a shard holds; its length is checked against its header."""
    try:
        with open_tensors(shard, folder=shard.parent) as file:
            names: Iterable[str] = file.keys()
            slices = {name: file.get_slice(name) for name in names}
            return {
                name: StoredTensor(shard, _parse_dtype(each.get_dtype(), name, shard), tuple(each.get_shape()))
                for name, each in slices.items()
            }
    except FileNotFoundError:
        raise StoreError(f"{shard} is missing: the index names it") from None
    except DocumentError as error:
        raise StoreError(error.args[0]) from error
    except (OSError, SafetensorError) as error:
        raise StoreError(f"{shard} is damaged or incomplete: {error}. Fetch it again") from error


def _parse_dtype(name: str, tensor: str, shard: Path) -> torch.dtype:
    try:
        return _DTYPES[name]
    except KeyError:
        raise StoreError(
            f"{shard.name}: {tensor} is of type {name}: scalepoint reads {', '.join(_DTYPES)}; a checkpoint that is "
            "quantized already cannot be quantized again"
        ) from None
