"""The custom operators of the stored graph, and their translation to ONNX."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from scalepoint.formats.onnx.write import onnx_module_factories
from scalepoint.formats.operators import dequantize
from scalepoint.formats.operators import quantize as to_codes
from scalepoint.formats.stored_graph import build_stored_graph
from scalepoint.graph.torch_export import export as exported
from scalepoint.quantize import QuantStub, quantize

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def case():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).eval(), torch.randn(6, 16)
    return quantize(model, x, forward_loop=[x], target="onnxruntime"), x


def test_weights_and_activations_use_the_same_two_operators(case):
    quantized, x = case
    program = exported(build_stored_graph(quantized, onnx_module_factories()), (x,), {}, True)
    called = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    stubs = sum(isinstance(module, QuantStub) and module.enabled for module in quantized.modules())
    assert sum(name.startswith("scalepoint.quantize") for name in called) == stubs
    assert sum(name.startswith("scalepoint.dequantize") for name in called) == stubs + 2 + 2  # weights, int32 biases
    assert not any("onnx" in name for name in called)


def test_the_stored_graph_computes_what_the_simulation_does(case):
    quantized, x = case
    with torch.no_grad():
        torch.testing.assert_close(
            build_stored_graph(quantized, onnx_module_factories())(x), quantized(x), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize(
    ("fmt", "low", "high", "zero"),
    [("uint8", 0, 255, 7), ("int8", -128, 127, 0), ("int8", -127, 127, 0), ("float8_e4m3fn", -448, 448, 0)],
)
def test_codes_equal_those_of_the_tensor_layer(fmt, low, high, zero):
    x = torch.linspace(-9, 9, 101)
    scale = torch.tensor(0.05)
    codes = to_codes(x, scale, torch.tensor(zero, dtype=torch.int32), 0, low, high, fmt)
    actual = dequantize(codes, scale, torch.tensor(zero, dtype=torch.int32), 0, 0, fmt)
    if fmt.startswith("float"):
        expected = (x / scale).clamp(low, high).to(torch.float8_e4m3fn).to(torch.float32) * scale
    else:
        expected = torch.fake_quantize_per_tensor_affine(x, float(scale), zero, low, high)
    torch.testing.assert_close(actual, expected, rtol=0, atol=float(scale) * 1e-3)


def test_each_channel_has_its_own_scale():
    x, scale = torch.ones(2, 3), torch.tensor([0.1, 0.5, 1.0])
    zero = torch.zeros(3, dtype=torch.int8)
    codes = to_codes(x, scale, zero, 1, -128, 127, "int8")
    assert codes.tolist() == [[10, 2, 1]] * 2
    torch.testing.assert_close(dequantize(codes, scale, zero, 1, 0, "int8"), x)


SPEC_ALONE = """
import io, sys, warnings
warnings.simplefilter("ignore")
import torch
from scalepoint.spec import QuantizationComponentFactory, default_activation_quantization_spec

fake = QuantizationComponentFactory.create_fake_quantizer(default_activation_quantization_spec(), "activation")
x = torch.randn(4, 8)
fake(x)
fake.disable_observer()
assert not any(name.startswith("scalepoint.formats") for name in sys.modules)
buffer = io.BytesIO()
torch.onnx.export(fake.eval(), (x,), buffer, dynamo=False)
import onnx
print([node.op_type for node in onnx.load_from_string(buffer.getvalue()).graph.node])
"""


def test_the_tensor_layer_imports_no_format_before_an_export():
    done = subprocess.run([sys.executable, "-c", SPEC_ALONE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "['QuantizeLinear', 'DequantizeLinear']"
