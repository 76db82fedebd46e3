"""Describe a target as sections of text, for `scalepoint targets NAME` and for its documentation page."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from scalepoint.numerics import dtype_name
from scalepoint.patterns import Pattern
from scalepoint.patterns.language import Element
from scalepoint.spec import QuantizationFormulation, QuantizationGranularity, QuantizationSpec
from scalepoint.targets.target import Accepted, RewriteRule, Target

MAX_KINDS_IN_CELL = 3  # an operation with more kinds is listed below the table
BIAS_DESCRIPTIONS = {
    "int32": "stored as int32 with the scale input x weight, which the integer kernel adds",
    "float": "stays float: the runtime quantizes it itself, or adds it in float",
}


@dataclass(frozen=True)
class Section:
    """One section of a target's description: a title, a table and a note."""

    title: str
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    note: str = ""


def describe(target: Target) -> tuple[Section, ...]:
    """Describe everything that a target declares: precisions, operations, placement rules, storage.

    Args:
        target: The target.

    Returns:
        Sections in the order of `scalepoint targets NAME`.
    """
    sections = (
        Section("Defaults", ("tensor", "how"), tuple(_describe_defaults(target))),
        _describe_patterns(target.patterns),
        _describe_accepted(target.accepts),
        Section("Refused", ("rule", "description"), tuple(map(_describe_function, target.refuses))),
        Section("Left float", ("rule", "description"), tuple(map(_describe_function, target.rules))),
        Section(
            "Same scale in and out",
            note=_format_shared_kinds(target.same_scale_kinds) + _format_joined_kinds(target.concat_kinds),
        ),
        Section("Rewritten in files", ("rule", "why"), tuple(map(_describe_rewrite, target.rewrites))),
        Section(
            "Before patterns are matched",
            ("conversion", "description"),
            tuple(map(_describe_function, target.conversions)),
        ),
    )
    return tuple(section for section in sections if section.rows or section.note)


def _format_shared_kinds(kinds: Iterable[str]) -> str:
    names = ", ".join(sorted(kinds))
    return f"These only move values, so their output has the scale of their input: {names}." if names else ""


def _format_joined_kinds(kinds: Iterable[str]) -> str:
    names = ", ".join(sorted(kinds))
    return f" The inputs of these have the scale of their output, if nothing else reads them: {names}." if names else ""


def _describe_defaults(target: Target) -> Iterator[tuple[str, str]]:
    yield "activation", format_spec(target.activation, "activation")
    yield from ((f"activation, {name}", format_spec(spec, "activation")) for name, spec in target.activations.items())
    yield "weight", format_spec(target.weight, "weight")
    if target.table is not None:
        yield "embedding table", f"{format_spec(target.table, 'weight')}: one scale per row"
    if target.head is not None:
        yield "last layer", format_spec(target.head, "weight")
    if target.sparse_code_bits:
        widths = " or ".join(map(str, target.sparse_code_bits))
        yield "pruned weights", f"codes of {widths} bits are stored without their zeros, with a mask"
    yield from _describe_language_model(target)
    if target.adapt_weight is not None:
        yield f"weight, {name_to_words(target.adapt_weight)}", _first_paragraph(target.adapt_weight)
    yield "bias", BIAS_DESCRIPTIONS[target.bias]
    if target.float_if_readers_are_float:
        yield "operations without weights", "stay float if all their readers are float"
    yield "not quantized", " or ".join(map(dtype_name, target.float_dtypes))
    yield from _describe_scales(target)
    if target.domains:
        yield "further operator domains", ", ".join(target.domains)
    yield from _describe_speed(target)
    if not target.is_language:
        reason = target.fixed_shapes_reason
        yield "free axes", f"only the batch: {reason}" if reason else "the batch, and those of dynamic_axes"
    yield "file format", target.format
    yield "runtime", target.runtime or "none: files are not run by verify"
    for name, value in target.options.items():
        yield f"made with {name}=", str(value)


def _describe_speed(target: Target) -> Iterator[tuple[str, str]]:
    if target.is_placed_by_speed:
        yield "layers that are slower in int8", "stay float, by times measured in the runtime on this machine"
    if target.kernel_tables:
        tables = ", ".join(target.kernel_tables)
        yield "times of layers that were not measured", f"are predicted from those of other CPUs ({tables})"
    if target.folds_input_scaling:
        yield (
            "outlier channels",
            "scaled before the quantizer of a linear layer's input; the quantizer absorbs the factor",
        )
    if target.dequantizes_weights_on_load:
        yield (
            "weights of layers that stay float for speed",
            "stored in int8, and dequantized once when the file is loaded",
        )


def _describe_language_model(target: Target) -> Iterator[tuple[str, str]]:
    if target.is_language:
        yield "made from", "the folder of a language model's checkpoint, by deploy_checkpoint"
    if target.caches:
        yield "KV cache", f"float, or with cache= in {' or '.join(target.caches)}"


def _describe_scales(target: Target) -> Iterator[tuple[str, str]]:
    if target.has_signed_scales:
        yield "signs of scales", "the scale of a block may be negative"
    if target.has_half_scales:
        yield "scales", "rounded to float16, in the simulation too"
    if target.block_scale_dtypes:
        dtypes = " and ".join(map(dtype_name, target.block_scale_dtypes))
        yield "scales of blocks", f"rounded to values of {dtypes}, in the simulation too"


def format_spec(spec: QuantizationSpec, role: str) -> str:
    """Format a spec in one line: "uint8, asymmetric, per_tensor, range: global_minmax"."""
    granularity = QuantizationGranularity.key_of(type(spec.granularity))
    fields = spec.to_dict()
    calculator, search = fields["qparam_calculator_cls"], fields["range_calculator_cls"]
    if calculator == "default":
        calculator = "static" if role == "weight" else "moving_average"
    range_method = search if calculator == "static" else calculator
    return f"{fields['dtype']}, {spec.qscheme.value}, {granularity}, range: {range_method}"


def _describe_patterns(patterns: tuple[Pattern, ...]) -> Section:
    """Describe the patterns in their order, in which they are matched."""
    roles_by_kinds: dict[str, list[str]] = {}
    rows = []
    for pattern in patterns:
        points = ", ".join(point.value for point in pattern.qdq_points) or f"none: {pattern.why_float or 'stays float'}"
        elements = ", ".join(_describe_element(element, roles_by_kinds) for element in pattern.match)
        rows.append((pattern.name, elements, points))
    note = " ".join(f"{' and '.join(roles)}: {kinds}." for kinds, roles in roles_by_kinds.items())
    return Section("Patterns", ("pattern", "matches", "Q/DQ on"), tuple(rows), note)


def _describe_element(element: Element, roles_by_kinds: dict[str, list[str]]) -> str:
    """Describe an operation: "[optional]", "mul + another tensor", "(condition)".

    If it has many kinds, return its role and add the kinds to `roles_by_kinds`, which becomes the note of the table.
    """
    kinds = sorted(element.kinds)
    if len(kinds) > MAX_KINDS_IN_CELL:
        text = element.role
        roles = roles_by_kinds.setdefault(", ".join(kinds), [])
        if text not in roles:
            roles.append(text)
    else:
        text = " or ".join(kinds)
    text += " + another tensor" if element.is_join else ""
    text += f" ({name_to_words(element.where)})" if element.where else ""
    return f"[{text}]" if element.is_optional else text


def _describe_accepted(accepts: Iterable[Accepted]) -> Section:
    rows = []
    for accepted in accepts:
        schemes = ", ".join(scheme.value for scheme in accepted.schemes) or "any"
        if QuantizationFormulation.MINVAL in accepted.formulations:
            schemes += "; also minval"
        block_sizes = ", ".join(map(str, accepted.block_sizes))
        if not block_sizes and "per_block" in accepted.granularities:
            block_sizes = "any"
        dtypes, granularities = ", ".join(map(dtype_name, accepted.dtypes)), ", ".join(accepted.granularities) or "any"
        rows.append((accepted.role, dtypes, schemes, granularities, block_sizes, ", ".join(accepted.kinds) or "all"))
    if not rows:
        return Section("Accepts", note="Everything: nothing is refused.")
    columns = ("tensor", "dtypes", "schemes", "granularities", "block sizes", "operations")
    return Section("Accepts", columns, tuple(rows))


def _describe_function(function: Callable[..., Any]) -> tuple[str, str]:
    return name_to_words(function), _first_paragraph(function)


def _describe_rewrite(rule: RewriteRule) -> tuple[str, str]:
    return _to_words(rule.name), rule.why


def _to_words(name: str) -> str:
    return name.strip("_").replace("_", " ")


def name_to_words(function: Callable[..., Any]) -> str:
    """Turn the name of a function into words: is_main_branch -> "is main branch"."""
    return _to_words(getattr(function, "__name__", type(function).__name__))


def _first_paragraph(function: Callable[..., Any]) -> str:
    """Return the first paragraph of a docstring as one line."""
    lines = (function.__doc__ or "").strip().partition("\n\n")[0].split()
    return " ".join(lines)
