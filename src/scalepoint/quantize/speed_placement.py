"""Leaves layers in float where int8 would make them slower.

    minimize  seconds of every layer (float or int8)  +  seconds of every conversion between float and int8 neighbours

Two choices per layer and a cost for each pair of different neighbours: a minimum cut gives the exact optimum. A layer's
seconds are those measured on this machine (`LocalTimes`); if it was never measured here, they are predicted from the
target's shipped table, for the shapes of the example inputs. CPUs with the same instruction set differ, so a target may
have several tables; the result is not slower than float on any of them. A layer without a time stays as requested.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from math import inf, prod

from torch import fx

from scalepoint.graph import Operation
from scalepoint.graph.kinds import ACTIVATIONS
from scalepoint.operation_coverage import OperationState
from scalepoint.patterns import Point, get_kind
from scalepoint.quantize.config import QuantConfig
from scalepoint.quantize.macs import count_output_positions, get_example_share, get_shape
from scalepoint.quantize.operations import get_part_kind, get_weight_shape
from scalepoint.quantize.placement import Decision, PlacementContext, make_stored_weight_spec
from scalepoint.targets import Target
from scalepoint.targets.kernel_times import KernelTimes, ProductShape, load_kernel_times
from scalepoint.targets.local_times import LocalTimes

MIN_NETWORK_SECONDS = 15e-6  # networks that take less are not faster in int8: each call costs as much as the products
MIN_GAIN = 0.03  # share of the predicted time; predictions are not more accurate than that
MIN_MEASURED_GAIN = 0.01  # the same for measured times
MIN_SECONDS = 1e-12  # capacities below this count as used up
RELATIVE_TOLERANCE = 1e-6
DEQUANTIZE_SECONDS_PER_WEIGHT = 2e-9  # per run, where a runtime computes in float from stored codes
LAYOUT_PASSES = 2.0  # integer convolutions want channels last, float ones blocked channels: a conversion may reorder
CALL_SECONDS = 1e-6  # of the smallest operation
FASTER = "faster in float, by the times of such kernels"
MEASURED_FASTER = "faster in float, as measured on this machine"
TOO_SMALL = "the network is so small that calling int8 kernels costs more than they gain"
NEIGHBOURS_FASTER = (
    "its neighbours are faster in float, and converting to int8 and back would cost more than int8 gains here"
)

# A smaller weight stays float: the DequantizeLinear node of stored codes needs more bytes than the codes save.
MIN_STORED_WEIGHTS = 256

INT8_SIDE = 0  # source of the cut
FLOAT_SIDE = 1  # sink of the cut


def leave_slow_layers_float(context: PlacementContext, decisions: Sequence[Decision]) -> Sequence[Decision]:
    """Turn decisions to float where a gain is measured or predicted, conversions included.

    If the target dequantizes stored weights when it loads a file, the weight of such a layer is stored as int8 all the
    same: the file stays small and runs no slower than float.
    """
    model, config, target, local = context.model, context.config, context.target, context.local_times
    is_known = bool(target and target.kernel_tables) or bool(local.layers) or local.float_layers is not None
    if target is None or not config.speed_first or not is_known:
        return decisions
    share = get_example_share(model)
    # A target without tables has a table without rows: only layers that were measured here have a time.
    tables = [load_kernel_times(name) for name in target.kernel_tables] or [KernelTimes([])]
    sources = [LayerTimes(table, local, share) for table in tables]

    # From here on layers are identified by their index in `decisions`.
    # Weights of fewer than 8 bits were requested to make the file small, not fast.
    must_quantize = {i for i, d in enumerate(decisions) if d.weight is not None and d.weight.n_bits < 8}
    for times in sources:
        must_quantize |= _build_problem(model, decisions, times, target).without_time
    cpus = [CpuModel(model, decisions, times, target, must_quantize) for times in sources]
    if local.float_layers is not None:
        names = set(local.float_layers)
        fastest = [i for i in cpus[0].layers if decisions[i].site.name in names and i not in must_quantize]
        return _make_float(decisions, fastest, cpus, context, target)

    is_measured = all(local.get(layer_key(decisions[i], share)) is not None for i in cpus[0].layers)
    is_too_small = not is_measured and 0 < max(cpu.all_float_seconds for cpu in cpus) < MIN_NETWORK_SECONDS
    if is_too_small:
        float_layers = [i for i in cpus[0].layers if i not in must_quantize]
    else:
        float_layers = _choose_float_layers(cpus, must_quantize)
    if len(float_layers) == len(cpus[0].layers) and not (target.dequantizes_weights_on_load or is_measured):
        # A prediction may be wrong: quantize the largest weight all the same, so that the file is smaller than float.
        largest = max(float_layers, key=lambda i: _count_weights(decisions[i]), default=None)
        must_quantize |= set() if largest is None else {largest}
        float_layers = _choose_float_layers(
            [CpuModel(model, decisions, times, target, must_quantize) for times in sources], must_quantize
        )
    best_gain = max(_predict_gain(cpu, float_layers) for cpu in cpus)
    if best_gain < (MIN_MEASURED_GAIN if is_measured else MIN_GAIN) and not is_too_small:
        return decisions
    return _make_float(decisions, float_layers, cpus, context, target, TOO_SMALL if is_too_small else FASTER)


def _make_float(
    decisions: Sequence[Decision],
    float_layers: Sequence[int],
    cpus: Sequence["CpuModel"],
    context: PlacementContext,
    target: Target,
    predicted_reason: str = MEASURED_FASTER,
) -> Sequence[Decision]:
    """Return the decisions with these layers in float. Layers without a measured time get `predicted_reason`."""
    share = get_example_share(context.model)
    result = list(decisions)
    for i in float_layers:
        seconds = [cpu.layer_seconds[i] for cpu in cpus]
        is_local = context.local_times.get(layer_key(decisions[i], share)) is not None
        reason = MEASURED_FASTER if is_local else predicted_reason
        result[i] = _make_float_decision(decisions[i], seconds, reason, context.config, target)
    return result


def layer_key(decision: Decision, share: float) -> str | None:
    """Return a text that names all that the time of a layer depends on; None if a shape is not known.

    Example: "conv+relu 1x64x56x56 * 64x64x3x3 -> 1x64x56x56".
    """
    site = decision.site
    shapes = [get_shape(tensor) for _, tensor in site.operands]
    output = get_shape(site.node)
    if output is None or not shapes or any(shape is None for shape in shapes):
        return None
    kinds = "+".join(kind for kind in map(get_part_kind, site.fused.parts.values()) if kind != "batch_norm")
    weight = [get_weight_shape(site.part)] if site.role else []
    operands = " * ".join("x".join(map(str, shape)) for shape in [*shapes, *weight] if shape is not None)
    # Capture records an example of one sample as two: its shapes are those of two, its times those of one.
    samples = "" if share == 1 else f" @ {share:g}"
    return f"{kinds} {operands} -> {'x'.join(map(str, output))}{samples}"


def list_layer_keys(model: fx.GraphModule, decisions: Sequence[Decision]) -> dict[str, str]:
    """Return the key of every layer that would run in int8, by name. Layers of unknown shape are left out."""
    share = get_example_share(model)
    keys = {decision.site.name: layer_key(decision, share) for decision in decisions if _is_quantized(decision)}
    return {name: key for name, key in keys.items() if key is not None}


def _is_quantized(decision: Decision) -> bool:
    return decision.state == OperationState.QUANTIZED and bool(decision.points)


def _predict_gain(cpu: "CpuModel", float_layers: Collection[int]) -> float:
    """Return the share of the time of the file with all layers in int8 that these float layers save."""
    all_int8_seconds = cpu.predict_seconds(())
    return 1 - cpu.predict_seconds(float_layers) / all_int8_seconds if all_int8_seconds > 0 else 0.0


def _make_float_decision(
    decision: Decision,
    seconds_per_cpu: Sequence[tuple[float, float]],
    reason: str,
    config: QuantConfig,
    target: Target,
) -> Decision:
    # The report shows the times of the CPU on which int8 loses most.
    float_seconds, int8_seconds = max(seconds_per_cpu, key=lambda seconds: seconds[1] - seconds[0])
    is_slower_in_int8 = int8_seconds > float_seconds
    stores_codes = target.dequantizes_weights_on_load and _count_weights(decision) >= MIN_STORED_WEIGHTS
    return replace(
        decision,
        weight=make_stored_weight_spec(decision.site, config, target) if stores_codes else None,
        points=(),
        state=OperationState.FLOAT,
        reason=reason if is_slower_in_int8 or reason == TOO_SMALL else NEIGHBOURS_FASTER,
        is_target_default=True,
        float_saves_seconds=int8_seconds - float_seconds,
        predicted_seconds=(float_seconds, int8_seconds) if is_slower_in_int8 else None,
    )


@dataclass(frozen=True)
class LayerTimes:
    """Times of layers on one kind of CPU: measured on this machine, else predicted from a shipped table."""

    table: KernelTimes
    local: LocalTimes
    share: float

    def seconds(self, decision: Decision) -> tuple[float, float] | None:
        """Return seconds in float and in int8; None if nothing similar was measured."""
        measured = self.local.get(layer_key(decision, self.share))
        return measured or _predict_layer_seconds(decision, self.table, self.share)

    def conversion_seconds(self, kind: str, shape: Sequence[int], passes: float = LAYOUT_PASSES) -> float:
        """Return the seconds of a conversion of a tensor; `kind` is "quantize" or "dequantize"."""
        measured = self.local.conversions.get(kind)
        if measured is not None:
            return CALL_SECONDS + measured * prod(shape) * self.share
        return self.table.move_seconds(kind, int(passes * prod(shape) * self.share))

    def activation_seconds(self, node: fx.Node) -> float:
        """Return what an activation that no kernel fuses costs more between int8 layers than between float layers.

        It computes in float, so its input is dequantized and its output quantized. Both keep the layout of int8 layers.
        """
        shape = get_shape(node)
        if shape is None:
            return 0.0
        return sum(self.conversion_seconds(kind, shape, passes=1.0) for kind in ("dequantize", "quantize"))


class CpuModel:
    """Predicted times on one kind of CPU.

    Attributes:
        layers: Indices of all layers that would be quantized.
        layer_seconds: Index -> seconds in float and in int8.
        all_float_seconds: The sum of all layers in float.
        best_seconds: Time of the fastest assignment.
        best_float_layers: The layers that are float in it.
    """

    def __init__(
        self,
        model: fx.GraphModule,
        decisions: Sequence[Decision],
        times: LayerTimes,
        target: Target,
        must_quantize: Collection[int],
    ) -> None:
        self._model, self._decisions, self._times, self._target = model, decisions, times, target
        self._must_quantize = frozenset(must_quantize)
        problem = self._build(self._must_quantize, ())
        self.layer_seconds = problem.layer_seconds
        self.layers = list(problem.layer_seconds)
        self.all_float_seconds = sum(float_seconds for float_seconds, _ in problem.layer_seconds.values())
        self.best_seconds, self.best_float_layers = problem.solve()

    def extend(self, float_layers: Collection[int]) -> list[int]:
        """Return the float layers of the fastest assignment in which all of these are float."""
        return self._build(self._must_quantize, float_layers).solve()[1]

    def predict_seconds(self, float_layers: Collection[int]) -> float:
        """Return the predicted time if exactly these layers are float."""
        int8_layers = [i for i in self.layers if i not in float_layers]
        return self._build(int8_layers, float_layers).solve()[0]

    def _build(self, must_quantize: Collection[int], must_be_float: Collection[int]) -> "CutProblem":
        return _build_problem(self._model, self._decisions, self._times, self._target, must_quantize, must_be_float)


def _choose_float_layers(cpus: Sequence[CpuModel], must_quantize: Collection[int]) -> list[int]:
    """Choose one assignment for all CPUs: not slower than all-float on any of them, and close to the best of each.

    Candidates: the best of each CPU, no float layer, as many float layers as allowed, and the union of the bests,
    extended until no CPU wants further float layers next to those.
    """
    layers = cpus[0].layers
    union = _in_graph_order(layers, [cpu.best_float_layers for cpu in cpus])
    while len(larger := _in_graph_order(layers, [cpu.extend(union) for cpu in cpus])) > len(union):
        union = larger
    all_allowed = [i for i in layers if i not in must_quantize]
    candidates = [*(cpu.best_float_layers for cpu in cpus), union, [], all_allowed]
    best_seconds = [max(cpu.best_seconds, MIN_SECONDS) for cpu in cpus]
    all_float_seconds = [cpu.predict_seconds(all_allowed) for cpu in cpus]

    def cost(float_layers: Sequence[int]) -> tuple[bool, float, int]:
        seconds = [cpu.predict_seconds(float_layers) for cpu in cpus]
        is_slower_than_float = any(
            time > limit * (1 + RELATIVE_TOLERANCE) for time, limit in zip(seconds, all_float_seconds, strict=True)
        )
        worst_ratio = max(time / best for time, best in zip(seconds, best_seconds, strict=True))
        return is_slower_than_float, worst_ratio, len(float_layers)

    return min(candidates, key=cost)


def _in_graph_order(layers: Sequence[int], groups: Sequence[Collection[int]]) -> list[int]:
    """Return the union of the groups, in graph order."""
    union = {i for group in groups for i in group}
    return [i for i in layers if i in union]


def _count_weights(decision: Decision) -> int:
    return prod(get_weight_shape(decision.site.part)) if decision.site.role else 0


@dataclass
class MinCut:
    """A directed graph with capacities, solved by augmenting shortest paths (Edmonds-Karp).

    Node 0 is the source (int8), node 1 the sink (float). Graphs have a few hundred nodes.
    """

    capacities: list[dict[int, float]] = field(default_factory=lambda: [{}, {}])

    def add_node(self) -> int:
        self.capacities.append({})
        return len(self.capacities) - 1

    def add_edge(self, start: int, end: int, seconds: float) -> None:
        """Add a cost that is paid if `start` is int8 and `end` is float."""
        if start != end and seconds > 0:
            self.capacities[start][end] = self.capacities[start].get(end, 0.0) + seconds
            self.capacities[end].setdefault(start, 0.0)

    def solve(self) -> tuple[float, set[int]]:
        """Consume the graph; return the cost of the cut and the nodes on the float side.

        Of several minimum cuts, the one with the smallest float side is returned.
        """
        total = 0.0
        while (path := self._find_augmenting_path()) is not None:
            flow = min(self.capacities[start][end] for start, end in path)
            total += flow
            for start, end in path:
                self.capacities[start][end] -= flow
                self.capacities[end][start] += flow
        return total, self._find_nodes_reaching_float()

    def _find_augmenting_path(self) -> list[tuple[int, int]] | None:
        """Return the edges of a shortest path with free capacity from int8 to float, last edge first."""
        previous = {INT8_SIDE: INT8_SIDE}
        queue = deque([INT8_SIDE])
        while queue and FLOAT_SIDE not in previous:
            node = queue.popleft()
            for end, capacity in self.capacities[node].items():
                if capacity > MIN_SECONDS and end not in previous:
                    previous[end] = node
                    queue.append(end)
        if FLOAT_SIDE not in previous:
            return None
        path, node = [], FLOAT_SIDE
        while node != INT8_SIDE:
            path.append((previous[node], node))
            node = previous[node]
        return path

    def _find_nodes_reaching_float(self) -> set[int]:
        reached, stack = {FLOAT_SIDE}, [FLOAT_SIDE]
        while stack:
            end = stack.pop()
            for node in self.capacities[end]:
                if node not in reached and self.capacities[node][end] > MIN_SECONDS:
                    reached.add(node)
                    stack.append(node)
        return reached


@dataclass
class CutProblem:
    """The network as a minimum cut for one CPU.

    Attributes:
        cut: The graph.
        cut_nodes: Layer index -> its node in the cut.
        layer_seconds: Layer index -> seconds in float and in int8.
        without_time: Layers without a predicted time.
    """

    cut: MinCut = field(default_factory=MinCut)
    cut_nodes: dict[int, int] = field(default_factory=dict)
    layer_seconds: dict[int, tuple[float, float]] = field(default_factory=dict)
    without_time: set[int] = field(default_factory=set)

    def solve(self) -> tuple[float, list[int]]:
        """Return the smallest predicted time, and the layers that are float for it."""
        seconds, float_side = self.cut.solve()
        return seconds, [i for i, node in self.cut_nodes.items() if node in float_side]


def _build_problem(
    model: fx.GraphModule,
    decisions: Sequence[Decision],
    times: LayerTimes,
    target: Target,
    must_quantize: Collection[int] = (),
    must_be_float: Collection[int] = (),
) -> CutProblem:
    problem = CutProblem()
    cut = problem.cut
    must_quantize, must_be_float = frozenset(must_quantize), frozenset(must_be_float)
    written_by: dict[fx.Node, int] = {}  # tensor -> the cut node that decides its side; a missing tensor is float
    read_by: dict[fx.Node, int] = {}  # reader -> its cut node; a missing reader reads float
    relu_costs: list[tuple[fx.Node, fx.Node, float]] = []  # producer, reader, seconds

    for i, decision in enumerate(decisions):
        if not _is_quantized(decision):
            continue
        site = decision.site
        seconds = times.seconds(decision)
        if seconds is None:
            problem.without_time.add(i)
        float_seconds, int8_seconds = seconds or (0.0, 0.0)
        node = cut.add_node()
        problem.cut_nodes[i] = read_by[site.node] = node
        problem.layer_seconds[i] = (float_seconds, int8_seconds)
        # An infinite capacity fixes a layer to one side.
        cut.add_edge(INT8_SIDE, node, inf if seconds is None or i in must_quantize else float_seconds)
        cut.add_edge(node, FLOAT_SIDE, inf if i in must_be_float else int8_seconds)
        if any(point == Point.OUTPUT for point, _, _ in decision.points):
            written_by[site.node] = node
        elif "relu" in map(get_part_kind, site.fused.parts.values()):
            # ONNX Runtime fuses a ReLU whose output is not quantized into a float kernel: with a float reader it
            # computes this product in float, and dequantizes the stored weight on every run.
            cost = prod(get_weight_shape(site.part)) * DEQUANTIZE_SECONDS_PER_WEIGHT
            relu_costs += [(site.node, user, cost) for user in site.node.users]

    # Operations that only move values (reshape, max pool, ...) run on either side for free.
    for node in model.graph.nodes:
        is_move = get_kind(node) in target.same_scale_kinds and node.op != "placeholder"
        if node not in read_by and (is_move or get_kind(node) in ACTIVATIONS):
            written_by[node] = read_by[node] = cut.add_node()
            if not is_move:
                cut.add_edge(read_by[node], FLOAT_SIDE, times.activation_seconds(node))
    for producer, user, cost in relu_costs:
        cut.add_edge(read_by[producer], read_by.get(user, FLOAT_SIDE), cost)
    _add_conversions(model, cut, written_by, read_by, times.conversion_seconds)
    return problem


def _add_conversions(
    model: fx.GraphModule,
    cut: MinCut,
    written_by: dict[fx.Node, int],
    read_by: dict[fx.Node, int],
    conversion_seconds: Callable[[str, Sequence[int]], float],
) -> None:
    """Add the cost of quantizing or dequantizing each tensor whose writer and readers may be on different sides."""
    for tensor in model.graph.nodes:
        readers = [user for user in tensor.users if user.op != "output" or tensor in written_by]
        shape = get_shape(tensor)
        is_always_float = tensor not in written_by and not any(user in read_by for user in readers)
        if shape is None or not readers or is_always_float:
            continue
        writer = written_by.get(tensor, FLOAT_SIDE)
        # A node of its own for the quantized copy: it is made once, however many int8 layers read it.
        quantized_copy = cut.add_node()
        cut.add_edge(quantized_copy, writer, conversion_seconds("quantize", shape))
        for user in readers:
            reader = read_by.get(user, FLOAT_SIDE)
            cut.add_edge(reader, quantized_copy, inf if reader != FLOAT_SIDE else 0.0)
            cut.add_edge(writer, reader, conversion_seconds("dequantize", shape) if writer != FLOAT_SIDE else 0.0)


def _predict_layer_seconds(decision: Decision, table: KernelTimes, share: float) -> tuple[float, float] | None:
    """Return seconds in float and in int8; None if shapes are unknown or the table has no similar kernel."""
    site = decision.site
    input_shape = get_shape(site.operands[0][1]) if site.operands else None
    output_shape = get_shape(site.node)
    if input_shape is None or output_shape is None:
        return None
    if site.role is None:  # an add or another elementwise operation: the same time in both types
        seconds = table.move_seconds("add", int(prod(output_shape) * share))
        return seconds, seconds
    weight = get_weight_shape(site.part)
    if site.kind == "linear":
        is_input_first = isinstance(site.part, Operation) and site.part.has_transposed_weight
        inputs, outputs = weight if is_input_first else weight[::-1]
        rows = max(1, int(prod(input_shape[:-1]) * share))
        return table.product_seconds(ProductShape("linear", inputs, outputs, rows))
    if site.kind != "conv" or len(weight) < 3:
        return None
    channels = input_shape[1]
    groups = max(1, channels // weight[1])
    positions = max(1, int(count_output_positions(site.part, input_shape, weight) * share))
    spatial_rank = len(weight) - 2
    return table.product_seconds(
        ProductShape("conv", channels, weight[0], positions, max(weight[2:]), groups, spatial_rank)
    )
