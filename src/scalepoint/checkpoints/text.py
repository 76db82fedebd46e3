"""Text for calibration and for judging: files become sequences of tokens, by the checkpoint's own tokenizer.

.txt                     as it is
.jsonl, .json lines      the field "text" of every line
a folder                 all such files in it, in the order of their names
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from scalepoint.checkpoints.source import Source
from scalepoint.errors import CalibrationError, DocumentError, StoreError, UsageError, short_repr
from scalepoint.support.documents import parse_json
from scalepoint.support.untrusted import open_text

Text = str | Path | Sequence[Tensor] | None  # a path, or sequences of tokens
SUFFIXES = (".txt", ".md", ".jsonl")
MAX_TEXT_BYTES = 64_000_000  # characters that are read of a text: enough for any calibration
PIECE_CHARACTERS = 1_000_000  # characters that are tokenized at once at most
CHARACTERS_PER_TOKEN = 8  # that a token has at most, in most texts
CONTEXTS = ("original_max_position_embeddings", "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
MARGIN = 16  # tokens beyond those that are wanted: the end of a text that was cut may have other ones


def load_sequences(given: Text, source: Source, *, length: int, count: int, what: str) -> list[Tensor]:
    """Return at most `count` sequences of shape (1, length); what follows the last whole one is left out.

    Rows of token tensors are cut in the same way. A row that is shorter than `length` is one sequence as it is.
    """
    if given is not None and not isinstance(given, str | Path):
        rows = _to_sequences(given, source, length, count)
        check_context(rows, source, what)
        return rows
    if given is None:
        raise CalibrationError(
            f"no {what}: give a text file, a .jsonl with a field 'text', a folder of such, or tokens; accuracy='fast' "
            "rounds without any"
        )
    tokens = tokenize_file(Path(given), source, length * count)
    whole = tokens.numel() // length
    if not whole:
        raise CalibrationError(
            f"{given} has {tokens.numel()} tokens, less than one sequence of {length}: give more text, or a shorter "
            "length"
        )
    found = [part[None] for part in tokens[: whole * length].reshape(whole, length)[:count]]
    check_context(found, source, what)
    return found


def context_length(source: Source, default: int) -> int:
    """The most tokens of a sequence: the shortest context that config.json names."""
    config = source.config
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    known = [config.get(name) for name in CONTEXTS]
    known += [rope.get(CONTEXTS[0])] if isinstance(rope, Mapping) else []  # anybody may have written the config
    return min([each for each in known if isinstance(each, int) and each > 1], default=default)


def check_context(found: Sequence[Tensor], source: Source, what: str) -> None:
    """Refuse sequences that are longer than the model's context: it has no positions for them."""
    longest = max((each.shape[1] for each in found), default=0)
    if longest > (context := context_length(source, longest)):
        raise UsageError(
            f"{what}: sequences of {longest} tokens, and config.json allows {context}: give length={context}, or less"
        )


def tokenize_file(path: Path, source: Source, enough: int) -> Tensor:
    """The first tokens of a text."""
    tokenizer = load_tokenizer(source)
    found: list[int] = []
    for text in _iterate_texts(path):
        for start in range(0, len(text), PIECE_CHARACTERS):
            found += _encode(tokenizer, text[start : start + PIECE_CHARACTERS], enough - len(found))
            if len(found) >= enough:
                return torch.tensor(found[:enough])
    return torch.tensor(found, dtype=torch.int64)


def _encode(tokenizer: Any, text: str, enough: int) -> list[int]:
    """Return the first `enough` tokens of a text, or all; no more of the text is tokenized than these need."""
    size = CHARACTERS_PER_TOKEN * (enough + MARGIN)
    while size < len(text):
        found: list[int] = tokenizer.encode(text[:size], add_special_tokens=False)
        if len(found) >= enough + MARGIN:
            return found[:enough]
        size *= 2
    return list(tokenizer.encode(text, add_special_tokens=False))


def load_tokenizer(source: Source) -> Any:
    """The tokenizer in the folder; nothing is fetched and no code of the folder runs."""
    from transformers import AutoTokenizer  # noqa: PLC0415  # an extra; the skeleton has looked for it

    try:
        return AutoTokenizer.from_pretrained(source.folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many things here
        raise StoreError(
            f"{source.folder} has no tokenizer that can be read ({str(error).splitlines()[0]}): copy "
            "tokenizer.json and tokenizer_config.json there, or give the data as tokens"
        ) from error


def _iterate_texts(path: Path) -> Iterator[str]:
    if not _exists(path):
        raise UsageError(
            f"{short_repr(str(path))}: no such file or folder. Text itself is given as a file, or as tokens"
        )
    files = sorted(each for each in path.rglob("*") if each.suffix in SUFFIXES) if path.is_dir() else [path]
    if not files:
        raise UsageError(f"{path} has no {', '.join(SUFFIXES)} files")
    for file in files:
        try:
            with open_text(file) as opened:
                yield from _iterate_lines(file, opened) if file.suffix == ".jsonl" else [opened.read(MAX_TEXT_BYTES)]
        except UnicodeDecodeError as error:
            raise UsageError(f"{file} is no UTF-8 text: {error}") from error
        except DocumentError as error:
            raise UsageError(error.args[0]) from error
        except OSError as error:
            raise UsageError(f"{file} cannot be read: {error.strerror or error}") from error


def _exists(path: Path) -> bool:
    """A whole text in place of a path is too long for the system to look for."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _iterate_lines(file: Path, opened: IO[str]) -> Iterator[str]:
    lines = iter(lambda: opened.readline(MAX_TEXT_BYTES), "")  # a file without line breaks must not become one string
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            said = parse_json(line, 4 * MAX_TEXT_BYTES)
        except DocumentError as error:
            raise UsageError(f"{file}, line {number}: no JSON: {error.args[0]}") from error
        if not isinstance(said, dict) or not isinstance(said.get("text"), str):
            raise UsageError(f"{file}, line {number}: an object with a field 'text' is wanted, not {short_repr(said)}")
        yield said["text"]


def _to_sequences(given: Iterable[Tensor], source: Source, length: int, count: int) -> list[Tensor]:
    """The first `count` sequences of token tensors, each of shape (1, length) or shorter."""
    size = source.config.get("vocab_size")
    found: list[Tensor] = []
    for tokens in given:
        is_whole = isinstance(tokens, Tensor) and not tokens.is_floating_point() and not tokens.is_complex()
        if not is_whole or tokens.ndim not in (1, 2) or not len(tokens) or tokens.shape[-1] < 2:
            raise UsageError(
                "tokens are integer tensors of shape (length,) or (batch, length), with a length of at least 2, not "
                f"{short_repr(tokens)}"
            )
        if isinstance(size, int) and not 0 <= int(tokens.min()) <= int(tokens.max()) < size:
            raise UsageError(f"tokens from {int(tokens.min())} to {int(tokens.max())}: the vocabulary has {size}")
        for row in tokens.to(torch.int64).reshape(-1, tokens.shape[-1]):
            whole = max(len(row) // length, 1)
            found += [part[None] for part in row[: whole * length].split(length)]
            if len(found) >= count:
                return found[:count]
    if not found:
        raise CalibrationError("no tokens were given")
    return found
