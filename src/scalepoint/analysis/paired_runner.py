"""The quantized graph run twice side by side, with and without its quantizers, node by node.

    exact[n] = f_n(exact inputs)         noisy[n] = q_n(noisy inputs)

Both values of a node are dropped when its last reader has run, so the memory is that of two forward passes. It all
happens in twins of the caller's model, which share its parameters and own their switches, modes and hooks: nothing is
to be restored.
"""

from collections.abc import Callable
from typing import Any

from torch import fx, nn

from scalepoint.quantize.shadow_models import copy_with_shared_parameters


class FloatAndQuantizedRunner(nn.Module):
    """`visit(node, self)` is called after each node, while the values of the node and of its inputs are at hand."""

    def __init__(self, model: fx.GraphModule, visit: Callable[[fx.Node, "FloatAndQuantizedRunner"], None]) -> None:
        super().__init__()
        self.plain, self.live = copy_with_shared_parameters(model, quantizing=False), copy_with_shared_parameters(model)
        self.visit = visit
        self._exact, self._noisy, self._carried = (
            fx.Interpreter(module, graph=model.graph) for module in (self.plain, self.live, self.plain)
        )

    @property
    def exact(self) -> dict[fx.Node, Any]:
        """The values without quantizers."""
        return self._exact.env

    @property
    def noisy(self) -> dict[fx.Node, Any]:
        """The values in the running quantized model."""
        return self._noisy.env

    def carried(self, node: fx.Node) -> Any:
        """What the node gives for the noisy inputs when its own quantizers are off."""
        self._carried.env = self._noisy.env
        return self._carried.run_node(node)

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
                for done in runner.user_to_last_uses.get(node, []):
                    del runner.env[done]
        for runner in (*runners, self._carried):
            runner.env = {}
        return result
