"""torch.onnx.export of a model for TensorRT: folded weights are constants of the file, and `check` finds nothing."""

import warnings

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn

from scalepoint import check
from scalepoint.errors import ScalepointWarning
from scalepoint.quantize import calibrate, disable_fake_quant, enable_fake_quant, insert_qdq, prepare_qat
from scalepoint.transformation import transform
from tests.models import Bottleneck, ResNet, VisionTransformer, with_norm_statistics

pytestmark = pytest.mark.filterwarnings("ignore")
by_either_exporter = pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])


def for_tensorrt(model, x):
    result = transform(model.eval(), x, target="tensorrt")
    quantized = insert_qdq(result.model, result.matches)
    calibrate(quantized, [x])
    return quantized


def export_plain(quantized, x, path, dynamo):
    names = {"input_names": ["x"], "output_names": ["y"]}
    torch.onnx.export(quantized.cpu().eval(), (x,), path, dynamo=dynamo, verbose=False, **names)
    return onnx.load(path).graph


def weight_sources(graph):
    """List the operators that compute the inputs of QuantizeLinear of weights; "initializer" for constants."""
    makers = {name: node for node in graph.node for name in node.output}
    weighted = [node for node in graph.node if node.op_type in ("Conv", "Gemm", "MatMul")]
    sources = []
    for node in weighted:
        dequantize = makers.get(node.input[1])
        quantize = makers.get(dequantize.input[0]) if dequantize is not None else None
        if quantize is not None and quantize.op_type == "QuantizeLinear" and dequantize.op_type == "DequantizeLinear":
            sources.append(makers[quantize.input[0]].op_type if quantize.input[0] in makers else "initializer")
    return sources


def run(path, x):
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"]).run(None, {"x": x.numpy()})[0]


@by_either_exporter
def test_folded_weights_of_a_residual_net_are_constants(tmp_path, dynamo):
    torch.manual_seed(0)
    model = with_norm_statistics(nn.Sequential(Bottleneck(128, 32), Bottleneck(128, 32)))
    x = torch.randn(2, 128, 8, 8)
    quantized = for_tensorrt(model, x)
    graph = export_plain(quantized, x, tmp_path / "m.onnx", dynamo)
    assert set(weight_sources(graph)) <= {"initializer", "Constant"}
    assert len(weight_sources(graph)) == 6
    assert not {node.op_type for node in graph.node} & {"Mul", "Sub", "Sqrt", "Min", "Max", "BatchNormalization"}
    assert "R26" not in [finding.rule for finding in check(str(tmp_path / "m.onnx"), "tensorrt")]
    with torch.no_grad():
        np.testing.assert_allclose(run(tmp_path / "m.onnx", x), quantized(x).numpy(), rtol=1e-3, atol=1e-3)


@by_either_exporter
@pytest.mark.parametrize("example", ["resnet", "vit", "qat"])
@pytest.mark.slow
def test_the_documented_examples_have_no_findings(tmp_path, example, dynamo):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 64, 64)
    if example == "vit":
        quantized = for_tensorrt(VisionTransformer(192, 3, 2, image=64, classes=64), x)
    else:
        quantized = for_tensorrt(with_norm_statistics(ResNet((1, 1, 1, 1), width=32, classes=64)), x)
    if example == "qat":
        prepare_qat(quantized)
        optimizer = torch.optim.SGD(quantized.parameters(), 1e-3)
        quantized.train()(x).square().mean().backward()
        optimizer.step()
    export_plain(quantized, x, tmp_path / "m.onnx", dynamo)
    assert [str(finding) for finding in check(str(tmp_path / "m.onnx"), "tensorrt")] == []


def test_weights_changed_in_training_are_the_ones_exported(tmp_path):
    torch.manual_seed(0)
    model = with_norm_statistics(nn.Sequential(nn.Conv2d(16, 64, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()))
    x = torch.randn(2, 16, 8, 8)
    quantized = for_tensorrt(model, x)
    quantized.train()
    with torch.no_grad():
        for parameter in quantized.parameters():
            parameter.mul_(1.5)
    export_plain(quantized, x, tmp_path / "m.onnx", dynamo=False)
    with torch.no_grad():
        np.testing.assert_allclose(run(tmp_path / "m.onnx", x), quantized(x).numpy(), rtol=1e-3, atol=1e-3)


@by_either_exporter
def test_disabled_quantizers_cause_a_warning(tmp_path, dynamo):
    torch.manual_seed(0)
    x = torch.randn(2, 16, 8, 8)
    quantized = for_tensorrt(
        with_norm_statistics(nn.Sequential(nn.Conv2d(16, 64, 3), nn.BatchNorm2d(64), nn.ReLU())), x
    )
    disable_fake_quant(quantized)
    with pytest.warns(ScalepointWarning, match="quantizers.*disabled.*enable_fake_quant"):
        graph = export_plain(quantized, x, tmp_path / "m.onnx", dynamo)
    assert "QuantizeLinear" not in {node.op_type for node in graph.node}
    enable_fake_quant(quantized)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ScalepointWarning)
        graph = export_plain(quantized, x, tmp_path / "m.onnx", dynamo)
    assert "QuantizeLinear" in {node.op_type for node in graph.node}
