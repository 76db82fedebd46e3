"""The residual add that a layer feeds: how its other operand changes the targets of the layer, and the row weights.

    sum = y + r          y: the output of the layer, r: the other operand
    target of y = W x + d,     d = r - r~        r in the float stream minus r in the quantized stream

d lets the layer correct what the quantized stream already lacks. It is zero if r is not computed yet, or is the same in
both streams. If a norm reads the sum, rows are weighted by the size of the sum (see row_weights.py).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, fx

from scalepoint.graph import Operation
from scalepoint.tuning.grouped_layer import GroupedLayer
from scalepoint.tuning.row_weights import feeds_norm, row_weights
from scalepoint.tuning.walk import LayerUse, StreamWalk


@dataclass(frozen=True)
class AddedOperand:
    """The other operand of the add, for all rows of a batch.

    Attributes:
        drift: d; None for zero.
        value: Its float value, if a norm reads the sum.
    """

    drift: Tensor | None = None
    value: Tensor | None = None

    def adjust_targets(self, targets: Tensor, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the targets of these rows with the drift added, and the weights of the rows."""
        weights = None if self.value is None else row_weights((targets + self.value[rows]).flatten(1)).view(-1)
        return (targets if self.drift is None else targets + self.drift[rows]), weights


def read_added_operand(
    walk: StreamWalk, use: LayerUse, grouped: GroupedLayer, index: int, count: int, *, has_drift: bool
) -> AddedOperand:
    """Read the other operand of the add in one batch; without such an add the result is empty.

    Args:
        walk: The two streams.
        use: The layer.
        grouped: The layer in groups.
        index: Number of the batch.
        count: Number of rows of the layer in this batch.
        has_drift: Whether the targets correct the drift.
    """
    drift = value = None
    changed_node = find_changed_operand(walk, use) if has_drift else None
    if changed_node is not None:
        exact = walk.get_value(changed_node, index, noisy=False)
        noisy = walk.get_value(changed_node, index, noisy=True)
        if isinstance(exact, Tensor) and noisy.shape == exact.shape:
            drift = grouped.output_rows(exact - noisy, count)
    normed_node = find_normed_operand(walk, use)
    if normed_node is not None:
        value = grouped.output_rows(walk.get_value(normed_node, index, noisy=False), count)
        _, bias = use.layer.fold_norm()
        if value is not None and bias is not None:  # targets have no bias, but the sum that the norm reads has one
            value = value + bias.detach().reshape(value.shape[1:])
    return AddedOperand(drift, value)


def depends_on_add(walk: StreamWalk, use: LayerUse) -> bool:
    """Whether the targets or the row weights of a layer depend on the other operand of an add."""
    return find_changed_operand(walk, use) is not None or find_normed_operand(walk, use) is not None


def find_changed_operand(walk: StreamWalk, use: LayerUse) -> fx.Node | None:
    """Return the other operand if it has a value that differs between the streams."""
    add = _find_add(walk, use)
    if add is None or add.operand in walk.same_nodes or not walk.has_value(add.operand):
        return None
    return add.operand


def find_normed_operand(walk: StreamWalk, use: LayerUse) -> fx.Node | None:
    """Return the other operand if it has a value and a norm reads the sum."""
    add = _find_add(walk, use)
    if add is None or not walk.has_value(add.operand) or not feeds_norm(walk, add.sum):
        return None
    return add.operand


class _Add(NamedTuple):
    """An add that a layer feeds: the node of its other operand, and the node whose value is the sum."""

    operand: fx.Node
    sum: fx.Node


def _find_add(walk: StreamWalk, use: LayerUse) -> _Add | None:
    return _find_add_in_group(walk, use) or _find_add_after(walk, use.node)


def _find_add_in_group(walk: StreamWalk, use: LayerUse) -> _Add | None:
    """Return an add that is fused with the layer."""
    parts, inputs = walk.get_parts(use.node), use.node.args
    if len(parts) < 2 or parts[0] is not use.layer or not _is_add(parts[1]) or len(inputs) != 2:
        return None
    return _Add(inputs[1], use.node) if isinstance(inputs[1], fx.Node) else None


def _find_add_after(walk: StreamWalk, node: fx.Node) -> _Add | None:
    """Return an add that alone reads the node, directly or behind an activation quantizer."""
    if len(walk.get_parts(node)) != 1 or len(node.users) != 1:
        return None
    user = next(iter(node.users))
    if walk.get_stub(user) is not None:  # the layer's output is quantized before it is added
        node = user
        if len(node.users) != 1:
            return None
        user = next(iter(node.users))
    first_part = next(iter(walk.get_parts(user)), None) or walk.get_module(user)
    operands = [operand for operand in user.args if isinstance(operand, fx.Node)]
    if not _is_add(first_part) or len(operands) != 2 or len(user.all_input_nodes) != 2 or node not in operands:
        return None
    return _Add(next(operand for operand in operands if operand is not node), user)


def _is_add(part: Any) -> bool:
    # alpha scales the second operand of torch.add, and the formula above assumes a plain sum.
    return isinstance(part, Operation) and part.kind == "add" and part.arguments.get("alpha", 1) == 1
