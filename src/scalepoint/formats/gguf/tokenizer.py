"""Write a checkpoint's tokenizer to a GGUF file: byte-level BPE with merges ("gpt2"), or SentencePiece BPE ("llama").

GGUF names the rule that splits a text before BPE; llama.cpp has a fixed list of such rules. The name is found by
comparing the rule in tokenizer.json with this list. Other models (unigram, WordPiece) and unknown rules are rejected:
llama.cpp would split text differently and give wrong results without an error.
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
from scalepoint.support.formatting import to_one_line
from scalepoint.support.untrusted import read_bytes

MAX_TOKENS = 2**24
# Parts of the regular expressions by which tokenizers split text
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # punctuation and white space
CONTRACTIONS = ("(?i:'s|'t|'re|'ve|'m|'ll|'d)", "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED_WORD = (rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*")
CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Pattern of a Split -> llama.cpp's name of the rule without ignore_merges, and with it ("": llama.cpp has none)
SPLITS = {
    **{rf"{short}|{WORD}|\p{{N}}{{1,3}}|{REST}": ("dbrx", "llama-bpe") for short in CONTRACTIONS},
    **{rf"{short}|{WORD}|\p{{N}}|{REST}": ("qwen2", "") for short in CONTRACTIONS},
    **{
        rf"{CASED_WORD[0]}{short}?|{CASED_WORD[1]}{short}?|\p{{N}}{{1,3}}|{CASED_REST}": ("gpt-4o", "")
        for short in CONTRACTIONS
    },
    rf"{CASED_WORD[0]}|{CASED_WORD[1]}|\p{{N}}|{CASED_REST}": ("", "tekken"),
}


class TokenType(IntEnum):
    """Token types of llama.cpp."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER = 4
    UNUSED = 5
    BYTE = 6


@dataclass
class Vocabulary:
    """The tokens of a tokenizer, by their ids.

    Attributes:
        model: "gpt2" (byte-level BPE) or "llama" (SentencePiece BPE).
        split: llama.cpp's name of the rule that splits text before BPE.
        texts: The text of every token.
        types: The type of every token.
        adds_bos: Whether the tokenizer puts a special token before a text.
        adds_eos: Whether the tokenizer puts a special token after a text.
        scores: The score of every token, of a "llama" model.
        merges: The merges, of a "gpt2" model.
        adds_space: Whether a text is tokenized as if it began with a space, of a "llama" model.
    """

    model: str
    split: str
    texts: list[str]
    types: list[TokenType]
    adds_bos: bool
    adds_eos: bool
    scores: list[float] | None = None
    merges: list[str] | None = None
    adds_space: bool | None = None


def add_tokenizer(writer: Any, folder: Path, config: Mapping[str, Any]) -> None:
    """Write tokens, special tokens and the chat template."""
    vocabulary = read_vocabulary(folder, vocabulary_size(config))
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.split)
    writer.add_token_list(vocabulary.texts)
    writer.add_token_types([int(token_type) for token_type in vocabulary.types])
    if vocabulary.scores is not None:
        writer.add_token_scores(vocabulary.scores)
    if vocabulary.merges is not None:
        writer.add_token_merges(vocabulary.merges)
    if vocabulary.adds_space is not None:
        writer.add_add_space_prefix(vocabulary.adds_space)
    _add_special_tokens(writer, folder, config, vocabulary)


def vocabulary_size(config: Mapping[str, Any]) -> int:
    """Return the number of tokens in config.json."""
    size = config.get("vocab_size")
    if not isinstance(size, int) or isinstance(size, bool):
        raise ExportError(f"vocab_size of the config must be a whole number, got {short_repr(size)}")
    return size


def read_vocabulary(folder: Path, size: int) -> Vocabulary:
    """Read tokenizer.json, or tokenizer.model if there is no other, and pad it with unused tokens to `size` tokens."""
    if not 0 <= size <= MAX_TOKENS:
        raise ExportError(
            f"{folder}: a vocabulary of {short_repr(size)} tokens is too large: the limit is {MAX_TOKENS}"
        )
    json_file, sentencepiece_file = folder / "tokenizer.json", folder / "tokenizer.model"
    if json_file.is_file():
        vocabulary = _read_tokenizer_json(json_file, size)
    elif sentencepiece_file.is_file():
        vocabulary = _read_sentencepiece(sentencepiece_file, size)
    else:
        raise ExportError(
            f"{folder} has no tokenizer.json or tokenizer.model: a GGUF file contains its tokenizer; copy the file "
            "there (tokenizer.save_pretrained)"
        )
    padding = range(len(vocabulary.texts), size)
    vocabulary.texts += [f"[PAD{token_id}]" for token_id in padding]
    vocabulary.types += [TokenType.UNUSED] * len(padding)
    if vocabulary.scores is not None:
        vocabulary.scores += [-10000.0] * len(padding)
    return vocabulary


def _check_count(count: int, size: int, path: Path) -> None:
    """Raise ExportError for more tokens than the model has.

    Called before a list of tokens is allocated: a single id of 2**63 would need all memory.
    """
    if count > size:
        raise ExportError(f"the tokenizer in {path.parent} has {count} tokens, the model {size}")


def _read_tokenizer_json(path: Path, size: int) -> Vocabulary:
    document = read_document(path)
    model_type = document.model.get("type") or ("BPE" if "merges" in document.model else "")
    if model_type != "BPE":
        raise ExportError(
            f"{path}: a {to_one_line(model_type) or 'nameless'} tokenizer cannot be written to GGUF, only BPE"
        )
    model = validate_as(BpeModel, document.model, path)
    merges = model.pairs()
    for pair in merges:
        if len(pair) != 2:
            raise ExportError(f"{path}: a merge must have two tokens, got {short_repr(pair)}")
    added_tokens = document.added_tokens or []
    is_sentencepiece = bool(model.byte_fallback)
    if is_sentencepiece:
        split = "default"
    else:
        split = _find_split(document.pre_tokenizer, path, ignores_merges=bool(model.ignore_merges))
    _check_count(_count_ids(model.vocab, added_tokens), size, path)
    texts, types = _list_tokens(model.vocab, added_tokens, is_sentencepiece=is_sentencepiece)
    check_text([*texts, *("".join(pair) for pair in merges)], path)
    adds_bos, adds_eos = _read_template_flags(document.post_processor)
    if is_sentencepiece:
        scores, adds_space = _merge_scores(texts, types, merges), _adds_space(document)
        return Vocabulary("llama", split, texts, types, adds_bos, adds_eos, scores=scores, adds_space=adds_space)
    # GGUF separates the two tokens by a space; byte-level BPE writes a space inside a token as U+0120.
    merge_texts = [" ".join(token.replace(" ", "\u0120") for token in pair) for pair in merges]
    return Vocabulary("gpt2", split, texts, types, adds_bos, adds_eos, merges=merge_texts)


def _count_ids(token_ids: Mapping[str, int], added_tokens: Sequence[AddedToken]) -> int:
    """Return the highest id plus one."""
    return max([*token_ids.values(), *(token.id for token in added_tokens)], default=-1) + 1


def _list_tokens(
    token_ids: Mapping[str, int], added_tokens: Sequence[AddedToken], *, is_sentencepiece: bool
) -> tuple[list[str], list[TokenType]]:
    """Return text and type of every token by id; ids without a token are unused tokens."""
    count = _count_ids(token_ids, added_tokens)
    texts, types = [f"[PAD{token_id}]" for token_id in range(count)], [TokenType.UNUSED] * count
    for text, token_id in token_ids.items():
        is_byte = is_sentencepiece and len(text) == 6 and text.startswith("<0x") and text.endswith(">")
        texts[token_id], types[token_id] = text, TokenType.BYTE if is_byte else TokenType.NORMAL
    for token in added_tokens:
        text = token.content
        if is_sentencepiece and text == "<unk>":
            token_type = TokenType.UNKNOWN
        elif token.special:
            token_type = TokenType.CONTROL
        else:
            token_type = TokenType.USER
            text = text.replace("\u2581", " ")
        texts[token.id], types[token.id] = text, token_type
    return texts, types


def _merge_scores(texts: list[str], types: list[TokenType], merges: list[list[str]]) -> list[float]:
    """Return the order of merges as scores: llama.cpp merges the pair whose token has the highest score."""
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault("".join(pair), rank)
    return [
        -float(ranks.get(text, len(merges))) if token_type is TokenType.NORMAL else 0.0
        for text, token_type in zip(texts, types, strict=True)
    ]


def _adds_space(document: TokenizerDocument) -> bool:
    """Whether a text is tokenized as if it began with a space."""
    steps = [*_list_steps(document.normalizer), *_list_steps(document.pre_tokenizer)]
    return any(
        step.type == "Prepend" or (step.type == "Metaspace" and step.prepend_scheme != "never") for step in steps
    )


def _list_steps(step: TokenizerStep | None) -> list[TokenizerStep]:
    return [] if step is None else step.parts()


def _find_split(pre_tokenizer: TokenizerStep | None, path: Path, *, ignores_merges: bool) -> str:
    """Return llama.cpp's name of the rule that splits text; raise ExportError if llama.cpp does not have the rule."""
    steps = _list_steps(pre_tokenizer)
    name = _match_split(steps, ignores_merges=ignores_merges)
    if name:
        return name
    description = to_one_line(", ".join(str(step.type) for step in steps))[:200] or "none"
    raise ExportError(
        f"{path}: its pre-tokenizer ({description}{', ignore_merges' if ignores_merges else ''}) is none of those that "
        "llama.cpp has: gpt-2, smollm, llama-bpe, dbrx, qwen2, gpt-4o, tekken"
    )


def _match_split(steps: Sequence[TokenizerStep], *, ignores_merges: bool) -> str:
    if not steps or steps[-1].type != "ByteLevel" or steps[-1].add_prefix_space:
        return ""
    uses_regex, first_types = steps[-1].use_regex, [step.type for step in steps[:-1]]
    if uses_regex and not ignores_merges:
        if not first_types:
            return "gpt-2"
        if first_types == ["Digits"] and steps[0].individual_digits:
            return "smollm"
    if not uses_regex and first_types == ["Split"]:
        pattern = (steps[0].pattern or {}).get("Regex", "")
        name_with_merges, name_without_merges = SPLITS.get(pattern, ("", ""))
        return name_without_merges if ignores_merges else name_with_merges
    return ""


def _read_sentencepiece(path: Path, size: int) -> Vocabulary:
    """Read a SentencePiece model: field 1 are pieces (text, score, type), 2 the training, 3 the normalizer."""
    texts: list[str] = []
    types: list[TokenType] = []
    scores: list[float] = []
    model_type, adds_space = 1, True  # the defaults of sentencepiece_model.proto; model type 1 is unigram, 2 is BPE
    try:
        for field, value in iterate_fields(read_bytes(path, MAX_FILE_BYTES, folder=path.parent)):
            if field == 1:
                _check_count(len(texts) + 1, size, path)
                text, score, token_type = _read_piece(value)
                texts.append(text)
                scores.append(score)
                types.append(token_type)
            elif field == 2:
                model_type = dict(iterate_fields(value)).get(3, 1)
            elif field == 3:
                adds_space = bool(dict(iterate_fields(value)).get(3, 1))
    except DocumentError as error:
        raise ExportError(error.args[0]) from error
    except (OSError, ValueError) as error:
        raise ExportError(f"{path} is not a SentencePiece model: {error}") from error
    if model_type != 2:
        raise ExportError(f"{path}: a unigram tokenizer cannot be written to GGUF, only BPE")
    return Vocabulary(
        "llama", "default", texts, types, adds_bos=True, adds_eos=False, scores=scores, adds_space=adds_space
    )


def _read_piece(value: Any) -> tuple[str, float, TokenType]:
    """Return text, score and type; raise ValueError for fields that are missing or have another type."""
    piece = dict(iterate_fields(value))
    text, score, token_type = piece.get(1), piece.get(2, bytes(4)), piece.get(3, 1)
    if not (isinstance(text, bytes) and isinstance(score, bytes) and len(score) == 4 and isinstance(token_type, int)):
        raise ValueError("a piece has no text, or its score or type is not a number")
    return text.decode(), struct.unpack("<f", score)[0], TokenType(token_type)


def _add_special_tokens(writer: Any, folder: Path, config: Mapping[str, Any], vocabulary: Vocabulary) -> None:
    """Write the ids of special tokens, whether texts begin and end with them, and the chat template."""
    path = folder / "tokenizer_config.json"
    settings = read_settings(path) if path.is_file() else TokenizerSettings()
    token_ids = {text: token_id for token_id, text in enumerate(vocabulary.texts)}
    for role in ("bos", "eos", "unk", "pad"):
        text = settings.special(role)
        token_id = token_ids.get(text) if text else config.get(f"{role}_token_id")
        token_id = token_id[0] if isinstance(token_id, list) and token_id else token_id
        if isinstance(token_id, int) and 0 <= token_id < len(vocabulary.texts):
            getattr(writer, f"add_{role}_token_id")(token_id)
    writer.add_add_bos_token(vocabulary.adds_bos if settings.add_bos_token is None else settings.add_bos_token)
    writer.add_add_eos_token(vocabulary.adds_eos if settings.add_eos_token is None else settings.add_eos_token)
    template_file = folder / "chat_template.jinja"
    template = read_template(template_file) if template_file.is_file() else settings.chat_template
    if isinstance(template, str):
        check_text([template], template_file if template_file.is_file() else path)
        writer.add_chat_template(template)


def _read_template_flags(post_processor: TokenizerStep | None) -> tuple[bool, bool]:
    """Whether tokenizer.json puts a special token before a text, and whether after it."""
    for step in _list_steps(post_processor):
        if step.type == "TemplateProcessing" and step.single:
            template = step.single
            return "SpecialToken" in template[0], len(template) > 1 and "SpecialToken" in template[-1]
    return False, False
