"""Tokenizers in GGUF files: cut as the checkpoint's own tokenizer cuts, or refused."""

import json
import struct

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from scalepoint.checkpoints import QuantizedCheckpoint
from scalepoint.errors import ExportError
from scalepoint.formats.gguf import GGUF
from scalepoint.formats.gguf.tokenizer import SPLITS, TokenType, read_vocabulary
from scalepoint.runtimes import find_runtime
from tests.formats.gguf.checkpoints import make

pytest.importorskip("gguf", reason='needs the package gguf: pip install "scalepoint[gguf]"')
LLAMACPP = find_runtime("llamacpp")
TEXT = (
    "The cat's hat, 1234567 and 89: we've SEEN it!!  \n\n  They'LL say 'so'...\tnaïve café — 東京へ行く 🚀🚀 "
    "x=3.14;\r\ndon't (stop) $5.00/kg <tag> __init__  end "
)


def byte_level(*splits, regex=True, **fields):
    made = Tokenizer(models.BPE(**fields))
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)
    made.pre_tokenizer = pre_tokenizers.Sequence([*splits, last]) if splits else last
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return trained(made, initial_alphabet=alphabet, special_tokens=["<|end|>"])


def trained(made, **fields):
    trainer = trainers.BpeTrainer(vocab_size=600, show_progress=False, **fields)
    made.train_from_iterator([TEXT, "the cat and the dog and they had 12 hats, 345 cats and 6789 dogs"] * 8, trainer)
    return made


def split_by(pattern, **fields):
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return byte_level(split, regex=False, **fields)


def pieces():
    """As SentencePiece's BPE looks in tokenizer.json."""
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))  # noqa: S106  # no secret
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    made = trained(made, special_tokens=special)
    document = json.loads(made.to_str())
    document["added_tokens"] = document["added_tokens"][:3]
    return Tokenizer.from_str(json.dumps(document))


MADE = {
    "gpt-2": byte_level,
    "smollm": lambda: byte_level(pre_tokenizers.Digits(individual_digits=True)),
    **{names[0]: lambda pattern=pattern: split_by(pattern) for pattern, names in SPLITS.items() if names[0]},
    **{
        names[1]: lambda pattern=pattern: split_by(pattern, ignore_merges=True)
        for pattern, names in SPLITS.items()
        if names[1]
    },
    "default": pieces,
}


def test_all_known_ways_are_tried():
    assert MADE.keys() == {"gpt-2", "smollm", "dbrx", "llama-bpe", "qwen2", "gpt-4o", "tekken", "default"}


@pytest.mark.parametrize("split", MADE)
def test_the_rule_of_tokenizer_json_is_named(split, tmp_path):
    made = MADE[split]()
    made.save(str(tmp_path / "tokenizer.json"))
    found = read_vocabulary(tmp_path, 700)
    assert found.split == split
    assert len(found.texts) == len(found.types) == 700
    assert found.types[-1] is TokenType.UNUSED
    assert found.texts[: made.get_vocab_size()] == [made.id_to_token(number) for number in range(made.get_vocab_size())]


@pytest.mark.skipif(not LLAMACPP.is_installed, reason=f"needs llama.cpp: {LLAMACPP.install}")
@pytest.mark.parametrize("split", MADE)
def test_llamacpp_cuts_text_alike(split, tmp_path):
    from scalepoint.runtimes.llamacpp.child import File

    source = make("llama, tied", tmp_path / "m", vocab_size=700)
    made = MADE[split]()
    made.save(str(source.folder / "tokenizer.json"))
    (source.folder / "tokenizer_config.json").unlink()
    GGUF.write(QuantizedCheckpoint(source, {}), tmp_path / "m.gguf")
    found = File(str(tmp_path / "m.gguf"), {"threads": 1}).tokens(TEXT)
    assert found == made.encode(TEXT).ids


def varint(number):
    found = b""
    while number > 127:
        found, number = found + bytes([number & 127 | 128]), number >> 7
    return found + bytes([number])


def field(number, value):
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def sentencepiece(kind):
    words = [
        ("<unk>", 0.0, 2),
        ("<s>", 0.0, 3),
        ("</s>", 0.0, 3),
        ("<0x00>", 0.0, 6),
        ("▁the", -1.5, 1),
        ("t", -2.5, 1),
    ]
    parts = [field(1, field(1, text.encode()) + field(2, score) + field(3, type_)) for text, score, type_ in words]
    return b"".join(parts) + field(2, field(3, kind)) + field(3, field(3, 0))


def test_a_sentencepiece_model_is_read_without_its_library(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece(2))
    found = read_vocabulary(tmp_path, 8)
    assert found.model == "llama"
    assert found.texts == ["<unk>", "<s>", "</s>", "<0x00>", "▁the", "t", "[PAD6]", "[PAD7]"]
    assert found.types[:5] == [
        TokenType.UNKNOWN,
        TokenType.CONTROL,
        TokenType.CONTROL,
        TokenType.BYTE,
        TokenType.NORMAL,
    ]
    assert found.scores[4:6] == [-1.5, -2.5]
    assert found.adds_space is False


def word_piece(folder):
    Tokenizer(models.WordPiece({"a": 0})).save(str(folder / "tokenizer.json"))


def unigram(folder):
    (folder / "tokenizer.model").write_bytes(sentencepiece(1))


def broken(folder):
    (folder / "tokenizer.model").write_bytes(sentencepiece(2)[:40])


def odd(folder):
    byte_level(pre_tokenizers.Whitespace()).save(str(folder / "tokenizer.json"))


def garbage(folder):
    (folder / "tokenizer.json").write_text("{")


def large(folder):
    byte_level().save(str(folder / "tokenizer.json"))


def nothing(folder):
    """No file."""


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (word_piece, "WordPiece.*BPE"),
        (unigram, "a unigram tokenizer"),
        (broken, "SentencePiece.*too early"),
        (odd, "Whitespace, ByteLevel.*llama.cpp"),
        (garbage, r"tokenizer\.json cannot be read"),
        (large, r"tokens, the model 100"),
        (nothing, r"no tokenizer\.json or tokenizer\.model"),
    ],
    ids=lambda each: each.__name__ if callable(each) else "",
)
def test_a_tokenizer_that_llamacpp_has_not_is_refused(spoil, says, tmp_path):
    spoil(tmp_path)
    with pytest.raises(ExportError, match=says):
        read_vocabulary(tmp_path, 100)
