"""Turn text for calibration and perplexity into sequences of tokens, with the checkpoint's own tokenizer.

.txt, .md    the whole file
.jsonl       the field "text" of every line
a folder     all such files in it, in the order of their names
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
MAX_TEXT_CHARACTERS = 64_000_000  # read from a file; enough for any calibration
PIECE_CHARACTERS = 1_000_000  # tokenized at a time
CHARACTERS_PER_TOKEN = 8  # first guess of how much text a number of tokens needs
CONTEXT_KEYS = ("original_max_position_embeddings", "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
MARGIN_TOKENS = 16  # cutting a text may change its last tokens, so that many more are tokenized and dropped


def load_sequences(text: Text, source: Source, *, length: int, count: int, what: str) -> list[Tensor]:
    """Read token sequences from a file, a folder or token tensors.

    Rows of token tensors are cut into sequences of `length` too; a row that is shorter is one shorter sequence.

    Args:
        text: A text file, a .jsonl file, a folder of such files, or integer tensors.
        source: The checkpoint, whose tokenizer is used.
        length: Tokens of a sequence.
        count: The maximum number of sequences.
        what: What the text is for, such as "calibration data", for messages.

    Returns:
        At most `count` sequences of shape (1, length); an incomplete sequence at the end is dropped.

    Raises:
        CalibrationError: There is no text, or less than one sequence.
        UsageError: The text cannot be read, or the sequences are longer than the model's context.
    """
    if text is None:
        raise CalibrationError(
            f"no {what}: give a text file, a .jsonl file with a field 'text', a folder of such files, or tokens; "
            "accuracy='fast' needs no data"
        )
    if not isinstance(text, str | Path):
        sequences = _to_sequences(text, source, length, count)
    else:
        tokens = tokenize_file(Path(text), source, length * count)
        complete = tokens.numel() // length
        if not complete:
            raise CalibrationError(
                f"{text} has {tokens.numel()} tokens, less than one sequence of {length}: give more text, or a shorter "
                "length"
            )
        rows = tokens[: complete * length].reshape(complete, length)
        sequences = [row[None] for row in rows[:count]]
    check_context(sequences, source, what)
    return sequences


def context_length(source: Source, default: int) -> int:
    """Return the maximum length of a sequence: the shortest context that config.json states."""
    config = source.config
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    lengths = [config.get(key) for key in CONTEXT_KEYS]
    if isinstance(rope, Mapping):
        lengths.append(rope.get(CONTEXT_KEYS[0]))
    return min([length for length in lengths if isinstance(length, int) and length > 1], default=default)


def check_context(sequences: Sequence[Tensor], source: Source, what: str) -> None:
    """Raise UsageError if a sequence is longer than the model's context: the model has no positions for it."""
    longest = max((sequence.shape[1] for sequence in sequences), default=0)
    context = context_length(source, longest)
    if longest > context:
        raise UsageError(
            f"{what}: sequences of {longest} tokens are longer than the model's context of {context} (config.json): "
            f"pass length={context} or less"
        )


def tokenize_file(path: Path, source: Source, count: int) -> Tensor:
    """Return the first `count` tokens of a file or folder."""
    tokenizer = load_tokenizer(source)
    tokens: list[int] = []
    for text in _iterate_texts(path):
        for start in range(0, len(text), PIECE_CHARACTERS):
            tokens += _encode(tokenizer, text[start : start + PIECE_CHARACTERS], count - len(tokens))
            if len(tokens) >= count:
                return torch.tensor(tokens[:count])
    return torch.tensor(tokens, dtype=torch.int64)


def _encode(tokenizer: Any, text: str, count: int) -> list[int]:
    """Return the first `count` tokens of a text, or all; tokenizes only as much of the text as these need."""
    size = CHARACTERS_PER_TOKEN * (count + MARGIN_TOKENS)
    while size < len(text):
        tokens: list[int] = tokenizer.encode(text[:size], add_special_tokens=False)
        if len(tokens) >= count + MARGIN_TOKENS:
            return tokens[:count]
        size *= 2
    return list(tokenizer.encode(text, add_special_tokens=False))


def load_tokenizer(source: Source) -> Any:
    """Load the tokenizer of the folder, without downloads and without running code of the folder."""
    from transformers import AutoTokenizer  # noqa: PLC0415  # an extra; build_skeleton checks that it is installed

    try:
        return AutoTokenizer.from_pretrained(source.folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises exceptions of many types here
        raise StoreError(
            f"{source.folder} has no tokenizer that can be read ({str(error).splitlines()[0]}): copy "
            "tokenizer.json and tokenizer_config.json there, or pass the data as tokens"
        ) from error


def _iterate_texts(path: Path) -> Iterator[str]:
    if not _exists(path):
        raise UsageError(
            f"{short_repr(str(path))}: no such file or folder: pass the path of a text file, or tokens, not the text"
        )
    files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES) if path.is_dir() else [path]
    if not files:
        raise UsageError(f"{path} has no {', '.join(SUFFIXES)} files")
    for file in files:
        try:
            with open_text(file) as stream:
                if file.suffix == ".jsonl":
                    yield from _iterate_lines(file, stream)
                else:
                    yield stream.read(MAX_TEXT_CHARACTERS)
        except UnicodeDecodeError as error:
            raise UsageError(f"{file} is not UTF-8 text: {error}") from error
        except DocumentError as error:
            raise UsageError(error.args[0]) from error
        except OSError as error:
            raise UsageError(f"{file} cannot be read: {error.strerror or error}") from error


def _exists(path: Path) -> bool:
    """Whether a path exists. A user may pass a text instead of a path, which the system rejects as too long."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _iterate_lines(file: Path, stream: IO[str]) -> Iterator[str]:
    # The size limit protects against a file without line breaks, which would become one huge string.
    lines = iter(lambda: stream.readline(MAX_TEXT_CHARACTERS), "")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = parse_json(line, 4 * MAX_TEXT_CHARACTERS)
        except DocumentError as error:
            raise UsageError(f"{file}, line {number}: not JSON: {error.args[0]}") from error
        if not isinstance(record, dict) or not isinstance(record.get("text"), str):
            raise UsageError(f"{file}, line {number}: must be an object with a field 'text', got {short_repr(record)}")
        yield record["text"]


def _to_sequences(tensors: Iterable[Tensor], source: Source, length: int, count: int) -> list[Tensor]:
    """Cut token tensors into at most `count` sequences of shape (1, length) or shorter."""
    vocabulary = source.config.get("vocab_size")
    sequences: list[Tensor] = []
    for tokens in tensors:
        is_integer = isinstance(tokens, Tensor) and not tokens.is_floating_point() and not tokens.is_complex()
        if not is_integer or tokens.ndim not in (1, 2) or not len(tokens) or tokens.shape[-1] < 2:
            raise UsageError(
                "tokens must be integer tensors of shape (length,) or (batch, length), with a length of at least 2, "
                f"got {short_repr(tokens)}"
            )
        if isinstance(vocabulary, int) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
            raise UsageError(
                f"tokens from {int(tokens.min())} to {int(tokens.max())} do not fit the vocabulary, which has "
                f"{vocabulary} tokens"
            )
        for row in tokens.to(torch.int64).reshape(-1, tokens.shape[-1]):
            complete = max(len(row) // length, 1)
            sequences += [part[None] for part in row[: complete * length].split(length)]
            if len(sequences) >= count:
                return sequences[:count]
    if not sequences:
        raise CalibrationError("no tokens were given")
    return sequences
