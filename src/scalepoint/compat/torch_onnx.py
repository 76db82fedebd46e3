"""Translates an exported program into an ONNX graph, by the parts of torch.onnx.export.

In every call torch.onnx.export (torch 2.13) rebuilds its table of 500 operators, reads the schema of an ONNX operator
again for each node, and runs the whole program once more to find operands of mixed dtypes. Here the tables are cached,
their functions are not parsed before they are used, and the dtypes are read from the program. The graph is the same. If
torch does not have these parts, or if the program needs type promotion, torch.onnx.export itself runs.
"""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from scalepoint.compat import attribute_replaced, only_in_this_thread, patches_enabled
from scalepoint.compat.fast_export import RecordedProgram
from scalepoint.compat.onnx_rewriter import simplify
from scalepoint.errors import ExportError

TranslationTable = Mapping[Any, Any]
NAME_SCOPES_KEY = "pkg.torch.onnx.name_scopes"  # metadata of an ONNX node: the modules that it comes from
_SIGNATURE_CACHE: dict[tuple[str, str, int], Any] = {}
_SYMBOLIC_TYPES = (torch.SymInt, torch.SymFloat, torch.SymBool)


def translate_program(program: ExportedProgram, opset: int, translations: TranslationTable) -> Any:
    """Return the simplified ONNX graph of a program.

    Args:
        program: The program.
        opset: The ONNX opset.
        translations: Translations of operations in addition to torch's.

    Raises:
        ExportError: torch.onnx.export returned nothing. It may also raise errors of its own.
    """
    graph = None
    if isinstance(program, RecordedProgram) and patches_enabled():
        graph = _translate_fast(program, opset, translations)
    if graph is None:
        exported = torch.onnx.export(
            program, opset_version=opset, custom_translation_table=dict(translations), optimize=False, verbose=False
        )
        if exported is None:
            raise ExportError("torch.onnx.export returned nothing")
        graph = exported.model
    simplify(graph)
    return graph


def _translate_fast(program: RecordedProgram, opset: int, translations: TranslationTable) -> Any:
    """Return the graph, or None if torch's parts have other names or the program needs type promotion."""
    try:
        from torch.onnx._internal.exporter._core import _exported_program_to_onnx_program  # noqa: PLC0415
        from torch.onnx._internal.exporter._decomp import get_onnx_implemented_overloads  # noqa: PLC0415

        registry = _build_registry(opset, translations)
        table = _decompositions(frozenset(get_onnx_implemented_overloads(registry)))
    except (ImportError, AttributeError, TypeError):
        return None
    if not program.decompose_in_place(table) or not all(map(_promote_numbers, program.graph.nodes)):
        return None
    with _cached_signatures(), _fast_attribute_types(), _only_name_scopes():
        return _exported_program_to_onnx_program(program, registry=registry).model


def _cached_signatures() -> AbstractContextManager[None]:
    """Inside this context, onnx_ir reads the schema of each ONNX operator once per process."""
    from onnx_ir.schemas import OpSignature  # noqa: PLC0415

    read_schema = vars(OpSignature)["from_op_schema"].__get__(None, OpSignature)

    def from_op_schema(_: Any, schema: Any) -> Any:
        key = (schema.domain, schema.name, schema.since_version)
        if key not in _SIGNATURE_CACHE:
            _SIGNATURE_CACHE[key] = read_schema(schema)
        return _SIGNATURE_CACHE[key]

    return attribute_replaced(OpSignature, "from_op_schema", classmethod(from_op_schema))


def _fast_attribute_types() -> AbstractContextManager[None]:
    """Inside this context, attributes that are tensors or lists of numbers are recognized by their type.

    onnx_ir 1.1 first checks whether an attribute is a graph, by isinstance with a runtime protocol, which is slow.
    """
    import onnx_ir as ir  # noqa: PLC0415
    from onnx_ir import _convenience  # noqa: PLC0415

    infer_type = getattr(_convenience, "_infer_attribute_type", None)
    if infer_type is None:
        return nullcontext()
    list_types = {frozenset([int]): ir.AttributeType.INTS, frozenset([float]): ir.AttributeType.FLOATS}

    def infer_fast(value: Any) -> Any:
        if isinstance(value, ir.Tensor):
            return ir.AttributeType.TENSOR
        list_type = list_types.get(frozenset(map(type, value))) if type(value) in (list, tuple) else None
        return infer_type(value) if list_type is None else list_type

    return attribute_replaced(_convenience, "_infer_attribute_type", infer_fast)


def _only_name_scopes() -> AbstractContextManager[None]:
    """Inside this context, ONNX nodes get the names of their modules as metadata, and nothing else.

    The other metadata (code, stack trace) is removed before the file is written.
    """
    from torch.onnx._internal.exporter import _core  # noqa: PLC0415

    if not hasattr(_core, "_set_node_metadata"):
        return nullcontext()

    def set_node_metadata(source: fx.Node, node: Any) -> None:
        stack = source.meta.get("nn_module_stack") or {}
        node.metadata_props[NAME_SCOPES_KEY] = repr([*(name for name, _ in stack.values()), source.name])

    return attribute_replaced(_core, "_set_node_metadata", set_node_metadata)


@cache
def _decompositions(implemented: frozenset[Any]) -> TranslationTable:
    """Return torch's decompositions of the operations that have no ONNX translation. Torch lists all its operations."""
    from torch.onnx._internal.exporter._decomp import create_onnx_friendly_decomposition_table  # noqa: PLC0415

    return dict(create_onnx_friendly_decomposition_table(set(implemented)).items())


def _build_registry(opset: int, translations: TranslationTable) -> Any:
    torch_registry = _torch_registry(opset)
    registry = type(torch_registry)()
    registry._opset_version = opset
    registry.functions = {operation: list(functions) for operation, functions in torch_registry.functions.items()}
    for operation, function in translations.items():
        registry.register_op(operation, function)
    return registry


@cache
def _torch_registry(opset: int) -> Any:
    from torch.onnx._internal.exporter._registration import ONNXRegistry  # noqa: PLC0415

    with _unparsed_functions(), _cached_signatures():
        return ONNXRegistry.from_torchlib(opset_version=opset)


def _unparsed_functions() -> AbstractContextManager[None]:
    """Inside this context, onnxscript does not parse the source of its translations to know their domain.

    onnxscript 0.7 parses about 450 functions when it lists them for torch, which reads neither domain nor body.
    """
    from onnxscript import values  # noqa: PLC0415

    traced = getattr(values, "TracedOnnxFunction", None)
    if traced is None or "function_ir" not in vars(traced):
        return nullcontext()
    parse = vars(traced)["function_ir"].fget
    get_opset = only_in_this_thread(lambda function: function.opset, parse)  # the opset has the domain
    return attribute_replaced(traced, "function_ir", property(get_opset))


def _promote_numbers(node: fx.Node) -> bool:
    """Make integers next to float tensors floats, like torch. Returns False if torch would also convert a tensor."""
    rule = _promotion_rule(node.target) if node.op == "call_function" else None
    if rule is None:
        return True
    args, kwargs = fx.node.map_aggregate((node.args, dict(node.kwargs)), _fake_value)
    operands = [*_flatten_lists(args), *_flatten_lists(kwargs.values())]
    dtypes = {operand.dtype for operand in operands if isinstance(operand, Tensor)}
    output_dtype = getattr(node.meta.get("val"), "dtype", None)
    has_symbols = any(isinstance(operand, _SYMBOLIC_TYPES) for operand in operands)
    if len(dtypes) != 1 or output_dtype not in (*dtypes, torch.bool) or has_symbols:
        return False
    dtype = dtypes.pop()
    if not dtype.is_floating_point:
        return not any(isinstance(operand, float | complex) for operand in operands)
    if any(isinstance(operand, int) for operand in operands):
        promoted = rule.preview_type_promotion(args, kwargs)
        node.args = tuple(_as_float(arg, promoted.args_dtypes.get(index)) for index, arg in enumerate(node.args))
        node.kwargs = {name: _as_float(arg, promoted.kwargs_dtypes.get(name)) for name, arg in node.kwargs.items()}
    return True


def _fake_value(operand: Any) -> Any:
    return operand.meta.get("val") if isinstance(operand, fx.Node) else operand


def _flatten_lists(operands: Iterable[Any]) -> list[Any]:
    return [leaf for operand in operands for leaf in (operand if isinstance(operand, list | tuple) else (operand,))]


def _as_float(operand: Any, dtype: torch.dtype | None) -> Any:
    is_integer = isinstance(operand, int) and not isinstance(operand, bool)
    return float(operand) if is_integer and dtype is not None and dtype.is_floating_point else operand


@cache
def _promotion_rule(operation: Any) -> Any:
    """Return torch's rule for the operand dtypes of an operation; None if it has none."""
    from torch.onnx._internal.fx.passes.type_promotion import TypePromotionTable  # noqa: PLC0415

    packet = getattr(operation, "overloadpacket", None)
    return None if packet is None else TypePromotionTable().get_rule(packet)
