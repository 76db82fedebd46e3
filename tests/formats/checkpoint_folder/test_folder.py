"""Folders of packed weights: one weight at a time, whole or not at all."""

import gc
import weakref
from collections.abc import Mapping

import pytest

from scalepoint.checkpoints import QuantizedCheckpoint
from scalepoint.errors import ExportError
from scalepoint.formats import find_checkpoint_format, list_checkpoint_formats
from scalepoint.spec import QuantizationSpec
from tests.formats.checkpoint_folder.tiny import make, nearest

INT4 = QuantizationSpec(dtype="int4", granularity={"type": "per_block", "block_size": 32, "axis": 1})
NAMES = ("compressed-tensors", "gptq", "awq")


class Lazy(Mapping):
    """Quantizes a weight when asked for; notes how many were alive at once."""

    def __init__(self, source, names):
        self.source, self.names = source, names
        self.alive = weakref.WeakSet()
        self.most = 0

    def __getitem__(self, name):
        if name not in self.names:
            raise KeyError(name)
        weight = self.source.tensor(name)
        packed = nearest(weight, INT4, weight.dtype)
        gc.collect()
        self.alive.add(packed.codes)
        self.most = max(self.most, len(self.alive))
        return packed

    def __contains__(self, name):
        return name in self.names

    def __iter__(self):
        return iter(self.names)

    def __len__(self):
        return len(self.names)


def test_all_three_are_found_by_name():
    assert set(NAMES) <= set(list_checkpoint_formats())
    assert [find_checkpoint_format(name).suffix for name in NAMES] == ["", "", ""]


@pytest.mark.usefixtures("own_garbage")
def test_one_weight_is_held_at_a_time(tmp_path):
    source = make("llama", tmp_path / "in")
    lazy = Lazy(source, [name for name in source.tensors if name.endswith("_proj.weight")])
    find_checkpoint_format("compressed-tensors").write(QuantizedCheckpoint(source, lazy), tmp_path / "out")
    assert len(lazy) == 14
    assert lazy.most == 1


@pytest.mark.usefixtures("own_garbage")
@pytest.mark.parametrize("name", NAMES)
def test_a_failure_leaves_what_was_there(tmp_path, name):
    source = make("llama", tmp_path / "in")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "before").write_text("mine")
    lazy = Lazy(source, ["model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"])
    with pytest.raises(ExportError, match=r"embed_tokens.*leave it float"):
        find_checkpoint_format(name).write(QuantizedCheckpoint(source, lazy), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir() if path.name != "in"] == ["out"]
    assert (tmp_path / "out" / "before").read_text() == "mine"
