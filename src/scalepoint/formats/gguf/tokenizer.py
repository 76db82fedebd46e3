"""The tokenizer of a checkpoint as GGUF keeps it: byte-level BPE with its merges ("gpt2"), SentencePiece BPE ("llama").

How a text is split before BPE is a name in GGUF, which stands for a fixed rule of llama.cpp; it is found by the rule
that tokenizer.json states. Other models (unigram, WordPiece) and unknown rules are refused: a file whose text is cut
differently would run, and be wrong.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from scalepoint.errors import DocumentError, ExportError, short_repr
from scalepoint.formats.gguf.tokenizer_files import (
    MAX_FILE_BYTES,
    AddedToken,
    BpeModel,
    TokenizerDocument,
    TokenizerSettings,
    TokenizerStep,
    check_text,
    iterate_fields,
    read_document,
    read_settings,
    read_template,
    validate_as,
)  # fmt: skip
from scalepoint.support.formatting import one_line
from scalepoint.support.untrusted import read_bytes

MAX_TOKENS = 2**24
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
END = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SHORT = ("(?i:'s|'t|'re|'ve|'m|'ll|'d)", "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*")
CASED_END = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {  # the pattern of a Split: its name, and that where whole words are taken before merges
    **{rf"{short}|{WORDS}|\p{{N}}{{1,3}}|{END}": ("dbrx", "llama-bpe") for short in SHORT},
    **{rf"{short}|{WORDS}|\p{{N}}|{END}": ("qwen2", "") for short in SHORT},
    **{rf"{CASED[0]}{short}?|{CASED[1]}{short}?|\p{{N}}{{1,3}}|{CASED_END}": ("gpt-4o", "") for short in SHORT},
    rf"{CASED[0]}|{CASED[1]}|\p{{N}}|{CASED_END}": ("", "tekken"),
}


class TokenType(IntEnum):
    """What a token is to llama.cpp."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER = 4
    UNUSED = 5
    BYTE = 6


@dataclass
class Vocabulary:
    """All tokens, by their numbers."""

    model: str
    split: str
    texts: list[str]
    types: list[TokenType]
    special: tuple[bool, bool]  # a special token is put before a text, and after it
    scores: list[float] | None = None
    merges: list[str] | None = None
    adds_space: bool | None = None


def add_tokenizer(writer: Any, folder: Path, config: Mapping[str, Any]) -> None:
    """Tokens, special ones, and the chat template."""
    found = read_vocabulary(folder, vocabulary_size(config))
    writer.add_tokenizer_model(found.model)
    writer.add_tokenizer_pre(found.split)
    writer.add_token_list(found.texts)
    writer.add_token_types([int(each) for each in found.types])
    if found.scores is not None:
        writer.add_token_scores(found.scores)
    if found.merges is not None:
        writer.add_token_merges(found.merges)
    if found.adds_space is not None:
        writer.add_add_space_prefix(found.adds_space)
    _add_special(writer, folder, config, found)


def vocabulary_size(config: Mapping[str, Any]) -> int:
    """The number of tokens that config.json states."""
    size = config.get("vocab_size")
    if not isinstance(size, int) or isinstance(size, bool):
        raise ExportError(f"vocab_size of the config must be a whole number, got {short_repr(size)}")
    return size


def read_vocabulary(folder: Path, size: int) -> Vocabulary:
    """Out of tokenizer.json, or of tokenizer.model where there is no other; `size` tokens, filled up."""
    if not 0 <= size <= MAX_TOKENS:
        raise ExportError(f"{folder}: a vocabulary of {short_repr(size)} tokens: at most {MAX_TOKENS} can be written")
    path, pieces = folder / "tokenizer.json", folder / "tokenizer.model"
    if path.is_file():
        found = _from_json(path, size)
    elif pieces.is_file():
        found = _from_pieces(pieces, size)
    else:
        raise ExportError(
            f"{folder} has no tokenizer.json or tokenizer.model: a GGUF file holds its tokenizer; copy the file there "
            "(tokenizer.save_pretrained)"
        )
    missing = range(len(found.texts), size)
    found.texts += [f"[PAD{number}]" for number in missing]
    found.types += [TokenType.UNUSED] * len(missing)
    if found.scores is not None:
        found.scores += [-10000.0] * len(missing)
    return found


def _check_count(count: int, size: int, path: Path) -> None:
    """Before any list of tokens is made: a single id of 2**63 would ask for all of the memory."""
    if count > size:
        raise ExportError(f"the tokenizer in {path.parent} has {count} tokens, the model {size}")


def _from_json(path: Path, size: int) -> Vocabulary:
    document = read_document(path)
    kind = document.model.get("type") or ("BPE" if "merges" in document.model else "")
    if kind != "BPE":
        raise ExportError(f"{path}: a {one_line(kind) or 'nameless'} tokenizer; GGUF is written here for BPE alone")
    model = validate_as(BpeModel, document.model, path)
    merges = model.pairs()
    if any(len(pair) != 2 for pair in merges):
        raise ExportError(f"{path}: a merge is of two tokens, not {short_repr(next(p for p in merges if len(p) != 2))}")
    added, is_plain = document.added_tokens or [], bool(model.byte_fallback)
    takes_words = bool(model.ignore_merges)
    split = "default" if is_plain else _find_split(document.pre_tokenizer, path, takes_words=takes_words)
    _check_count(max([*model.vocab.values(), *(each.id for each in added)], default=-1) + 1, size, path)
    texts, types = _list_tokens(model.vocab, added, is_plain=is_plain)
    check_text([*texts, *("".join(pair) for pair in merges)], path)
    special = _read_template_flags(document.post_processor)
    if is_plain:
        return Vocabulary(
            "llama", split, texts, types, special, _merge_scores(texts, types, merges), None, _adds_space(document)
        )
    joined = [" ".join(part.replace(" ", "\u0120") for part in pair) for pair in merges]
    return Vocabulary("gpt2", split, texts, types, special, merges=joined)


def _list_tokens(
    vocabulary: Mapping[str, int], added: Sequence[AddedToken], *, is_plain: bool
) -> tuple[list[str], list[TokenType]]:
    """By number; a hole is an unused token."""
    count = max([*vocabulary.values(), *(each.id for each in added)], default=-1) + 1
    texts, types = [f"[PAD{number}]" for number in range(count)], [TokenType.UNUSED] * count
    for text, number in vocabulary.items():
        is_byte = is_plain and len(text) == 6 and text.startswith("<0x") and text.endswith(">")
        texts[number], types[number] = text, TokenType.BYTE if is_byte else TokenType.NORMAL
    for each in added:
        text = each.content
        kind = (
            TokenType.UNKNOWN if is_plain and text == "<unk>" else TokenType.CONTROL if each.special else TokenType.USER
        )
        texts[each.id], types[each.id] = text.replace("\u2581", " ") if kind is TokenType.USER else text, kind
    return texts, types


def _merge_scores(texts: list[str], types: list[TokenType], merges: list[list[str]]) -> list[float]:
    """The order of merges, as scores: llama.cpp joins the pair whose token scores highest."""
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault("".join(pair), rank)
    return [
        -float(ranks.get(text, len(merges))) if kind is TokenType.NORMAL else 0.0
        for text, kind in zip(texts, types, strict=True)
    ]


def _adds_space(document: TokenizerDocument) -> bool:
    """Whether a text begins as if a space stood before it."""
    parts = [*_list_steps(document.normalizer), *_list_steps(document.pre_tokenizer)]
    scheme = (each.prepend_scheme for each in parts if each.type == "Metaspace")
    return any(each.type == "Prepend" for each in parts) or any(each != "never" for each in scheme)


def _list_steps(step: TokenizerStep | None) -> list[TokenizerStep]:
    return [] if step is None else step.parts()


def _find_split(step: TokenizerStep | None, path: Path, *, takes_words: bool) -> str:
    """The name for how a text is cut."""
    parts = _list_steps(step)
    kinds = [each.type for each in parts]
    if kinds and kinds[-1] == "ByteLevel" and not parts[-1].add_prefix_space:
        uses_regex = parts[-1].use_regex
        if kinds == ["ByteLevel"] and uses_regex and not takes_words:
            return "gpt-2"
        if kinds == ["Digits", "ByteLevel"] and uses_regex and parts[0].individual_digits and not takes_words:
            return "smollm"
        if kinds == ["Split", "ByteLevel"] and not uses_regex:
            pattern = (parts[0].pattern or {}).get("Regex", "")
            name = SPLITS.get(pattern, ("", ""))[takes_words]
            if name:
                return name
    named = one_line(", ".join(map(str, kinds)))[:200] or "none"
    raise ExportError(
        f"{path}: its pre-tokenizer ({named}{', ignore_merges' if takes_words else ''}) is none that llama.cpp is "
        "known to have: gpt-2, smollm, llama-bpe, dbrx, qwen2, gpt-4o, tekken"
    )


def _from_pieces(path: Path, size: int) -> Vocabulary:
    """A SentencePiece model: field 1 are pieces (text, score, type), field 2 says how it was trained."""
    texts: list[str] = []
    types: list[TokenType] = []
    scores: list[float] = []
    trained, adds_space = 1, True
    try:
        for field, value in iterate_fields(read_bytes(path, MAX_FILE_BYTES, folder=path.parent)):
            if field == 1:
                _check_count(len(texts) + 1, size, path)
                text, score, kind = _read_piece(value)
                texts.append(text)
                scores.append(score)
                types.append(kind)
            elif field == 2:
                trained = dict(iterate_fields(value)).get(3, 1)
            elif field == 3:
                adds_space = bool(dict(iterate_fields(value)).get(3, 1))
    except DocumentError as error:
        raise ExportError(error.args[0]) from error
    except (OSError, ValueError) as error:
        raise ExportError(f"{path} is no SentencePiece model: {error}") from error
    if trained != 2:
        raise ExportError(f"{path}: a unigram tokenizer; GGUF is written here for BPE alone")
    return Vocabulary("llama", "default", texts, types, (True, False), scores, None, adds_space)


def _read_piece(value: Any) -> tuple[str, float, TokenType]:
    """Text, score and type; ValueError for fields that are missing or of another type."""
    piece = dict(iterate_fields(value))
    text, score, kind = piece.get(1), piece.get(2, bytes(4)), piece.get(3, 1)
    if not (isinstance(text, bytes) and isinstance(score, bytes) and len(score) == 4 and isinstance(kind, int)):
        raise ValueError("a piece has no text, or its score or type is not a number")
    return text.decode(), struct.unpack("<f", score)[0], TokenType(kind)


def _add_special(writer: Any, folder: Path, config: Mapping[str, Any], found: Vocabulary) -> None:
    """Numbers of the special tokens, whether a text begins and ends with them, and the chat template."""
    path = folder / "tokenizer_config.json"
    about = read_settings(path) if path.is_file() else TokenizerSettings()
    numbers = {text: number for number, text in enumerate(found.texts)}
    for role in ("bos", "eos", "unk", "pad"):
        text = about.special(role)
        number = numbers.get(text) if text else config.get(f"{role}_token_id")
        number = number[0] if isinstance(number, list) and number else number
        if isinstance(number, int) and 0 <= number < len(found.texts):
            getattr(writer, f"add_{role}_token_id")(number)
    first, last = found.special
    writer.add_add_bos_token(first if about.add_bos_token is None else about.add_bos_token)
    writer.add_add_eos_token(last if about.add_eos_token is None else about.add_eos_token)
    template = folder / "chat_template.jinja"
    chat = read_template(template) if template.is_file() else about.chat_template
    if isinstance(chat, str):
        check_text([chat], template if template.is_file() else path)
        writer.add_chat_template(chat)


def _read_template_flags(step: TokenizerStep | None) -> tuple[bool, bool]:
    """Whether tokenizer.json puts a special token before a text, and after it."""
    for each in _list_steps(step):
        if each.type == "TemplateProcessing" and each.single:
            single = each.single
            return "SpecialToken" in single[0], len(single) > 1 and "SpecialToken" in single[-1]
    return False, False
