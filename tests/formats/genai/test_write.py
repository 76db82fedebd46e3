"""The folder: what is in it, and that it is there whole or not at all."""

import json
import tracemalloc
from collections.abc import Iterator, Mapping

import pytest

from scalepoint.checkpoints import QuantizedCheckpoint, QuantizedWeight, Source
from scalepoint.errors import StoreError
from scalepoint.formats.genai import ORT_GENAI
from scalepoint.formats.registry import find_checkpoint_format, list_checkpoint_formats
from tests.formats.genai.tiny import int_spec, make, nearest, quantized


def test_it_is_found_by_name():
    assert "ort-genai" in list_checkpoint_formats()
    assert find_checkpoint_format("ort-genai") is ORT_GENAI
    assert ORT_GENAI.suffix == ""


def test_the_folder_has_all_that_the_runtime_reads(tmp_path):
    make("llama", tmp_path / "float")
    (tmp_path / "float" / "tokenizer.json").write_text("{}")
    (tmp_path / "float" / "tokenizer_config.json").write_text('{"a": 1}')
    ORT_GENAI.write(quantized(tmp_path / "float", int_spec(4)), tmp_path / "out")
    names = {each.name for each in (tmp_path / "out").iterdir()}
    assert {"model.onnx", "model.onnx.data", "genai_config.json", "tokenizer.json", "tokenizer_config.json"} <= names
    model = json.loads((tmp_path / "out" / "genai_config.json").read_text())["model"]
    assert (model["type"], model["eos_token_id"], model["vocab_size"], model["context_length"]) == ("llama", 2, 96, 64)
    decoder = model["decoder"]
    assert (decoder["head_size"], decoder["num_key_value_heads"], decoder["num_hidden_layers"]) == (16, 2, 2)
    assert decoder["inputs"]["past_key_names"] == "past_key_values.%d.key"


def test_ends_are_those_of_the_generation_config(tmp_path):
    make("llama", tmp_path / "float")
    (tmp_path / "float" / "generation_config.json").write_text('{"eos_token_id": [5, 7], "bos_token_id": 4}')
    ORT_GENAI.write(quantized(tmp_path / "float", int_spec(4)), tmp_path / "out")
    model = json.loads((tmp_path / "out" / "genai_config.json").read_text())["model"]
    assert (model["eos_token_id"], model["bos_token_id"], model["pad_token_id"]) == ([5, 7], 4, 2)


def test_the_same_checkpoint_gives_the_same_bytes(tmp_path):
    make("gemma3", tmp_path / "float")
    checkpoint = quantized(tmp_path / "float", int_spec(4))
    for name in ("first", "second"):
        ORT_GENAI.write(checkpoint, tmp_path / name)
    for each in (tmp_path / "first").iterdir():
        assert each.read_bytes() == (tmp_path / "second" / each.name).read_bytes()


class Broken(Mapping[str, QuantizedWeight]):
    """Weights of which the last one cannot be read."""

    def __init__(self, packed: Mapping[str, QuantizedWeight]) -> None:
        self.packed = packed

    def __getitem__(self, name: str) -> QuantizedWeight:
        if name == list(self.packed)[-1]:
            raise OSError(5, "the disk is gone")
        return self.packed[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.packed)

    def __len__(self) -> int:
        return len(self.packed)

    def __contains__(self, name: object) -> bool:
        return name in self.packed


def test_nothing_is_left_of_a_folder_that_could_not_be_finished(tmp_path):
    make("llama", tmp_path / "float")
    checkpoint = quantized(tmp_path / "float", int_spec(4))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")
    with pytest.raises(StoreError, match="the disk is gone"):
        ORT_GENAI.write(QuantizedCheckpoint(checkpoint.source, Broken(checkpoint.quantized)), tmp_path / "out")
    assert [each.name for each in (tmp_path / "out").iterdir()] == ["mine"]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["float", "out"]


class Lazy(Broken):
    """Codes that are made when they are asked for."""

    def __init__(self, source: Source, packed: Mapping[str, QuantizedWeight]) -> None:
        self.source, self.packed = source, packed

    def __getitem__(self, name: str) -> QuantizedWeight:
        return nearest(self.source.tensor(name), int_spec(4))


def test_memory_does_not_grow_with_the_depth(tmp_path):
    peaks = []
    for depth in (2, 12):
        from tests.formats.genai import tiny

        tiny.FAMILIES["deep"] = (
            "LlamaConfig",
            {"num_hidden_layers": depth, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4},
        )
        folder = tmp_path / str(depth)
        make("deep", folder / "float")
        del tiny.FAMILIES["deep"]
        source = Source.open(folder / "float")
        named = {name: None for name, stored in source.tensors.items() if len(stored.shape) == 2}
        checkpoint = QuantizedCheckpoint(source, Lazy(source, named))  # type: ignore[arg-type]
        tracemalloc.start()
        ORT_GENAI.write(checkpoint, folder / "out")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.6 * peaks[0]
