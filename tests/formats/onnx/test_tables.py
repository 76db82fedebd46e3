"""Embedding tables in the file: rows are looked up as codes, and agree with the simulation bit for bit."""

from collections import Counter

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from scalepoint.formats import export
from scalepoint.quantize import Override, QuantConfig
from scalepoint.support.cpu import instruction_set
from scalepoint.targets import onnxruntime_target
from scalepoint.verification import verify
from tests.quantize.test_tables import ROWS, WIDTH, Words, ids, made, words

NARROW = QuantConfig(overrides=(Override(name="words", weight={"n_bits": 4, "block_size": 16}),))
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tables")
    quantized = made(words())
    export(quantized, folder / "m.onnx", ids()[0], float_path=folder / "float.onnx")
    return folder, quantized


def tables(path):
    return [each for each in onnx.load(path).graph.initializer if tuple(each.dims) == (ROWS, WIDTH)]


def session(path, level=onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED, keep=None):
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level, options.log_severity_level = level, 3
    if keep is not None:
        options.optimized_model_filepath = str(keep)
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def test_the_file_holds_the_table_as_int8_and_gathers_codes_and_scales(file):
    folder, _ = file
    (table,) = tables(folder / "m.onnx")
    assert table.data_type == onnx.TensorProto.INT8
    readers = [node for node in onnx.load(folder / "m.onnx").graph.node if table.name in node.input]
    assert [node.op_type for node in readers] == ["Gather"]  # never a DequantizeLinear of the whole table
    (plain,) = tables(folder / "float.onnx")
    assert plain.data_type == onnx.TensorProto.FLOAT


@pytest.mark.parametrize("config", [QuantConfig(), NARROW], ids=["int8 rows", "int4 blocks"])
@pytest.mark.parametrize("batch", [1, 4, 9])
def test_rows_in_onnx_runtime_are_those_of_the_simulation_bit_for_bit(tmp_path, batch, config):
    class Rows(Words):
        def forward(self, ids):
            return self.words(ids), super().forward(ids)

    torch.manual_seed(0)
    quantized = made(Rows().eval(), config)
    export(quantized, tmp_path / "m.onnx", ids()[0])
    given = torch.randint(0, ROWS, (batch, 7))
    with torch.no_grad():
        expected = quantized(given)[0].numpy()
    found = session(tmp_path / "m.onnx").run(None, {"ids": given.numpy()})[0]
    assert np.array_equal(found, expected)


def test_a_table_of_four_bits_is_stored_in_four_bits_and_only_the_rows_that_are_read_become_floats(tmp_path):
    quantized = made(words(), NARROW)
    export(quantized, tmp_path / "m.onnx", ids()[0], float_path=tmp_path / "float.onnx")
    (table,) = tables(tmp_path / "m.onnx")
    assert table.data_type == onnx.TensorProto.INT4
    session(tmp_path / "m.onnx", keep=tmp_path / "compiled.onnx")
    readers = [node for node in onnx.load(tmp_path / "compiled.onnx").graph.node if table.name in node.input]
    assert [node.op_type for node in readers] == ["GatherBlockQuantized"]
    found = verify(tmp_path / "m.onnx", quantized, ids()[1], float_path=tmp_path / "float.onnx")
    assert found.holds


def test_what_stays_float_for_speed_is_unpacked_beside_a_table_of_four_bits_too(tmp_path):
    quantized = made(words(), NARROW.model_copy(update={"speed_first": True}), target=onnxruntime_target("avx2"))
    export(quantized, tmp_path / "m.onnx", ids()[0])
    session(tmp_path / "m.onnx", keep=tmp_path / "compiled.onnx")
    kinds = Counter(node.op_type for node in onnx.load(tmp_path / "compiled.onnx").graph.node)
    assert (kinds["Gemm"] + kinds["MatMul"] + kinds["FusedGemm"], kinds["MatMulNBits"]) == (1, 0)


def test_the_whole_file_agrees_with_the_simulation(file):
    folder, quantized = file
    found = verify(folder / "m.onnx", quantized, ids()[1], float_path=folder / "float.onnx")
    assert found.holds
    assert found.size < found.float_size / 2


@pytest.mark.parametrize("cpu", ["vnni", "avx2"])
def test_a_tied_head_shares_the_bytes_of_its_table_and_still_multiplies_in_int8(tmp_path, cpu):
    quantized = made(words(tied=True), target=onnxruntime_target(cpu))
    export(quantized, tmp_path / "m.onnx", ids()[0])
    assert len(tables(tmp_path / "m.onnx")) == 1
    assert (tmp_path / "m.onnx").stat().st_size < 1.6 * ROWS * WIDTH
    running = session(tmp_path / "m.onnx", keep=tmp_path / "compiled.onnx")
    kinds = Counter(node.op_type for node in onnx.load(tmp_path / "compiled.onnx").graph.node)
    assert not kinds["MatMul"]
    assert not kinds["Gemm"]
    with torch.no_grad():
        expected = quantized(ids()[1]).numpy()
    found = running.run(None, {"ids": ids()[1].numpy()})[0]
    if cpu in ("avx2", instruction_set()):  # elsewhere products of the other kind saturate
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_openvino_reads_it_too(tmp_path):
    quantized = made(words(), target="openvino")
    export(quantized, tmp_path / "m.onnx", ids()[0], float_path=tmp_path / "float.onnx")
    found = verify(tmp_path / "m.onnx", quantized, ids()[1], float_path=tmp_path / "float.onnx")
    assert found.holds
