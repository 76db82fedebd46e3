"""Tokenizers in GGUF files split text like the checkpoint's own tokenizer, or are rejected."""

import json
import struct

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from scalepoint.checkpoints import QuantizedCheckpoint
from scalepoint.errors import ExportError
from scalepoint.formats.gguf import GGUF
from scalepoint.formats.gguf.tokenizer import SPLITS, TokenType, read_vocabulary
from scalepoint.runtimes import find_runtime
from tests.formats.gguf.checkpoints import save_checkpoint

pytest.importorskip("gguf", reason='needs the package gguf: pip install "scalepoint[gguf]"')
LLAMACPP = find_runtime("llamacpp")
TEXT = (
    "The cat's hat, 1234567 and 89: we've SEEN it!!  \n\n  They'LL say 'so'...\tnaïve café — 東京へ行く 🚀🚀 "
    "x=3.14;\r\ndon't (stop) $5.00/kg <tag> __init__  end "
)


def make_byte_level(*splits, regex=True, **settings):
    tokenizer = Tokenizer(models.BPE(**settings))
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, last]) if splits else last
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return train(tokenizer, initial_alphabet=alphabet, special_tokens=["<|end|>"])


def train(tokenizer, **settings):
    trainer = trainers.BpeTrainer(vocab_size=600, show_progress=False, **settings)
    texts = [TEXT, "the cat and the dog and they had 12 hats, 345 cats and 6789 dogs"] * 8
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def make_with_split(pattern, **settings):
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return make_byte_level(split, regex=False, **settings)


def make_sentencepiece():
    """A BPE tokenizer of SentencePiece, converted to tokenizer.json."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))  # noqa: S106  # no secret
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = train(tokenizer, special_tokens=special)
    document = json.loads(tokenizer.to_str())
    document["added_tokens"] = document["added_tokens"][:3]
    return Tokenizer.from_str(json.dumps(document))


FACTORIES = {  # by llama.cpp's name of the split rule
    "gpt-2": make_byte_level,
    "smollm": lambda: make_byte_level(pre_tokenizers.Digits(individual_digits=True)),
    **{names[0]: lambda pattern=pattern: make_with_split(pattern) for pattern, names in SPLITS.items() if names[0]},
    **{
        names[1]: lambda pattern=pattern: make_with_split(pattern, ignore_merges=True)
        for pattern, names in SPLITS.items()
        if names[1]
    },
    "default": make_sentencepiece,
}


def test_all_known_split_rules_are_tested():
    assert FACTORIES.keys() == {"gpt-2", "smollm", "dbrx", "llama-bpe", "qwen2", "gpt-4o", "tekken", "default"}


@pytest.mark.parametrize("split", FACTORIES)
def test_the_split_rule_of_tokenizer_json_is_recognized(split, tmp_path):
    tokenizer = FACTORIES[split]()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    vocabulary = read_vocabulary(tmp_path, 700)
    assert vocabulary.split == split
    assert len(vocabulary.texts) == len(vocabulary.types) == 700
    assert vocabulary.types[-1] is TokenType.UNUSED
    size = tokenizer.get_vocab_size()
    assert vocabulary.texts[:size] == [tokenizer.id_to_token(token_id) for token_id in range(size)]


@pytest.mark.skipif(not LLAMACPP.is_installed, reason=f"needs llama.cpp: {LLAMACPP.install}")
@pytest.mark.parametrize("split", FACTORIES)
def test_llamacpp_tokenizes_text_like_the_original_tokenizer(split, tmp_path):
    from scalepoint.runtimes.llamacpp.child import File

    source = save_checkpoint("llama, tied", tmp_path / "m", vocab_size=700)
    tokenizer = FACTORIES[split]()
    tokenizer.save(str(source.folder / "tokenizer.json"))
    (source.folder / "tokenizer_config.json").unlink()
    GGUF.write(QuantizedCheckpoint(source, {}), tmp_path / "m.gguf")
    tokens = File(str(tmp_path / "m.gguf"), {"threads": 1}).tokens(TEXT)
    assert tokens == tokenizer.encode(TEXT).ids


def varint(number):
    data = b""
    while number > 127:
        data, number = data + bytes([number & 127 | 128]), number >> 7
    return data + bytes([number])


def field(number, value):
    """A field of a protocol buffer message."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def sentencepiece_model(model_type):
    """The content of a tokenizer.model; model type 1 is unigram, 2 is BPE."""
    pieces = [
        ("<unk>", 0.0, 2),
        ("<s>", 0.0, 3),
        ("</s>", 0.0, 3),
        ("<0x00>", 0.0, 6),
        ("▁the", -1.5, 1),
        ("t", -2.5, 1),
    ]
    parts = [field(1, field(1, text.encode()) + field(2, score) + field(3, type_)) for text, score, type_ in pieces]
    return b"".join(parts) + field(2, field(3, model_type)) + field(3, field(3, 0))


def test_a_sentencepiece_model_is_read_without_its_library(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model(2))
    vocabulary = read_vocabulary(tmp_path, 8)
    assert vocabulary.model == "llama"
    assert vocabulary.texts == ["<unk>", "<s>", "</s>", "<0x00>", "▁the", "t", "[PAD6]", "[PAD7]"]
    assert vocabulary.types[:5] == [
        TokenType.UNKNOWN,
        TokenType.CONTROL,
        TokenType.CONTROL,
        TokenType.BYTE,
        TokenType.NORMAL,
    ]
    assert vocabulary.scores[4:6] == [-1.5, -2.5]
    assert vocabulary.adds_space is False


def save_word_piece(folder):
    Tokenizer(models.WordPiece({"a": 0})).save(str(folder / "tokenizer.json"))


def save_unigram(folder):
    (folder / "tokenizer.model").write_bytes(sentencepiece_model(1))


def save_truncated_sentencepiece(folder):
    (folder / "tokenizer.model").write_bytes(sentencepiece_model(2)[:40])


def save_unknown_pre_tokenizer(folder):
    make_byte_level(pre_tokenizers.Whitespace()).save(str(folder / "tokenizer.json"))


def save_invalid_json(folder):
    (folder / "tokenizer.json").write_text("{")


def save_too_many_tokens(folder):
    make_byte_level().save(str(folder / "tokenizer.json"))


def save_nothing(folder):
    """Write no file."""


@pytest.mark.parametrize(
    ("save", "message"),
    [
        (save_word_piece, "WordPiece.*BPE"),
        (save_unigram, "a unigram tokenizer"),
        (save_truncated_sentencepiece, "SentencePiece.*too early"),
        (save_unknown_pre_tokenizer, "Whitespace, ByteLevel.*llama.cpp"),
        (save_invalid_json, r"tokenizer\.json cannot be read"),
        (save_too_many_tokens, r"tokens, the model 100"),
        (save_nothing, r"no tokenizer\.json or tokenizer\.model"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_tokenizer_that_llamacpp_does_not_support_is_rejected(save, message, tmp_path):
    save(tmp_path)
    with pytest.raises(ExportError, match=message):
        read_vocabulary(tmp_path, 100)
