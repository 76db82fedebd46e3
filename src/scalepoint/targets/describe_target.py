"""A target in words: the sections that `scalepoint targets NAME` prints and that its documentation page is made of."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from scalepoint.numerics import dtype_name
from scalepoint.patterns import Pattern
from scalepoint.patterns.language import Element
from scalepoint.spec import QuantizationFormulation, QuantizationGranularity, QuantizationSpec
from scalepoint.targets.target import Accepted, RewriteRule, Target

MOST_KINDS = 3  # of one operation, before they are named below the table
BIAS = {
    "int32": "stored as int32 with the scale input x weight, as the integer kernel adds it",
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
        Section("Defaults", ("tensor", "how"), tuple(_defaults(target))),
        _patterns(target.patterns),
        _accepted(target.accepts),
        Section("Refused", ("rule", "what it says"), tuple(map(_describe_function, target.refuses))),
        Section("Left float", ("rule", "what it says"), tuple(map(_describe_function, target.rules))),
        Section(
            "Same scale in and out",
            note=_format_shared_kinds(target.same_scale_kinds) + _format_joined_kinds(target.concat_kinds),
        ),
        Section("Written in other words", ("rule", "why"), tuple(map(_describe_rule, target.rewrites))),
        Section(
            "Before patterns are matched",
            ("conversion", "what it says"),
            tuple(map(_describe_function, target.conversions)),
        ),
    )
    return tuple(section for section in sections if section.rows or section.note)


def _format_shared_kinds(kinds: Iterable[str]) -> str:
    named = ", ".join(sorted(kinds))
    return f"These only move values, so their output has the parameters of their input: {named}." if named else ""


def _format_joined_kinds(kinds: Iterable[str]) -> str:
    named = ", ".join(sorted(kinds))
    return f" Inputs that nothing else reads have the parameters of the output: {named}." if named else ""


def _defaults(target: Target) -> Iterator[tuple[str, str]]:
    yield "activation", format_spec(target.activation, "activation")
    yield from ((f"activation, {name}", format_spec(spec, "activation")) for name, spec in target.activations.items())
    yield "weight", format_spec(target.weight, "weight")
    if target.table is not None:
        yield "embedding table", f"{format_spec(target.table, 'weight')}: a scale a row, as rows are looked up"
    if target.head is not None:
        yield "last layer", format_spec(target.head, "weight")
    yield from _language(target)
    if target.adapt_weight is not None:
        yield f"weight, {name_to_words(target.adapt_weight)}", _docstring(target.adapt_weight)
    yield "bias", BIAS[target.bias]
    if target.float_if_readers_are_float:
        yield "what has no weights", "stays float when all that read it do"
    yield "what stays float", " or ".join(map(dtype_name, target.float_dtypes))
    yield from _scales(target)
    if target.domains:
        yield "operators beyond ONNX's", ", ".join(target.domains)
    yield from _speed(target)
    if not target.is_language:
        yield (
            "free axes",
            f"the batch alone: {target.fixed_shapes_reason}"
            if target.fixed_shapes_reason
            else "the batch, and dynamic_axes",
        )
    yield "file format", target.format
    yield "runtime", target.runtime or "none that verify can start"
    for name, value in target.options.items():
        yield f"made with {name}=", str(value)


def _speed(target: Target) -> Iterator[tuple[str, str]]:
    if target.kernel_tables:
        measured = ", ".join(target.kernel_tables)
        yield "where int8 pays", f"by measured kernels ({measured}): deploy's files lose to float on none of these CPUs"
    if target.folds_input_scaling:
        yield "channels that stand out", "scaled before the quantizer of a linear layer's input, which takes that in"
    if target.dequantizes_weights_on_load:
        yield "weights of what stays float for speed", "stored in int8, and made float once, as the file is loaded"


def _language(target: Target) -> Iterator[tuple[str, str]]:
    if target.is_language:
        yield "made from", "the folder of a language model's checkpoint, by deploy_checkpoint"
    if target.caches:
        yield "keys and values of earlier tokens", f"float, or with cache= in {' or '.join(target.caches)}"


def _scales(target: Target) -> Iterator[tuple[str, str]]:
    if target.has_signed_scales:
        yield "signs of scales", "a scale of a block may be negative"
    if target.has_half_scales:
        yield "scales", "numbers that float16 holds, in the simulation too"
    if target.block_scale_dtypes:
        held = " and ".join(map(dtype_name, target.block_scale_dtypes))
        yield "scales of blocks", f"numbers that {held} can hold, in the simulation too"


def format_spec(spec: QuantizationSpec, role: str) -> str:
    """uint8, asymmetric, per_tensor, range: global_minmax"""
    granularity = QuantizationGranularity.key_of(type(spec.granularity))
    fields = spec.to_dict()
    calculator, search = fields["qparam_calculator_cls"], fields["range_calculator_cls"]
    if calculator == "default":
        calculator = "static" if role == "weight" else "moving_average"
    how = search if calculator == "static" else calculator
    return f"{fields['dtype']}, {spec.qscheme.value}, {granularity}, range: {how}"


def _patterns(patterns: tuple[Pattern, ...]) -> Section:
    """Longer chains go first, so the order is part of the declaration."""
    many: dict[str, list[str]] = {}
    rows = []
    for pattern in patterns:
        points = ", ".join(point.value for point in pattern.qdq_points) or f"none: {pattern.why_float or 'stays float'}"
        rows.append((pattern.name, ", ".join(_element(element, many) for element in pattern.match), points))
    note = " ".join(f"{' and '.join(roles)}: {kinds}." for kinds, roles in many.items())
    return Section("Patterns", ("pattern", "matches", "Q/DQ on"), tuple(rows), note)


def _element(element: Element, many: dict[str, list[str]]) -> str:
    """One operation: [optional], a + other operand, (its condition); kinds too many for a cell go into `many`."""
    kinds = sorted(element.kinds)
    if len(kinds) > MOST_KINDS:
        text = element.role
        roles = many.setdefault(", ".join(kinds), [])
        roles += [] if text in roles else [text]
    else:
        text = " or ".join(kinds)
    text += " + another tensor" if element.is_join else ""
    text += f" ({name_to_words(element.where)})" if element.where else ""
    return f"[{text}]" if element.is_optional else text


def _also_minval(row: Accepted) -> str:
    return "; also minval" if QuantizationFormulation.MINVAL in row.formulations else ""


def _accepted(rows: Iterable[Accepted]) -> Section:
    cells = tuple(
        (
            row.role,
            ", ".join(map(dtype_name, row.dtypes)),
            (", ".join(scheme.value for scheme in row.schemes) or "any") + _also_minval(row),
            ", ".join(row.granularities) or "any",
            ", ".join(map(str, row.block_sizes)) or ("any" if "per_block" in row.granularities else ""),
            ", ".join(row.kinds) or "all",
        )
        for row in rows
    )
    columns = ("tensor", "dtypes", "schemes", "granularities", "block sizes", "operations")
    note = "" if cells else "Everything: nothing is refused."
    return Section("Accepts", columns if cells else (), cells, note)


def _describe_function(function: Callable[..., Any]) -> tuple[str, str]:
    return name_to_words(function), _docstring(function)


def _describe_rule(rule: RewriteRule) -> tuple[str, str]:
    return _to_words(rule.name), rule.why


def _to_words(name: str) -> str:
    return name.strip("_").replace("_", " ")


def name_to_words(function: Callable[..., Any]) -> str:
    """is_main_branch -> is main branch"""
    return _to_words(getattr(function, "__name__", type(function).__name__))


def _docstring(function: Callable[..., Any]) -> str:
    lines = (function.__doc__ or "").strip().partition("\n\n")[0].split()
    return " ".join(lines)
