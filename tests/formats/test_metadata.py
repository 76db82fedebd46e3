"""Metadata of files: versions, target, config, calibration, and entries of the user."""

import copy
import json

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import scalepoint
from scalepoint.errors import StoreError, UsageError
from scalepoint.formats import check_metadata, find_format, read_value
from scalepoint.pipeline.model_metadata import read_library_metadata
from scalepoint.quantize import quantize
from tests.errors import raises

USER_METADATA = {
    "preprocessing": {"mean": (0.5, 0.25), "size": 224},
    "labels": ["cat", "chien é", "<script>"],
    "author": "somebody",
    "epochs": 3,
}


ENDLESS: list = []
ENDLESS.append(ENDLESS)


@pytest.fixture(scope="module")
def quantized():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)).eval()
    data = [torch.randn(4, 16), torch.randn(3, 16)]
    return quantize(model, data[0], forward_loop=data, freeze_weights=True, target="onnxruntime")


@pytest.fixture(scope="module")
def path(quantized, tmp_path_factory):
    folder = tmp_path_factory.mktemp("metadata")
    return scalepoint.export(quantized, folder / "m.onnx", torch.randn(2, 16), metadata=USER_METADATA)


def test_versions_target_config_and_calibration_are_in_the_file(path, quantized) -> None:
    metadata = find_format("onnx").about(path).metadata
    assert metadata["scalepoint.version"] == scalepoint.__version__
    assert metadata["scalepoint.torch"] == torch.__version__
    assert metadata["scalepoint.target"] == "onnxruntime"
    assert json.loads(metadata["scalepoint.calibration"]) == {"batches": 2, "samples": 7}
    assert json.loads(metadata["scalepoint.config"]) == {}  # the default config of the target


def test_user_metadata_is_stored_as_text_or_json(path) -> None:
    metadata = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    assert metadata["author"] == "somebody"
    assert read_value(metadata["labels"]) == USER_METADATA["labels"]
    assert read_value(metadata["preprocessing"]) == {"mean": [0.5, 0.25], "size": 224}
    assert metadata["epochs"] == "3"


def test_the_runtime_reads_the_metadata(path) -> None:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert json.loads(session.get_modelmeta().custom_metadata_map["labels"]) == USER_METADATA["labels"]


def test_the_file_does_not_depend_on_the_key_order_or_on_save_and_load(path, quantized, tmp_path) -> None:
    scalepoint.save(quantized, tmp_path / "kept", with_graph=True)
    loaded = scalepoint.load(tmp_path / "kept")
    reversed_metadata = dict(reversed(USER_METADATA.items()))
    again = scalepoint.export(loaded, tmp_path / "m.onnx", torch.randn(2, 16), metadata=reversed_metadata)
    assert again.read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("user_metadata", "message"),
    [
        (["cat"], "must be a mapping"),
        ({"scalepoint.version": "9"}, "are reserved"),
        ({3: "x"}, "must be printable text"),
        ({"": "x"}, "must be printable text"),
        ({"a\nb": "x"}, "must be printable text"),
        ({"labels": "x" * 1_000_001}, "more than 1000000 characters"),
        ({"x" * 1_000_001: ""}, "more than 1000000 characters"),
        ({"labels": "\ud800"}, "incomplete character"),
        ({"labels": ["cat", "\udfff"]}, "incomplete character"),
        ({"labels": ENDLESS}, "contains itself"),
    ],
)
def test_invalid_metadata_is_refused(user_metadata, message) -> None:
    with pytest.raises(UsageError, match=message):
        check_metadata(user_metadata)


def test_arrays_and_tensors_are_stored_as_lists() -> None:
    user_metadata = {"labels": np.array(["cat", "dog"]), "mean": torch.tensor([0.5, 0.25]), "is_rgb": np.bool_(True)}
    assert check_metadata(user_metadata) == {"is_rgb": "true", "labels": '["cat", "dog"]', "mean": "[0.5, 0.25]"}


@pytest.mark.parametrize("text", ["{not json", "[" * 100_000, "plain", ""])
def test_text_that_is_not_json_is_returned_unchanged(text) -> None:
    assert read_value(text) == text


class ModelWithAttributes(nn.Module):
    def __init__(self, **attributes):
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)


class Config:
    def __init__(self, id2label):
        self.id2label = id2label


PRETRAINED = {"input_size": (3, 96, 96), "mean": (0.1,), "std": (0.2,), "interpolation": "bicubic", "url": "x"}


@pytest.mark.parametrize(
    ("model", "known"),
    [
        (nn.Linear(2, 2), {}),
        (ModelWithAttributes(config=Config({1: "dog", 0: "cat"})), {"labels": ["cat", "dog"]}),
        (ModelWithAttributes(config=Config({0: "LABEL_0", 1: "LABEL_1"})), {}),
        (ModelWithAttributes(config="a string"), {}),
        (
            ModelWithAttributes(pretrained_cfg={**PRETRAINED, "label_names": ("a", "b")}),
            {
                "labels": ["a", "b"],
                "preprocessing": {"size": 96, "mean": (0.1,), "std": (0.2,), "interpolation": "bicubic"},
            },
        ),
        (ModelWithAttributes(pretrained_cfg={"input_size": None}), {}),
        (ModelWithAttributes(pretrained_cfg={"input_size": (), "mean": (0.1,)}), {}),
        (ModelWithAttributes(config=Config({1: "dog", 3: "cat"})), {}),
        (ModelWithAttributes(config=Config({0: "cat", 1: "\ud800"})), {"labels": ["cat", "?"]}),
        (ModelWithAttributes(config=Config(dict.fromkeys(range(20_000), "x" * 60))), {}),
        (ModelWithAttributes(pretrained_cfg={"label_names": ("a", "b")}, num_classes=3), {}),
        (
            ModelWithAttributes(pretrained_cfg={"input_size": (1, 64, 96), "mean": (0.1,)}),
            {"preprocessing": {"size": [64, 96], "mean": (0.1,)}},
        ),
    ],
    ids=[
        "plain",
        "transformers",
        "unnamed",
        "other",
        "timm",
        "empty",
        "no size",
        "gaps",
        "half",
        "long",
        "new",
        "wide",
    ],
)
def test_library_metadata_of_a_model(model, known) -> None:
    assert read_library_metadata(model) == known


def test_invalid_inputs_and_invalid_text_in_a_file_raise_store_errors(path, tmp_path) -> None:
    model = onnx.load(path)
    model.graph.input[0].CopyFrom(onnx.helper.make_tensor_sequence_value_info("x", onnx.TensorProto.FLOAT, None))
    onnx.save(model, tmp_path / "sequence.onnx")
    with raises(StoreError, "input 'x'", "not a tensor"):
        find_format("onnx").about(tmp_path / "sequence.onnx")
    damaged = path.read_bytes().replace(b"somebody", b"some\xffody")
    (tmp_path / "damaged.onnx").write_bytes(damaged)
    assert find_format("onnx").about(tmp_path / "damaged.onnx").metadata["author"] == "some\ufffdody"


def test_a_tuned_file_states_its_number_of_tuning_threads(quantized, path, tmp_path) -> None:
    assert not any("tuning.threads" in entry.key for entry in onnx.load(path).metadata_props)
    tuned = copy.deepcopy(quantized)
    scalepoint.tune(tuned, [torch.randn(32, 16)], progress=False)
    scalepoint.save(tuned, tmp_path / "saved", with_graph=True)
    for model in (tuned, scalepoint.load(tmp_path / "saved")):
        file = onnx.load(scalepoint.export(model, tmp_path / "m.onnx", torch.randn(2, 16)))
        metadata = {entry.key: entry.value for entry in file.metadata_props}
        assert metadata["scalepoint.tuning.threads"] == str(torch.get_num_threads())


def test_a_file_that_is_not_tuned_does_not_depend_on_the_number_of_threads(tmp_path) -> None:
    before, files = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            torch.manual_seed(0)
            model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 16, 3)).eval()
            data = [torch.randn(8, 3, 32, 32) for _ in range(2)]
            quantized_model = quantize(model, data[0], forward_loop=data, target="onnxruntime", progress=False)
            files.append(scalepoint.export(quantized_model, tmp_path / f"{threads}.onnx", data[0]).read_bytes())
    finally:
        torch.set_num_threads(before)
    assert files[0] == files[1]
