"""Read a checkpoint folder of transformers: config.json, and safetensors in any number of shards.

`Source.open` reads the config and the headers of all shards, and checks that every shard is complete. `Source.tensor`
reads one tensor into memory of its own; no file stays mapped.
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
from scalepoint.support.files import compute_digest
from scalepoint.support.untrusted import check_file, open_tensors, read_json

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE_SHARD = "model.safetensors"
MAX_INDEX_BYTES = 64_000_000
COMPARED_ROWS = 4096  # rows of a matrix that are compared at a time
MAX_FILE_BYTES = 256_000_000  # of a file that is not safetensors; the largest are tokenizers
SUFFIXES_READ_BY_TRANSFORMERS = (".json", ".model", ".txt", ".jinja", ".safetensors")
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
    """Shard, dtype and shape of a tensor in a checkpoint folder."""

    shard: Path
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


class Source:
    """A language model's checkpoint folder: config, tensors that are read one by one, tokenizer files.

    Attributes:
        folder: The folder.
        config: The content of config.json.
        tensors: Shard, dtype and shape of every tensor, by name.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> None:
        self.folder, self.config, self.tensors = folder, config, tensors

    @classmethod
    def open(cls, folder: str | Path) -> Self:
        """Read the config and the headers of all shards, but no weights.

        Args:
            folder: A folder that transformers has written.

        Returns:
            The checkpoint.

        Raises:
            StoreError: The folder, its config or a shard is missing, damaged or incomplete.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise StoreError(f"{folder}: no such folder. A checkpoint is a folder with {CONFIG} and safetensors files")
        check_files(folder)
        config = _read_json(folder / CONFIG)
        tensors: dict[str, StoredTensor] = {}
        for shard, listed_names in _list_shards(folder).items():
            header = _read_header(shard)
            missing = sorted(set(listed_names or ()) - header.keys())
            if missing:
                raise StoreError(f"{shard.name} lacks {missing[0]} ({len(missing)} in all), which {INDEX} lists for it")
            tensors |= {name: header[name] for name in (listed_names or header)}
        source = cls(folder, config, tensors)
        if config.get(TIE_KEY) is not False and source.has_own_head():
            return cls(folder, {**config, TIE_KEY: False}, tensors)
        return source

    def has_own_head(self) -> bool:
        """Whether the checkpoint has a head whose values differ from the embedding.

        transformers uses such a head even if config.json ties it to the embedding.
        """
        heads, embeddings = self._weights_of(HEAD_LAYERS), self._weights_of(TOKEN_EMBEDDINGS)
        if len(heads) != 1 or len(embeddings) != 1:
            return False
        if self.tensors[heads[0]].shape != self.tensors[embeddings[0]].shape:
            return True
        return not self._are_equal(heads[0], embeddings[0])

    def _are_equal(self, first: str, second: str) -> bool:
        """Compare two matrices of equal shape, some rows at a time: a head can be larger than a block of the model."""
        first_stored, second_stored = self.tensors[first], self.tensors[second]
        row_count = first_stored.shape[0] if first_stored.shape else 0
        try:
            with (
                open_tensors(first_stored.shard, folder=self.folder) as first_file,
                open_tensors(second_stored.shard, folder=self.folder) as second_file,
            ):
                first_rows, second_rows = first_file.get_slice(first), second_file.get_slice(second)
                for start in range(0, row_count, COMPARED_ROWS):
                    rows = slice(start, start + COMPARED_ROWS)
                    if not torch.equal(first_rows[rows].to(torch.float32), second_rows[rows].to(torch.float32)):
                        return False
                return True
        except (OSError, SafetensorError, DocumentError) as error:
            raise StoreError(f"{first_stored.shard}: {first} cannot be read: {error}") from error

    def _weights_of(self, layers: Iterable[str]) -> list[str]:
        """Return the names of the weights of all layers with one of these names, wherever they are in the model."""
        return [name for name in self.tensors if name.endswith(".weight") and name.split(".")[-2] in layers]

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type", ""))

    @property
    def size(self) -> int:
        """The size of all tensors in bytes."""
        return sum(stored.nbytes for stored in self.tensors.values())

    @property
    def tokenizer_files(self) -> list[Path]:
        """The files of the tokenizer and the generation config, which formats copy unchanged."""
        return [path for name in TOKENIZER_FILES if (path := self.folder / name).is_file()]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the config and of all shards."""
        shards = sorted({stored.shard for stored in self.tensors.values()})
        checksum = hashlib.sha256(json.dumps(dict(self.config), sort_keys=True).encode())
        for shard in shards:
            checksum.update(f"{shard.name} {compute_digest(shard)}".encode())
        return checksum.hexdigest()

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Read a tensor into memory of its own.

        Args:
            name: The name of the tensor.
            dtype: The dtype of the result; by default that of the file.

        Returns:
            The tensor.

        Raises:
            StoreError: The checkpoint has no such tensor, or it cannot be read.
        """
        stored = self.tensors.get(name)
        if stored is None:
            raise StoreError(f"{self.folder} has no tensor {name!r}: {did_you_mean(name, self.tensors)}")
        try:
            with open_tensors(stored.shard, folder=self.folder) as file:
                return file.get_tensor(name).to(dtype or stored.dtype, copy=True)  # type: ignore[no-any-return]
        except (OSError, SafetensorError, DocumentError) as error:
            raise StoreError(f"{stored.shard}: {name} cannot be read: {error}") from error


def check_files(folder: Path) -> None:
    """Check the files that transformers opens itself: regular files of a sane size, and no links out of the folder."""
    for path in sorted(folder.iterdir()):
        if path.suffix not in SUFFIXES_READ_BY_TRANSFORMERS or path.is_dir():
            continue
        try:
            check_file(path, None if path.suffix == ".safetensors" else MAX_FILE_BYTES, folder=folder)
        except DocumentError as error:
            raise StoreError(error.args[0]) from error
        except OSError as error:
            raise StoreError(f"{path}: {error.strerror}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = read_json(path, MAX_INDEX_BYTES, folder=path.parent)
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}. A checkpoint folder needs a {path.name}") from error
    except DocumentError as error:
        raise StoreError(error.args[0]) from error
    if not isinstance(document, dict):
        raise StoreError(f"{path} is not a JSON object")
    return document


def _list_shards(folder: Path) -> Mapping[Path, list[str] | None]:
    """Return every shard with the tensors that the index lists for it; None stands for all tensors of the shard."""
    if (folder / INDEX).is_file():
        return _read_index(folder)
    if (folder / SINGLE_SHARD).is_file():
        return {folder / SINGLE_SHARD: None}
    message = f"{folder} has neither {SINGLE_SHARD} nor {INDEX}."
    other_formats = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".gguf"))
    if other_formats:
        message += (
            f" It has {other_formats[0]}: save it as safetensors first (save_pretrained), pickles are never read."
        )
    raise StoreError(message)


def _read_index(folder: Path) -> dict[Path, list[str]]:
    """Read which tensors the index lists for each shard."""
    weight_map = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise StoreError(f"{folder / INDEX} has no weight_map of names to files")
    if not all(isinstance(file, str) for file in weight_map.values()):
        raise StoreError(f"{folder / INDEX} has no weight_map of names to files")
    names_by_shard: dict[Path, list[str]] = {}
    for name, file in sorted(weight_map.items()):
        if Path(file).name != file:
            raise StoreError(f"{folder / INDEX}: {file!r} is not the name of a file in the folder")
        names_by_shard.setdefault(folder / file, []).append(name)
    return names_by_shard


def _read_header(shard: Path) -> dict[str, StoredTensor]:
    """Read dtype and shape of every tensor of a shard; safetensors checks the file's length against the header."""
    try:
        with open_tensors(shard, folder=shard.parent) as file:
            names: Iterable[str] = file.keys()
            slices = {name: file.get_slice(name) for name in names}
            return {
                name: StoredTensor(shard, _parse_dtype(tensor.get_dtype(), name, shard), tuple(tensor.get_shape()))
                for name, tensor in slices.items()
            }
    except FileNotFoundError:
        raise StoreError(f"{shard} is missing, but the index lists it") from None
    except DocumentError as error:
        raise StoreError(error.args[0]) from error
    except (OSError, SafetensorError) as error:
        raise StoreError(f"{shard} is damaged or incomplete: {error}. Download it again") from error


def _parse_dtype(name: str, tensor: str, shard: Path) -> torch.dtype:
    try:
        return _DTYPES[name]
    except KeyError:
        raise StoreError(
            f"{shard.name}: {tensor} has dtype {name}, scalepoint reads {', '.join(_DTYPES)}: a checkpoint that is "
            "already quantized cannot be quantized again"
        ) from None
