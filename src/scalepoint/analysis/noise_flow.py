"""How noise flows through a quantized model: what each node adds, and how much of its inputs' noise it passes on.

noise(n)   = sum |q(x') - f(x)|^2               x the float inputs, x' those in the quantized model,
own(n)     = sum |q(x') - f(x')|^2              f the node without its quantizers, q with them
gain(n)    = sum |f(x') - f(x)|^2 / sum_i noise(i), i the nodes it reads
weight(n)  = sum_r gain(r) weight(r), r the nodes that read it; 1 / sum y^2 at an output y
"""

from dataclasses import dataclass, field

from torch import fx, nn

from scalepoint import distributed
from scalepoint.analysis.layers import get_quantizers
from scalepoint.analysis.paired_runner import FloatAndQuantizedRunner
from scalepoint.analysis.statistics import energy, error_energy, float_tensors
from scalepoint.quantize.batches import Data
from scalepoint.quantize.feeding import feed_data
from scalepoint.quantize.shadow_models import wrap_with_signature


@dataclass
class NoiseFlow:
    """Sums of squares at each node; the `visit` function of a FloatAndQuantizedRunner.

    Attributes:
        graph: The graph.
        noise: noise(n) of the formula above.
        own_noise: own(n), of nodes with quantizers.
        passed_noise: sum |f(x') - f(x)|^2, of nodes with quantizers; for other nodes it is their noise.
        signal: sum y^2 of the outputs.
        has_quantizers: Whether a node has active quantizers.
    """

    graph: fx.Graph
    noise: dict[fx.Node, float] = field(default_factory=dict)
    own_noise: dict[fx.Node, float] = field(default_factory=dict)
    passed_noise: dict[fx.Node, float] = field(default_factory=dict)
    signal: dict[fx.Node, float] = field(default_factory=dict)
    has_quantizers: dict[fx.Node, bool] = field(default_factory=dict)

    def __call__(self, node: fx.Node, runner: FloatAndQuantizedRunner) -> None:
        if node.op == "output":
            for source in node.all_input_nodes:
                _add_to(self.signal, source, sum(map(energy, float_tensors(runner.exact[source]))))
            return
        exact, noisy = runner.exact[node], runner.noisy[node]
        _add_to(self.noise, node, error_energy(exact, noisy))
        if node not in self.has_quantizers:
            is_module = node.op == "call_module"
            module = runner.quantized_model.get_submodule(str(node.target)) if is_module else nn.Identity()
            self.has_quantizers[node] = any(quantizer.enabled for quantizer in get_quantizers(module))
        if self.has_quantizers[node]:
            passed = runner.run_without_own_quantizers(node)
            _add_to(self.own_noise, node, error_energy(passed, noisy))
            _add_to(self.passed_noise, node, error_energy(exact, passed))

    def merge(self) -> None:
        """Add the sums of the other ranks."""
        sums = (self.noise, self.own_noise, self.passed_noise, self.signal)
        by_name = [{node.name: value for node, value in sums_of_nodes.items()} for sums_of_nodes in sums]
        parts = distributed.gather_values("merging sums", by_name)
        nodes = {node.name: node for node in self.graph.nodes}
        for index, sums_of_nodes in enumerate(sums):
            sums_of_nodes.clear()
            for part in parts:
                for name, value in part[index].items():
                    _add_to(sums_of_nodes, nodes[name], value)

    def weights(self, graph: fx.Graph) -> dict[fx.Node, float]:
        """Return weight(n) of each node: how much of its noise reaches the outputs, as noise to signal."""
        weights = dict.fromkeys(graph.nodes, 0.0)
        for node, signal in self.signal.items():
            weights[node] += 1 / signal if signal else 0.0
        for node in reversed(graph.nodes):
            if node.op == "output" or not weights[node]:
                continue
            gain = self.gain(node)
            if gain:
                for source in node.all_input_nodes:
                    weights[source] += gain * weights[node]
        return weights

    def gain(self, node: fx.Node) -> float:
        """Return how much of the noise of its inputs a node passes on."""
        input_noise = sum(self.noise[source] for source in node.all_input_nodes)
        return self.passed_noise.get(node, self.noise[node]) / input_noise if input_noise else 0.0


def _add_to(sums: dict[fx.Node, float], node: fx.Node, value: float) -> None:
    sums[node] = sums.get(node, 0.0) + value


def measure_noise_flow(
    quantized: fx.GraphModule, data: Data, *, max_batches: int | None = None, progress: bool | None = None
) -> NoiseFlow:
    """Measure the noise flow in one pass over the data."""
    flow = NoiseFlow(quantized.graph)
    run = wrap_with_signature(quantized, FloatAndQuantizedRunner(quantized, flow))
    feed_data(run, data, "finding sensitive layers", max_batches=max_batches, progress=progress, merge=flow.merge)
    return flow
