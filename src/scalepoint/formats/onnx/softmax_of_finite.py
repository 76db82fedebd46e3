"""Removes the check for NaN after a softmax that cannot give NaN, because no row of its scores is all -inf.

    Softmax -> IsNaN -> Where(IsNaN, 0, Softmax)    becomes    Softmax

The check is for rows that are masked completely: with -inf, their softmax is 0 / 0. With a mask of finite numbers, such
as the lowest float32, a masked key has the probability exp(-3e38) = 0 too. A row that such a mask covers completely has
equal probabilities, not NaN, so the check does not change it.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from scalepoint.formats.onnx.graph_edits import find_producer

MAX_FINITE_MASK = 1e30  # a larger magnitude may overflow when it is added to another mask


def softmax_of_finite(model: Any) -> None:
    """Remove all checks that cannot find a NaN."""
    for where in list(model.graph):
        softmax = _find_guarded_softmax(where)
        if softmax is not None and _cannot_give_nan(softmax):
            is_nan = where.inputs[0].producer()
            ir.convenience.replace_all_uses_with(where.outputs[0], softmax.outputs[0])
            model.graph.remove([where, is_nan], safe=True)


def _find_guarded_softmax(where: Any) -> Any:
    """Return the softmax of Where(IsNaN(softmax), 0, softmax); None for another node."""
    if where.op_type != "Where" or not _holds_for_all(where.inputs[1], lambda values: values == 0):
        return None
    is_nan = find_producer(where.inputs[0], "IsNaN")
    if is_nan is None or is_nan.inputs[0] is not where.inputs[2]:
        return None
    can_remove = len(is_nan.outputs[0].uses()) == 1 and not where.outputs[0].is_graph_output()
    return find_producer(where.inputs[2], "Softmax") if can_remove else None


def _cannot_give_nan(softmax: Any) -> bool:
    """Whether no row of the scores is all -inf, and no score is NaN or +inf.

    The scores must be a MatMul, multiplied by at most 1, plus masks. Its result is taken to be far from the limits of
    float32. One mask may have large numbers or -inf; the sum of two could be -inf in a whole row.
    """
    node, large_mask_count = softmax.inputs[0].producer(), 0
    keeps_minus_inf = True  # all factors between the current node and the softmax are positive
    while node is not None and node.op_type in ("Add", "Mul", "Div"):
        magnitudes = [_max_magnitude(operand) for operand in node.inputs]
        constants = [(index, magnitude) for index, magnitude in enumerate(magnitudes) if magnitude is not None]
        if len(constants) != 1:
            return False
        index, magnitude = constants[0]
        if node.op_type == "Add":
            # -inf times a negative number is +inf, and -inf times 0 is NaN.
            if magnitude == np.inf and not (keeps_minus_inf and _is_along_last_axis(softmax)):
                return False
            large_mask_count += magnitude > MAX_FINITE_MASK
        else:
            if not (_divides_by_one_or_more(node) if node.op_type == "Div" else magnitude <= 1):
                return False
            keeps_minus_inf = keeps_minus_inf and _holds_for_all(node.inputs[index], lambda values: values > 0)
        node = node.inputs[1 - index].producer()
    return node is not None and node.op_type == "MatMul" and large_mask_count <= 1


def _divides_by_one_or_more(division: Any) -> bool:
    return _holds_for_all(division.inputs[1], lambda values: np.isfinite(values) & (np.abs(values) >= 1))


def _is_along_last_axis(softmax: Any) -> bool:
    axis, shape = softmax.attributes.get_int("axis", -1), softmax.inputs[0].shape
    return axis == -1 or (shape is not None and axis == len(shape) - 1)


def _max_magnitude(operand: Any) -> float | None:
    """Return the largest magnitude in a mask or factor: a constant, or a Where between finite constants.

    A constant with -inf has the magnitude infinity, if every row also has finite values. None stands for a value that
    is not known, and for a constant that is not usable: it has NaN, +inf, or a row of -inf only.
    """
    if operand.const_value is not None:
        values = np.atleast_1d(operand.const_value.numpy())
        every_row_has_finite = bool(np.isfinite(values).any(-1).all())
        has_usable_values = bool((values <= MAX_FINITE_MASK).all())  # False for NaN and +inf too
        return float(np.abs(values).max()) if values.size and every_row_has_finite and has_usable_values else None
    where = find_producer(operand, "Where")
    branches = [] if where is None else where.inputs[1:]
    if not branches or not all(_holds_for_all(branch, np.isfinite) for branch in branches):
        return None
    return max(float(np.abs(branch.const_value.numpy()).max()) for branch in branches)


def _holds_for_all(value: Any, predicate: Callable[[Any], Any]) -> bool:
    """Whether a value is a constant and the predicate holds for all of its elements."""
    return value is not None and value.const_value is not None and bool(np.all(predicate(value.const_value.numpy())))
