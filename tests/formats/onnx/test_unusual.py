"""Unusual inputs, types and operations, from the model to its file in ONNX Runtime."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from scalepoint.formats import export
from scalepoint.graph.capture import as_inputs
from scalepoint.quantize import quantize
from scalepoint.verification import Verification, verify

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def quantized(model: nn.Module, inputs: Any) -> fx.GraphModule:
    args, kwargs = as_inputs(inputs, None)
    return quantize(model.eval(), args, kwargs=kwargs, forward_loop=[inputs], target="onnxruntime")


def run(model: nn.Module, inputs: Any, folder: Path) -> Verification:
    """The file of a model in its runtime, against the simulation."""
    made = quantized(model, inputs)
    found = verify(export(made, folder / "model.onnx", inputs), made, inputs, layers=False)
    assert found.holds, found
    return found


class Layer(nn.Module):
    """A linear layer around which a test computes something."""

    def __init__(self, after: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.after = after

    def forward(self, x: Tensor, *rest: Any, **named: Any) -> Any:
        return self.after(self.layer(x), *rest, **named)


class Switched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, factor: float = 1.0, absolute: bool = True) -> Tensor:
        y = self.layer(x) * factor
        return y.abs() if absolute else y


@pytest.mark.parametrize("settings", [{"absolute": False}, {"factor": 2.0, "absolute": True}], ids=str)
def test_a_keyword_input_that_is_no_tensor_is_a_constant_of_the_file(tmp_path, settings):
    run(Switched(), {"x": torch.randn(4, 8), **settings}, tmp_path)


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, file: Tensor, allow_pickle: Tensor, pair: tuple[Tensor, dict[str, Tensor]]) -> Tensor:
        return self.layer(file) - 2 * allow_pickle + 3 * pair[0] - 5 * pair[1]["max"]


def test_inputs_may_have_any_names_nesting_and_order(tmp_path):
    tensors = [torch.randn(4, 8) for _ in range(4)]
    pair = (tensors[0], {"max": tensors[1]})
    run(Reader(), {"pair": pair, "allow_pickle": tensors[2], "file": tensors[3]}, tmp_path)
