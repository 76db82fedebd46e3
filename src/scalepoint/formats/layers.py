"""Modules of the exported graphs that several formats share (see stored_graph.py).

WeightedOperation      base class of layers in float and with codes
FloatWeight            a layer in float
InputFirstFloatWeight  a layer in float, with matrices as (in, out)
int8_module_factories  the factories of a format whose kernels take int8 activations, with one scale or one per row
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scalepoint.errors import ExportError
from scalepoint.formats.stored_graph import ModuleFactories
from scalepoint.quantize.operations import EMBEDDING, run_with_weight
from scalepoint.quantize.quantized_layers import QuantizedLayer
from scalepoint.quantize.quantizers import QuantStub
from scalepoint.spec import PerTensorGranularity, PerTokenGranularity

INT8_MIN, INT8_MAX = -128, 127


class WeightedOperation(nn.Module):
    """An operation that takes its weight and bias as arguments."""

    def __init__(self, source: QuantizedLayer) -> None:
        super().__init__()
        self.references = {"operation": source.operation}  # in a dict, so that it is not a submodule
        self.is_linear = source.kind == "linear"

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.is_linear:
            return F.linear(x, weight, bias)
        operation: Any = self.references["operation"]
        return run_with_weight(operation, x, weight, bias)


class FloatWeight(WeightedOperation):
    """The operation in float with its batch norm folded in, for the float file."""

    def __init__(self, source: QuantizedLayer) -> None:
        super().__init__(source)
        weight, bias = source.fold_norm()
        weight = source.to_output_first(weight) if self.is_linear else weight
        self.register_buffer("weight", weight.detach().contiguous())
        self.register_buffer("bias", None if bias is None else bias.detach().clone())

    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias)


class InputFirstFloatWeight(WeightedOperation):
    """FloatWeight with matrices stored as (in, out), the layout of ONNX and Core ML.

    With `as_view` a matrix is a transposed view of the model's parameter, which is copied only when it is written.
    """

    def __init__(self, source: QuantizedLayer, *, as_view: bool = False) -> None:
        super().__init__(source)
        weight, bias = source.fold_norm()
        if self.is_linear and not source.is_input_first:
            weight = weight.transpose(0, 1)
        weight = weight.detach()  # shared with the model: the export only reads it
        self.register_buffer("weight", weight if as_view and self.is_linear else weight.contiguous())
        self.register_buffer("bias", None if bias is None else bias.detach())

    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_linear:
            return self.product(x, self.weight, self.bias)
        y = torch.matmul(x, self.weight)
        return y if self.bias is None else y + self.bias


def int8_module_factories(
    runtime: str,
    *,
    weight: Callable[[QuantizedLayer], nn.Module],
    table: Callable[[QuantizedLayer], nn.Module],
    stub: Callable[[QuantStub, float], nn.Module],
    row_stub: Callable[[], nn.Module],
) -> ModuleFactories:
    """Build the factories of a runtime.

    Args:
        runtime: The name of the runtime, for errors.
        weight: Builds a quantized layer.
        table: Builds a quantized embedding table.
        stub: Builds a quantizer with constant parameters; its second argument is a factor for the scale.
        row_stub: Builds a quantizer that computes its parameters for each row.
    """

    def build_weight(source: QuantizedLayer) -> nn.Module:
        return table(source) if source.kind == EMBEDDING else weight(source)

    def build_stub(source: QuantStub, factor: float) -> nn.Module:
        granularity, dtype = source.calculator.granularity, source.quantizer.grid.format.name
        if dtype != "int8":
            raise ExportError(f"{source.name}: activations of {runtime} must be int8, got {dtype}")
        is_dynamic = source.calculator.always_called
        if isinstance(granularity, PerTokenGranularity) and is_dynamic:
            return row_stub()
        if not isinstance(granularity, PerTensorGranularity) or (is_dynamic and not source.is_learned):
            raise ExportError(
                f"{source.name}: activations of {runtime} must have one constant scale, or a dynamic scale for each row"
            )
        return stub(source, factor)

    return ModuleFactories(weight=build_weight, stub=build_stub, float_layer=FloatWeight)
