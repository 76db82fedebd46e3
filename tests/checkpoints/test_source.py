"""Folders of language models: read lazily, refused clearly."""

import json

import pytest
import torch
from safetensors.torch import save_file

from scalepoint.checkpoints import Source
from scalepoint.errors import StoreError


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file({"a.weight": torch.arange(6.0).reshape(2, 3)}, tmp_path / "model-1.safetensors")
    save_file({"b.weight": torch.ones(4, dtype=torch.bfloat16)}, tmp_path / "model-2.safetensors")
    places = {"a.weight": "model-1.safetensors", "b.weight": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return tmp_path


def test_shards_are_found_by_the_index_and_tensors_read_one_by_one(folder):
    source = Source.open(folder)
    assert source.model_type == "llama"
    assert source.tensors["b.weight"].dtype == torch.bfloat16
    assert source.size == 6 * 4 + 4 * 2
    assert torch.equal(source.tensor("a.weight"), torch.arange(6.0).reshape(2, 3))
    assert source.tensor("b.weight", torch.float32).dtype == torch.float32


def test_one_file_without_an_index_is_a_checkpoint_too(folder):
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model-1.safetensors").rename(folder / "model.safetensors")
    assert list(Source.open(folder).tensors) == ["a.weight"]


def test_the_mark_follows_the_weights(folder):
    before = Source.open(folder).mark
    assert Source.open(folder).mark == before
    save_file({"b.weight": torch.zeros(4, dtype=torch.bfloat16)}, folder / "model-2.safetensors")
    assert Source.open(folder).mark != before


def truncate(folder):
    path = folder / "model-2.safetensors"
    path.write_bytes(path.read_bytes()[:-2])


def lose(folder):
    (folder / "model-2.safetensors").unlink()


def empty(folder):
    save_file({"c.weight": torch.zeros(1)}, folder / "model-2.safetensors")


def escape(folder):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))


def no_map(folder):
    (folder / "model.safetensors.index.json").write_text("{}")


def no_config(folder):
    (folder / "config.json").unlink()


def broken_config(folder):
    (folder / "config.json").write_text("{")


def list_config(folder):
    (folder / "config.json").write_text("[]")


def pickled(folder):
    for path in folder.glob("model*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x")


def quantized(folder):
    save_file({"b.weight": torch.ones(4).to(torch.float8_e4m3fn)}, folder / "model-2.safetensors")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (truncate, r"model-2.*damaged or incomplete"),
        (lose, r"model-2.*is missing"),
        (empty, r"model-2.*lacks b\.weight"),
        (escape, "name of a file"),
        (no_map, r"no weight_map"),
        (no_config, r"config\.json.*No such file"),
        (broken_config, r"config\.json cannot be read"),
        (list_config, r"no JSON object"),
        (pickled, r"pytorch_model\.bin.*pickles are never read"),
        (quantized, r"b\.weight.*F8_E4M3"),
    ],
    ids=lambda each: each.__name__ if callable(each) else "",
)
def test_a_broken_folder_is_refused_with_its_reason(folder, spoil, says):
    spoil(folder)
    with pytest.raises(StoreError, match=says):
        Source.open(folder)


def test_an_unknown_tensor_is_named_with_the_nearest(folder):
    with pytest.raises(StoreError, match=r"did you mean 'a\.weight'"):
        Source.open(folder).tensor("a.weigth")


def test_no_folder_at_all(tmp_path):
    with pytest.raises(StoreError, match="no such folder"):
        Source.open(tmp_path / "nowhere")


@pytest.mark.parametrize(("row", "is_own"), [(None, False), (0, True), (9_999, True)])
def test_a_head_is_its_own_if_any_row_differs_from_the_embedding(tmp_path, row, is_own):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "tie_word_embeddings": True}))
    embedding = torch.randn(10_000, 8).to(torch.bfloat16)
    head = embedding.to(torch.float32)
    if row is not None:
        head[row, 3] += 1
    save_file({"model.embed_tokens.weight": embedding, "lm_head.weight": head}, tmp_path / "model.safetensors")
    source = Source.open(tmp_path)
    assert source.has_own_head() == is_own
    assert source.config["tie_word_embeddings"] == (not is_own)
