"""How the time to transform grows with the graph, and what memory capture takes beside the model's.

Time: CPU time per node at 1,000 and at 10,000 nodes, one thread.
The graph is a chain of conv + BN + ReLU blocks with residuals, recorded without example inputs, because torch.export
alone takes minutes at this size. Timed: conversions, matching and fusing. Runs of both sizes alternate; medians.
Memory: how far the process grows at its peak, in units of the parameters, on linear layers of 420 MB.
`python bench/graph.py [--quick]` prints the table and writes out/bench-graph.json.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, fx, nn

from measure import Row, peak_extra_bytes, report
from scalepoint.graph import capture
from scalepoint.patterns import BASE_PATTERNS
from scalepoint.patterns.conversions import convert
from scalepoint.patterns.plan import make_plan
from scalepoint.transformation import apply_transformation_plan

SMALL, LARGE = 1_000, 10_000
NODES_A_BLOCK = 7


class Block(nn.Module):
    """Seven nodes, two groups: conv + BN + ReLU, and conv + BN + add + ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 1, 1, bias=False), nn.BatchNorm2d(1)
        self.conv2, self.bn2 = nn.Conv2d(1, 1, 1, bias=False), nn.BatchNorm2d(1)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(y)) + x)


def chain_of(nodes: int) -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(nodes // NODES_A_BLOCK))).eval()


def transform_graph(graph: fx.GraphModule) -> int:
    """What transform does after capture; gives the number of groups."""
    convert(graph)
    return len(apply_transformation_plan(make_plan(graph, BASE_PATTERNS)).matches)


def plan_only(graph: fx.GraphModule) -> int:
    return len(make_plan(graph, BASE_PATTERNS).matches)


def seconds_per_node(work: Callable[[fx.GraphModule], int], models: dict[int, nn.Module], repeats: int) -> list[float]:
    """Median CPU seconds a node, for each size; every run has a fresh graph over the same modules."""
    taken: dict[int, list[float]] = {size: [] for size in models}
    for _ in range(repeats):
        for size, model in models.items():
            graph = capture(model, None, copy=False)
            count = len(graph.graph.nodes)
            gc.collect()
            gc.disable()
            start = time.process_time()
            groups = work(graph)
            taken[size].append((time.process_time() - start) / count)
            gc.enable()
            assert groups == 2 * (size // NODES_A_BLOCK), f"{groups} groups of {count} nodes"
    return [statistics.median(times) for times in taken.values()]


def linear_rows(small: int, large: int, repeats: int) -> list[Row]:
    models = {size: chain_of(size) for size in (small, large)}
    works: dict[str, Callable[[fx.GraphModule], int]] = {
        "transform": transform_graph,
        "plan": plan_only,
    }
    rows = []
    for name, work in works.items():
        few, many = seconds_per_node(work, models, repeats)
        note = f"{few * 1e6:.0f} and {many * 1e6:.0f} us a node, {many * large:.1f} s in all"
        rows.append(Row(f"{name}: time per node at {large:,} nodes", many / few, 1.5, f"{small:,} nodes", note))
    return rows


class Wide(nn.Module):
    """Linear layers that are nearly all of the memory; one that writes through a view is made functional by torch."""

    def __init__(self, layers: int, is_writing: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(layers)))
        self.is_writing = is_writing

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        if self.is_writing:
            x[:, 0].relu_()
        return x


def memory_rows(layers: int) -> list[Row]:
    capture(Wide(1, is_writing=True), torch.randn(1, 2048))  # what torch loads at the first export
    rows = []
    for name, is_writing in (("", False), (", a model that writes through views", True)):
        model = Wide(layers, is_writing).eval()
        size = sum(value.numel() * value.element_size() for value in model.parameters())
        for how, copy, limit in (("copies", True, 1.2), ("shares", False, 0.2)):
            peak = peak_extra_bytes(lambda model=model, copy=copy: capture(model, torch.randn(1, 2048), copy=copy))
            rows.append(Row(f"peak memory, capture that {how}{name}", peak / size, limit, "the model's parameters"))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller graphs and fewer repeats: to see that it runs")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    rows = memory_rows(5 if quick else 25)
    rows += linear_rows(350, 1_400, 1) if quick else linear_rows(SMALL, LARGE, 5)
    title = f"capture and transform, 1 thread, torch {torch.__version__}"
    return 0 if report(title, rows, Path("out/bench-graph.json")) else 1


if __name__ == "__main__":
    sys.exit(main())
