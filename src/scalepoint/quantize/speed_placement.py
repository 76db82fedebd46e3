"""Does it pay? What int8 would make slower stays float: each layer has two prices, and so has every border.

    least  sum of price(layer, how) + sum of price(tensor): to quantize what is read as int8, to dequantize what is not

Two labels with prices on borders are a minimum cut: exact, in one pass over the graph. Prices are predicted from the
target's tables of measured kernels, for the shapes of the example inputs. CPUs with the same instructions differ: where
a target has tables of several, the choice is slower than float on none of them. A layer that has no price, because its
shape is not known or a table has nothing like it, stays as it was asked for.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf, prod

from torch import fx

from scalepoint.graph import Operation
from scalepoint.operation_coverage import OperationState
from scalepoint.patterns import Point, get_kind
from scalepoint.quantize.config import QuantConfig
from scalepoint.quantize.macs import count_output_positions, get_example_share, get_shape
from scalepoint.quantize.operations import get_part_kind, get_weight_shape
from scalepoint.quantize.placement import Decision, PlacementContext, make_stored_weight_spec
from scalepoint.targets import Target
from scalepoint.targets.kernel_times import KernelTimes, ProductShape, load_kernel_times

MIN_NETWORK_SECONDS = 15e-6  # seconds of all products: below, the call itself weighs more than any layer
MIN_GAIN = 0.03  # of the predicted time: less is within what a prediction can tell
INT8_SIDE, FLOAT_SIDE = 0, 1  # the two ends of the cut
MIN_SECONDS = 1e-12  # seconds
RELATIVE_TOLERANCE = 1e-6
DEQUANTIZE_SECONDS_PER_WEIGHT = 2e-9  # seconds a weight, at each run, where a runtime fuses float over stored codes
FASTER = "faster in float, by the times of such kernels"
NEIGHBOURS_FASTER = (
    "its neighbours are faster in float, and converting to int8 and back would cost more than int8 gains here"
)
LAYOUT_PASSES = 2.0  # passes over a tensor at a border: integer kernels have channels last, float ones in blocks


def leave_slow_layers_float(context: PlacementContext, decisions: Sequence[Decision]) -> Sequence[Decision]:
    """Turn decisions to float where the target's tables predict a gain, conversions included.

    Its weight is stored in int8 all the same where the target makes it float as it loads a file: no slower than float.
    """
    model, config, target = context.model, context.config, context.target
    if target is None or not config.speed_first:
        return decisions
    tables = [load_kernel_times(name) for name in target.kernel_tables]
    kept = [each for each in decisions if each.weight is not None and each.weight.n_bits < 8]  # asked for, to be small
    kept += [each for table in tables for each in _build_problem(model, decisions, table, target).unknown]
    views = [CpuModel(model, decisions, table, target, kept) for table in tables]
    if not views or max(view.all_float for view in views) < MIN_NETWORK_SECONDS:
        return decisions
    in_float = _choose_float_layers(views)
    if (
        len(in_float) == len(views[0].free) and not target.dequantizes_weights_on_load
    ):  # nothing wins: make at least one weight small
        heaviest = max(in_float, key=lambda each: prod(get_weight_shape(each.site.part)) if each.site.role else 0)
        in_float = _choose_float_layers(
            [CpuModel(model, decisions, table, target, [*kept, heaviest]) for table in tables]
        )
    if max(1 - view.seconds(in_float) / view.seconds([]) for view in views) < MIN_GAIN:
        return decisions
    replaced = {id(decision): _make_float_decision(decision, views, config, target) for decision in in_float}
    return [replaced.get(id(decision), decision) for decision in decisions]


def _make_float_decision(
    decision: Decision, views: Sequence["CpuModel"], config: QuantConfig, target: Target
) -> Decision:
    # The report shows the times of the CPU on which int8 loses most.
    times = max((view.prices[id(decision)] for view in views), key=lambda price: price[1] - price[0])
    is_slower = times[1] > times[0]
    return replace(
        decision,
        weight=make_stored_weight_spec(decision.site, config, target) if target.dequantizes_weights_on_load else None,
        points=(),
        state=OperationState.FLOAT,
        reason=FASTER if is_slower else NEIGHBOURS_FASTER,
        is_target_default=True,
        saves=times[1] - times[0],
        seconds=times if is_slower else None,
    )


class CpuModel:
    """The prices of one CPU."""

    def __init__(
        self,
        model: fx.GraphModule,
        decisions: Sequence[Decision],
        table: KernelTimes,
        target: Target,
        kept: Sequence[Decision],
    ) -> None:
        self.priced = partial(_build_problem, model, decisions, table, target)
        self.kept = kept
        first = self.priced(kept)
        self.prices, self.free = first.prices, list(first.decisions.values())
        self.all_float = sum(before for before, _ in first.prices.values())
        self.least, self.best = first.solved()

    def beside(self, left: Sequence[Decision]) -> list[Decision]:
        """What is float for the least sum when all of these are."""
        return self.priced(self.kept, left).solved()[1]

    def seconds(self, left: Sequence[Decision]) -> float:
        """The sum when these are float and nothing else."""
        held = set(map(id, left))
        return self.priced([each for each in self.free if id(each) not in held], left).solved()[0]


def _choose_float_layers(views: Sequence[CpuModel]) -> list[Decision]:
    """What is float: on no CPU slower than all in float, and nowhere much slower than the best of that CPU.

    Candidates are the best of each, none, all that may be, and what is float on any: with its neighbours, until no CPU
    wants more.
    """
    free = views[0].free
    joint = _in_graph_order(free, [view.best for view in views])
    while len(more := _in_graph_order(free, [view.beside(joint) for view in views])) > len(joint):
        joint = more
    kept = set(map(id, views[0].kept))
    every = [each for each in free if id(each) not in kept]
    candidates = [view.best for view in views] + [joint, [], every]
    floors = [max(view.least, MIN_SECONDS) for view in views]
    plain = [view.seconds(every) for view in views]

    def cost(left: Sequence[Decision]) -> tuple[bool, float, int]:
        taken = [view.seconds(left) for view in views]
        is_slower = any(own > limit * (1 + RELATIVE_TOLERANCE) for own, limit in zip(taken, plain, strict=True))
        return is_slower, max(own / floor for own, floor in zip(taken, floors, strict=True)), len(left)

    return min(candidates, key=cost)


def _in_graph_order(free: Sequence[Decision], lists: Sequence[Sequence[Decision]]) -> list[Decision]:
    """All of these, in the order of the graph."""
    named = {id(each) for each_list in lists for each in each_list}
    return [each for each in free if id(each) in named]


@dataclass
class MinCut:
    """Edges with capacities; 0 and 1 are the ends."""

    edges: list[dict[int, float]] = field(default_factory=lambda: [{}, {}])

    def node(self) -> int:
        self.edges.append({})
        return len(self.edges) - 1

    def edge(self, source: int, end: int, price: float) -> None:
        """Paid when `source` is int8 and `end` is float."""
        if source != end and price > 0:
            self.edges[source][end] = self.edges[source].get(end, 0.0) + price
            self.edges[end].setdefault(source, 0.0)

    def solve(self) -> tuple[float, set[int]]:
        """The least sum of edges that are cut, and what is float then; of equal cuts that with the least float."""
        paid = 0.0
        while True:
            before = {INT8_SIDE: INT8_SIDE}
            pending = deque([INT8_SIDE])
            while pending and FLOAT_SIDE not in before:
                node = pending.popleft()
                for end, room in self.edges[node].items():
                    if room > MIN_SECONDS and end not in before:
                        before[end] = node
                        pending.append(end)
            if FLOAT_SIDE not in before:
                return paid, self._reaching_float()
            path, node = [], FLOAT_SIDE
            while node != INT8_SIDE:
                path.append((before[node], node))
                node = before[node]
            least = min(self.edges[one][two] for one, two in path)
            paid += least
            for one, two in path:
                self.edges[one][two] -= least
                self.edges[two][one] += least

    def _reaching_float(self) -> set[int]:
        found, pending = {FLOAT_SIDE}, [FLOAT_SIDE]
        while pending:
            end = pending.pop()
            for node in self.edges[end]:
                if node not in found and self.edges[node][end] > MIN_SECONDS:
                    found.add(node)
                    pending.append(node)
        return found


@dataclass
class CutProblem:
    """The graph as a cut: a variable for each layer that may be either, and for what only moves values."""

    cut: MinCut
    variables: dict[int, int]  # id of a decision -> its node in the cut
    prices: dict[int, tuple[float, float]]  # id of a decision -> seconds in float, in int8
    decisions: dict[int, Decision]
    unknown: list[Decision] = field(default_factory=list)  # without a price

    def solved(self) -> tuple[float, list[Decision]]:
        """The least sum, and what is float then."""
        paid, in_float = self.cut.solve()
        return paid, [self.decisions[key] for key, node in self.variables.items() if node in in_float]


def _build_problem(
    model: fx.GraphModule,
    decisions: Sequence[Decision],
    table: KernelTimes,
    target: Target,
    kept: Sequence[Decision] = (),
    left: Sequence[Decision] = (),
) -> CutProblem:
    """The prices of all that is to be quantized, of which some is kept in int8, and some left in float."""
    held, unheld = set(map(id, kept)), set(map(id, left))
    cut, share = MinCut(), get_example_share(model)
    priced = CutProblem(cut, {}, {}, {})
    gives: dict[fx.Node, int] = {}  # what a tensor is on
    takes: dict[fx.Node, int] = {}
    fused: list[
        tuple[fx.Node, fx.Node, float]
    ] = []  # products whose ReLU makes them float where a float reader follows
    for decision in decisions:
        if decision.state != OperationState.QUANTIZED or not decision.points:
            continue
        known = _predict_seconds(decision, table, share)
        price = known or (0.0, 0.0)
        priced.unknown += [decision] if known is None else []
        node = priced.variables[id(decision)] = takes[decision.site.node] = cut.node()
        priced.prices[id(decision)], priced.decisions[id(decision)] = price, decision
        cut.edge(INT8_SIDE, node, inf if known is None or id(decision) in held else price[0])
        cut.edge(node, FLOAT_SIDE, inf if id(decision) in unheld else price[1])
        if any(point == Point.OUTPUT for point, _, _ in decision.points):
            gives[decision.site.node] = node
        elif "relu" in map(get_part_kind, decision.site.fused.parts.values()):
            price_of_float = prod(get_weight_shape(decision.site.part)) * DEQUANTIZE_SECONDS_PER_WEIGHT
            fused += [(decision.site.node, user, price_of_float) for user in decision.site.node.users]
    for node in model.graph.nodes:
        if get_kind(node) in target.same_scale_kinds and node not in takes and node.op != "placeholder":
            gives[node] = takes[node] = cut.node()
    for tensor, user, cost in fused:
        cut.edge(takes[tensor], takes.get(user, FLOAT_SIDE), cost)
    _add_conversions(model, cut, gives, takes, table, share)
    return priced


def _add_conversions(
    model: fx.GraphModule,
    cut: MinCut,
    gives: dict[fx.Node, int],
    takes: dict[fx.Node, int],
    table: KernelTimes,
    share: float,
) -> None:
    for tensor in model.graph.nodes:
        readers = [user for user in tensor.users if user.op != "output" or tensor in gives]
        shape = get_shape(tensor)
        if shape is None or not readers or (tensor not in gives and not any(user in takes for user in readers)):
            continue
        elements = int(LAYOUT_PASSES * prod(shape) * share)
        own = gives.get(tensor, FLOAT_SIDE)
        copy = cut.node()  # the codes of the tensor: made once for all that read them
        cut.edge(copy, own, table.move_seconds("quantize", elements))
        for user in readers:
            end = takes.get(user, FLOAT_SIDE)
            cut.edge(end, copy, inf if end != FLOAT_SIDE else 0.0)
            cut.edge(own, end, table.move_seconds("dequantize", elements) if own != FLOAT_SIDE else 0.0)


def _predict_seconds(decision: Decision, table: KernelTimes, share: float) -> tuple[float, float] | None:
    """Seconds in float and in int8; None where the shapes or kernels like it are not known."""
    site = decision.site
    source, made = get_shape(site.operands[0][1]) if site.operands else None, get_shape(site.node)
    if source is None or made is None:
        return None
    if site.role is None:
        cost = table.move_seconds("add", int(prod(made) * share))
        return cost, cost
    weight = get_weight_shape(site.part)
    if site.kind == "linear":
        turned = isinstance(site.part, Operation) and site.part.has_transposed_weight
        inputs, outputs = weight if turned else weight[::-1]
        return table.product_seconds(ProductShape("linear", inputs, outputs, max(1, int(prod(source[:-1]) * share))))
    if site.kind != "conv" or len(weight) < 3:
        return None
    groups = max(1, source[1] // weight[1])
    pixels = max(1, int(count_output_positions(site.part, source, weight) * share))
    return table.product_seconds(
        ProductShape("conv", source[1], weight[0], pixels, max(weight[2:]), groups, len(weight) - 2)
    )
