"""insert_qdq: quantizers go onto the operands that the matched patterns declare, and onto their weights."""

import copy as copying
from collections.abc import Mapping, Sequence
from functools import partial

from torch import Tensor, fx

from scalepoint.errors import CoverageError
from scalepoint.graph import Operation, check_graph
from scalepoint.graph.nodes import get_kind, inherit_meta, set_state
from scalepoint.graph.operations import WEIGHTS
from scalepoint.graph.origin import get_origin
from scalepoint.graph.tree import ModuleTree
from scalepoint.operation_coverage import Coverage, CoverageRow
from scalepoint.patterns import Fused, PatternMatch, Point
from scalepoint.patterns.language import get_layer_name
from scalepoint.quantize.concat_scales import find_last_concats
from scalepoint.quantize.config import QuantConfig
from scalepoint.quantize.coverage_rows import build_coverage_rows, build_parameter_rows
from scalepoint.quantize.embedding_tables import decide_embedding_table, is_embedding_table, share_codes_with_heads
from scalepoint.quantize.fingerprint import fingerprint_model
from scalepoint.quantize.operations import can_fold_norm, get_part_kind
from scalepoint.quantize.outlier_scaling import ChannelFactors, insert_channel_factors
from scalepoint.quantize.placement import (
    Decision,
    PlacementContext,
    QuantizationSite,
    check_formulations,
    check_overrides,
    decide,
    find_sites,
    find_unmatched_operations,
    get_operation_facts,
    leave_inputs_of_float_layers_float,
)
from scalepoint.quantize.quantized_layers import QuantizedLayer
from scalepoint.quantize.quantizers import (
    QuantizerBase,
    QuantStub,
    WeightFakeQuantize,
    round_scales_to,
    round_scales_to_float16,
)
from scalepoint.quantize.record import LayerSite, Record
from scalepoint.quantize.smooth import SmoothQuantObserver, insert_smoothing_observers
from scalepoint.quantize.speed_placement import leave_slow_layers_float
from scalepoint.spec import PerBlockGranularity, QuantizationSpec
from scalepoint.support.torch_state import serialized
from scalepoint.targets import Target, find_target
from scalepoint.transformation import get_transformation_state

DECISION_PASSES = (
    leave_slow_layers_float,  # first: prices are those of the decisions as the config and the target make them
    share_codes_with_heads,  # a head that became float for speed has another spec, or none, to share
    leave_inputs_of_float_layers_float,  # last: it depends on the final state of the layers
)


@serialized
def insert_qdq(
    model: fx.GraphModule,
    matches: Sequence[PatternMatch],
    config: QuantConfig | Mapping[str, object] | None = None,
    *,
    target: str | Target | None = None,
    strict: bool = False,
    copy: bool = True,
) -> fx.GraphModule:
    """Put quantizers into a transformed model, where the patterns declare them.

    Each quantized tensor gets one QuantStub, shared by its readers. Each weight gets a WeightFakeQuantize, with the
    batch norm folded in. The model computes in float until it is calibrated.

    Args:
        model: The graph of a TransformationResult.
        matches: Its matches.
        config: What to quantize and how; the target's default if not given.
        target: A target or its name; that of the transform by default. Its rules and limits are applied.
        strict: Raise an error if an operation would stay float without being asked to.
        copy: False changes the given model.

    Returns:
        The model with quantizers.
    """
    config = QuantConfig.build(config)
    target = target if target is not None else get_transformation_state(model).target
    chosen = None if target is None else find_target(target)
    if chosen is not None:
        check_formulations(config, chosen)
    quantized = copying.deepcopy(model) if copy else model
    marks = fingerprint_model(quantized)
    decisions, rows, coverage = make_decisions(quantized, matches, config, chosen)
    if coverage.is_empty:
        raise CoverageError(coverage.describe_empty())
    if strict:
        coverage.check()
    tree = ModuleTree(quantized)
    _insert_stubs(quantized, tree, decisions, chosen)
    _insert_weight_quantizers(decisions)
    if chosen is not None and chosen.bias == "int32":
        _connect_input_stubs(quantized, decisions)
    if chosen is not None:
        _set_scale_rounding(quantized, chosen)
        if chosen.folds_input_scaling and config.outliers and not config.migrations:
            insert_channel_factors(quantized, tree, decisions)
    sites_here = [decision.site for decision in decisions] if "smooth" in config.migrations else None
    unsmoothed = {} if sites_here is None else insert_smoothing_observers(quantized, sites_here, config.smooth_quant)
    for module in quantized.modules():
        if isinstance(module, Fused | QuantizedLayer | QuantizerBase | SmoothQuantObserver | ChannelFactors):
            for each in module.modules():
                each.training = quantized.training
    quantized.recompile()
    check_graph(quantized)
    plan = tuple((match.name, match.pattern.name) for match in matches)
    sites = _make_layer_sites(quantized, decisions, rows)
    origin = get_origin(quantized)
    set_state(quantized, Record(origin, chosen, config, plan, sites, coverage, marks, unsmoothed))
    return quantized


def make_decisions(
    model: fx.GraphModule, matches: Sequence[PatternMatch], config: QuantConfig, target: Target | None
) -> tuple[Sequence[Decision], dict[fx.Node, CoverageRow], Coverage]:
    """What would be inserted where, the rows of nodes, and the coverage of all; nothing is changed."""
    sites = find_sites(model, matches)
    unmatched = find_unmatched_operations(model, sites)
    check_overrides(sites, unmatched, config)
    if target is not None and target.refuses:
        for site in sites:
            target.refuse(get_operation_facts(site, config, target))
    decisions: Sequence[Decision]
    decisions = [
        (decide_embedding_table if is_embedding_table(site) else decide)(site, config, target) for site in sites
    ]
    context = PlacementContext(model, config, target)
    for run_pass in DECISION_PASSES:
        decisions = run_pass(context, decisions)
    refusals = get_transformation_state(model).refusals
    rows = build_coverage_rows(model, decisions, unmatched, config, refusals)
    return decisions, rows, Coverage((*rows.values(), *build_parameter_rows(model, rows, refusals)))


def _make_layer_sites(
    model: fx.GraphModule, decisions: Sequence[Decision], rows: Mapping[fx.Node, CoverageRow]
) -> tuple[LayerSite, ...]:
    """All groups, and all that counts without being in one."""
    places = {node: index for index, node in enumerate(rows)}
    names = {node: row.name for node, row in rows.items()} | {each.site.node: each.site.name for each in decisions}
    ordered = [node for node in model.graph.nodes if node in names]
    return tuple(LayerSite(node.name, names[node], places.get(node)) for node in ordered)


StubNodes = dict[tuple[fx.Node, QuantizationSpec], fx.Node]


def _insert_stubs(
    model: fx.GraphModule, tree: ModuleTree, decisions: Sequence[Decision], target: Target | None
) -> None:
    """One stub a tensor and spec; whoever declared a point on the tensor reads the stub."""
    stubs: StubNodes = {}
    shares, joins = (frozenset(), frozenset()) if target is None else (target.same_scale_kinds, target.concat_kinds)
    into = find_last_concats(decisions, joins, shares)
    names: dict[tuple[fx.Node, QuantizationSpec], str] = {}  # of the stubs, by their tensor or by its join
    outputs: dict[fx.Node, fx.Node] = {}  # a tensor -> the stub that its own group put on it
    for decision in decisions:
        for point, tensor, spec in decision.points:
            stub = stubs.get((tensor, spec))
            if stub is None:
                end = into.get((tensor, spec), tensor)
                name = names.get((end, spec)) or _find_stub_before_moves(stubs, tensor, spec, shares)
                name = names[end, spec] = name or _create_stub(tree, outputs.get(end, end), spec)
                stub = stubs[tensor, spec] = _insert_stub_call(model, outputs.get(tensor, tensor), name)
            _get_stub(model, stub).consumers.append(decision.site.name)
            if point == Point.OUTPUT:
                outputs[tensor] = stub
                for user in [user for user in tensor.users if user is not stub]:
                    user.replace_input_with(tensor, stub)
            else:
                _redirect_to_stub(decision.site.node, tensor, stub)


def _redirect_to_stub(node: fx.Node, tensor: fx.Node, stub: fx.Node) -> None:
    """Let a node read the stub in the place of the tensor, or of another stub on it."""
    for source in list(node.all_input_nodes):
        origin = source
        while get_kind(origin) == "quant" and isinstance(origin.args[0], fx.Node):
            origin = origin.args[0]
        if origin is tensor and source is not stub:
            node.replace_input_with(source, stub)


def _get_stub(model: fx.GraphModule, stub: fx.Node) -> QuantStub:
    module = model.get_submodule(str(stub.target))
    assert isinstance(module, QuantStub)  # noqa: S101  # it was made here
    return module


def _find_stub_before_moves(
    stubs: StubNodes, tensor: fx.Node, spec: QuantizationSpec, shares: frozenset[str]
) -> str | None:
    """The stub before an operation that only moves values: the same one stands after it, with the same parameters."""
    while get_kind(tensor) in shares and tensor.all_input_nodes:
        tensor = tensor.all_input_nodes[0]
        if get_kind(tensor) == "quant":
            tensor = tensor.all_input_nodes[0]
        if (tensor, spec) in stubs:
            return str(stubs[tensor, spec].target)
    return None


def _create_stub(tree: ModuleTree, tensor: fx.Node, spec: QuantizationSpec) -> str:
    """The name of a new stub, which is called after the tensor."""
    stub = QuantStub([], spec=spec)
    place = str(tensor.target) if tensor.op in ("placeholder", "get_attr") else get_layer_name(tensor)
    stub.name = tree.add(f"{place}_quant", stub)
    return stub.name


def _insert_stub_call(model: fx.GraphModule, tensor: fx.Node, name: str) -> fx.Node:
    """A call of a stub right after the tensor."""
    after = tensor
    while after.op == "placeholder" and after.next.op == "placeholder":
        after = after.next
    with model.graph.inserting_after(after):
        node = model.graph.call_module(name, (tensor,))
    inherit_meta(node, tensor, kind="quant")
    return node


def _insert_weight_quantizers(decisions: Sequence[Decision]) -> None:
    """A quantizer for each weight; one that two groups share has one."""
    made: dict[tuple[int, int, QuantizationSpec], WeightFakeQuantize] = {}
    sharing: dict[int, list[QuantizedLayer]] = {}
    for decision in decisions:
        site, spec = decision.site, decision.weight
        if spec is None or site.role is None or isinstance(site.part, QuantizedLayer):
            continue
        norm_role = _find_foldable_norm(site)
        norm = site.fused.parts[norm_role] if norm_role else None
        key = (get_weight_key(site), id(norm), spec)
        if key not in made:
            made[key] = _create_weight_quantizer(site, spec)
        made[key].consumers.append(site.name)
        weighted = QuantizedLayer(site.fused.parts[site.role], norm, made[key])
        weighted.sharing_layers = sharing.setdefault(id(made[key]), [])
        weighted.sharing_layers.append(weighted)
        weighted.computes_in_float = decision.saves is not None
        name = site.role if not hasattr(site.fused, site.role) else f"{site.role}_quantized"
        site.fused.add_module(name, weighted)
        _replace_part(site, weighted, norm_role)


def get_weight_key(site: QuantizationSite) -> int:
    """What tells one weight from another."""
    if isinstance(site.part, Operation) and site.part.is_computed:
        return id(next(site.part.references()[name].owner for name in WEIGHTS if name in site.part.references()))
    weight = getattr(site.part, "weight", None)
    return weight.data_ptr() if isinstance(weight, Tensor) and not weight.is_meta else id(site.part)


def _create_weight_quantizer(site: QuantizationSite, spec: QuantizationSpec) -> WeightFakeQuantize:
    quantizer = WeightFakeQuantize([], spec=spec, channel_axis=1 if site.kind == "conv_transpose" else 0)
    quantizer.name = f"{site.name}.weight"
    return quantizer


def _find_foldable_norm(site: QuantizationSite) -> str | None:
    """The role of the batch norm that follows the weighted part, when it can be folded."""
    roles = list(site.fused.parts)
    following = roles[roles.index(str(site.role)) + 1 :][:1]
    for role in following:
        part = site.fused.parts[role]
        if get_part_kind(part) == "batch_norm" and can_fold_norm(part):
            return role
    return None


def _replace_part(site: QuantizationSite, weighted: QuantizedLayer, norm_role: str | None) -> None:
    """The group runs the quantized operation in the place of its own, and no batch norm after it."""
    fused = site.fused
    roles = list(fused.parts)
    kept = [role for role in roles if role != norm_role]
    fused.wiring = [fused.wiring[roles.index(role)] for role in kept]
    fused.parts = {role: weighted if role == site.role else fused.parts[role] for role in kept}


def _set_scale_rounding(model: fx.GraphModule, target: Target) -> None:
    """Let quantizers have scales that the target's files can hold."""
    for module in model.modules():
        if isinstance(module, QuantizerBase) and target.has_half_scales:
            module.round_parameters = round_scales_to_float16
        elif isinstance(module, WeightFakeQuantize) and isinstance(module.spec.granularity, PerBlockGranularity):
            dtypes = target.block_scale_dtypes
            module.round_parameters = partial(round_scales_to, dtypes=dtypes) if dtypes else None


def _connect_input_stubs(model: fx.GraphModule, decisions: Sequence[Decision]) -> None:
    """Let each quantized operation know the stub on its input: its bias has the scale of the products."""
    for decision in decisions:
        weighted, source = decision.site.part, next(iter(decision.site.node.args), None)
        if not isinstance(weighted, QuantizedLayer) or weighted.computes_in_float:
            continue
        if not isinstance(source, fx.Node) or get_kind(source) != "quant":
            continue
        stub = _get_stub(model, source)
        if stub.is_learned or not stub.calculator.always_called:  # else no scale is known before the call
            weighted.module_refs["input"] = stub
