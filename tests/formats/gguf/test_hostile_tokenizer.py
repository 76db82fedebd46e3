"""Tokenizer files with any value in any place: written, or refused as ExportError at once; never another error."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from scalepoint.errors import ExportError
from scalepoint.formats.gguf.tokenizer import add_tokenizer, read_vocabulary
from tests.formats.gguf.test_tokenizer import sentencepiece

pytest.importorskip("gguf", reason='needs the package gguf: pip install "scalepoint[gguf]"')
SIZE = 12
VALUES = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**40, 1.5, float("nan"), float("inf"), "", "a", "a b c", "\ud800",
    "BPE", [], {}, [[]], [None], {"a": None}, {"type": "BPE"}, [["a", "b", "c"]], [{"id": 2**63, "content": "x"}],
    {"a": 2**63}, {"a": -1}, {"a": "0"}, {"a": True},
)  # fmt: skip


def byte_level() -> dict[str, Any]:
    made = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2, "c": 3}, [("a", "b")]))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<s>"])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 4)])
    return dict(json.loads(made.to_str()))


def pieces() -> dict[str, Any]:
    made = Tokenizer(models.BPE({"<unk>": 0, "<0x00>": 1, "a": 2, "b": 3, "ab": 4}, [("a", "b")], byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return dict(json.loads(made.to_str()))


SETTINGS = {
    "bos_token": {"content": "<s>", "lstrip": False},
    "eos_token": "c",
    "add_bos_token": True,
    "chat_template": "{{ messages }}",
}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a document."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield from places(each, (*path, key))


def changed(value: Any, path: tuple[Any, ...], other: Any) -> Any:
    if not path:
        return other
    copied = dict(value) if isinstance(value, dict) else list(value)
    copied[path[0]] = changed(value[path[0]], path[1:], other)
    return copied


class Writer:
    """Takes what a GGUFWriter takes, and encodes texts as it does."""

    def __getattr__(self, name: str) -> Any:
        def add(value: Any) -> None:
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, str):
                    each.encode()

        return add


def write(folder: Path, documents: dict[str, Any]) -> bool:
    """Whether the tokenizer is taken; anything but ExportError fails the test."""
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document))
    try:
        add_tokenizer(Writer(), folder, {"vocab_size": SIZE, "bos_token_id": [0]})
    except ExportError:
        return False
    return True


@pytest.mark.parametrize("make", [byte_level, pieces])
def test_any_value_in_any_place_of_tokenizer_json(make: Any, tmp_path: Path) -> None:
    document, chance = make(), random.Random(0)  # noqa: S311  # no secret
    everywhere = list(places(document))
    assert write(tmp_path, {"tokenizer.json": document, "tokenizer_config.json": SETTINGS})
    taken = 0
    for _ in range(400):
        mutated = changed(document, chance.choice(everywhere), chance.choice(VALUES))
        taken += write(tmp_path, {"tokenizer.json": mutated, "tokenizer_config.json": SETTINGS})
    assert 0 < taken < 400


def test_any_value_in_any_place_of_tokenizer_config_json(tmp_path: Path) -> None:
    document = byte_level()
    for path in places(SETTINGS):
        for value in VALUES:
            write(tmp_path, {"tokenizer.json": document, "tokenizer_config.json": changed(SETTINGS, path, value)})


def test_a_sentencepiece_model_with_any_byte_changed(tmp_path: Path) -> None:
    whole, chance = sentencepiece(2), random.Random(0)  # noqa: S311  # no secret
    for _ in range(500):
        content = bytearray(whole)
        content[chance.randrange(len(whole))] = chance.randrange(256)
        (tmp_path / "tokenizer.model").write_bytes(bytes(content[: chance.choice((len(whole), chance.randrange(200)))]))
        write(tmp_path, {})


@pytest.mark.parametrize("size", [2**63, -1])
def test_a_vocabulary_of_no_sane_size_is_refused(size: int, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(byte_level()))
    with pytest.raises(ExportError, match="a vocabulary of"):
        read_vocabulary(tmp_path, size)


def test_a_number_without_end_in_a_sentencepiece_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\xff" * 1_000_000)
    with pytest.raises(ExportError, match="64 bits"):
        read_vocabulary(tmp_path, SIZE)


def test_a_token_id_far_beyond_the_vocabulary_is_refused_before_a_list_is_made(tmp_path: Path) -> None:
    document = byte_level()
    document["model"]["vocab"]["c"] = 2**63
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(ExportError, match=f"the model {SIZE}"):
        read_vocabulary(tmp_path, SIZE)
