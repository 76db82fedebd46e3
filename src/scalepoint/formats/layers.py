"""What formats share of a layer's form.

Layer         the product by a weight that was made of codes
FloatWeight   the layer in float
int8_parts    all parts of a format whose kernels take int8 activations of one scale, or of one a row
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scalepoint.errors import ExportError
from scalepoint.formats.stored_graph import ModuleFactories
from scalepoint.quantize.parts import TABLE, run_with
from scalepoint.quantize.stubs import QuantStub
from scalepoint.quantize.weighted import QuantizedWeighted
from scalepoint.spec import PerTensorGranularity, PerTokenGranularity

INT8_MIN, INT8_MAX = -128, 127


class WeightedOperation(nn.Module):
    """An operation that is given its weight and bias."""

    def __init__(self, source: QuantizedWeighted) -> None:
        super().__init__()
        self.references = {"operation": source.operation}  # which keeps its own path
        self.is_linear = source.kind == "linear"

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.is_linear:
            return F.linear(x, weight, bias)
        operation: Any = self.references["operation"]
        return run_with(operation, x, weight, bias)


class FloatWeight(WeightedOperation):
    """The same operation in float, with the batch norm folded in: what the quantized file is compared with."""

    def __init__(self, source: QuantizedWeighted) -> None:
        super().__init__(source)
        weight, bias = source.folded()
        self.register_buffer("weight", (source.canonical(weight) if self.is_linear else weight).detach().contiguous())
        self.register_buffer("bias", None if bias is None else bias.detach().clone())

    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias)


class InputFirstFloatWeight(nn.Module):
    """FloatWeight with matrices stored as (in, out), the layout that ONNX and Core ML multiply by.

    With `as_view` a matrix is a transposed view of the model's parameter, copied only when it is written.
    """

    def __init__(self, source: QuantizedWeighted, *, as_view: bool = False) -> None:
        super().__init__()
        weight, bias = source.folded()
        self.references = {"operation": source.operation}
        self.is_linear = source.kind == "linear"
        if self.is_linear and not source.is_input_first:
            weight = weight.transpose(0, 1)
        weight = weight.detach()  # only read, so no copy
        self.register_buffer("weight", weight if as_view and self.is_linear else weight.contiguous())
        self.register_buffer("bias", None if bias is None else bias.detach())

    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        if self.is_linear:
            y = torch.matmul(x, self.weight)
            return y if self.bias is None else y + self.bias
        operation: Any = self.references["operation"]
        return run_with(operation, x, self.weight, self.bias)


def int8_module_factories(
    runtime: str,
    weights: tuple[Callable[[QuantizedWeighted], nn.Module], Callable[[QuantizedWeighted], nn.Module]],
    stubs: tuple[Callable[[QuantStub, float], nn.Module], Callable[[], nn.Module]],
) -> ModuleFactories:
    """Of a runtime by its name: weights and tables; stubs with constant parameters and with those of every row."""
    (weight_layer, table_layer), (constant_stub, row_stub) = weights, stubs

    def weight_of(source: QuantizedWeighted) -> nn.Module:
        return table_layer(source) if source.kind == TABLE else weight_layer(source)

    def stub_of(stub: QuantStub, factor: float) -> nn.Module:
        granularity, found = stub.calculator.granularity, stub.quantizer.grid.format.name
        if found != "int8":
            raise ExportError(f"{stub.name}: {runtime}'s activations are int8, not {found}")
        if isinstance(granularity, PerTokenGranularity) and stub.calculator.always_called:
            return row_stub()
        if not isinstance(granularity, PerTensorGranularity) or (stub.calculator.always_called and not stub.is_learned):
            raise ExportError(f"{stub.name}: {runtime}'s activations have one scale, or one a row that is found anew")
        return constant_stub(stub, factor)

    return ModuleFactories(weight=weight_of, stub=stub_of, float_layer=FloatWeight)
