"""Which operations the overrides of a config apply to, with the user's line of each."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from scalepoint.graph.user_traceback import recorded_line
from scalepoint.quantize.config import Override, QuantConfig
from scalepoint.quantize.sites import QuantizationSite, UnmatchedOperation, find_sites, find_unmatched_operations
from scalepoint.support.formatting import escape_unprintable, format_plural
from scalepoint.targets import Target
from scalepoint.transformation import TransformationResult, transform

PlacedOperation = QuantizationSite | UnmatchedOperation


@dataclass(frozen=True)
class MatchedOperation:
    """An operation that an override matches.

    Attributes:
        name: Name of the operation.
        kind: Kind of the operation, such as "conv" or "linear".
        line: The user's line that calls it, as "file:line: code"; "" if it is not recorded.
        decides: The roles ("weight", "input", "output") that this override decides. A more specific override may have
            taken the others.
    """

    name: str
    kind: str
    line: str
    decides: tuple[str, ...]


@dataclass(frozen=True)
class OverrideMatches:
    """The operations that one override matches; none if its name or type fits nothing."""

    override: Override
    operations: tuple[MatchedOperation, ...]


@dataclass(frozen=True)
class ConfigMatches:
    """The operations that each override of a config matches. Printing it shows them all."""

    overrides: tuple[OverrideMatches, ...]

    def __str__(self) -> str:
        lines = []
        for matches in self.overrides:
            lines.append(f"{matches.override.label}: {format_plural(len(matches.operations), 'operation')}")
            for operation in matches.operations:
                decided = ", ".join(operation.decides) or "nothing: a more specific override does"
                lines.append(f"  {operation.name} ({operation.kind}), decides {decided}")
                lines += [f"    {operation.line}"] if operation.line else []
        return "\n".join(map(escape_unprintable, lines))


def find_override_matches(
    config: QuantConfig,
    model: nn.Module | TransformationResult,
    args: Any = None,
    *,
    target: str | Target | None = None,
) -> ConfigMatches:
    """Find the operations that each override of a config matches, with the line of the model that calls them.

    Args:
        config: The config.
        model: A module, or the result of `transform`.
        args: Example inputs of a module: a tensor, a tuple, or a dict of keyword inputs.
        target: A target or its name, whose patterns group the operations of a module.

    Example:
        >>> print(find_override_matches(config, model, torch.randn(1, 3, 32, 32)))
    """
    result = transform(model, args, target=target) if isinstance(model, nn.Module) else model
    sites = find_sites(result.model, result.matches)
    operations: list[PlacedOperation] = [*sites, *find_unmatched_operations(result.model, sites)]
    matches = []
    for override in config.overrides:
        matched = [operation for operation in operations if override.matches(operation.names, operation.types)]
        matches.append(
            OverrideMatches(override, tuple(_describe(operation, override, config) for operation in matched))
        )
    return ConfigMatches(tuple(matches))


def _describe(operation: PlacedOperation, override: Override, config: QuantConfig) -> MatchedOperation:
    decides = tuple(
        role
        for role in ("weight", "input", "output")
        if config.find_override(role, operation.names, operation.types) is override
    )
    line = recorded_line(operation.node.stack_trace).removeprefix(" at ")
    return MatchedOperation(operation.name, operation.kind, line, decides)
