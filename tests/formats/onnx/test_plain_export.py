"""torch's own exporters on a quantized model: torch.export.export, and torch.onnx.export with both of its exporters."""

import onnx
import pytest
import torch
from torch import nn

from scalepoint.errors import SpecError
from scalepoint.graph.nodes import get_kind
from scalepoint.quantize import QuantConfig, quantize
from scalepoint.spec import QuantizationSpec
from tests.formats.onnx.test_export import Attends, Net, run, sqnr, with_random_statistics

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def quantize_model(kind):
    torch.manual_seed(0)
    if kind == "cnn":
        model, x = with_random_statistics(Net()), torch.randn(6, 3, 32, 32)
    else:
        model, x = Attends().eval(), torch.randn(6, 16, 32)
    return quantize(model, x, forward_loop=[x], target="onnxruntime"), x


@pytest.fixture(scope="module", params=["cnn", pytest.param("transformer", marks=pytest.mark.slow)])
def case(request):
    return quantize_model(request.param)


def test_torch_export_takes_any_batch(case):
    quantized, x = case
    program = torch.export.export(quantized, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=2)},))
    with torch.no_grad():
        for batch in (2, 5):
            torch.testing.assert_close(program.module()(x[:batch]), quantized(x[:batch]), atol=1e-5, rtol=1e-4)


def plain_export(quantized, x, path, dynamo):
    names = {"input_names": ["x"], "output_names": ["y"], "dynamic_axes": {"x": {0: "batch"}, "y": {0: "batch"}}}
    options = {"external_data": False} if dynamo else {}
    torch.onnx.export(quantized.cpu().eval(), (x,), path, **names, dynamo=dynamo, verbose=False, **options)


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
def test_torch_onnx_export_writes_q_and_dq_for_any_batch(case, tmp_path, dynamo):
    quantized, x = case
    plain_export(quantized, x[:2], tmp_path / "m.onnx", dynamo)
    graph = onnx.load(tmp_path / "m.onnx").graph
    kinds = [node.op_type for node in graph.node]
    stubs = sum(get_kind(node) == "quant" for node in quantized.graph.nodes)
    assert kinds.count("QuantizeLinear") >= stubs > 1
    assert kinds.count("DequantizeLinear") == kinds.count("QuantizeLinear")
    with torch.no_grad():
        for batch in (1, 5):
            actual = run(tmp_path / "m.onnx", x[:batch], optimize=False)
            assert sqnr(quantized(x[:batch]).numpy(), actual) > 35


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
@pytest.mark.parametrize("block", [32, None])
def test_int4_is_refused_instead_of_exported_as_float(tmp_path, dynamo, block):
    x = torch.randn(2, 64)
    quantized = quantize(nn.Sequential(nn.Linear(64, 32)).eval(), x, QuantConfig.weight_only("int4", block))
    error = torch.onnx.errors.OnnxExporterError if dynamo else SpecError
    with pytest.raises(error, match=r"int4.*scalepoint\.export"):
        plain_export(quantized, x, tmp_path / "m.onnx", dynamo)
    assert not list(tmp_path.iterdir())


class TestFp8:
    @pytest.fixture(scope="class")
    def quantized(self):
        torch.manual_seed(0)
        weight = QuantizationSpec(dtype="float8_e4m3fn", qparam_calculator_cls="static")
        config = QuantConfig(activation=weight.replace(qparam_calculator_cls="global_minmax"), weight=weight)
        x = torch.randn(4, 64)
        return quantize(nn.Sequential(nn.Linear(64, 32)).eval(), x, config, forward_loop=[x]), x

    def test_fp8_is_written(self, quantized, tmp_path):
        model, x = quantized
        plain_export(model, x, tmp_path / "m.onnx", dynamo=True)
        kinds = [node.op_type for node in onnx.load(tmp_path / "m.onnx").graph.node]
        assert kinds.count("QuantizeLinear") == kinds.count("DequantizeLinear") == 2
        with torch.no_grad():
            assert sqnr(model(x).numpy(), run(tmp_path / "m.onnx", x, optimize=False)) > 35

    def test_the_older_exporter_does_not_support_fp8(self, quantized, tmp_path):
        model, x = quantized
        with pytest.raises(SpecError, match="dynamo=True"):
            plain_export(model, x, tmp_path / "m.onnx", dynamo=False)
