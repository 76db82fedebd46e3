"""Calibration data by name: files, images and functions. Data can be iterated several times; nothing is unpickled."""

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from scalepoint.cli.data import MAX_DATA_BYTES, DataOptions, load_data
from scalepoint.cli.load_objects import ObjectLoader
from scalepoint.errors import UsageError

TRUSTED = ObjectLoader(trust=True)


def test_one_array_is_one_input(here) -> None:
    np.savez("one.npz", images=np.arange(20, dtype=np.float32).reshape(5, 4))
    data = load_data("one.npz", DataOptions(batch_size=2))
    assert [tuple(batch.shape) for batch in data] == [(2, 4), (2, 4), (1, 4)]
    assert torch.equal(torch.cat(list(data)), torch.arange(20.0).reshape(5, 4))
    assert len(list(load_data("one.npz", DataOptions(2, max_batches=2)))) == 2


def test_numbered_arrays_are_positional_and_others_are_keywords(here) -> None:
    np.savez("numbered.npz", *(np.full((3, 1), index) for index in range(11)))
    (batch,) = load_data("numbered.npz", DataOptions())
    assert [int(array[0, 0]) for array in batch] == list(range(11))
    save_file({"ids": torch.ones(3, 2, dtype=torch.int64), "mask": torch.zeros(3, 2)}, "named.safetensors")
    (batch,) = load_data("named.safetensors", DataOptions())
    assert {name: value.dtype for name, value in batch.items()} == {"ids": torch.int64, "mask": torch.float32}


def test_float64_is_read_as_float32_with_a_note(here, capsys) -> None:
    np.savez("double.npz", x=np.ones((2, 2)))
    (batch,) = load_data("double.npz", DataOptions())
    assert batch.dtype == torch.float32
    assert "float64" in capsys.readouterr().err


def test_images_are_resized_cropped_and_normalised(here) -> None:
    folder = here / "photos" / "cats"
    folder.mkdir(parents=True)
    Image.new("RGB", (20, 10), (255, 0, 51)).save(folder / "b.png")
    Image.new("L", (9, 30), 255).save(folder / "a.JPG")
    (folder / "notes.txt").write_text("not an image")
    options = DataOptions(size=8, mean=(0.5, 0.5, 0.2), std=(0.5, 0.5, 0.1))
    (batch,) = load_data("photos", options)
    assert batch.shape == (2, 3, 8, 8)
    assert torch.allclose(batch[1, :, 4, 4], torch.tensor([1.0, -1.0, 0.0]), atol=1e-5)
    assert torch.allclose(batch[0, :, 4, 4], torch.tensor([1.0, 1.0, 8.0]), atol=1e-5)
    (grey,) = load_data("photos", DataOptions(size=4, mean=(0,), std=(1,)))
    assert grey.shape == (2, 1, 4, 4)
    (folder / "c.png").write_bytes(b"\x89PNG broken")
    with pytest.raises(UsageError, match=r"c\.png cannot be read"):
        list(load_data("photos", options))


def test_a_generator_function_is_called_for_each_iteration(here) -> None:
    data = load_data("nets:batches", DataOptions(max_batches=2, loader=TRUSTED))
    assert [len(list(data)), len(list(data))] == [2, 2]
    assert data.first().shape == (2, 3, 8, 8)
    with pytest.raises(UsageError, match="the disk went away"):
        list(load_data("nets:broken_batches", DataOptions(loader=TRUSTED)))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.npz", "no such file"),
        ("nowhere", "no such file"),
        ("text.npz", "not a .npz"),
        ("objects.npz", "plain arrays"),
        ("unequal.npz", "along its first axis"),
        ("scalar.npz", "along its first axis"),
        ("nothing.npz", "got no arrays"),
        ("text.safetensors", "not a safetensors file"),
        ("text.csv", "cannot be used as data"),
        ("pictures", "preprocessing of the model"),
        ("nets:number", "must be an iterable"),
        ("nets:nothing", "has no 'nothing'"),
        ("data.pt", "never opened"),
        ("data.pkl", "never opened"),
    ],
)
def test_a_name_that_is_not_data_is_refused(here, name, message) -> None:
    np.savez("objects.npz", x=np.array([{}, {}], dtype=object))
    np.savez("unequal.npz", x=np.ones((2, 1)), y=np.ones((3, 1)))
    np.savez("scalar.npz", x=np.ones(()))
    np.savez("nothing.npz")
    for file in ("text.npz", "text.safetensors", "text.csv", "data.pt", "data.pkl"):
        (here / file).write_text("text")
    (here / "pictures").mkdir()
    with pytest.raises(UsageError, match=message):
        load_data(name, DataOptions(loader=TRUSTED))


@pytest.mark.parametrize(
    ("mean", "std"), [((0.5,), (0.5, 0.5, 0.5)), ((0, 0), (1, 1)), ((0,), (0,)), ((0, 0, 0), (1, 1, -1)), ((), ())]
)
def test_an_invalid_preprocessing_is_refused(here, mean, std) -> None:
    (here / "pictures").mkdir()
    with pytest.raises(UsageError, match="--mean"):
        load_data("pictures", DataOptions(size=8, mean=mean, std=std))
    with pytest.raises(UsageError, match="no images"):
        load_data("pictures", DataOptions(size=8, mean=(0,), std=(1,)))


def test_a_file_that_is_too_large_once_unpacked_is_refused(here, monkeypatch) -> None:
    assert MAX_DATA_BYTES > 1e9
    monkeypatch.setattr("scalepoint.cli.data.MAX_DATA_BYTES", 1000)
    np.savez_compressed("bomb.npz", x=np.zeros((1000, 10)))
    with pytest.raises(UsageError, match="once unpacked"):
        load_data("bomb.npz", DataOptions())


def test_labels_next_to_the_inputs_are_left_out(call, here) -> None:
    np.savez("labelled.npz", x=np.zeros((4, 3, 8, 8), np.float32), labels=np.zeros(4, np.int64))
    code, out, err = call("deploy", "nets:Net", "--data", "labelled.npz", "--dry-run")
    assert code == 0, err
    assert "2 quantized" in out
    np.savez("misnamed.npz", image=np.zeros((4, 3, 8, 8), np.float32), labels=np.zeros(4, np.int64))
    code, _, err = call("deploy", "nets:Net", "--data", "misnamed.npz", "--dry-run")
    assert code == 2
    assert "the model also needs x" in " ".join(err.split())
