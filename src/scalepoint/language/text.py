"""Text for calibration and for judging: files become sequences of tokens, by the checkpoint's own tokenizer.

.txt                     as it is
.jsonl, .json lines      the field "text" of every line
a folder                 all such files in it, in the order of their names
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from scalepoint.checkpoints import Source
from scalepoint.documents import parse_json
from scalepoint.errors import CalibrationError, DocumentError, StoreError, UsageError, shown
from scalepoint.untrusted import open_text

Text = str | Path | Sequence[Tensor] | None  # a path, or sequences of tokens
SUFFIXES = (".txt", ".md", ".jsonl")
LARGEST = 64_000_000  # characters that are read of a text: enough for any calibration


def sequences(given: Text, source: Source, *, length: int, count: int, what: str) -> list[Tensor]:
    """So many sequences of so many tokens, each of shape (1, length); the text is cut where they end."""
    if given is not None and not isinstance(given, str | Path):
        return _checked(given, source)
    if given is None:
        raise CalibrationError(
            f"no {what}: give a text file, a .jsonl with a field 'text', a folder of such, or tokens; accuracy='fast' "
            "rounds without any"
        )
    tokens = tokenized(Path(given), source, length * count)
    whole = tokens.numel() // length
    if not whole:
        raise CalibrationError(
            f"{given} has {tokens.numel()} tokens, less than one sequence of {length}: give more text, or a shorter "
            "length"
        )
    return [part[None] for part in tokens[: whole * length].reshape(whole, length)[:count]]


def tokenized(path: Path, source: Source, enough: int) -> Tensor:
    """The first tokens of a text."""
    tokenizer = tokenizer_of(source)
    found: list[int] = []
    for text in _texts(path):
        for start in range(0, len(text), 1_000_000):
            found += tokenizer.encode(text[start : start + 1_000_000], add_special_tokens=False)
            if len(found) >= enough:
                return torch.tensor(found[:enough])
    return torch.tensor(found, dtype=torch.int64)


def tokenizer_of(source: Source) -> Any:
    """The tokenizer in the folder; nothing is fetched and no code of the folder runs."""
    from transformers import AutoTokenizer  # noqa: PLC0415  # an extra; the skeleton has looked for it

    try:
        return AutoTokenizer.from_pretrained(source.folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many things here
        raise StoreError(
            f"{source.folder} has no tokenizer that can be read ({str(error).splitlines()[0]}): copy "
            "tokenizer.json and tokenizer_config.json there, or give the data as tokens"
        ) from error


def _texts(path: Path) -> Iterator[str]:
    if not _is_there(path):
        raise UsageError(f"{shown(str(path))}: no such file or folder. Text itself is given as a file, or as tokens")
    files = sorted(each for each in path.rglob("*") if each.suffix in SUFFIXES) if path.is_dir() else [path]
    if not files:
        raise UsageError(f"{path} has no {', '.join(SUFFIXES)} files")
    for file in files:
        try:
            with open_text(file) as opened:
                yield from _lines(file, opened) if file.suffix == ".jsonl" else [opened.read(LARGEST)]
        except UnicodeDecodeError as error:
            raise UsageError(f"{file} is no UTF-8 text: {error}") from error
        except DocumentError as error:
            raise UsageError(error.args[0]) from error
        except OSError as error:
            raise UsageError(f"{file} cannot be read: {error.strerror or error}") from error


def _is_there(path: Path) -> bool:
    """A whole text in place of a path is too long for the system to look for."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _lines(file: Path, opened: IO[str]) -> Iterator[str]:
    lines = iter(lambda: opened.readline(LARGEST), "")  # a file without line breaks must not become one string
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            said = parse_json(line, 4 * LARGEST)
        except DocumentError as error:
            raise UsageError(f"{file}, line {number}: no JSON: {error.args[0]}") from error
        if not isinstance(said, dict) or not isinstance(said.get("text"), str):
            raise UsageError(f"{file}, line {number}: an object with a field 'text' is wanted, not {shown(said)}")
        yield said["text"]


def _checked(given: Sequence[Tensor], source: Source) -> list[Tensor]:
    size = source.config.get("vocab_size")
    found = []
    for tokens in given:
        if not isinstance(tokens, Tensor) or tokens.is_floating_point() or tokens.ndim not in (1, 2) or not len(tokens):
            raise UsageError(f"tokens are integer tensors of shape (length,) or (batch, length), not {shown(tokens)}")
        if isinstance(size, int) and not 0 <= int(tokens.min()) <= int(tokens.max()) < size:
            raise UsageError(f"tokens from {int(tokens.min())} to {int(tokens.max())}: the vocabulary has {size}")
        found.append(tokens.reshape(-1, tokens.shape[-1]))
    if not found:
        raise CalibrationError("no tokens were given")
    return found
