"""Checkpoint folders are read lazily, and broken ones are rejected with a clear reason."""

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
    weight_map = {"a.weight": "model-1.safetensors", "b.weight": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def test_the_index_lists_the_shards_and_tensors_are_read_one_by_one(folder):
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


def test_the_fingerprint_depends_on_the_weights(folder):
    before = Source.open(folder).fingerprint
    assert Source.open(folder).fingerprint == before
    save_file({"b.weight": torch.zeros(4, dtype=torch.bfloat16)}, folder / "model-2.safetensors")
    assert Source.open(folder).fingerprint != before


def truncate_shard(folder):
    path = folder / "model-2.safetensors"
    path.write_bytes(path.read_bytes()[:-2])


def delete_shard(folder):
    (folder / "model-2.safetensors").unlink()


def remove_tensor(folder):
    save_file({"c.weight": torch.zeros(1)}, folder / "model-2.safetensors")


def point_outside(folder):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))


def remove_weight_map(folder):
    (folder / "model.safetensors.index.json").write_text("{}")


def delete_config(folder):
    (folder / "config.json").unlink()


def break_config(folder):
    (folder / "config.json").write_text("{")


def make_config_a_list(folder):
    (folder / "config.json").write_text("[]")


def replace_by_pickle(folder):
    for path in folder.glob("model*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x")


def store_float8(folder):
    save_file({"b.weight": torch.ones(4).to(torch.float8_e4m3fn)}, folder / "model-2.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate_shard, r"model-2.*damaged or incomplete"),
        (delete_shard, r"model-2.*is missing"),
        (remove_tensor, r"model-2.*lacks b\.weight"),
        (point_outside, "name of a file"),
        (remove_weight_map, r"no weight_map"),
        (delete_config, r"config\.json.*No such file"),
        (break_config, r"config\.json cannot be read"),
        (make_config_a_list, r"not a JSON object"),
        (replace_by_pickle, r"pytorch_model\.bin.*pickles are never read"),
        (store_float8, r"b\.weight.*F8_E4M3"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_broken_folder_is_rejected_with_its_reason(folder, damage, message):
    damage(folder)
    with pytest.raises(StoreError, match=message):
        Source.open(folder)


def test_the_error_for_an_unknown_tensor_suggests_the_nearest_name(folder):
    with pytest.raises(StoreError, match=r"did you mean 'a\.weight'"):
        Source.open(folder).tensor("a.weigth")


def test_a_missing_folder_is_rejected(tmp_path):
    with pytest.raises(StoreError, match="no such folder"):
        Source.open(tmp_path / "nowhere")


@pytest.mark.parametrize(("row", "is_separate"), [(None, False), (0, True), (9_999, True)])
def test_a_head_is_separate_if_any_row_differs_from_the_embedding(tmp_path, row, is_separate):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "tie_word_embeddings": True}))
    embedding = torch.randn(10_000, 8).to(torch.bfloat16)
    head = embedding.to(torch.float32)
    if row is not None:
        head[row, 3] += 1
    save_file({"model.embed_tokens.weight": embedding, "lm_head.weight": head}, tmp_path / "model.safetensors")
    source = Source.open(tmp_path)
    assert source.has_own_head() == is_separate
    assert source.config["tie_word_embeddings"] == (not is_separate)
