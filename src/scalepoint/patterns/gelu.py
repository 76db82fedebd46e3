"""Replace a GELU that is written as single operations by one operation. A conversion; see `conversions.py`.

0.5 x (1 + erf(x / sqrt 2))                                gelu(x)
0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))          gelu(x, approximate="tanh")
"""

import math

import torch
from torch import fx

from scalepoint.graph.nodes import get_info, get_kind, inherit_meta
from scalepoint.graph.operations import Operation, Slot
from scalepoint.graph.tree import ModuleTree


def join_gelu(model: fx.GraphModule) -> int:
    """Replace a GELU that is written as single operations by one operation."""
    changed = 0
    for node in list(model.graph.nodes):
        if get_kind(node) not in ("erf", "tanh") or len(node.users) != 1:
            continue
        x = _find_input(model, node)
        last = None if x is None else _find_last_product(model, node, x)
        if x is not None and last is not None:
            _replace(model, last, x, "tanh" if get_kind(node) == "tanh" else "none")
            changed += 1
    if changed:
        model.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output") or node.is_impure())
    return changed


def _find_input(model: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    """Return the x of erf(x / sqrt 2) or of tanh(sqrt(2 / pi) (x + 0.044715 x^3))."""
    scaled = node.all_input_nodes[0]
    if get_kind(node) == "erf":
        is_product = _is_operation(model, scaled, "mul", math.sqrt(0.5))
        is_quotient = _is_operation(model, scaled, "div", math.sqrt(2))
        return scaled.all_input_nodes[0] if is_product or is_quotient else None
    if not _is_operation(model, scaled, "mul", math.sqrt(2 / math.pi)):
        return None
    polynomial = scaled.all_input_nodes[0]
    if get_kind(polynomial) != "add" or len(polynomial.all_input_nodes) != 2:
        return None
    for x, cubic in (polynomial.all_input_nodes, reversed(polynomial.all_input_nodes)):
        if _is_operation(model, cubic, "mul", 0.044715):
            power = cubic.all_input_nodes[0]
            if get_kind(power) == "pow" and 3 in power.args and power.all_input_nodes == [x]:
                return x
    return None


def _find_last_product(model: fx.GraphModule, node: fx.Node, x: fx.Node) -> fx.Node | None:
    """Return the last multiplication of (1 + f) * (0.5 x) or of ((1 + f) * x) * 0.5."""
    one_plus = next(iter(node.users))
    if not _is_operation(model, one_plus, "add", 1.0) or len(one_plus.users) != 1:
        return None
    product = next(iter(one_plus.users))
    factors = [source for source in product.all_input_nodes if source is not one_plus]
    if get_kind(product) != "mul" or len(factors) != 1:
        return None
    factor = factors[0]
    if factor is x and len(product.users) == 1:
        last = next(iter(product.users))
        return last if _is_operation(model, last, "mul", 0.5) else None
    is_half_x = _is_operation(model, factor, "mul", 0.5) and factor.all_input_nodes == [x]
    return product if is_half_x else None


def _is_operation(model: fx.GraphModule, node: fx.Node, kind: str, value: float) -> bool:
    """Whether a node is an operation of this kind on one tensor and this constant."""
    if get_kind(node) != kind or node.op != "call_module" or len(node.all_input_nodes) != 1:
        return False
    module = model.get_submodule(str(node.target))
    if not isinstance(module, Operation):
        return False
    numbers = [setting for setting in module.settings.values() if isinstance(setting, int | float)]
    return len(numbers) == 1 and math.isclose(numbers[0], value, rel_tol=1e-4)


def _replace(model: fx.GraphModule, last: fx.Node, x: fx.Node, approximate: str) -> None:
    arguments = {"self": Slot(0), "approximate": approximate}
    path = get_info(last).path or ""
    name = ModuleTree(model).add(
        f"{path}.gelu" if path else "gelu", Operation("gelu", torch.ops.aten.gelu.default, arguments)
    )
    with model.graph.inserting_before(last):
        gelu = model.graph.call_module(name, (x,))
    inherit_meta(gelu, last, kind="gelu")
    last.replace_all_uses_with(gelu)
    model.graph.erase_node(last)
