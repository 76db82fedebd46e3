"""ONNX files with external data files."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

from scalepoint import check, export, verify
from scalepoint.formats.onnx import save
from scalepoint.formats.onnx.file_info import read_info
from scalepoint.quantize import Override, QuantConfig, quantize
from scalepoint.verification import benchmark
from tests.warm import warm

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Table(nn.Module):
    """A large table that stays float, and a linear layer that does not."""

    def __init__(self, rows):
        super().__init__()
        self.table, self.linear = nn.Embedding(rows, 256), nn.Linear(256, 64)

    def forward(self, x):
        return self.linear(self.table(x))


@pytest.fixture
def small_files(monkeypatch):
    monkeypatch.setattr(save, "MAX_SINGLE_FILE_BYTES", 10_000)


@pytest.fixture(scope="module")
def case():
    torch.manual_seed(0)
    x = torch.randint(0, 500, (4, 3))
    return quantize(Table(500).eval(), x, QuantConfig(), forward_loop=[x], target="onnxruntime"), x


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.usefixtures("small_files")
class TestTwoFiles:
    def test_it_runs_and_its_size_includes_the_data_file(self, case, tmp_path):
        quantized, x = case
        export(quantized, tmp_path / "m.onnx", x, float_path=tmp_path / "float.onnx")
        verification = verify(tmp_path / "m.onnx", quantized, x, float_path=tmp_path / "float.onnx")
        assert verification.holds
        assert verification.low_precision == 1
        data = next(tmp_path.glob("m.*.data"))
        assert (
            verification.size
            == read_info(tmp_path / "m.onnx").size
            == data.stat().st_size + (tmp_path / "m.onnx").stat().st_size
        )
        assert 500 * 256 < verification.size < 2 * 500 * 256  # the table in int8
        assert verification.float_size - verification.size > 64 * 256 * 2
        assert benchmark(tmp_path / "float.onnx", tmp_path / "m.onnx", repeats=5, seconds=1).ratio > 0
        assert isinstance(check(tmp_path / "m.onnx", target="tensorrt"), list)

    def test_the_same_model_gives_the_same_bytes(self, case, tmp_path):
        quantized, x = case
        for folder in (tmp_path / "a", tmp_path / "b"):
            export(quantized, folder / "m.onnx", x)
        assert names(tmp_path / "a") == names(tmp_path / "b")
        for name in names(tmp_path / "a"):
            assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()

    def test_overwriting_a_file_removes_its_old_data_file(self, case, tmp_path, monkeypatch):
        quantized, x = case
        (tmp_path / "m.other.data").write_text("not ours")
        other = quantize(Table(400).eval(), x % 400, forward_loop=[x % 400], target="onnxruntime")
        export(quantized, tmp_path / "m.onnx", x)
        first = names(tmp_path)
        export(other, tmp_path / "m.onnx", x % 400)
        second = names(tmp_path)
        assert len(first) == len(second) == 3
        assert first != second
        monkeypatch.setattr(save, "MAX_SINGLE_FILE_BYTES", 10**9)
        export(other, tmp_path / "m.onnx", x % 400)
        assert names(tmp_path) == ["m.onnx", "m.other.data"]

    def test_a_failed_write_keeps_the_old_model(self, case, tmp_path):
        """A process with a limit on file sizes fails when it writes the data file."""
        quantized, x = case
        export(quantized, tmp_path / "m.onnx", x)
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        script = textwrap.dedent(
            """
            import resource, sys, warnings, torch
            warnings.simplefilter("ignore")
            from scalepoint import export
            from scalepoint.errors import StoreError
            from scalepoint.formats.onnx import save
            from scalepoint.quantize import quantize
            from tests.formats.onnx.test_large import Table
            save.MAX_SINGLE_FILE_BYTES = 10_000
            x = torch.randint(0, 400, (4, 3))
            quantized = quantize(Table(400).eval(), x, forward_loop=[x], target="onnxruntime")
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
            try:
                export(quantized, sys.argv[1], x)
            except StoreError as error:
                print(error)
            """
        )
        done = subprocess.run(
            [*warm(), "-c", script, str(tmp_path / "m.onnx")],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert "The old content is unchanged" in done.stdout
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.slow
def test_a_model_of_more_than_two_gigabytes(tmp_path):
    torch.manual_seed(0)
    model = Table(2_200_000).eval()  # 2.25 GB of float32
    x = torch.randint(0, 2_200_000, (2, 5))
    config = QuantConfig(overrides=(Override(name="table", weight="float"),))
    quantized = quantize(model, x, config, forward_loop=[x], target="onnxruntime")
    path = export(quantized, tmp_path / "large.onnx", x)
    assert path.stat().st_size < 1_000_000
    assert read_info(path).size > 2**31
    verification = verify(path, quantized, x)
    assert verification.holds
    assert verification.low_precision == 1
    assert verification.sqnr > 35
    assert len(names(tmp_path)) == 2
