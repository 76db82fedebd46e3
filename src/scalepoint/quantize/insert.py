"""insert_qdq: inserts quantizers on the operands that the matched patterns declare, and on their weights."""

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
    check_formulations,
    decide,
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
from scalepoint.quantize.sites import QuantizationSite, check_overrides, find_sites, find_unmatched_operations
from scalepoint.quantize.smooth import SmoothQuantObserver, insert_smoothing_observers
from scalepoint.quantize.speed_placement import leave_slow_layers_float
from scalepoint.spec import PerBlockGranularity, QuantizationSpec
from scalepoint.support.torch_state import serialized
from scalepoint.targets import Target, find_target
from scalepoint.targets.local_times import LocalTimes
from scalepoint.transformation import get_transformation_state

DECISION_PASSES = (
    leave_slow_layers_float,  # first: predicts times for the decisions that config and target made
    share_codes_with_heads,  # a head that became float for speed has a different spec, or none, to share
    leave_inputs_of_float_layers_float,  # last: depends on the final state of the layers
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
    local_times: LocalTimes | None = None,
) -> fx.GraphModule:
    """Insert quantizers into a transformed model, where its patterns declare them.

    Each quantized tensor gets one QuantStub, shared by its readers. Each weight gets a WeightFakeQuantize, with the
    batch norm folded in. The model computes in float until `calibrate` has run.

    Args:
        model: The graph of a TransformationResult.
        matches: Its matches.
        config: What to quantize and how; the target's default if not given.
        target: A target or its name; that of the transform by default. Its rules and limits are applied.
        strict: Raise an error if an operation would stay float without being asked to.
        copy: False changes the given model.
        local_times: Times of layers on this machine. With `QuantConfig(speed_first=True)` they decide which layers
            stay float, instead of the target's shipped tables.

    Returns:
        The model with quantizers.

    Raises:
        CoverageError: Nothing would be quantized; with `strict`, an operation would stay float.
    """
    config = QuantConfig.build(config)
    target_or_name = target if target is not None else get_transformation_state(model).target
    target = None if target_or_name is None else find_target(target_or_name)
    if target is not None:
        check_formulations(config, target)
    quantized = copying.deepcopy(model) if copy else model
    fingerprint = fingerprint_model(quantized)
    decisions, rows, coverage = make_decisions(quantized, matches, config, target, local_times)
    if coverage.is_empty:
        raise CoverageError(coverage.describe_empty())
    if strict:
        coverage.check()
    tree = ModuleTree(quantized)
    _insert_stubs(quantized, tree, decisions, target)
    _insert_weight_quantizers(decisions)
    if target is not None:
        if target.bias == "int32":
            _connect_input_stubs(quantized, decisions)
        _set_scale_rounding(quantized, target)
        if target.folds_input_scaling and config.outliers and not config.migrations:
            insert_channel_factors(quantized, tree, decisions)
    unsmoothed = {}
    if "smooth" in config.migrations:
        sites = [decision.site for decision in decisions]
        unsmoothed = insert_smoothing_observers(quantized, sites, config.smooth_quant)
    _copy_training_mode(quantized)
    quantized.recompile()
    check_graph(quantized)
    plan = tuple((match.name, match.pattern.name) for match in matches)
    layer_sites = _make_layer_sites(quantized, decisions, rows)
    origin = get_origin(quantized)
    record = Record(
        origin, target, config, plan, layer_sites, coverage, fingerprint, unsmoothed, local_times=local_times
    )
    set_state(quantized, record)
    return quantized


def _copy_training_mode(model: fx.GraphModule) -> None:
    """Set the inserted modules to the mode of the model. Modules of the user keep their own modes."""
    for module in model.modules():
        if isinstance(module, Fused | QuantizedLayer | QuantizerBase | SmoothQuantObserver | ChannelFactors):
            for inner in module.modules():
                inner.training = model.training


def make_decisions(
    model: fx.GraphModule,
    matches: Sequence[PatternMatch],
    config: QuantConfig,
    target: Target | None,
    local_times: LocalTimes | None = None,
) -> tuple[Sequence[Decision], dict[fx.Node, CoverageRow], Coverage]:
    """Decide what to insert where, without changing the model.

    Returns:
        The decisions, the coverage row of each node that has one, and the coverage of the model.
    """
    sites = find_sites(model, matches)
    unmatched = find_unmatched_operations(model, sites)
    check_overrides(sites, unmatched, config)
    if target is not None and target.refuses:
        for site in sites:
            target.check_operation(get_operation_facts(site, config, target))
    decisions: Sequence[Decision] = [
        (decide_embedding_table if is_embedding_table(site) else decide)(site, config, target) for site in sites
    ]
    context = PlacementContext(model, config, target, local_times or LocalTimes())
    for run_pass in DECISION_PASSES:
        decisions = run_pass(context, decisions)
    refusals = get_transformation_state(model).refusals
    rows = build_coverage_rows(model, decisions, unmatched, config, refusals)
    return decisions, rows, Coverage((*rows.values(), *build_parameter_rows(model, rows, refusals)))


def _make_layer_sites(
    model: fx.GraphModule, decisions: Sequence[Decision], rows: Mapping[fx.Node, CoverageRow]
) -> tuple[LayerSite, ...]:
    """Return all fused groups, and single operations that appear in the coverage."""
    coverage_indices = {node: index for index, node in enumerate(rows)}
    names = {node: row.name for node, row in rows.items()}
    names |= {decision.site.node: decision.site.name for decision in decisions}
    ordered = [node for node in model.graph.nodes if node in names]
    return tuple(LayerSite(node.name, names[node], coverage_indices.get(node)) for node in ordered)


StubNodes = dict[tuple[fx.Node, QuantizationSpec], fx.Node]  # a tensor and a spec -> the call of its stub


def _insert_stubs(
    model: fx.GraphModule, tree: ModuleTree, decisions: Sequence[Decision], target: Target | None
) -> None:
    """Insert one stub per tensor and spec. Every operation with a point on the tensor reads the stub."""
    stub_nodes: StubNodes = {}
    same_scale_kinds: frozenset[str] = frozenset() if target is None else target.same_scale_kinds
    concat_kinds: frozenset[str] = frozenset() if target is None else target.concat_kinds
    last_concats = find_last_concats(decisions, concat_kinds, same_scale_kinds)
    stub_names: dict[tuple[fx.Node, QuantizationSpec], str] = {}  # by tensor, or by the concat whose stub it shares
    output_stubs: dict[fx.Node, fx.Node] = {}  # a tensor -> the stub that quantizes it as the output of its group
    for decision in decisions:
        for point, tensor, spec in decision.points:
            stub_node = stub_nodes.get((tensor, spec))
            if stub_node is None:
                owner = last_concats.get((tensor, spec), tensor)  # the concat whose stub it shares, or the tensor
                name = (
                    stub_names.get((owner, spec))
                    or _find_stub_before_moves(stub_nodes, tensor, spec, same_scale_kinds)
                    or _create_stub(tree, output_stubs.get(owner, owner), spec)
                )
                stub_names[owner, spec] = name
                stub_node = stub_nodes[tensor, spec] = _insert_stub_call(model, output_stubs.get(tensor, tensor), name)
            _get_stub(model, stub_node).consumers.append(decision.site.name)
            if point == Point.OUTPUT:
                output_stubs[tensor] = stub_node
                for user in [user for user in tensor.users if user is not stub_node]:
                    user.replace_input_with(tensor, stub_node)
            else:
                _redirect_to_stub(decision.site.node, tensor, stub_node)


def _redirect_to_stub(node: fx.Node, tensor: fx.Node, stub_node: fx.Node) -> None:
    """Make a node read the stub instead of the tensor, or instead of another stub on the tensor."""
    for source in list(node.all_input_nodes):
        origin = source
        while get_kind(origin) == "quant" and isinstance(origin.args[0], fx.Node):
            origin = origin.args[0]
        if origin is tensor and source is not stub_node:
            node.replace_input_with(source, stub_node)


def _get_stub(model: fx.GraphModule, stub_node: fx.Node) -> QuantStub:
    module = model.get_submodule(str(stub_node.target))
    assert isinstance(module, QuantStub)  # noqa: S101  # inserted by this module
    return module


def _find_stub_before_moves(
    stub_nodes: StubNodes, tensor: fx.Node, spec: QuantizationSpec, same_scale_kinds: frozenset[str]
) -> str | None:
    """Return the name of a stub in front of the operations that moved the tensor: it has the same parameters."""
    while get_kind(tensor) in same_scale_kinds and tensor.all_input_nodes:
        tensor = tensor.all_input_nodes[0]
        if get_kind(tensor) == "quant":
            tensor = tensor.all_input_nodes[0]
        if (tensor, spec) in stub_nodes:
            return str(stub_nodes[tensor, spec].target)
    return None


def _create_stub(tree: ModuleTree, tensor: fx.Node, spec: QuantizationSpec) -> str:
    """Add a stub named after the tensor to the model; return its path."""
    stub = QuantStub([], spec=spec)
    tensor_name = str(tensor.target) if tensor.op in ("placeholder", "get_attr") else get_layer_name(tensor)
    stub.name = tree.add(f"{tensor_name}_quant", stub)
    return stub.name


def _insert_stub_call(model: fx.GraphModule, tensor: fx.Node, name: str) -> fx.Node:
    """Insert a call of a stub right after the tensor."""
    previous = tensor
    while previous.op == "placeholder" and previous.next.op == "placeholder":
        previous = previous.next  # placeholders must stay together at the start of the graph
    with model.graph.inserting_after(previous):
        node = model.graph.call_module(name, (tensor,))
    inherit_meta(node, tensor, kind="quant")
    return node


def _insert_weight_quantizers(decisions: Sequence[Decision]) -> None:
    """Insert a quantizer for each weight. Groups that share a weight share its quantizer."""
    quantizers: dict[tuple[int, int, QuantizationSpec], WeightFakeQuantize] = {}
    layers_of_quantizer: dict[int, list[QuantizedLayer]] = {}
    for decision in decisions:
        site, spec = decision.site, decision.weight
        if spec is None or site.role is None or isinstance(site.part, QuantizedLayer):
            continue
        norm_role = _find_foldable_norm(site)
        norm = site.fused.parts[norm_role] if norm_role else None
        key = (get_weight_key(site), id(norm), spec)
        if key not in quantizers:
            quantizers[key] = _create_weight_quantizer(site, spec)
        quantizer = quantizers[key]
        quantizer.consumers.append(site.name)
        layer = QuantizedLayer(site.fused.parts[site.role], norm, quantizer)
        layer.sharing_layers = layers_of_quantizer.setdefault(id(quantizer), [])
        layer.sharing_layers.append(layer)
        layer.computes_in_float = decision.float_saves_seconds is not None
        name = site.role if not hasattr(site.fused, site.role) else f"{site.role}_quantized"
        site.fused.add_module(name, layer)
        _replace_part(site, layer, norm_role)


def get_weight_key(site: QuantizationSite) -> int:
    """Return a number that is the same for groups with the same weight."""
    if isinstance(site.part, Operation) and site.part.is_computed:
        references = site.part.references()
        return id(next(references[name].owner for name in WEIGHTS if name in references))
    weight = getattr(site.part, "weight", None)
    return weight.data_ptr() if isinstance(weight, Tensor) and not weight.is_meta else id(site.part)


def _create_weight_quantizer(site: QuantizationSite, spec: QuantizationSpec) -> WeightFakeQuantize:
    quantizer = WeightFakeQuantize([], spec=spec, channel_axis=1 if site.kind == "conv_transpose" else 0)
    quantizer.name = f"{site.name}.weight"
    return quantizer


def _find_foldable_norm(site: QuantizationSite) -> str | None:
    """Return the role of the batch norm right after the part with the weight, if it can be folded."""
    roles = list(site.fused.parts)
    next_index = roles.index(str(site.role)) + 1
    if next_index == len(roles):
        return None
    role = roles[next_index]
    part = site.fused.parts[role]
    return role if get_part_kind(part) == "batch_norm" and can_fold_norm(part) else None


def _replace_part(site: QuantizationSite, layer: QuantizedLayer, norm_role: str | None) -> None:
    """Replace the part with the weight by the quantized layer, and remove the batch norm that is folded into it."""
    fused = site.fused
    roles = list(fused.parts)
    remaining_roles = [role for role in roles if role != norm_role]
    fused.wiring = [fused.wiring[roles.index(role)] for role in remaining_roles]
    fused.parts = {role: layer if role == site.role else fused.parts[role] for role in remaining_roles}


def _set_scale_rounding(model: fx.GraphModule, target: Target) -> None:
    """Make quantizers round their scales to types that the target's files can store."""
    for module in model.modules():
        if isinstance(module, QuantizerBase) and target.has_half_scales:
            module.round_parameters = round_scales_to_float16
        elif isinstance(module, WeightFakeQuantize) and isinstance(module.spec.granularity, PerBlockGranularity):
            dtypes = target.block_scale_dtypes
            module.round_parameters = partial(round_scales_to, dtypes=dtypes) if dtypes else None


def _connect_input_stubs(model: fx.GraphModule, decisions: Sequence[Decision]) -> None:
    """Give each quantized layer the stub on its input: its int32 bias has the scale s_x * s_w."""
    for decision in decisions:
        layer, source = decision.site.part, next(iter(decision.site.node.args), None)
        if not isinstance(layer, QuantizedLayer) or layer.computes_in_float:
            continue
        if not isinstance(source, fx.Node) or get_kind(source) != "quant":
            continue
        stub = _get_stub(model, source)
        is_dynamic = stub.calculator.always_called and not stub.is_learned
        if not is_dynamic:  # a dynamic quantizer has no scale before the call
            layer.module_refs["input"] = stub
