"""Cost rules that several targets share. A rule returns the reason why an operation is better left float, or None."""

from math import prod

from scalepoint.targets.target import OperationFacts

MIN_TABLE_VALUES = 16_384  # 64 KB in float


def small_embedding_table(facts: OperationFacts) -> str | None:
    """A small embedding table stays float: int8 saves few bytes and needs two more operations."""
    if facts.kind == "embedding" and prod(facts.weight_shape) < MIN_TABLE_VALUES:
        return f"its table has only {prod(facts.weight_shape):,} values"
    return None


def weight_only_outside_linear(facts: OperationFacts) -> str | None:
    """Only linear layers have weight-only kernels; other weights would be dequantized in each call."""
    if facts.is_weight_only and facts.kind not in ("linear", "embedding"):
        return f"no kernel for {facts.kind} with integer weights and float activations"
    return None
