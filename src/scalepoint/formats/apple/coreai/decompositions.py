"""Operations that coreai-torch 0.4.3 does not convert, written with operations that it converts.

Each function has the signature of its aten operation. It returns NotImplemented for arguments that it does not take.
`check_operations` names an operation that remains.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from scalepoint.compat.torch_names import OpOverload
from scalepoint.errors import TargetError
from scalepoint.formats.recurrent import RECURRENT_DECOMPOSITIONS
from scalepoint.graph.user_traceback import describe_location, get_operation_name

aten = torch.ops.aten


def decompose_program(coreai_torch: Any, program: ExportedProgram) -> ExportedProgram:
    """Decompose with the table of coreai-torch and with the functions of this module."""
    decomposed: ExportedProgram = program.run_decompositions({**coreai_torch.get_decomp_table(), **DECOMPOSITIONS})
    return decomposed


def check_operations(program: ExportedProgram) -> None:
    """Raise TargetError for the first operation of a decomposed program that coreai-torch does not convert."""
    from coreai_torch._aten_to_core import _aten_to_core_resolver  # noqa: PLC0415

    for node in program.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, OpOverload):
            continue
        namespace, _, name = str(node.target).partition(".")
        is_check = "assert" in name or "sym_constrain" in name  # coreai-torch removes them
        if namespace == "aten" and name not in _aten_to_core_resolver and not is_check:
            raise unsupported_operation(node)


def unsupported_operation(node: fx.Node) -> TargetError:
    """Build the error for an operation: its name, its line in the user's code, and what to do."""
    return TargetError(
        f"{get_operation_name(node)}{describe_location(node)}: target 'coreai' cannot run it in any precision. Write "
        "that line with other operations, or deploy for 'onnxruntime'"
    )


def elu(x: Tensor, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Tensor:
    return torch.relu(x) * scale + torch.expm1(torch.clamp(x, max=0) * input_scale) * (alpha * scale)


def remainder(x: Tensor, divisor: float) -> Any:
    return aten.remainder.Tensor(x, torch.full((), divisor, dtype=x.dtype))


def variance(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> Tensor:
    axes = list(range(x.ndim)) if dim is None else list(dim)
    count = 1
    for axis in axes:
        count *= x.shape[axis]
    squares = (x - x.mean(axes, keepdim=True)).square().sum(axes, keepdim=keepdim)
    return squares / (count - (1 if correction is None else correction))


def sort(x: Tensor, dim: int = -1, descending: bool = False) -> Any:
    """Sort by topk with all elements. Equal elements may come in another order than torch's."""
    values, indices = torch.topk(x, x.shape[dim], dim, descending, True)
    return values, indices


DECOMPOSITIONS = {
    aten.elu.default: elu,
    aten.remainder.Scalar: remainder,
    aten.var.correction: variance,
    aten.sort.default: sort,
    **RECURRENT_DECOMPOSITIONS,
}
