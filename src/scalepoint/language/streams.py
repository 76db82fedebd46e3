"""The float and the quantized model over some tokens, block by block: losses and logits of both.

load a piece -> run all sequences through it, in both streams -> drop it -> the next
at the head: a sequence at a time, so that logits are never all in memory
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from scalepoint import distributed
from scalepoint.checkpoints.skeleton import Weights
from scalepoint.errors import CaptureError, NonFiniteError, UsageError
from scalepoint.support.progress import phase
from scalepoint.tuning.checkpoint import Checkpoint
from scalepoint.tuning.lending import borrow, give_back
from scalepoint.tuning.pieces import Piece, cut
from scalepoint.tuning.state import restore
from scalepoint.tuning.walk import Walk

FLOAT_NAN = (
    "the weights are finite, but its logits are not, so values overflow on the way. Check the checkpoint and its "
    "config.json by running it in transformers"
)
QUANTIZED_NAN = "the float model's is a number, so the codes are the cause: give more bits, or smaller blocks"


@dataclass(frozen=True)
class Scored:
    """Perplexities, and the simulation's logits of the first sequence (of several ranks the first has it)."""

    float_perplexity: float
    perplexity: float
    tokens: int
    logits: Tensor
    sqnr_db: float  # of the logits of the quantized stream against those of the float one


def perplexity(run: Callable[[Tensor], Tensor], tokens: Sequence[Tensor]) -> float:
    """exp of the mean loss of every next token; `run` gives the logits (batch, length, vocabulary) of tokens.

    Raises:
        NonFiniteError: it is NaN, because logits are.
        UsageError: there is no next token in `tokens`.
    """
    total, count = 0.0, 0
    for each in tokens:
        own = each if each.ndim == 2 else each[None]
        loss, number = loss_of(run(own), own)
        total, count = total + loss, count + number
    if not count:
        raise UsageError("perplexity needs at least one sequence of 2 tokens or more")
    return _perplexity(total, count, "the perplexity is NaN: the logits hold NaN or infinity")


def _perplexity(loss: float, count: int, message: str) -> float:
    """exp(loss / count), or NonFiniteError with this message."""
    found = float(torch.tensor(loss / count, dtype=torch.float64).exp())
    if math.isnan(found):
        raise NonFiniteError(message)
    return found


def loss_of(logits: Tensor, tokens: Tensor) -> tuple[float, int]:
    """The sum of the losses, and of how many tokens."""
    flat = logits[:, :-1].reshape(-1, logits.shape[-1]).float()
    wanted = tokens[:, 1:].reshape(-1)
    return float(F.cross_entropy(flat, wanted, reduction="sum")), int(wanted.numel())


def scored(
    model: fx.GraphModule,
    weights: Weights,
    kept: Checkpoint,
    tokens: Sequence[Tensor],
    *,
    memory: int,
    progress: bool | None,
) -> Scored:
    """Both models on these tokens, which ranks share; the codes are those in the folder."""
    walk, own = Walk(model, memory=memory, keeps_outputs=False), distributed.shard(tokens)
    try:
        for each in own:
            walk.take([each])
        pieces = cut(walk.graph, walk.same, lambda node: walk.layer(node) is not None, "block")
        with phase("scoring", total=len(pieces), unit="blocks", show=progress) as running:
            for index, piece in enumerate(pieces[:-1]):
                _enter(walk, weights, kept, piece, f"{index:04}")
                for node in piece.nodes:
                    walk.advance(node)
                give_back(walk, piece, weights)
                running.advance()
            _enter(walk, weights, kept, pieces[-1], f"{len(pieces) - 1:04}")
            found = _at_head(walk, pieces[-1], own)
            give_back(walk, pieces[-1], weights)
            running.advance()
        return found
    finally:
        walk.shelf.close()


def _enter(walk: Walk, weights: Weights, kept: Checkpoint, piece: Piece, name: str) -> None:
    borrow(walk, piece, weights)
    found = kept.find(name)
    if found is not None:
        states, _ = found
        restore({place: walk.live.get_submodule(place) for place in states}, states)


def _at_head(walk: Walk, piece: Piece, tokens: Sequence[Tensor]) -> Scored:
    """`tokens` are those of this rank."""
    first = torch.empty(0)
    with torch.no_grad(), distributed.phase("scoring") as step:
        step.value = []
        for index, own in enumerate(tokens):
            exact, noisy = (
                _logits(walk.run(piece, walk.entries(piece, index, noisy=side), noisy=side)) for side in (False, True)
            )
            (before, number), (after, _) = (loss_of(logits, own) for logits in (exact, noisy))
            noise = float((noisy - exact).double().square().sum())
            step.value.append([before, after, number, noise, float(exact.double().square().sum())])
            first = noisy.clone() if not index else first
    rows = distributed.interleave(step.values)  # in the order of the text
    before, after, count, noise, signal = (sum(column) for column in zip(*rows, strict=True))
    before = _perplexity(before, count, f"the float model's perplexity is NaN: {FLOAT_NAN}")
    after = _perplexity(after, count, f"the quantized model's perplexity is NaN: {QUANTIZED_NAN}")
    sqnr = float("inf") if not noise else 10 * float(torch.tensor(signal / noise, dtype=torch.float64).log10())
    return Scored(before, after, count, first, sqnr)


def _logits(exits: Sequence[object]) -> Tensor:
    for value in reversed(exits):
        if isinstance(value, Tensor) and value.ndim == 3:
            return value
    raise CaptureError("the model's last output is no tensor of logits (batch, length, vocabulary)")
