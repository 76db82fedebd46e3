"""The ways to run a layer: what is tried at each, only what the target runs, and who has to share.

    by name     int4, int8, ...: the weight in this format, everything else as configured; float: weight and inputs
    upwards     as it is, then wider weights, inputs of 8 bits, both, float

Layers that multiply one tensor (q, k, v; gate and up) share a way, so that a compiler can still fuse them; so do layers
with one weight.
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
from scalepoint.spec import QuantizationSpec
from scalepoint.spec.extended import spec_from_dict
from scalepoint.spec.spec import to_code_type
from scalepoint.targets import Target

UNCHANGED = "as it is"
WIDER_WEIGHTS = ("int4", "int8")


@dataclass(frozen=True)
class PrecisionOption:
    """One way to run a layer: fields of an override, and what comes of them."""

    name: str
    said: dict[str, Any]
    weight: QuantizationSpec | None  # None: float, or no weight
    inputs: tuple[QuantizationSpec, ...]
    has_weight: bool = True

    @property
    def bits(self) -> int:
        """Of a code of the weight."""
        return 32 if self.weight is None else self.weight.n_bits

    @property
    def widest(self) -> int:
        """Of the operands of a product."""
        inputs = max((each.n_bits for each in self.inputs), default=32)
        return max(self.bits, inputs) if self.has_weight else inputs


@dataclass
class LayerOptions:
    """The groups of one name, with their ways; the reasons why others are none."""

    name: str
    decisions: list[Decision]
    ways: list[PrecisionOption] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def first(self) -> Decision:
        return self.decisions[0]


def group_by_layer(decisions: Iterable[Decision]) -> list[LayerOptions]:
    """What is quantized, each name once, in graph order; a table of embeddings is multiplied by nothing, and has no
    choice."""
    found: dict[str, LayerOptions] = {}
    for each in decisions:
        if (each.weight is not None or each.points) and not is_embedding_table(each.site):
            found.setdefault(each.site.name, LayerOptions(each.site.name, [])).decisions.append(each)
    return list(found.values())


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
        raise UsageError(f"choices={choices!r}: name formats of weights, as ('int4', 'int8', 'float')")
    for name in choices:
        if name != FLOAT:
            try:
                get_format(to_code_type(name))
            except (ScalepointError, KeyError, AttributeError) as error:
                known = ("int2", "int4", "int8", "uint4", "uint8", FLOAT)
                raise UsageError(
                    f"choices: {name!r} is no format of a weight: {did_you_mean(str(name), known)}"
                ) from error
    return tuple(dict.fromkeys(choices))


def add_choices(layers: Sequence[LayerOptions], choices: Sequence[str], config: QuantConfig, target: Target) -> None:
    """The ways by name; a choice that no layer can have is an error."""
    for layer in layers:
        for name in choices:
            _add_choice(layer, name, config, target)
    for name in choices:
        refusals = [layer.refused[name] for layer in layers if name in layer.refused]
        if layers and len(refusals) == len(layers):
            raise TargetError(f"choices: no layer can have {name}: {refusals[0]}")
    without = [layer for layer in layers if not layer.ways]
    if without:
        why = "; ".join(without[0].refused.values())
        raise TargetError(f"choices: {without[0].name} can have none of {', '.join(choices)}: {why}")


def _add_choice(layer: LayerOptions, name: str, config: QuantConfig, target: Target) -> None:
    if name == FLOAT:
        layer.ways.append(build_option(layer, FLOAT, {"weight": FLOAT, "activation": FLOAT}, config, target))
        return
    reasons = []
    for base in (_configured_weight(layer.first, config, target), target.weight):
        try:
            spec = _with_dtype(base, name)
            layer.ways.append(build_option(layer, name, {"weight": spec}, config, target))
        except ValueError as error:
            reasons.append(_error_text(error))
        else:
            return
    layer.refused[name] = reasons[0]


def add_higher_precisions(layer: LayerOptions, config: QuantConfig, target: Target) -> None:
    """As it is, and everything that is more."""
    layer.ways.append(build_option(layer, UNCHANGED, {}, config, target))
    now = layer.ways[0]
    weights = [
        name for name in WIDER_WEIGHTS if now.weight is not None and get_format(to_code_type(name)).bits > now.bits
    ]
    inputs = min((each.n_bits for each in now.inputs), default=8)
    for weight in (None, *weights):
        said: dict[str, Any] = {}
        if weight is not None:
            if not (found := _find_wider_weight(layer, weight, config, target)):
                continue
            said = found
            layer.ways.append(build_option(layer, f"{weight} weights", said, config, target))
        if inputs < 8:
            wide = {
                "input": _with_dtype(now.inputs[0], "uint8" if "uint" in dtype_name(now.inputs[0].dtype) else "int8")
            }
            words = f"{weight} weights, 8-bit inputs" if weight else "8-bit inputs"
            _try_option(layer, words, {**said, **wide}, config, target)
    _try_option(layer, FLOAT, {"weight": FLOAT, "activation": FLOAT}, config, target)


def _error_text(error: Exception) -> str:
    return str(error.args[0]) if isinstance(error, ScalepointError) else str(error).splitlines()[0]


def _find_wider_weight(layer: LayerOptions, name: str, config: QuantConfig, target: Target) -> dict[str, Any] | None:
    """The weight in a wider format as the target runs it."""
    tried = LayerOptions(layer.name, layer.decisions)
    _add_choice(tried, name, config, target)
    return tried.ways[0].said if tried.ways else None


def _try_option(layer: LayerOptions, name: str, said: dict[str, Any], config: QuantConfig, target: Target) -> None:
    try:
        layer.ways.append(build_option(layer, name, said, config, target))
    except ValueError as error:
        layer.refused[name] = _error_text(error)


def build_option(
    layer: LayerOptions, name: str, said: dict[str, Any], config: QuantConfig, target: Target
) -> PrecisionOption:
    """What an override comes to; TargetError for what the target does not run."""
    more = (Override(name=layer.name, **said),) if said else ()
    asked = config.model_copy(update={"overrides": (*config.overrides, *more)})
    found = [decide(each.site, asked, target) for each in layer.decisions]
    for each in found:
        if said and each.weight is not None:
            each.weight.granularity.get_block_size(
                get_operation_facts(each.site, asked, target).weight_shape
            )  # blocks must divide
    inputs = tuple(spec for each in found for point, _, spec in each.points if point != Point.OUTPUT)
    return PrecisionOption(name, said, found[0].weight, inputs, layer.first.site.role is not None)


def _configured_weight(decision: Decision, config: QuantConfig, target: Target) -> QuantizationSpec:
    """What the config says of a weight, before the target adapts it."""
    said = config.spec_for("weight", decision.site.names, decision.site.types)
    return said if isinstance(said, QuantizationSpec) else target.weight


def _with_dtype(spec: QuantizationSpec, name: str) -> QuantizationSpec:
    if dtype_name(spec.dtype) == name:
        return spec
    own = type(spec).model_fields
    fields = {key: value for key, value in spec.to_dict().items() if key in own and key != "scale_dtype"}
    return spec_from_dict({**fields, "dtype": name})


def is_weight_overridden(layer: LayerOptions, config: QuantConfig) -> bool:
    """Whether an override of the user says what its weight is."""
    site = layer.first.site
    return any(
        each.setting_for("weight") is not None and each.matches(site.names, site.types) for each in config.overrides
    )


def group_layers_sharing_precision(layers: Sequence[LayerOptions]) -> list[list[LayerOptions]]:
    """Layers that have to share a way, in the order of their first."""
    keys: dict[object, int] = {}
    owner = list(range(len(layers)))

    def root(index: int) -> int:
        while owner[index] != index:
            index = owner[index]
        return index

    for index, layer in enumerate(layers):
        for key in _sharing_keys(layer):
            if key in keys:
                one, other = sorted((root(keys[key]), root(index)))
                owner[other] = one
            keys.setdefault(key, index)
    groups: dict[int, list[LayerOptions]] = {}
    for index, layer in enumerate(layers):
        groups.setdefault(root(index), []).append(layer)
    return list(groups.values())


def _sharing_keys(layer: LayerOptions) -> list[object]:
    """What makes two layers partners: one weight, or, of linear layers, one input."""
    keys: list[object] = []
    for each in layer.decisions:
        if each.weight is None:
            continue
        keys.append(get_weight_key(each.site))
        source: fx.Node | None = next((node for point, node in each.site.operands if point == Point.INPUT), None)
        keys += [source] if each.site.kind == "linear" and source is not None else []
    return keys
