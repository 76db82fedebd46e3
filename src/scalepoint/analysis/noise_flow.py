"""How noise flows through a quantized model: what each node adds, and how much of what reaches it it hands on.

noise(n)   = sum |q(x') - f(x)|^2               x the inputs in float, x' in the running quantized model,
own(n)     = sum |q(x') - f(x')|^2              f the node without its quantizers and q with them
gain(n)    = sum |f(x') - f(x)|^2 / sum_i noise(i), i the nodes it reads
weight(n)  = sum_r gain(r) weight(r), r the nodes that read it; 1 / sum y^2 at an output y
"""

from dataclasses import dataclass, field

from torch import fx, nn

from scalepoint import distributed
from scalepoint.analysis.layers import get_quantizers
from scalepoint.analysis.paired_runner import FloatAndQuantizedRunner
from scalepoint.analysis.statistics import energy, error_energy, float_tensors
from scalepoint.quantize.feeding import Data, feed_data
from scalepoint.quantize.shadow_models import wrap_with_signature


@dataclass
class NoiseFlow:
    """Sums of squares at each node of the lockstep."""

    graph: fx.Graph
    noise: dict[fx.Node, float] = field(default_factory=dict)
    own: dict[fx.Node, float] = field(default_factory=dict)
    carried: dict[fx.Node, float] = field(default_factory=dict)
    signal: dict[fx.Node, float] = field(default_factory=dict)  # of the outputs
    quantizing: dict[fx.Node, bool] = field(default_factory=dict)

    def __call__(self, node: fx.Node, steps: FloatAndQuantizedRunner) -> None:
        if node.op == "output":
            for each in node.all_input_nodes:
                _add_to(self.signal, each, sum(map(energy, float_tensors(steps.exact[each]))))
            return
        exact, noisy = steps.exact[node], steps.noisy[node]
        _add_to(self.noise, node, error_energy(exact, noisy))
        if node not in self.quantizing:
            module = steps.live.get_submodule(str(node.target)) if node.op == "call_module" else nn.Identity()
            self.quantizing[node] = any(each.enabled for each in get_quantizers(module))
        if self.quantizing[node]:
            carried = steps.carried(node)
            _add_to(self.own, node, error_energy(carried, noisy))
            _add_to(self.carried, node, error_energy(exact, carried))

    def merge(self) -> None:
        """Take in the sums of the other ranks."""
        sums = (self.noise, self.own, self.carried, self.signal)
        own = [{node.name: value for node, value in each.items()} for each in sums]
        parts = distributed.gather_values("merging sums", own)
        nodes = {node.name: node for node in self.graph.nodes}
        for index, each in enumerate(sums):
            each.clear()
            for part in parts:
                for name, value in part[index].items():
                    _add_to(each, nodes[name], value)

    def weights(self, graph: fx.Graph) -> dict[fx.Node, float]:
        """How much noise at a node ends up in the outputs, as noise to signal."""
        weights = dict.fromkeys(graph.nodes, 0.0)
        for node, signal in self.signal.items():
            weights[node] += 1 / signal if signal else 0.0
        for node in reversed(graph.nodes):
            if node.op == "output" or not weights[node]:
                continue
            gain = self.gain(node)
            if gain:
                for each in node.all_input_nodes:
                    weights[each] += gain * weights[node]
        return weights

    def gain(self, node: fx.Node) -> float:
        """How much of the noise that reaches a node it hands on."""
        coming = sum(self.noise[each] for each in node.all_input_nodes)
        return self.carried.get(node, self.noise[node]) / coming if coming else 0.0


def _add_to(sums: dict[fx.Node, float], node: fx.Node, value: float) -> None:
    sums[node] = sums.get(node, 0.0) + value


def measure_noise_flow(
    quantized: fx.GraphModule, data: Data, *, max_batches: int | None = None, progress: bool | None = None
) -> NoiseFlow:
    """One pass of the data."""
    flow = NoiseFlow(quantized.graph)
    run = wrap_with_signature(quantized, FloatAndQuantizedRunner(quantized, flow))
    feed_data(run, data, "finding sensitive layers", max_batches=max_batches, progress=progress, merge=flow.merge)
    return flow
