"""The first layer that departs by itself, as a small file that needs only ONNX Runtime."""

import subprocess
import sys

import onnx
import pytest
import torch

from scalepoint.errors import UsageError
from scalepoint.verification import extract_failing
from tests.formats.onnx.test_export import Net, with_random_statistics
from tests.verification.test_layers import deployed

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A correct file, and a file whose second layer has a doubled weight scale."""
    folder = tmp_path_factory.mktemp("failing")
    torch.manual_seed(0)
    model, x = with_random_statistics(Net()), torch.randn(4, 3, 32, 32)
    quantized = deployed(model, x, "avx2", folder / "good.onnx")
    proto = onnx.load(folder / "good.onnx")
    tensors = (tensor for tensor in proto.graph.initializer if tensor.name.startswith("expand"))
    scale = next(tensor for tensor in tensors if tensor.name.endswith("conv.scale"))
    scale.CopyFrom(onnx.numpy_helper.from_array(2 * onnx.numpy_helper.to_array(scale), scale.name))
    onnx.save(proto, folder / "bad.onnx")
    return folder, quantized, x


def test_a_correct_file_has_no_failing_layer(files, tmp_path):
    folder, quantized, x = files
    assert extract_failing(folder / "good.onnx", quantized, x, tmp_path / "failing") is None
    assert not (tmp_path / "failing").exists()


def test_the_extracted_layer_reproduces_the_difference_without_scalepoint(files, tmp_path):
    folder, quantized, x = files
    result = extract_failing(folder / "bad.onnx", quantized, x, tmp_path / "failing")
    assert {path.name for path in result.iterdir()} == {"model.onnx", "inputs.npz", "expected.npz", "run.py"}
    part, full = onnx.load(result / "model.onnx"), onnx.load(folder / "bad.onnx")
    assert sum(node.op_type == "Conv" for node in part.graph.node) == 1
    assert len(part.graph.node) < len(full.graph.node) / 2
    assert "scalepoint" not in (result / "run.py").read_text()
    done = subprocess.run([sys.executable, str(result / "run.py")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "values are equal" in done.stdout
    assert float(done.stdout.split("%")[0]) < 90


def test_a_folder_with_other_files_needs_force_and_keeps_them(files, tmp_path):
    folder, quantized, x = files
    (tmp_path / "failing").mkdir()
    (tmp_path / "failing" / "mine").write_text("mine")
    with pytest.raises(UsageError, match=r"not empty.*force=True"):
        extract_failing(folder / "bad.onnx", quantized, x, tmp_path / "failing")
    for _ in range(2):
        extract_failing(folder / "bad.onnx", quantized, x, tmp_path / "failing", force=True)
    assert (tmp_path / "failing" / "mine").read_text() == "mine"
    assert len(list((tmp_path / "failing").iterdir())) == 5


def test_the_folder_of_the_file_itself_is_refused(files):
    """The extracted layer could overwrite the file."""
    folder, quantized, x = files
    before = (folder / "bad.onnx").read_bytes()
    with pytest.raises(UsageError, match="contains the file"):
        extract_failing(folder / "bad.onnx", quantized, x, folder, force=True)
    assert (folder / "bad.onnx").read_bytes() == before
