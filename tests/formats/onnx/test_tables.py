"""Embedding tables in the file: rows are looked up as codes and match the simulation bit by bit."""

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
from tests.quantize.test_embedding_tables import ROWS, WIDTH, Words, ids, make_quantized, words

NARROW = QuantConfig(overrides=(Override(name="words", weight={"n_bits": 4, "block_size": 16}),))
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tables")
    quantized = make_quantized(words())
    export(quantized, folder / "m.onnx", ids()[0], float_path=folder / "float.onnx")
    return folder, quantized


def tables(path):
    return [tensor for tensor in onnx.load(path).graph.initializer if tuple(tensor.dims) == (ROWS, WIDTH)]


def session(path, level=onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED, keep=None):
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level, options.log_severity_level = level, 3
    if keep is not None:
        options.optimized_model_filepath = str(keep)
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def test_the_table_is_int8_and_codes_and_scales_are_gathered(file):
    folder, _ = file
    (table,) = tables(folder / "m.onnx")
    assert table.data_type == onnx.TensorProto.INT8
    readers = [node for node in onnx.load(folder / "m.onnx").graph.node if table.name in node.input]
    assert [node.op_type for node in readers] == ["Gather"]  # never a DequantizeLinear of the whole table
    (plain,) = tables(folder / "float.onnx")
    assert plain.data_type == onnx.TensorProto.FLOAT


@pytest.mark.parametrize("config", [QuantConfig(), NARROW], ids=["int8 rows", "int4 blocks"])
@pytest.mark.parametrize("batch", [1, 4, 9])
def test_rows_in_onnx_runtime_equal_the_simulation_bit_by_bit(tmp_path, batch, config):
    class Rows(Words):
        def forward(self, ids):
            return self.words(ids), super().forward(ids)

    torch.manual_seed(0)
    quantized = make_quantized(Rows().eval(), config)
    export(quantized, tmp_path / "m.onnx", ids()[0])
    token_ids = torch.randint(0, ROWS, (batch, 7))
    with torch.no_grad():
        expected = quantized(token_ids)[0].numpy()
    actual = session(tmp_path / "m.onnx").run(None, {"ids": token_ids.numpy()})[0]
    assert np.array_equal(actual, expected)


def test_a_4_bit_table_is_stored_in_4_bits_and_only_read_rows_are_dequantized(tmp_path):
    quantized = make_quantized(words(), NARROW)
    export(quantized, tmp_path / "m.onnx", ids()[0], float_path=tmp_path / "float.onnx")
    (table,) = tables(tmp_path / "m.onnx")
    assert table.data_type == onnx.TensorProto.INT4
    session(tmp_path / "m.onnx", keep=tmp_path / "compiled.onnx")
    readers = [node for node in onnx.load(tmp_path / "compiled.onnx").graph.node if table.name in node.input]
    assert [node.op_type for node in readers] == ["GatherBlockQuantized"]
    verification = verify(tmp_path / "m.onnx", quantized, ids()[1], float_path=tmp_path / "float.onnx")
    assert verification.holds


def test_layers_left_float_for_speed_are_unpacked_next_to_a_4_bit_table(tmp_path):
    quantized = make_quantized(
        words(), NARROW.model_copy(update={"speed_first": True}), target=onnxruntime_target("avx2")
    )
    export(quantized, tmp_path / "m.onnx", ids()[0])
    session(tmp_path / "m.onnx", keep=tmp_path / "compiled.onnx")
    kinds = Counter(node.op_type for node in onnx.load(tmp_path / "compiled.onnx").graph.node)
    assert (kinds["Gemm"] + kinds["MatMul"] + kinds["FusedGemm"], kinds["MatMulNBits"]) == (1, 0)


def test_the_whole_file_agrees_with_the_simulation(file):
    folder, quantized = file
    verification = verify(folder / "m.onnx", quantized, ids()[1], float_path=folder / "float.onnx")
    assert verification.holds
    assert verification.size < verification.float_size / 2


@pytest.mark.parametrize("cpu", ["vnni", "avx2"])
def test_a_tied_head_shares_the_bytes_of_its_table_and_still_multiplies_in_int8(tmp_path, cpu):
    quantized = make_quantized(words(tied=True), target=onnxruntime_target(cpu))
    export(quantized, tmp_path / "m.onnx", ids()[0])
    assert len(tables(tmp_path / "m.onnx")) == 1
    assert (tmp_path / "m.onnx").stat().st_size < 1.6 * ROWS * WIDTH
    running = session(tmp_path / "m.onnx", keep=tmp_path / "compiled.onnx")
    kinds = Counter(node.op_type for node in onnx.load(tmp_path / "compiled.onnx").graph.node)
    assert not kinds["MatMul"]
    assert not kinds["Gemm"]
    with torch.no_grad():
        expected = quantized(ids()[1]).numpy()
    actual = running.run(None, {"ids": ids()[1].numpy()})[0]
    if cpu in ("avx2", instruction_set()):  # on other CPUs int8 products may saturate
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_openvino_runs_the_table(tmp_path):
    quantized = make_quantized(words(), target="openvino")
    export(quantized, tmp_path / "m.onnx", ids()[0], float_path=tmp_path / "float.onnx")
    verification = verify(tmp_path / "m.onnx", quantized, ids()[1], float_path=tmp_path / "float.onnx")
    assert verification.holds
