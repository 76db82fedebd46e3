"""Runs a quantized graph twice, with and without its quantizers, node by node.

    exact[n] = f_n(exact inputs)         noisy[n] = q_n(noisy inputs)

Both values of a node are dropped after its last reader, so the memory is that of two forward passes. It runs on copies
of the caller's model, which share its parameters and have their own switches, modes and hooks.
"""

from collections.abc import Callable
from typing import Any

from torch import fx, nn

from scalepoint.quantize.shadow_models import copy_with_shared_parameters


class FloatAndQuantizedRunner(nn.Module):
    """Calls `visit(node, self)` after each node, while the values of the node and of its inputs are stored.

    Attributes:
        float_model, quantized_model: The copies.
    """

    def __init__(self, model: fx.GraphModule, visit: Callable[[fx.Node, "FloatAndQuantizedRunner"], None]) -> None:
        super().__init__()
        self.float_model = copy_with_shared_parameters(model, quantizing=False)
        self.quantized_model = copy_with_shared_parameters(model)
        self.visit = visit
        self._exact = fx.Interpreter(self.float_model, graph=model.graph)
        self._noisy = fx.Interpreter(self.quantized_model, graph=model.graph)
        self._propagated = fx.Interpreter(self.float_model, graph=model.graph)

    @property
    def exact(self) -> dict[fx.Node, Any]:
        """The values without quantizers."""
        return self._exact.env

    @property
    def noisy(self) -> dict[fx.Node, Any]:
        """The values with quantizers."""
        return self._noisy.env

    def run_without_own_quantizers(self, node: fx.Node) -> Any:
        """Return the value of a node for the noisy inputs if its own quantizers are off."""
        self._propagated.env = self._noisy.env
        return self._propagated.run_node(node)

    def forward(self, *inputs: Any) -> Any:
        runners = (self._exact, self._noisy)
        for runner in runners:
            runner.env, runner.args_iter = {}, iter(inputs)
        for node in self._exact.graph.nodes:
            for runner in runners:
                runner.env[node] = runner.run_node(node)
            self.visit(node, self)
            result = self._noisy.env[node]
            for runner in runners:
                for source in runner.user_to_last_uses.get(node, []):
                    del runner.env[source]
        for runner in (*runners, self._propagated):
            runner.env = {}
        return result
