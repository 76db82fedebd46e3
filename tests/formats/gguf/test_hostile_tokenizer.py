"""Tokenizer files with arbitrary values are written or rejected with an ExportError at once; nothing else is raised."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from scalepoint.errors import ExportError
from scalepoint.formats.gguf.tokenizer import add_tokenizer, read_vocabulary
from tests.formats.gguf.test_tokenizer import sentencepiece_model

pytest.importorskip("gguf", reason='needs the package gguf: pip install "scalepoint[gguf]"')
SIZE = 12
VALUES = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**40, 1.5, float("nan"), float("inf"), "", "a", "a b c", "\ud800",
    "BPE", [], {}, [[]], [None], {"a": None}, {"type": "BPE"}, [["a", "b", "c"]], [{"id": 2**63, "content": "x"}],
    {"a": 2**63}, {"a": -1}, {"a": "0"}, {"a": True},
)  # fmt: skip


def byte_level_document() -> dict[str, Any]:
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2, "c": 3}, [("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 4)])
    return dict(json.loads(tokenizer.to_str()))


def sentencepiece_document() -> dict[str, Any]:
    tokenizer = Tokenizer(
        models.BPE({"<unk>": 0, "<0x00>": 1, "a": 2, "b": 3, "ab": 4}, [("a", "b")], byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return dict(json.loads(tokenizer.to_str()))


SETTINGS = {
    "bos_token": {"content": "<s>", "lstrip": False},
    "eos_token": "c",
    "add_bos_token": True,
    "chat_template": "{{ messages }}",
}


def iterate_paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a document."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from iterate_paths(item, (*path, key))


def replace_at(value: Any, path: tuple[Any, ...], replacement: Any) -> Any:
    """A copy of a document with another value at this path."""
    if not path:
        return replacement
    copied = dict(value) if isinstance(value, dict) else list(value)
    copied[path[0]] = replace_at(value[path[0]], path[1:], replacement)
    return copied


class FakeWriter:
    """Accepts all calls of a GGUFWriter, and encodes texts as it does."""

    def __getattr__(self, name: str) -> Any:
        def add(value: Any) -> None:
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, str):
                    item.encode()

        return add


def is_accepted(folder: Path, documents: dict[str, Any]) -> bool:
    """Whether the tokenizer can be written; any exception other than ExportError fails the test."""
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document))
    try:
        add_tokenizer(FakeWriter(), folder, {"vocab_size": SIZE, "bos_token_id": [0]})
    except ExportError:
        return False
    return True


@pytest.mark.parametrize("make", [byte_level_document, sentencepiece_document])
def test_tokenizer_json_with_any_value_changed(make: Any, tmp_path: Path) -> None:
    document, rng = make(), random.Random(0)  # noqa: S311  # no secret
    paths = list(iterate_paths(document))
    assert is_accepted(tmp_path, {"tokenizer.json": document, "tokenizer_config.json": SETTINGS})
    accepted = 0
    for _ in range(400):
        mutated = replace_at(document, rng.choice(paths), rng.choice(VALUES))
        accepted += is_accepted(tmp_path, {"tokenizer.json": mutated, "tokenizer_config.json": SETTINGS})
    assert 0 < accepted < 400


def test_tokenizer_config_json_with_any_value_changed(tmp_path: Path) -> None:
    document = byte_level_document()
    for path in iterate_paths(SETTINGS):
        for value in VALUES:
            settings = replace_at(SETTINGS, path, value)
            is_accepted(tmp_path, {"tokenizer.json": document, "tokenizer_config.json": settings})


def test_a_sentencepiece_model_with_any_byte_changed(tmp_path: Path) -> None:
    original, rng = sentencepiece_model(2), random.Random(0)  # noqa: S311  # no secret
    for _ in range(500):
        content = bytearray(original)
        content[rng.randrange(len(original))] = rng.randrange(256)
        size = rng.choice((len(original), rng.randrange(200)))
        (tmp_path / "tokenizer.model").write_bytes(bytes(content[:size]))
        is_accepted(tmp_path, {})


@pytest.mark.parametrize("size", [2**63, -1])
def test_a_vocabulary_of_absurd_size_is_rejected(size: int, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(byte_level_document()))
    with pytest.raises(ExportError, match="a vocabulary of"):
        read_vocabulary(tmp_path, size)


def test_an_endless_number_in_a_sentencepiece_model_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\xff" * 1_000_000)
    with pytest.raises(ExportError, match="64 bits"):
        read_vocabulary(tmp_path, SIZE)


def test_a_huge_token_id_is_rejected_before_a_list_is_allocated(tmp_path: Path) -> None:
    document = byte_level_document()
    document["model"]["vocab"]["c"] = 2**63
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(ExportError, match=f"the model {SIZE}"):
        read_vocabulary(tmp_path, SIZE)
