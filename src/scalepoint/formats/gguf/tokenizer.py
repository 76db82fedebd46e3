"""The tokenizer of a checkpoint as GGUF keeps it: byte-level BPE with its merges ("gpt2"), SentencePiece BPE ("llama").

How a text is split before BPE is a name in GGUF, which stands for a fixed rule of llama.cpp; it is found by the rule
that tokenizer.json states. Other models (unigram, WordPiece) and unknown rules are refused: a file whose text is cut
differently would run, and be wrong.
"""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from scalepoint.documents import parse_json
from scalepoint.errors import DocumentError, ExportError

LARGEST = 256_000_000
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


class Type(IntEnum):
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
    types: list[Type]
    scores: list[float] | None = None
    merges: list[str] | None = None
    adds_space: bool | None = None


def add_tokenizer(writer: Any, folder: Path, config: Mapping[str, Any]) -> None:
    """Tokens, special ones, and the chat template."""
    found = read(folder, int(config["vocab_size"]))
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


def read(folder: Path, size: int) -> Vocabulary:
    """Out of tokenizer.json, or of tokenizer.model where there is no other; `size` tokens, filled up."""
    path, pieces = folder / "tokenizer.json", folder / "tokenizer.model"
    if path.is_file():
        found = _from_json(_document(path), path)
    elif pieces.is_file():
        found = _from_pieces(pieces)
    else:
        raise ExportError(
            f"{folder} has no tokenizer.json or tokenizer.model: a GGUF file holds its tokenizer; copy the file there "
            "(tokenizer.save_pretrained)"
        )
    if len(found.texts) > size:
        raise ExportError(f"the tokenizer in {folder} has {len(found.texts)} tokens, the model {size}")
    missing = range(len(found.texts), size)
    found.texts += [f"[PAD{number}]" for number in missing]
    found.types += [Type.UNUSED] * len(missing)
    if found.scores is not None:
        found.scores += [-10000.0] * len(missing)
    return found


def _document(path: Path) -> dict[str, Any]:
    try:
        found = parse_json(path.read_text(encoding="utf-8"), LARGEST)
    except (OSError, UnicodeDecodeError, DocumentError) as error:
        raise ExportError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ExportError(f"{path} is no JSON object")
    return found


def _from_json(document: Mapping[str, Any], path: Path) -> Vocabulary:
    model = document.get("model") or {}
    kind = model.get("type") or ("BPE" if "merges" in model else "")
    if kind != "BPE":
        raise ExportError(f"{path}: a {kind or 'nameless'} tokenizer; GGUF is written here for BPE alone")
    merges = [each if isinstance(each, list) else each.split(" ") for each in model.get("merges", ())]
    is_plain = bool(model.get("byte_fallback"))
    texts, types = _tokens(model["vocab"], document.get("added_tokens") or (), is_plain=is_plain)
    if is_plain:
        prefix = _puts_space(document)
        return Vocabulary("llama", "default", texts, types, _scores(texts, types, merges), None, prefix)
    split = _split(document.get("pre_tokenizer"), path, takes_words=bool(model.get("ignore_merges")))
    joined = [" ".join(part.replace(" ", "\u0120") for part in pair) for pair in merges]
    return Vocabulary("gpt2", split, texts, types, merges=joined)


def _tokens(vocabulary: Mapping[str, int], added: Any, *, is_plain: bool) -> tuple[list[str], list[Type]]:
    """By number; a hole is an unused token."""
    count = max([*vocabulary.values(), *(int(each["id"]) for each in added)], default=-1) + 1
    texts, types = [f"[PAD{number}]" for number in range(count)], [Type.UNUSED] * count
    for text, number in vocabulary.items():
        is_byte = is_plain and len(text) == 6 and text.startswith("<0x") and text.endswith(">")
        texts[number], types[number] = text, Type.BYTE if is_byte else Type.NORMAL
    for each in added:
        number, text = int(each["id"]), str(each["content"])
        kind = Type.UNKNOWN if is_plain and text == "<unk>" else Type.CONTROL if each.get("special") else Type.USER
        texts[number], types[number] = text.replace("\u2581", " ") if kind is Type.USER else text, kind
    return texts, types


def _scores(texts: list[str], types: list[Type], merges: list[list[str]]) -> list[float]:
    """The order of merges, as scores: llama.cpp joins the pair whose token scores highest."""
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault("".join(pair), rank)
    return [
        -float(ranks.get(text, len(merges))) if kind is Type.NORMAL else 0.0
        for text, kind in zip(texts, types, strict=True)
    ]


def _puts_space(document: Mapping[str, Any]) -> bool:
    """Whether a text begins as if a space stood before it."""
    parts = [*_parts(document.get("normalizer")), *_parts(document.get("pre_tokenizer"))]
    scheme = (each.get("prepend_scheme", "always") for each in parts if each.get("type") == "Metaspace")
    return any(each.get("type") == "Prepend" for each in parts) or any(each != "never" for each in scheme)


def _parts(step: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """The steps of a sequence, or the one step."""
    if not step:
        return []
    inner = step.get("pretokenizers") or step.get("normalizers")
    return [part for each in inner for part in _parts(each)] if inner else [step]


def _split(step: Mapping[str, Any] | None, path: Path, *, takes_words: bool) -> str:
    """The name for how a text is cut."""
    parts = _parts(step)
    kinds = [each.get("type") for each in parts]
    if kinds and kinds[-1] == "ByteLevel" and not parts[-1].get("add_prefix_space"):
        uses_regex = parts[-1].get("use_regex", True)
        if kinds == ["ByteLevel"] and uses_regex and not takes_words:
            return "gpt-2"
        if kinds == ["Digits", "ByteLevel"] and uses_regex and parts[0].get("individual_digits") and not takes_words:
            return "smollm"
        if kinds == ["Split", "ByteLevel"] and not uses_regex:
            pattern = (parts[0].get("pattern") or {}).get("Regex", "")
            name = SPLITS.get(pattern, ("", ""))[takes_words]
            if name:
                return name
    raise ExportError(
        f"{path}: its pre-tokenizer ({', '.join(map(str, kinds)) or 'none'}{', ignore_merges' if takes_words else ''}) "
        "is none that llama.cpp is known to have: gpt-2, smollm, llama-bpe, dbrx, qwen2, gpt-4o, tekken"
    )


def _from_pieces(path: Path) -> Vocabulary:
    """A SentencePiece model: field 1 are pieces (text, score, type), field 2 says how it was trained."""
    texts, types, scores, trained, adds_space = [], [], [], 1, True
    try:
        for field, value in _fields(path.read_bytes()):
            if field == 1:
                piece = dict(_fields(value))
                texts.append(bytes(piece[1]).decode())
                scores.append(struct.unpack("<f", piece[2])[0] if 2 in piece else 0.0)
                types.append(Type(piece.get(3, 1)))
            elif field == 2:
                trained = dict(_fields(value)).get(3, 1)
            elif field == 3:
                adds_space = bool(dict(_fields(value)).get(3, 1))
    except (OSError, ValueError, IndexError, KeyError, struct.error) as error:
        raise ExportError(f"{path} is no SentencePiece model: {error}") from error
    if trained != 2:
        raise ExportError(f"{path}: a unigram tokenizer; GGUF is written here for BPE alone")
    return Vocabulary("llama", "default", texts, types, scores, None, adds_space)


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protocol buffer: integers, or bytes."""
    at = 0
    while at < len(data):
        key, at = _integer(data, at)
        if key & 7 == 0:
            value, at = _integer(data, at)
            yield key >> 3, value
            continue
        size, at = _integer(data, at) if key & 7 == 2 else ({1: 8, 5: 4}[key & 7], at)
        if at + size > len(data):
            raise ValueError("it ends too early")
        yield key >> 3, data[at : at + size]
        at += size


def _integer(data: bytes, at: int) -> tuple[int, int]:
    found = shift = 0
    while True:
        found |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return found, at


def _add_special(writer: Any, folder: Path, config: Mapping[str, Any], found: Vocabulary) -> None:
    """Numbers of the special tokens, whether a text begins and ends with them, and the chat template."""
    path = folder / "tokenizer_config.json"
    about = _document(path) if path.is_file() else {}
    numbers = {text: number for number, text in enumerate(found.texts)}
    for role, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unk"), ("pad", "pad")):
        given = about.get(f"{role}_token")
        text = given.get("content") if isinstance(given, dict) else given
        number = numbers.get(str(text)) if text else config.get(f"{role}_token_id")
        number = number[0] if isinstance(number, list) and number else number
        if isinstance(number, int) and 0 <= number < len(found.texts):
            getattr(writer, f"add_{name}_token_id")(number)
    first, last = _template(folder)
    writer.add_add_bos_token(bool(about.get("add_bos_token", first)))
    writer.add_add_eos_token(bool(about.get("add_eos_token", last)))
    template = folder / "chat_template.jinja"
    chat = template.read_text() if template.is_file() else about.get("chat_template")
    if isinstance(chat, str):
        writer.add_chat_template(chat)


def _template(folder: Path) -> tuple[bool, bool]:
    """Whether tokenizer.json puts a special token before a text, and after it."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return True, False
    step = _document(path).get("post_processor") or {}
    for each in step.get("processors") or [step]:
        if each.get("type") == "TemplateProcessing" and each.get("single"):
            single = each["single"]
            return "SpecialToken" in single[0], len(single) > 1 and "SpecialToken" in single[-1]
    return False, False
