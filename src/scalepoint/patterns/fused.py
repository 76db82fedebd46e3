"""Fused modules: each runs the operations that a pattern matched, as one node of the graph.

A fused module references its parts and does not register them. They keep their names in the model, so parameters, batch
norm statistics, train mode and fine-tuning work as before.
"""

import warnings
from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from scalepoint.graph.operations import Operation, Slot, get_tensors


class Fused(nn.Module):
    """The parts of a fused group in execution order.

    Attributes:
        parts: Modules by role.
        wiring: The inputs of each part: None is the output of the part before it, a number an input of the group.
    """

    parts: dict[str, nn.Module]

    def __init__(self, parts: Mapping[str, nn.Module], wiring: Sequence[Sequence[int | None]]) -> None:
        super().__init__()
        self.parts = dict(parts)  # a plain dict, so that the parts are not registered twice
        self.wiring = [list(inputs) for inputs in wiring]

    def forward(self, *inputs: Any) -> Any:
        value: Any = None
        for part, sources in zip(self.parts.values(), self.wiring, strict=True):
            value = part(*(value if source is None else inputs[source] for source in sources))
        return value

    def tensors(self) -> list[Tensor]:
        """Return the tensors that its parts compute with."""
        return [tensor for part in self.parts.values() for tensor in get_tensors(part)]

    def part(self, role: str) -> nn.Module | None:
        """Return the module with a role in the pattern, or None."""
        return self.parts.get(role)

    @property
    def weighted_part(self) -> nn.Module:
        """The part with the weight of the kernel."""
        return next(iter(self.parts.values()))

    @property
    def weight(self) -> Tensor | None:
        return getattr(self.weighted_part, "weight", None)

    @property
    def bias(self) -> Tensor | None:
        return getattr(self.weighted_part, "bias", None)

    def extra_repr(self) -> str:
        return ", ".join(f"{role}={type(part).__name__}" for role, part in self.parts.items())


class FusedConvBN(Fused):
    """y = BN(conv(x))"""


class FusedConvBNReLU(Fused):
    """y = act(BN(conv(x)))"""


class FusedConvBNAddReLU(Fused):
    """y = act(BN(conv(x)) + r)"""


class FusedStemConvBNReLUMaxPool(Fused):
    """y = maxpool(act(BN(conv(x))))"""


class FusedConvTransposeBNReLU(Fused):
    """y = act(BN(conv_transpose(x)))"""


class FusedLinear(Fused):
    """y = linear(x)"""


class FusedLinearReLU(Fused):
    """y = act(linear(x))"""


class FusedNorm(Fused):
    """y = norm(x): layer, group, instance or RMS norm"""


class FusedMHAInProjection(Fused):
    """qkv = linear(x)"""


class FusedAttention(Fused):
    """y = softmax(q k^T / sqrt(d)) v"""

    def forward(self, *inputs: Any) -> Any:
        attention = self._plain_attention() if torch.onnx.is_in_onnx_export() and not self.training else None
        if attention is None:
            return super().forward(*inputs)
        # The exporters of torch scale q and k each by the root of the scale, between their quantizers and the product,
        # which prevents int8 kernels. Scale the scores instead.
        query, key, value = inputs
        scale = attention.arguments.get("scale")
        scores = query @ key.transpose(-2, -1)
        scores = scores * (_default_scale(query) if scale is None else float(scale))
        return torch.softmax(scores, -1) @ value

    def _plain_attention(self) -> Operation | None:
        """Return the operation if it is attention over q, k, v without mask, causal mask, grouped heads and dropout."""
        part = next(iter(self.parts.values()), None)
        if len(self.parts) != 1 or self.wiring != [[0, 1, 2]] or not isinstance(part, Operation):
            return None
        slots = [part.arguments.get(name) for name in ("query", "key", "value")]
        options = ("attn_mask", "is_causal", "enable_gqa", "dropout_p")
        has_options = any(part.arguments.get(name) for name in options)
        is_plain = part.kind == "attention" and not has_options and slots == [Slot(0), Slot(1), Slot(2)]
        return part if is_plain else None


class FusedPool(Fused):
    """y = average_pool(x)"""


class FusedEmbedding(Fused):
    """y = table[x]"""


class FusedGatedLinear(Fused):
    """y = act(linear(x)) * g, as in SwiGLU and GeGLU"""


class FusedAdd(Fused):
    """y = act(a + b)"""


class FusedConcat(Fused):
    """y = [x, ...]"""


class FusedHead(Fused):
    """y = conv1x1(x): a classifier after a global pool"""


def _default_scale(query: Tensor) -> float:
    """Return 1 / sqrt(head size). The TracerWarning about int() is ignored: the head size is fixed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # type: ignore[attr-defined]  # not in its __all__
        return 1 / sqrt(int(query.shape[-1]))
