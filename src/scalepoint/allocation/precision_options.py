"""The precisions that are tried for each layer: those that the target runs; and which layers must have the same.

    by name     int4, int8, ...: the weight in this format, everything else as configured; float: weight and inputs
                palette2, palette4, ...: the weight as indices into tables
    upwards     as configured, then wider weights, inputs of 8 bits, both, float

Layers that multiply one tensor (q, k, v; gate and up) have the same precision, so that a compiler can still fuse them.
So do layers with one weight.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from scalepoint.errors import ScalepointError, TargetError, UsageError, did_you_mean
from scalepoint.numerics import dtype_name, get_format
from scalepoint.patterns import Point
from scalepoint.quantize.config import FLOAT, Override, QuantConfig
from scalepoint.quantize.embedding_tables import is_embedding_table
from scalepoint.quantize.insert import get_weight_key
from scalepoint.quantize.placement import Decision, decide, get_operation_facts
from scalepoint.spec import PerGroupedChannelGranularity, QuantizationSpec, palette_spec
from scalepoint.spec.extended import spec_from_dict
from scalepoint.spec.palette import is_palette, palette_bits
from scalepoint.spec.spec import to_code_type
from scalepoint.targets import Target

UNCHANGED = "as configured"  # name of the configured precision
WIDER_WEIGHTS = ("int4", "int8")


@dataclass(frozen=True)
class PrecisionOption:
    """One precision of a layer.

    Attributes:
        name: Its name, such as "int4".
        override: Fields of the override that asks for it.
        weight: Spec of the weight; None if it is float, or there is none.
        inputs: Specs of the quantized inputs.
        has_weight: Whether the layer has a weight.
    """

    name: str
    override: dict[str, Any]
    weight: QuantizationSpec | None
    inputs: tuple[QuantizationSpec, ...]
    has_weight: bool = True

    @property
    def bits(self) -> int:
        """Bits per weight."""
        return 32 if self.weight is None else self.weight.n_bits

    @property
    def operand_bits(self) -> int:
        """Bits of the wider operand of a product."""
        inputs = max((spec.n_bits for spec in self.inputs), default=32)
        return max(self.bits, inputs) if self.has_weight else inputs


@dataclass
class LayerOptions:
    """The options of a layer.

    Attributes:
        name: Name of the layer.
        decisions: What the config decides for each of its groups.
        options: The precisions to choose from.
        refused: Precision -> why the target does not run it.
    """

    name: str
    decisions: list[Decision]
    options: list[PrecisionOption] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def first(self) -> Decision:
        return self.decisions[0]


def group_by_layer(decisions: Iterable[Decision]) -> list[LayerOptions]:
    """Return the quantized layers without options, in graph order; without embedding tables, which have no products."""
    layers: dict[str, LayerOptions] = {}
    for decision in decisions:
        if (decision.weight is not None or decision.points) and not is_embedding_table(decision.site):
            name = decision.site.name
            layers.setdefault(name, LayerOptions(name, [])).decisions.append(decision)
    return list(layers.values())


def check_choices(choices: Sequence[str]) -> tuple[str, ...]:
    """Check names of precisions, such as "int8", "int4" or "float".

    Args:
        choices: The names.

    Returns:
        The names as a tuple.

    Raises:
        UsageError: A name is not known.
    """
    if isinstance(choices, str) or not choices:
        raise UsageError(
            f"choices= must be a sequence with names of weight formats, such as ('int4', 'int8', 'float'), got "
            f"{choices!r}"
        )
    for name in choices:
        if name != FLOAT and palette_bits(name) is None:
            try:
                get_format(to_code_type(name))
            except (ScalepointError, KeyError, AttributeError) as error:
                known = ("int2", "int4", "int8", "uint4", "uint8", "palette4", FLOAT)
                raise UsageError(
                    f"choices: {name!r} is not a weight format: {did_you_mean(str(name), known)}"
                ) from error
    return tuple(dict.fromkeys(choices))


def add_choices(layers: Sequence[LayerOptions], choices: Sequence[str], config: QuantConfig, target: Target) -> None:
    """Add the options with these names to the layers.

    Raises:
        TargetError: No layer can have one of the choices, or one layer can have none of them.
    """
    for layer in layers:
        for name in choices:
            _add_choice(layer, name, config, target)
    for name in choices:
        refusals = [layer.refused[name] for layer in layers if name in layer.refused]
        if layers and len(refusals) == len(layers):
            raise TargetError(f"choices: no layer can have {name}: {refusals[0]}")
    without_options = [layer for layer in layers if not layer.options]
    if without_options:
        layer = without_options[0]
        reasons = "; ".join(layer.refused.values())
        raise TargetError(f"choices: {layer.name} can have none of {', '.join(choices)}: {reasons}")


def _add_choice(layer: LayerOptions, name: str, config: QuantConfig, target: Target) -> None:
    if name == FLOAT:
        layer.options.append(build_option(layer, FLOAT, {"weight": FLOAT, "activation": FLOAT}, config, target))
        return
    # The target may not run the format with the granularity of the config; then its own granularity is tried.
    reasons = []
    for base in (_configured_weight(layer.first, config, target), target.weight):
        try:
            spec = _with_dtype(base, name)
            layer.options.append(build_option(layer, name, {"weight": spec}, config, target))
        except ValueError as error:
            reasons.append(_error_text(error))
        else:
            return
    layer.refused[name] = reasons[0]


def add_higher_precisions(layer: LayerOptions, config: QuantConfig, target: Target) -> None:
    """Add the configured precision and all that are higher."""
    present = build_option(layer, UNCHANGED, {}, config, target)
    layer.options.append(present)
    wider_weights = [
        name
        for name in WIDER_WEIGHTS
        if present.weight is not None and get_format(to_code_type(name)).bits > present.bits
    ]
    input_bits = min((spec.n_bits for spec in present.inputs), default=8)
    for weight in (None, *wider_weights):
        override: dict[str, Any] = {}
        if weight is not None:
            wider = _find_wider_weight(layer, weight, config, target)
            if not wider:
                continue
            override = wider
            layer.options.append(build_option(layer, f"{weight} weights", override, config, target))
        if input_bits < 8:
            input_spec = present.inputs[0]
            wide_input = _with_dtype(input_spec, "uint8" if "uint" in dtype_name(input_spec.dtype) else "int8")
            name = f"{weight} weights, 8-bit inputs" if weight else "8-bit inputs"
            _try_option(layer, name, {**override, "input": wide_input}, config, target)
    _try_option(layer, FLOAT, {"weight": FLOAT, "activation": FLOAT}, config, target)


def _error_text(error: Exception) -> str:
    return str(error.args[0]) if isinstance(error, ScalepointError) else str(error).splitlines()[0]


def _find_wider_weight(layer: LayerOptions, name: str, config: QuantConfig, target: Target) -> dict[str, Any] | None:
    """Return the override for a wider weight that the target runs; None if there is none."""
    wider = LayerOptions(layer.name, layer.decisions)
    _add_choice(wider, name, config, target)
    return wider.options[0].override if wider.options else None


def _try_option(layer: LayerOptions, name: str, override: dict[str, Any], config: QuantConfig, target: Target) -> None:
    """Add an option, or note why the target does not run it."""
    try:
        layer.options.append(build_option(layer, name, override, config, target))
    except ValueError as error:
        layer.refused[name] = _error_text(error)


def build_option(
    layer: LayerOptions, name: str, override: dict[str, Any], config: QuantConfig, target: Target
) -> PrecisionOption:
    """Decide what an override of a layer leads to.

    Raises:
        TargetError: The target does not run it.
    """
    overrides = (Override(name=layer.name, **override),) if override else ()
    new_config = config.model_copy(update={"overrides": (*config.overrides, *overrides)})
    decisions = [decide(decision.site, new_config, target) for decision in layer.decisions]
    for decision in decisions:
        if override and decision.weight is not None:
            shape = get_operation_facts(decision.site, new_config, target).weight_shape
            decision.weight.granularity.get_block_size(shape)  # raises an error if the blocks do not divide the weight
    inputs = tuple(spec for decision in decisions for point, _, spec in decision.points if point != Point.OUTPUT)
    return PrecisionOption(name, override, decisions[0].weight, inputs, layer.first.site.role is not None)


def _configured_weight(decision: Decision, config: QuantConfig, target: Target) -> QuantizationSpec:
    """Return the spec of the weight in the config, before the target adapts it."""
    spec = config.spec_for("weight", decision.site.names, decision.site.types)
    return spec if isinstance(spec, QuantizationSpec) else target.weight


def _with_dtype(spec: QuantizationSpec, name: str) -> QuantizationSpec:
    bits = palette_bits(name)
    if bits is not None:
        granularity = spec.granularity
        grouping = granularity.group_size if isinstance(granularity, PerGroupedChannelGranularity) else None
        return palette_spec(bits, grouping)
    if is_palette(spec):
        raise TargetError(f"{name} is not a palette")
    if dtype_name(spec.dtype) == name:
        return spec
    known = type(spec).model_fields
    fields = {key: value for key, value in spec.to_dict().items() if key in known and key != "scale_dtype"}
    return spec_from_dict({**fields, "dtype": name})


def is_weight_overridden(layer: LayerOptions, config: QuantConfig) -> bool:
    """Whether an override of the user sets the precision of the weight."""
    site = layer.first.site
    return any(
        override.setting_for("weight") is not None and override.matches(site.names, site.types)
        for override in config.overrides
    )


def group_layers_sharing_precision(layers: Sequence[LayerOptions]) -> list[list[LayerOptions]]:
    """Group layers that must have the same precision, in the order of their first layer (union-find over keys)."""
    first_with_key: dict[object, int] = {}
    parent = list(range(len(layers)))

    def find_root(index: int) -> int:
        while parent[index] != index:
            index = parent[index]
        return index

    for index, layer in enumerate(layers):
        for key in _sharing_keys(layer):
            if key in first_with_key:
                earlier, later = sorted((find_root(first_with_key[key]), find_root(index)))
                parent[later] = earlier
            first_with_key.setdefault(key, index)
    groups: dict[int, list[LayerOptions]] = {}
    for index, layer in enumerate(layers):
        groups.setdefault(find_root(index), []).append(layer)
    return list(groups.values())


def _sharing_keys(layer: LayerOptions) -> list[object]:
    """Return the keys of a layer. Layers with a common key (a weight, an input of linears) must have one precision."""
    keys: list[object] = []
    for decision in layer.decisions:
        if decision.weight is None:
            continue
        keys.append(get_weight_key(decision.site))
        source: fx.Node | None = next((node for point, node in decision.site.operands if point == Point.INPUT), None)
        if decision.site.kind == "linear" and source is not None:
            keys.append(source)
    return keys
