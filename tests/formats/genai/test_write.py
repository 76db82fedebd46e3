"""The exported folder is complete, reproducible and written atomically."""

import json
import tracemalloc
from collections.abc import Iterator, Mapping

import pytest

from scalepoint.checkpoints import QuantizedCheckpoint, QuantizedWeight, Source
from scalepoint.errors import StoreError
from scalepoint.formats.genai import ORT_GENAI
from scalepoint.formats.registry import find_checkpoint_format, list_checkpoint_formats
from tests.formats.genai.tiny import int_spec, quantize_folder, round_to_nearest, save_model


def test_the_format_is_registered_under_its_name():
    assert "ort-genai" in list_checkpoint_formats()
    assert find_checkpoint_format("ort-genai") is ORT_GENAI
    assert ORT_GENAI.suffix == ""


def test_the_folder_has_everything_that_the_runtime_reads(tmp_path):
    save_model("llama", tmp_path / "float")
    (tmp_path / "float" / "tokenizer.json").write_text("{}")
    (tmp_path / "float" / "tokenizer_config.json").write_text('{"a": 1}')
    ORT_GENAI.write(quantize_folder(tmp_path / "float", int_spec(4)), tmp_path / "out")
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert {"model.onnx", "model.onnx.data", "genai_config.json", "tokenizer.json", "tokenizer_config.json"} <= names
    model = json.loads((tmp_path / "out" / "genai_config.json").read_text())["model"]
    assert (model["type"], model["eos_token_id"], model["vocab_size"], model["context_length"]) == ("llama", 2, 96, 64)
    decoder = model["decoder"]
    assert (decoder["head_size"], decoder["num_key_value_heads"], decoder["num_hidden_layers"]) == (16, 2, 2)
    assert decoder["inputs"]["past_key_names"] == "past_key_values.%d.key"


def test_special_tokens_come_from_the_generation_config(tmp_path):
    save_model("llama", tmp_path / "float")
    (tmp_path / "float" / "generation_config.json").write_text('{"eos_token_id": [5, 7], "bos_token_id": 4}')
    ORT_GENAI.write(quantize_folder(tmp_path / "float", int_spec(4)), tmp_path / "out")
    model = json.loads((tmp_path / "out" / "genai_config.json").read_text())["model"]
    assert (model["eos_token_id"], model["bos_token_id"], model["pad_token_id"]) == ([5, 7], 4, 2)


def test_the_same_checkpoint_gives_the_same_bytes(tmp_path):
    save_model("gemma3", tmp_path / "float")
    checkpoint = quantize_folder(tmp_path / "float", int_spec(4))
    for name in ("first", "second"):
        ORT_GENAI.write(checkpoint, tmp_path / name)
    for file in (tmp_path / "first").iterdir():
        assert file.read_bytes() == (tmp_path / "second" / file.name).read_bytes()


class UnreadableWeights(Mapping[str, QuantizedWeight]):
    """Weights of which the last one cannot be read."""

    def __init__(self, weights: Mapping[str, QuantizedWeight]) -> None:
        self.weights = weights

    def __getitem__(self, name: str) -> QuantizedWeight:
        if name == list(self.weights)[-1]:
            raise OSError(5, "the disk is gone")
        return self.weights[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)

    def __contains__(self, name: object) -> bool:
        return name in self.weights


def test_a_failed_write_leaves_an_existing_folder_unchanged(tmp_path):
    save_model("llama", tmp_path / "float")
    checkpoint = quantize_folder(tmp_path / "float", int_spec(4))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")
    unreadable = QuantizedCheckpoint(checkpoint.source, UnreadableWeights(checkpoint.quantized))
    with pytest.raises(StoreError, match="the disk is gone"):
        ORT_GENAI.write(unreadable, tmp_path / "out")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["mine"]
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["float", "out"]


class LazyWeights(UnreadableWeights):
    """Weights that are quantized when they are read."""

    def __init__(self, source: Source, weights: Mapping[str, QuantizedWeight]) -> None:
        super().__init__(weights)
        self.source = source

    def __getitem__(self, name: str) -> QuantizedWeight:
        return round_to_nearest(self.source.tensor(name), int_spec(4))


def test_memory_does_not_grow_with_the_number_of_blocks(tmp_path):
    peaks = []
    for depth in (2, 12):
        from tests.formats.genai import tiny

        tiny.FAMILIES["deep"] = (
            "LlamaConfig",
            {"num_hidden_layers": depth, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4},
        )
        folder = tmp_path / str(depth)
        save_model("deep", folder / "float")
        del tiny.FAMILIES["deep"]
        source = Source.open(folder / "float")
        matrices = {name: None for name, stored in source.tensors.items() if len(stored.shape) == 2}
        checkpoint = QuantizedCheckpoint(source, LazyWeights(source, matrices))  # type: ignore[arg-type]
        tracemalloc.start()
        ORT_GENAI.write(checkpoint, folder / "out")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.6 * peaks[0]
