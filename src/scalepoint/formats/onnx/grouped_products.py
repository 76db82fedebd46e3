"""Writes the experts of a mixture of experts to ONNX: rows are sorted by expert, with one product per expert.

y[start_e : end_e] = x[start_e : end_e] W_e,    start_e = offsets[e - 1], end_e = offsets[e]
"""

from typing import Any

import torch

from scalepoint.errors import ExportError


def grouped_product_translations(opset: int) -> dict[Any, Any]:
    """Return the translations of torch's grouped product, and of the one that transformers defines."""
    import onnx  # noqa: PLC0415  # only an export needs it
    from onnxscript.values import Opset  # noqa: PLC0415

    op: Any = Opset("", opset)

    def to_onnx(x: Any, weight: Any, offsets: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
        has_supported_shapes = offsets is not None and len(x.shape) == 2 and len(weight.shape) == 3
        if not has_supported_shapes or bias is not None or out_dtype is not None:
            raise ExportError(_describe_unsupported(x, weight, bias, out_dtype))
        ends = op.Cast(offsets, to=onnx.TensorProto.INT64)
        end = op.Constant(value_ints=[0])
        products = []
        for expert in range(int(weight.shape[0])):
            start = end
            end = op.Gather(ends, op.Constant(value_ints=[expert]))
            rows = op.Slice(x, start, end, op.Constant(value_ints=[0]))
            products.append(op.MatMul(rows, op.Gather(weight, op.Constant(value_int=expert))))
        return op.Concat(*products, axis=0)

    operators = [torch.ops.aten._grouped_mm.default]
    if hasattr(torch.ops.transformers, "grouped_mm_fallback"):  # exists once transformers is imported
        operators.append(torch.ops.transformers.grouped_mm_fallback.default)
    return dict.fromkeys(operators, to_onnx)


def _describe_unsupported(x: Any, weight: Any, bias: Any, out_dtype: Any) -> str:
    extras = [name for name, value in (("a bias", bias), ("an out_dtype", out_dtype)) if value is not None]
    shapes = " x ".join(f"({', '.join(map(str, tensor.shape))})" for tensor in (x, weight))
    return (
        f"a grouped product of {shapes}{' with ' if extras else ''}{' and '.join(extras)} cannot be written to ONNX, "
        "only (rows, in) x (experts, in, out) with offsets: sort the rows by expert, and add a bias after the product"
    )
