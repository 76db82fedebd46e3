"""A learned scale: LSQ, learned step size quantization (Esser et al., ICLR 2020).

dy/dscale = round(x / scale) - x / scale   inside the range, the limit where clamped,
times 1 / sqrt(elements per scale * largest code), so that scales and weights learn at the same rate. If ranks share a
batch (`replicas` of them), the elements of all ranks count.

The base class stores the scale as a buffer. Here it is a Parameter, so everything that reads or writes the buffer
"scale" is overridden: set_buffer, stored, statistics, reset.
"""

from typing import Any

import torch
from torch import Tensor, nn

from scalepoint.errors import SpecError
from scalepoint.numerics import E8M0, EPS, QParams, is_traced
from scalepoint.numerics.blocks import block_counts
from scalepoint.spec.qparams_calculator import (
    QParamsCalculatorBase,
    StatefulQParamsCalculatorBase,
    check_same_kind,
)


class _PositiveScale(torch.autograd.Function):
    """Clamp a scale to at least float32 epsilon, and multiply its gradient by a factor.

    The gradient also reaches a scale that an optimizer step made negative, so that it can grow again.
    """

    @staticmethod
    def forward(ctx: Any, scale: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return scale.clamp(min=EPS)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


@QParamsCalculatorBase.register("learned")
class LearnedScaleQParamsCalculator(StatefulQParamsCalculatorBase):
    """The scale is a Parameter that is trained (LSQ). The zero point is constant.

    The first tensor sets the scale, so run one batch before the first optimizer step. The Parameter object stays the
    same, so the optimizer may be built earlier.
    """

    always_called = True  # also with the observer off: `stored` has no gradient to the scale
    learns = True  # the fake quantizer runs `forward` with gradients

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.grid.scale_dtype is not None:
            kind = "a power of two" if self.grid.scale_dtype == E8M0 else "an 8-bit float"
            raise SpecError(f"a learned scale is float32, but scale_dtype makes it {kind}: leave out scale_dtype=")
        empty = self._buffers.pop("scale")
        assert empty is not None  # noqa: S101  # the base registers it
        self.scale = nn.Parameter(empty)

    def forward(self, tensor: Tensor) -> QParams:
        if not self.is_initialized:
            super().forward(tensor.detach())  # stores a scale, except in export mode and for a skipped batch
        return self._with_scaled_gradient(tensor) if self.is_initialized else self.stored

    def set_buffer(self, name: str, value: Tensor) -> None:
        if name == "scale":
            self.scale.data = value.detach().clone()
        else:
            super().set_buffer(name, value)

    def _with_scaled_gradient(self, tensor: Tensor) -> QParams:
        """Return the scale, clamped to be positive, with the gradient factor of the paper."""
        counts = block_counts(tensor.shape, self.get_block_size(tensor.shape))
        self.check_shape(torch.Size(counts))  # raises if this tensor does not have one block for each scale
        _, zero_point, minval = self.stored
        if not torch.is_grad_enabled() or not self.scale.requires_grad or self.is_on("export_mode"):
            return QParams(self.scale.detach().clamp(min=EPS), zero_point, minval)
        elements_per_scale = tensor.numel() * self.replicas / self.scale.numel()
        factor = (elements_per_scale * max(abs(self.grid.low), abs(self.grid.high))) ** -0.5
        if is_traced(tensor):
            # The same as _PositiveScale with plain operations: the value of `clamped`, and its gradient times `factor`.
            clamped = self.scale + (self.scale.clamp(min=EPS) - self.scale).detach()
            return QParams((clamped - clamped * factor).detach() + clamped * factor, zero_point, minval)
        scale: Tensor = _PositiveScale.apply(self.scale, factor)  # type: ignore[no-untyped-call]
        return QParams(scale, zero_point, minval)

    @property
    def stored(self) -> QParams:
        return QParams(self.scale.detach(), self._buffers["zero_point"], self._buffers["minval"])

    def statistics(self) -> dict[str, Tensor]:
        return {**super().statistics(), "scale": self.scale.detach()}

    def merge(self, other: QParamsCalculatorBase) -> None:
        """Take the scale of `other` if this calculator has none. The first tensor sets the scale, later ones do not."""
        check_same_kind(self, other)
        if not self.is_initialized:
            self.store(other.stored)
            self.observed_batches.copy_(other.observed_batches)

    def reset(self) -> None:
        super().reset()
        self.scale.data = self.scale.new_empty(0)
