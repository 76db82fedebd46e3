"""Perplexity of a function, and of a checkpoint: of its float and its quantized model in one pass.

For a checkpoint only one block is in memory: load it, run all sequences through it in float and quantized, release it.
The head runs one sequence at a time, so only the logits of one sequence are in memory.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from scalepoint import distributed
from scalepoint.analysis.statistics import decibels
from scalepoint.checkpoints.skeleton import CheckpointWeights
from scalepoint.errors import CaptureError, NonFiniteError, UsageError
from scalepoint.results import Score
from scalepoint.support.progress import phase
from scalepoint.tuning.checkpoint import Checkpoint
from scalepoint.tuning.pieces import Piece, cut_into_pieces
from scalepoint.tuning.state import restore_states
from scalepoint.tuning.walk import StreamWalk
from scalepoint.tuning.weight_provider import load_weights, release_weights

FLOAT_NAN_HINT = (
    "the weights are finite, but the logits are not, so values overflow in between. Check the checkpoint and its "
    "config.json by running it in transformers"
)
QUANTIZED_NAN_HINT = "that of the float model is finite, so quantization is the cause: use more bits or smaller blocks"


@dataclass(frozen=True)
class Evaluation:
    """The simulation of a checkpoint, compared with the float model.

    Attributes:
        score: Perplexity of both.
        tokens: Number of predicted tokens.
        logits: The quantized model's logits for the first sequence; only on rank 0.
        sqnr_db: Signal-to-noise ratio of the quantized logits against the float logits, over all sequences, in dB.
    """

    score: Score
    tokens: int
    logits: Tensor
    sqnr_db: float


def perplexity(run: Callable[[Tensor], Tensor], tokens: Sequence[Tensor]) -> float:
    """Return exp of the mean cross-entropy of every next token.

    Args:
        run: Takes tokens (batch, length) and returns logits (batch, length, vocabulary).
        tokens: Sequences, each (length,) or (batch, length).

    Raises:
        NonFiniteError: The logits contain NaN or infinity.
        UsageError: No sequence has two tokens.
    """
    total_loss, predicted_tokens = 0.0, 0
    for sequence in tokens:
        batch = sequence if sequence.ndim == 2 else sequence[None]
        loss, count = cross_entropy_sum(run(batch), batch)
        total_loss += loss
        predicted_tokens += count
    if not predicted_tokens:
        raise UsageError("perplexity needs at least one sequence of 2 tokens or more")
    return _to_perplexity(total_loss, predicted_tokens, "the perplexity is NaN: the logits contain NaN or infinity")


def _to_perplexity(loss: float, count: int, message: str) -> float:
    """Return exp(loss / count); raise NonFiniteError with this message if it is NaN."""
    value = float(torch.tensor(loss / count, dtype=torch.float64).exp())
    if math.isnan(value):
        raise NonFiniteError(message)
    return value


def cross_entropy_sum(logits: Tensor, tokens: Tensor) -> tuple[float, int]:
    """Return the summed cross-entropy of the next tokens, and the number of these tokens."""
    flat = logits[:, :-1].reshape(-1, logits.shape[-1]).float()
    next_tokens = tokens[:, 1:].reshape(-1)
    return float(F.cross_entropy(flat, next_tokens, reduction="sum")), int(next_tokens.numel())


def score_checkpoint(
    model: fx.GraphModule,
    weights: CheckpointWeights,
    tuned: Checkpoint,
    tokens: Sequence[Tensor],
    *,
    memory: int,
    progress: bool | None,
) -> Evaluation:
    """Score the float and the quantized model. With several ranks, each scores a part of the sequences."""
    walk = StreamWalk(model, memory=memory, keeps_outputs=False)
    rank_tokens = distributed.shard(tokens)
    try:
        for sequence in rank_tokens:
            walk.add_batch([sequence])
        pieces = cut_into_pieces(walk.graph, walk.same_nodes, lambda node: walk.get_layer(node) is not None, "block")
        with phase("scoring", total=len(pieces), unit="blocks", show=progress) as running:
            for index, piece in enumerate(pieces[:-1]):
                _load_piece(walk, weights, tuned, piece, f"{index:04}")
                for node in piece.nodes:
                    walk.advance(node)
                release_weights(walk, piece, weights)
                running.advance()
            _load_piece(walk, weights, tuned, pieces[-1], f"{len(pieces) - 1:04}")
            evaluation = _score_head(walk, pieces[-1], rank_tokens)
            release_weights(walk, pieces[-1], weights)
            running.advance()
        return evaluation
    finally:
        walk.activation_store.close()


def _load_piece(walk: StreamWalk, weights: CheckpointWeights, tuned: Checkpoint, piece: Piece, name: str) -> None:
    load_weights(walk, piece, weights)
    stored = tuned.load_piece(name)
    if stored is not None:
        states, _ = stored
        restore_states({path: walk.quantized_model.get_submodule(path) for path in states}, states)


def _score_head(walk: StreamWalk, piece: Piece, tokens: Sequence[Tensor]) -> Evaluation:
    """Run the last piece on the sequences of this rank, and sum the losses of all ranks."""
    first_logits = torch.empty(0)
    with torch.no_grad(), distributed.phase("scoring") as step:
        step.value = []
        for index, sequence in enumerate(tokens):
            float_logits = _run_head(walk, piece, index, is_quantized=False)
            quantized_logits = _run_head(walk, piece, index, is_quantized=True)
            float_loss, count = cross_entropy_sum(float_logits, sequence)
            quantized_loss, _ = cross_entropy_sum(quantized_logits, sequence)
            noise = float((quantized_logits - float_logits).double().square().sum())
            signal = float(float_logits.double().square().sum())
            step.value.append([float_loss, quantized_loss, count, noise, signal])
            if index == 0:
                first_logits = quantized_logits.clone()
    rows = distributed.interleave(step.values)  # in the order of the sequences, so sums do not depend on ranks
    float_loss, quantized_loss, count, noise, signal = (sum(column) for column in zip(*rows, strict=True))
    before = _to_perplexity(float_loss, count, f"the float model's perplexity is NaN: {FLOAT_NAN_HINT}")
    after = _to_perplexity(quantized_loss, count, f"the quantized model's perplexity is NaN: {QUANTIZED_NAN_HINT}")
    score = Score("perplexity", after, before, higher_is_better=False)
    return Evaluation(score, count, first_logits, decibels(signal, noise))


def _run_head(walk: StreamWalk, piece: Piece, index: int, *, is_quantized: bool) -> Tensor:
    """Run the last piece on a sequence, and return the logits: its last output of shape (batch, length, vocabulary)."""
    inputs = walk.get_entries(piece, index, noisy=is_quantized)
    for value in reversed(walk.run_piece(piece, inputs, noisy=is_quantized)):
        if isinstance(value, Tensor) and value.ndim == 3:
            return value
    raise CaptureError("the model has no output of shape (batch, length, vocabulary): its logits were not found")
