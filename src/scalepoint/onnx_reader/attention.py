"""Attention and rotary embeddings of ONNX and of ONNX Runtime (domain com.microsoft)."""

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch
import torch.nn.functional as F
from torch import Tensor

from scalepoint.onnx_reader.layers import linear_layer
from scalepoint.onnx_reader.operators import Layer, Node, operator, outputs_of, require

_MICROSOFT = "com.microsoft::"
_PLAIN_ATTRIBUTES = frozenset(  # the others change the scores, or only matter for the output of the scores
    ("is_causal", "kv_num_heads", "q_num_heads", "qk_matmul_output_mode", "scale", "softmax_precision")
)
_PLAIN_COUNTS = {"inputs": 6, "outputs": 3}  # others: number of keys that are not padding; scores


def is_plain_attention(node: ir.Node) -> bool:
    """Whether torch's own function computes an Attention: it has no softcap, no window, no output of the scores, ..."""
    is_extended = any(name not in _PLAIN_ATTRIBUTES and attribute.value for name, attribute in node.attributes.items())
    inputs, outputs = node.inputs[_PLAIN_COUNTS["inputs"] :], node.outputs[_PLAIN_COUNTS["outputs"] :]
    return not is_extended and all(value is None or not value.name for value in (*inputs, *outputs))


def _split_heads(x: Tensor, heads: int) -> Tensor:
    """(batch, tokens, heads * size) -> (batch, heads, tokens, size)"""
    return x.reshape(x.shape[0], x.shape[1], heads, x.shape[2] // heads).transpose(1, 2)


def _join_heads(x: Tensor) -> Tensor:
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], x.shape[1] * x.shape[3])


def _causal_bias(query: Tensor, key: Tensor, past: Any) -> Tensor:
    """Return 0 where a query may attend to a key, and -inf where not; `past` keys come before those of the queries."""
    query_positions = torch.arange(query.shape[2], device=query.device).unsqueeze(1) + past
    is_allowed = torch.arange(key.shape[2], device=query.device) <= query_positions
    return _as_bias(is_allowed, query)


def _as_bias(mask: Tensor, like: Tensor) -> Tensor:
    """Return a mask as numbers that are added to the scores. A mask of numbers is one already."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(~mask, float("-inf"))


@operator("Attention")
def attention(
    node: Node,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    *rest: Any,
) -> Any:
    """Compute a plain attention. `load.py` replaces others by ONNX's function, unless types are not declared."""
    unknown = sorted(name for name, value in node.attributes.items() if name not in _PLAIN_ATTRIBUTES and value)
    require(not unknown, f"Attention with {', '.join(unknown)}")
    require(not rest and not node.has_output(3), "Attention with counts of keys or an output of scores")
    has_joined_heads = query.ndim == 3
    if has_joined_heads:
        query = _split_heads(query, node.get("q_num_heads"))
        key, value = (_split_heads(x, node.get("kv_num_heads")) for x in (key, value))
    past = 0
    if past_key is not None and past_value is not None:
        past = past_key.shape[2]
        key, value = torch.cat([past_key, key], 2), torch.cat([past_value, value], 2)
    y = _torch_attention(node, query, key, value, mask, past)
    return outputs_of(node, _join_heads(y) if has_joined_heads else y, key, value)


def _torch_attention(node: Node, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, past: Any) -> Tensor:
    """Compute attention with torch's own function, which a target can recognize."""
    is_causal = bool(node.get("is_causal", 0))
    mask = _padded_mask(mask, query, key)
    if is_causal and (mask is not None or not isinstance(past, int) or past):
        # torch's is_causal assumes that there is no mask and no past.
        causal = _causal_bias(query, key, past)
        mask = causal if mask is None else _as_bias(mask, query) + causal
        is_causal = False
    key, value = _repeat_key_heads(query, key, value)
    return F.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal, scale=node.get("scale"))


def _repeat_key_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat the heads of keys and values, of which there may be fewer than heads of queries."""
    repeats = query.shape[1] // key.shape[1]
    if repeats == 1:
        return key, value
    return key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)


def _padded_mask(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Return the mask for all keys. A shorter one forbids the keys at the end."""
    if mask is None:
        return None
    missing = key.shape[2] - mask.shape[-1]
    if isinstance(missing, int) and missing > 0 and mask.shape[-1] != 1:
        return F.pad(mask, (0, missing), value=False if mask.dtype == torch.bool else float("-inf"))
    return mask


@operator("AttentionScores")
def attention_scores(node: Node, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute Softmax(scale * query @ key + mask) @ value. `rewrites.py` makes this operator; the key is transposed."""
    axis, batch_shapes = node.get("axis"), [x.shape[:-2] for x in (query, key, value)]
    is_over_keys = query.ndim == key.ndim == value.ndim > 2 and axis in (-1, query.ndim - 1)
    if is_over_keys and batch_shapes[0] == batch_shapes[1] == batch_shapes[2]:
        return F.scaled_dot_product_attention(query, key.transpose(-1, -2), value, mask, scale=node.get("scale"))
    scores = query @ key * node.get("scale")
    return torch.softmax(scores if mask is None else scores + mask, axis) @ value


@operator("RotaryEmbedding")
def rotary_embedding(node: Node, x: Tensor, cosine: Tensor, sine: Tensor, positions: Tensor | None = None) -> Tensor:
    has_joined_heads = x.ndim == 3
    if has_joined_heads:
        x = _split_heads(x, node.get("num_heads"))
    if positions is not None:
        cosine, sine = cosine[positions], sine[positions]
    cosine, sine = cosine.unsqueeze(1), sine.unsqueeze(1)  # (batch, 1, tokens, size / 2)
    size = node.get("rotary_embedding_dim", 0) or x.shape[-1]
    part, rest = x[..., :size], x[..., size:]
    is_interleaved = bool(node.get("interleaved", 0))
    if is_interleaved:
        first, second = part[..., 0::2], part[..., 1::2]
    else:
        first, second = part.chunk(2, -1)
    real, imaginary = first * cosine - second * sine, first * sine + second * cosine
    parts = [real, imaginary]
    rotated = torch.stack(parts, -1).flatten(-2) if is_interleaved else torch.cat(parts, -1)
    y = torch.cat([rotated, rest], -1) if rest.shape[-1] else rotated
    return _join_heads(y) if has_joined_heads else y


# --- com.microsoft -------------------------------------------------------------------------------------------------


def _microsoft_attention_layer(node: Node, constants: Sequence[Tensor | None]) -> Layer | None:
    weight, bias = constants[1:3]
    if weight is None:
        return None
    return Layer(JoinedAttention(node, linear_layer(weight.T, bias)), data_inputs=(0, 3, 4, 5))


class JoinedAttention(torch.nn.Module):
    """com.microsoft::Attention: one linear layer computes queries, keys and values; then attention."""

    def __init__(self, node: Node, projection: torch.nn.Module) -> None:
        super().__init__()
        require(not node.get("do_rotary", 0), "Attention with do_rotary")
        sizes = node.get("qkv_hidden_sizes")
        require(not sizes or len(set(sizes)) == 1, "Attention with different sizes of queries and values")
        self.heads = node.get("num_heads")
        self.scale = node.get("scale") or None
        self.is_causal = bool(node.get("unidirectional", 0))
        self.mask_value = node.get("mask_filter_value", -10000.0)
        self.in_proj = projection

    def forward(
        self, x: Tensor, mask: Tensor | None = None, past: Tensor | None = None, added: Tensor | None = None
    ) -> Tensor:
        require(past is None, "Attention with past keys and values")
        query, key, value = (_split_heads(part, self.heads) for part in self.in_proj(x).chunk(3, -1))
        bias = _microsoft_mask(mask, query, self.mask_value)
        if added is not None:
            bias = added if bias is None else bias + added
        if self.is_causal and bias is not None:
            bias = bias + _causal_bias(query, key, past=0)
        is_causal = self.is_causal and bias is None
        return _join_heads(
            F.scaled_dot_product_attention(query, key, value, bias, is_causal=is_causal, scale=self.scale)
        )


def _microsoft_mask(mask: Tensor | None, query: Tensor, filter_value: float) -> Tensor | None:
    """Return the bias of a mask with 1 for tokens and 0 for padding, as (batch, heads, queries, keys)."""
    if mask is None:
        return None
    require(mask.ndim != 1, "a mask of sequence lengths")
    bias = (1.0 - mask.to(query.dtype)) * filter_value
    if mask.ndim == 2:  # (batch, keys)
        return bias[:, None, None]
    return bias[:, None] if mask.ndim == 3 else bias


@operator(_MICROSOFT + "Attention", make_layer=_microsoft_attention_layer)
def microsoft_attention(node: Node, x: Tensor, weight: Tensor, bias: Tensor | None = None, *rest: Any) -> Tensor:
    result: Tensor = JoinedAttention(node, linear_layer(weight.T, bias))(x, *rest)
    return result


@operator(_MICROSOFT + "MultiHeadAttention")
def multi_head_attention(
    node: Node,
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    added: Tensor | None = None,
    *past: Any,
) -> Tensor:
    require(key is not None and value is not None and query.ndim == 3, "MultiHeadAttention with packed inputs")
    require(all(part is None for part in past), "MultiHeadAttention with past keys and values")
    assert key is not None  # noqa: S101  # see above
    assert value is not None  # noqa: S101
    if bias is not None:
        sizes = [query.shape[-1], key.shape[-1], value.shape[-1]]
        query, key, value = (x + part for x, part in zip((query, key, value), torch.split(bias, sizes), strict=True))
    heads = node.get("num_heads")
    query, key, value = (x if x.ndim == 4 else _split_heads(x, heads) for x in (query, key, value))
    score_bias = _microsoft_mask(mask, query, node.get("mask_filter_value", -10000.0))
    if added is not None:
        score_bias = added if score_bias is None else score_bias + added
    is_causal = bool(node.get("unidirectional", 0))
    require(not (is_causal and score_bias is not None), "a causal MultiHeadAttention with a mask")
    return _join_heads(
        F.scaled_dot_product_attention(
            query, key, value, score_bias, is_causal=is_causal, scale=node.get("scale") or None
        )
    )
