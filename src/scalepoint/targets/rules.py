"""Rules that several targets share: what is better left float, and why."""

from scalepoint.targets.target import Facts


def weights_alone(facts: Facts) -> str | None:
    """Only linear layers have kernels that multiply by narrow weights; elsewhere they are dequantized at each run."""
    if facts.is_weight_only and facts.kind != "linear":
        return f"no kernel for a {facts.kind} with narrow weights and float activations"
    return None
