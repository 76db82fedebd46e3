"""Coverage: every operation with weights or a matrix product, and what became of it. Nothing is silent."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import Tensor, fx, nn

from scalepoint.errors import CoverageError
from scalepoint.patterns.plan import plain
from scalepoint.quantize.config import QuantConfig
from scalepoint.quantize.cost import batch_share, macs_of
from scalepoint.quantize.placement import COUNTED, Decision, Left, Site, State
from scalepoint.spec import QuantizationGranularity, QuantizationSpec
from scalepoint.words import count, share_of


@dataclass(frozen=True)
class Operation:
    """One row: an operation of the model, and how it runs."""

    name: str
    kind: str
    state: State
    how: str  # "w int8 per_channel, x int8"
    reason: str
    parameters: int
    macs: int | None
    is_asked: bool = False  # float because the config says so
    is_meant: bool = False  # float because the target runs its kind so

    @property
    def precision(self) -> str:
        return self.how or "float"


@dataclass(frozen=True)
class Coverage:
    """All operations with weights or a matrix product, each in exactly one state."""

    operations: tuple[Operation, ...]

    def share_of_macs(self) -> dict[str, float] | None:
        """Precision -> share of the multiply-accumulates; None when capture had no example inputs."""
        if any(row.macs is None for row in self.operations):
            return None
        return self._shares([(row.precision, row.macs or 0) for row in self.operations])

    def share_of_parameters(self) -> dict[str, float]:
        """Precision -> share of the weights."""
        return self._shares([(row.precision, row.parameters) for row in self.operations])

    @staticmethod
    def _shares(rows: list[tuple[str, int]]) -> dict[str, float]:
        total = sum(amount for _, amount in rows) or 1
        shares: dict[str, float] = {}
        for precision, amount in rows:
            shares[precision] = shares.get(precision, 0.0) + amount / total
        return dict(sorted(shares.items(), key=lambda pair: -pair[1]))

    @property
    def unasked(self) -> tuple[Operation, ...]:
        """What stays float though nobody wished it."""
        left = (row for row in self.operations if row.state != State.QUANTIZED)
        return tuple(row for row in left if not (row.is_asked or row.is_meant))

    def in_state(self, state: State | str) -> tuple[Operation, ...]:
        return tuple(row for row in self.operations if row.state == state)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is quantized."""
        return not self.in_state(State.QUANTIZED)

    def why_empty(self) -> str:
        reasons = "; ".join(f"{row.name}: {row.reason}" for row in self.operations[:4]) or "it has no weights"
        return f"nothing of this model would be quantized: {reasons}"

    def check(self) -> None:
        """strict=True: an error that names what stays float unasked."""
        if not self.unasked:
            return
        listed = "; ".join(f"{row.name} ({row.kind}): {row.reason}" for row in self.unasked[:8])
        more = f"; and {len(self.unasked) - 8} more" if len(self.unasked) > 8 else ""
        raise CoverageError(
            f"{len(self.unasked)} operations stay float unasked: {listed}{more}. Ask for it with "
            "Override(name=..., weight='float', activation='float'), or leave strict=True away"
        )

    def summary(self) -> str:
        counts = {state: len(self.in_state(state)) for state in State}
        text = ", ".join(f"{count} {state.value}" for state, count in counts.items() if count)
        if not self.operations:
            return "no operation with weights or a matrix product"
        macs = self.share_of_macs()
        for label, shares in (("MACs", macs), ("parameters", self.share_of_parameters())):
            if shares is not None:
                low = sum(share for precision, share in shares.items() if precision != "float")
                text += f"; {share_of(low)} of the {label} in low precision"
        return text

    def table(self) -> Table:
        table = Table(title=self.summary(), title_justify="left")
        for column in ("operation", "kind", "runs in", "why"):
            table.add_column(column, overflow="fold")
        for column in ("MACs", "weights"):
            table.add_column(column, justify="right", no_wrap=True)
        for row in self.operations:
            cells = (row.name, row.kind, row.precision, row.reason)
            table.add_row(*map(plain, cells), count(row.macs), count(row.parameters))
        return table

    def __str__(self) -> str:
        console = Console(width=None)
        with console.capture() as capture:
            console.print(self.table())
        return capture.get()

    def to_list(self) -> list[dict[str, Any]]:
        """Plain values, for JSON."""
        return [{**vars(row), "state": row.state.value} for row in self.operations]


def coverage_rows(
    model: fx.GraphModule,
    decisions: Sequence[Decision],
    left: Sequence[Left],
    config: QuantConfig,
    refusals: Iterable[Any],
) -> dict[fx.Node, Operation]:
    """One row a decision that concerns weights or products, and one for each such operation that no pattern took; in
    graph order."""
    why = {refusal.name: refusal.reason for refusal in refusals if refusal.reason}
    rows = {decision.site.node: _row(decision) for decision in decisions if _counts(decision.site)}
    rows |= {each.node: _left_row(each, config, why) for each in left}
    share = batch_share(model)
    ordered = [(node, rows[node]) for node in model.graph.nodes if node in rows]
    return {node: replace(row, macs=None if row.macs is None else int(row.macs * share)) for node, row in ordered}


def _counts(site: Site) -> bool:
    return site.role is not None or site.kind in COUNTED or _parameters(site.fused.parts.values()) > 0


def _row(decision: Decision) -> Operation:
    site = decision.site
    operands = [argument for argument in site.node.args if isinstance(argument, fx.Node)]
    kind = "attention" if site.match.pattern.name.startswith("Attention") else site.kind
    macs = macs_of(kind, site.part or next(iter(site.fused.parts.values())), site.node, operands)
    words = [f"w {describe(decision.weight)}"] if decision.weight else []
    inputs = {describe(spec) for _, _, spec in decision.points}
    words += [f"x {' / '.join(sorted(inputs))}"] if inputs else []
    parameters = _parameters(site.fused.parts.values())
    how = ", ".join(words)
    whose = (decision.is_asked, decision.is_meant)
    return Operation(site.name, kind, decision.state, how, decision.reason, parameters, macs, *whose)


def _left_row(each: Left, config: QuantConfig, why: dict[str, str]) -> Operation:
    asked = any(override.fits(each.names, each.types) for override in config.overrides)
    reason = why.get(each.name) or f"no low-precision form of a {each.kind} is known for this target"
    parameters = _parameters([each.module] if each.module is not None else [])
    macs = macs_of(each.kind, each.module, each.node, list(each.node.all_input_nodes))
    return Operation(
        each.name, each.kind, State.FLOAT, "", "asked for by the config" if asked else reason, parameters, macs, asked
    )


def _parameters(parts: Iterable[nn.Module]) -> int:
    """Elements of the weights that parts hold or refer to; a weight that two read counts once."""
    held: dict[int, int] = {}
    for part in parts:
        references = getattr(part, "references", None)
        tensors = [reference.value for reference in references().values()] if callable(references) else []
        tensors += list(part.parameters())
        weight = getattr(part, "weight", None)
        if isinstance(weight, Tensor) and not tensors:
            tensors = [weight]
        for tensor in tensors:
            if tensor.ndim > 0:
                held[tensor.data_ptr()] = tensor.numel()
    return sum(held.values())


def describe(spec: QuantizationSpec) -> str:
    """int8 per_channel"""
    key = QuantizationGranularity.key_of(type(spec.granularity))
    dtype: str = spec.to_dict()["dtype"]
    return dtype if key == "per_tensor" else f"{dtype} {key}"
