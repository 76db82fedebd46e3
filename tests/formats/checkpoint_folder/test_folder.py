"""Folders with packed weights are written atomically, with one weight in memory at a time."""

import gc
import weakref
from collections.abc import Mapping

import pytest

from scalepoint.checkpoints import QuantizedCheckpoint
from scalepoint.errors import ExportError
from scalepoint.formats import find_checkpoint_format, list_checkpoint_formats
from scalepoint.spec import QuantizationSpec
from tests.formats.checkpoint_folder.tiny import round_to_nearest, save_model

INT4 = QuantizationSpec(dtype="int4", granularity={"type": "per_block", "block_size": 32, "axis": 1})
NAMES = ("compressed-tensors", "gptq", "awq")


class LazyWeights(Mapping):
    """Quantizes a weight when it is read, and records how many were in memory at the same time."""

    def __init__(self, source, names):
        self.source, self.names = source, names
        self.alive = weakref.WeakSet()
        self.max_alive = 0

    def __getitem__(self, name):
        if name not in self.names:
            raise KeyError(name)
        weight = self.source.tensor(name)
        quantized = round_to_nearest(weight, INT4, weight.dtype)
        gc.collect()
        self.alive.add(quantized.codes)
        self.max_alive = max(self.max_alive, len(self.alive))
        return quantized

    def __contains__(self, name):
        return name in self.names

    def __iter__(self):
        return iter(self.names)

    def __len__(self):
        return len(self.names)


def test_the_three_formats_are_registered_under_their_names():
    assert set(NAMES) <= set(list_checkpoint_formats())
    assert [find_checkpoint_format(name).suffix for name in NAMES] == ["", "", ""]


@pytest.mark.usefixtures("fast_gc_collect")
def test_one_weight_is_in_memory_at_a_time(tmp_path):
    source = save_model("llama", tmp_path / "in")
    weights = LazyWeights(source, [name for name in source.tensors if name.endswith("_proj.weight")])
    find_checkpoint_format("compressed-tensors").write(QuantizedCheckpoint(source, weights), tmp_path / "out")
    assert len(weights) == 14
    assert weights.max_alive == 1


@pytest.mark.usefixtures("fast_gc_collect")
@pytest.mark.parametrize("name", NAMES)
def test_a_failed_write_leaves_the_folder_unchanged(tmp_path, name):
    source = save_model("llama", tmp_path / "in")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "before").write_text("mine")
    weights = LazyWeights(source, ["model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"])
    with pytest.raises(ExportError, match=r"embed_tokens.*leave it float"):
        find_checkpoint_format(name).write(QuantizedCheckpoint(source, weights), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir() if path.name != "in"] == ["out"]
    assert (tmp_path / "out" / "before").read_text() == "mine"
