"""Every activation of torch.nn in every target: the file computes what the simulation does."""

from importlib.util import find_spec

import pytest
import torch
from torch import Tensor, nn

from scalepoint.formats import export
from scalepoint.quantize import quantize
from scalepoint.verification import Status, verify

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

PACKAGES = {
    "onnxruntime": "onnxruntime",
    "openvino": "openvino",
    "executorch": "executorch",
    "litert": "ai_edge_litert",
    "coreml": "coremltools",
    "coreai": "coreai_torch",
}
SUFFIXES = {"executorch": ".pte", "litert": ".tflite", "coreml": ".mlpackage", "coreai": ".aimodel"}
ACTIVATIONS = {
    "CELU": nn.CELU(), "CELU_half": nn.CELU(0.5), "ELU": nn.ELU(), "ELU_half": nn.ELU(0.5), "GELU": nn.GELU(),
    "GELU_tanh": nn.GELU(approximate="tanh"), "GLU": nn.GLU(1), "Hardshrink": nn.Hardshrink(),
    "Hardsigmoid": nn.Hardsigmoid(), "Hardswish": nn.Hardswish(), "Hardtanh": nn.Hardtanh(),
    "Hardtanh_whole": nn.Hardtanh(-2, 3), "LeakyReLU": nn.LeakyReLU(), "LogSigmoid": nn.LogSigmoid(),
    "LogSoftmax": nn.LogSoftmax(1), "Mish": nn.Mish(), "PReLU": nn.PReLU(), "PReLU_channels": nn.PReLU(8),
    "RReLU": nn.RReLU(), "ReLU": nn.ReLU(), "ReLU6": nn.ReLU6(), "SELU": nn.SELU(), "SiLU": nn.SiLU(),
    "Sigmoid": nn.Sigmoid(), "Softmax": nn.Softmax(1), "Softmax2d": nn.Softmax2d(), "Softmin": nn.Softmin(1),
    "Softplus": nn.Softplus(), "Softplus_steep": nn.Softplus(beta=3, threshold=5), "Softshrink": nn.Softshrink(),
    "Softsign": nn.Softsign(), "Tanh": nn.Tanh(), "Tanhshrink": nn.Tanhshrink(), "Threshold": nn.Threshold(0.1, 0.5),
}  # fmt: skip
RARE = ("CELU_half", "ELU_half", "Hardshrink", "Hardswish", "Hardtanh_whole", "LogSigmoid", "SELU", "Softshrink")


class Branches(nn.Module):
    """One output for each activation, which is between two convolutions."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.before = nn.ModuleDict({name: nn.Conv2d(3, 8, 1) for name in names})
        self.activation = nn.ModuleDict({name: ACTIVATIONS[name] for name in names})
        self.after = nn.ModuleDict({name: nn.Conv2d(4 if name == "GLU" else 8, 4, 1) for name in names})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {name: self.after[name](self.activation[name](self.before[name](x))) for name in self.before}


def verified(target, names, folder):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8) * 2
    model = quantize(Branches(tuple(names)).eval(), x, forward_loop=[x], target=target)
    path = folder / f"model{SUFFIXES.get(target, '.onnx')}"
    export(model, path, x)
    return verify(path, model, x, layers=False)


def check(verification, names):
    """Check all outputs. A runtime may round a tie differently: by one code, about 40 dB below the signal."""
    assert verification.status == Status.OK, verification.message
    assert verification.differences == ()
    assert len(verification.optimized) == len(names)
    assert [str(output) for output in verification.optimized if output.sqnr < 30] == []


def test_the_table_has_every_activation_of_torch():
    """Attention is not an activation, and AdaptiveLogSoftmaxWithLoss is a loss."""
    activations_of_torch = set(torch.nn.modules.activation.__all__) - {"MultiheadAttention"}
    assert activations_of_torch == {type(activation).__name__ for activation in ACTIVATIONS.values()}


@pytest.mark.parametrize("target", ["litert", "coreml", "coreai"])
def test_activations_without_an_operation_in_a_format_are_written_with_other_operations(target, tmp_path):
    if find_spec(PACKAGES[target]) is None:
        pytest.skip(f"{PACKAGES[target]} is not installed")
    check(verified(target, RARE, tmp_path), RARE)


@pytest.mark.slow
@pytest.mark.parametrize("target", PACKAGES)
def test_every_activation_runs_as_simulated(target, tmp_path):
    if find_spec(PACKAGES[target]) is None:
        pytest.skip(f"{PACKAGES[target]} is not installed")
    check(verified(target, ACTIVATIONS, tmp_path), ACTIVATIONS)
