"""An exported program as an ONNX graph: torch's translation of each operation, without what the program says already.

torch.onnx.export rebuilds its table of 500 operations in every call, reads what ONNX says of an operator anew for every
node, runs the whole program once more to find operands of mixed types, and asks every rule of its optimizer about every
node. Here tables are kept, the types are read from the program, and a rule is asked about the nodes that it can end in;
the graph that comes out is the same.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from scalepoint.errors import ExportError
from scalepoint.formats.onnx.passes import NAME_SCOPES_KEY
from scalepoint.formats.onnx.simplify import simplify
from scalepoint.graph.program import Program

TranslationTable = Mapping[Any, Any]
_SIGNATURE_CACHE: dict[tuple[str, str, int], Any] = {}
_SYMBOLIC_TYPES = (torch.SymInt, torch.SymFloat, torch.SymBool)


def translate_program(program: ExportedProgram, opset: int, own: TranslationTable) -> Any:
    """The graph, with translations of our own beside torch's; raises what torch raises."""
    made = _translate_fast(program, opset, own) if isinstance(program, Program) else None
    if made is None:
        found = torch.onnx.export(
            program, opset_version=opset, custom_translation_table=dict(own), optimize=False, verbose=False
        )
        if found is None:
            raise ExportError("torch.onnx.export gave nothing")
        made = found.model
    simplify(made)
    return made


def _translate_fast(program: Program, opset: int, own: TranslationTable) -> Any:
    """By the parts of torch.onnx.export; None where torch has others, or the program needs one that is left out."""
    try:
        from torch.onnx._internal.exporter._core import _exported_program_to_onnx_program  # noqa: PLC0415
        from torch.onnx._internal.exporter._decomp import get_onnx_implemented_overloads  # noqa: PLC0415

        registry = _build_registry(opset, own)
        table = _decompositions(frozenset(get_onnx_implemented_overloads(registry)))
    except (ImportError, AttributeError, TypeError):
        return None
    if not program.take_apart(table) or any(map(_needs_promotion, program.graph.nodes)):
        return None
    with _cached_signatures(), _fast_attribute_types(), _only_name_scopes():
        return _exported_program_to_onnx_program(program, registry=registry).model


@contextmanager
def _patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, an attribute of a module or a class has another value."""
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _cached_signatures() -> Any:
    """Inside, what ONNX says of an operator is read once."""
    from onnx_ir.schemas import OpSignature  # noqa: PLC0415

    read = vars(OpSignature)["from_op_schema"].__get__(None, OpSignature)

    def known(_: Any, schema: Any) -> Any:
        key = (schema.domain, schema.name, schema.since_version)
        if key not in _SIGNATURE_CACHE:
            _SIGNATURE_CACHE[key] = read(schema)
        return _SIGNATURE_CACHE[key]

    return _patched(OpSignature, "from_op_schema", classmethod(known))


def _fast_attribute_types() -> Any:
    """Inside, tensors and lists of numbers are known by their type: onnx_ir asks of each first whether it could be a
    graph, by all the methods that one has."""
    import onnx_ir as ir  # noqa: PLC0415
    from onnx_ir import _convenience  # noqa: PLC0415

    read = getattr(_convenience, "_infer_attribute_type", None)
    if read is None:
        return nullcontext()
    lists = {frozenset([int]): ir.AttributeType.INTS, frozenset([float]): ir.AttributeType.FLOATS}

    def inferred(value: Any) -> Any:
        if isinstance(value, ir.Tensor):
            return ir.AttributeType.TENSOR
        kind = lists.get(frozenset(map(type, value))) if type(value) in (list, tuple) else None
        return read(value) if kind is None else kind

    return _patched(_convenience, "_infer_attribute_type", inferred)


def _only_name_scopes() -> Any:
    """Inside, of what torch notes on a node (its code, its stack trace) only the modules that made it are: all else is
    dropped before the file is written."""
    from torch.onnx._internal.exporter import _core  # noqa: PLC0415

    if not hasattr(_core, "_set_node_metadata"):
        return nullcontext()

    def note(source: fx.Node, node: Any) -> None:
        stack = source.meta.get("nn_module_stack") or {}
        node.metadata_props[NAME_SCOPES_KEY] = repr([*(name for name, _ in stack.values()), source.name])

    return _patched(_core, "_set_node_metadata", note)


@cache
def _decompositions(implemented: frozenset[Any]) -> TranslationTable:
    """Torch's table of what is taken apart beside these operations; it looks at all that torch has."""
    from torch.onnx._internal.exporter._decomp import create_onnx_friendly_decomposition_table  # noqa: PLC0415

    return dict(create_onnx_friendly_decomposition_table(set(implemented)).items())


def _build_registry(opset: int, own: TranslationTable) -> Any:
    known = _torch_registry(opset)
    registry = type(known)()
    registry._opset_version = opset
    registry.functions = {target: list(found) for target, found in known.functions.items()}
    for target, function in own.items():
        registry.register_op(target, function)
    return registry


@cache
def _torch_registry(opset: int) -> Any:
    from torch.onnx._internal.exporter._registration import ONNXRegistry  # noqa: PLC0415

    return ONNXRegistry.from_torchlib(opset_version=opset)


def _needs_promotion(node: fx.Node) -> bool:
    """Whether torch would promote a tensor. Whole numbers beside float tensors are made floats here, as it would."""
    rule = _promotion_rule(node.target) if node.op == "call_function" else None
    if rule is None:
        return False
    args, kwargs = fx.node.map_aggregate((node.args, dict(node.kwargs)), _fake_value)
    operands = [*_flatten_lists(args), *_flatten_lists(kwargs.values())]
    types = {each.dtype for each in operands if isinstance(each, Tensor)}
    gives = getattr(node.meta.get("val"), "dtype", None)
    if (
        len(types) != 1
        or gives not in (*types, torch.bool)
        or any(isinstance(each, _SYMBOLIC_TYPES) for each in operands)
    ):
        return True
    dtype = types.pop()
    if not dtype.is_floating_point:
        return any(isinstance(each, float | complex) for each in operands)
    if any(isinstance(each, int) for each in operands):
        wanted = rule.preview_type_promotion(args, kwargs)
        node.args = tuple(_as_float(each, wanted.args_dtypes.get(at)) for at, each in enumerate(node.args))
        node.kwargs = {name: _as_float(each, wanted.kwargs_dtypes.get(name)) for name, each in node.kwargs.items()}
    return False


def _fake_value(operand: Any) -> Any:
    return operand.meta.get("val") if isinstance(operand, fx.Node) else operand


def _flatten_lists(operands: Iterable[Any]) -> list[Any]:
    return [leaf for each in operands for leaf in (each if isinstance(each, list | tuple) else (each,))]


def _as_float(operand: Any, dtype: torch.dtype | None) -> Any:
    is_whole = isinstance(operand, int) and not isinstance(operand, bool)
    return float(operand) if is_whole and dtype is not None and dtype.is_floating_point else operand


@cache
def _promotion_rule(target: Any) -> Any:
    """Torch's rule for the types of an operation's operands, if it has one."""
    from torch.onnx._internal.fx.passes.type_promotion import TypePromotionTable  # noqa: PLC0415

    packet = getattr(target, "overloadpacket", None)
    return None if packet is None else TypePromotionTable().get_rule(packet)
