"""A runtime or a writer that is not installed is reported before any work starts."""

from importlib.util import find_spec

import pytest
import torch
from torch import nn

import scalepoint
from scalepoint.errors import ExportError, ScalepointWarning, VerificationError
from scalepoint.formats import find_format
from scalepoint.runtimes import Runtime
from tests.errors import raises

X = torch.randn(2, 8)


def deploy(folder, read, **options):
    def data(run):
        read.append(1)
        run(X)

    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    return scalepoint.deploy(model, X, data, output=folder / "out", progress=False, smoke=True, **options)


@pytest.fixture
def no_runtime(monkeypatch):
    """As on a machine where no runtime is installed."""
    monkeypatch.setattr(Runtime, "is_installed", False)


@pytest.mark.usefixtures("no_runtime")
def test_a_missing_runtime_is_reported_before_the_data_is_read(tmp_path):
    read = []
    with raises(VerificationError, "onnxruntime", "pip install", "allow_departure=True"):
        deploy(tmp_path, read)
    assert read == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_runtime")
def test_a_file_that_may_be_unverified_is_written_without_its_runtime(tmp_path):
    read = []
    with pytest.warns(ScalepointWarning, match="onnxruntime.*not be verified"):
        done = deploy(tmp_path, read, allow_departure=True)
    assert done.verification.status.value == "unavailable"
    assert done.path.is_file()


@pytest.mark.parametrize("name", ["executorch", "litert", "coreml", "coreai"])
def test_a_missing_writer_is_reported_before_the_data_is_read(monkeypatch, tmp_path, name):
    package = find_format(name).package
    find_spec_without = lambda name: None if name == package else find_spec(name)  # noqa: E731  # as where it is not installed
    monkeypatch.setattr("scalepoint.formats.format.find_spec", find_spec_without)
    read = []
    with raises(ExportError, package, f"pip install 'scalepoint[{name}]'"):
        deploy(tmp_path, read, target=name, allow_departure=True)
    assert read == []


def test_formats_without_extra_packages_are_always_installed():
    find_format("onnx").check_installed()
