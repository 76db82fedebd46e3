"""A decoder as a description: what kind of blocks it has, and what its tensors are called in the checkpoint.

    pre       h = x + attention(norm(x));           y = h + mlp(norm(h))
    post      h = x + norm(attention(x));           y = h + norm(mlp(h))
    sandwich  h = x + norm(attention(norm(x)));     y = h + norm(mlp(norm(h)))
    parallel  y = x + attention(norm(x)) + mlp(norm(x))

Which norms there are follows from the names: a part without a name is not there.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from scalepoint.formats.genai.rotary import Rotary

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True)
class DecoderBlock:
    """What may differ from block to block."""

    rotary: Rotary | None = None
    window: int | None = None  # tokens that are looked at, the last one included; None: all
    has_experts: bool = False


@dataclass(frozen=True)
class DecoderExperts:
    """A mixture: `used` of `count` experts for every token."""

    count: int
    used: int
    is_normalized: bool  # the weights of those used add up to 1
    names: Mapping[str, str]  # gate, up, down: with {expert}


@dataclass(frozen=True)
class TensorNames:
    """Tensors without ".weight" or ".bias"; those of a block after `block`."""

    embedding: str
    norm: str
    head: str
    block: str  # with {block}
    parts: Mapping[str, str]
    positions: str = ""  # of a learned one

    def of(self, block: int, part: str) -> str:
        return f"{self.block.format(block=block)}{self.parts[part]}"

    def has(self, part: str) -> bool:
        return part in self.parts


@dataclass(frozen=True)
class Decoder:
    """Everything that the graph is written from, but the weights."""

    kind: str  # for genai_config.json
    vocabulary: int
    hidden: int
    heads: int
    groups: int  # heads of keys and values
    head: int  # channels of one
    context: int
    epsilon: float
    names: TensorNames
    blocks: tuple[DecoderBlock, ...]
    is_tied: bool
    activation: Activation = "silu"
    norm: Literal["rms", "layer"] = "rms"
    norm_offset: float = 0.0  # the weight of a norm is stored less this
    is_parallel: bool = False
    qk_norm: Literal["", "head", "all"] = ""
    clip: float | None = None  # of queries, keys and values
    scale: float | None = None  # of attention; None: head^-1/2
    softcap: float = 0.0  # of attention
    logit_softcap: float = 0.0
    embedding_scale: float = 1.0
    is_transposed: bool = False  # the checkpoint keeps (in, out)
    is_mixed: bool = False  # queries, keys and values of a head lie together
    experts: DecoderExperts | None = None
    has_shared: bool = False  # an expert for all tokens beside the chosen ones

    def layers(self, block: int) -> list[str]:
        """The matrices of a block, as the checkpoint calls them."""
        names, found = self.names, ["q", "k", "v", "qkv", "o"]
        experts = self.experts if self.blocks[block].has_experts else None
        found += ["router"] if experts else ["gate", "up", "gate_up", "down"]
        found += ["shared_gate", "shared_up", "shared_down", "shared_router"] if experts and self.has_shared else []
        made = [names.of(block, part) for part in found if names.has(part)]
        if experts:
            prefix = names.block.format(block=block)
            each = [
                prefix + name.format(expert=index) for index in range(experts.count) for name in experts.names.values()
            ]
            made += each
        return made
