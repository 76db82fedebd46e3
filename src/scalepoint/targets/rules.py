"""Rules that several targets share: what is better left float, and why."""

from math import prod

from scalepoint.targets.target import OperationFacts

SMALLEST_TABLE = 16_384  # values: 64 KB in float


def small_tables(facts: OperationFacts) -> str | None:
    """A small embedding table stays float: it saves fewer bytes than the two operations more are worth."""
    if facts.kind == "embedding" and prod(facts.weight_shape) < SMALLEST_TABLE:
        return f"its table has only {prod(facts.weight_shape):,} values"
    return None


def weights_alone(facts: OperationFacts) -> str | None:
    """Only linear layers have kernels that multiply by narrow weights; elsewhere they are dequantized at each run."""
    if facts.is_weight_only and facts.kind not in ("linear", "embedding"):
        return f"no kernel for a {facts.kind} with narrow weights and float activations"
    return None
