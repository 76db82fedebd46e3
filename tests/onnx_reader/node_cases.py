"""The backend node tests of the onnx package, run through the reader: one small model for each operator and setting."""

import contextlib
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from onnx import TensorProto, numpy_helper

from scalepoint.errors import ScalepointError
from scalepoint.onnx_reader.load import build_model
from scalepoint.onnx_reader.values import tensor_from_array

# Relative and absolute tolerance of low precisions: the expected values were computed with other intermediate types.
TOLERANCES = {torch.float16: (2e-3, 1e-3), torch.bfloat16: (1e-2, 1e-2)}


class Outcome(NamedTuple):
    """What happened to a case: right, wrong, refused (a ScalepointError) or foreign (another exception)."""

    name: str
    operator: str
    kind: str
    message: str = ""


def collect_cases() -> list[Any]:
    """Make all cases; the package computes their expected outputs, some with warnings of numpy."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.case.node import collect_testcases

        with np.errstate(all="ignore"):
            return collect_testcases(None)


def run_case(case: Any) -> Outcome:
    """Run a case. The operator of a case with several nodes is the last one's."""
    operator = case.model.graph.node[-1].op_type
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            message = _compare(case)
    except ScalepointError as error:
        return Outcome(case.name, operator, "refused", str(error))
    except Exception as error:
        return Outcome(case.name, operator, "foreign", f"{type(error).__name__}: {error}")
    return Outcome(case.name, operator, "wrong" if message else "right", message)


def _compare(case: Any) -> str:
    """Return what differs; "" if the case is right."""
    model = build_model(case.model, {}, quantizers="keep", half_as_float=False)
    for inputs, expected in case.data_sets:
        with torch.no_grad():
            outputs = model(*map(_to_tensors, inputs))
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        if len(outputs) != len(expected):
            return f"{len(outputs)} outputs instead of {len(expected)}"
        for output, value in zip(outputs, expected, strict=True):
            if message := _difference(output, _to_tensors(value), case):
                return message
    return ""


def _to_tensors(value: Any) -> Any:
    if isinstance(value, list):
        return [_to_tensors(part) for part in value]
    return tensor_from_array(numpy_helper.to_array(value) if isinstance(value, TensorProto) else np.asarray(value))


def _difference(output: Any, expected: Any, case: Any) -> str:
    if isinstance(expected, list):
        parts = [_difference(*pair, case) for pair in zip(output, expected, strict=True)]
        return next(filter(None, parts), "")
    if not isinstance(output, torch.Tensor) or output.dtype != expected.dtype or output.shape != expected.shape:
        return f"{getattr(output, 'dtype', type(output))} {getattr(output, 'shape', '')} instead of {expected.dtype}"
    rtol, atol = TOLERANCES.get(output.dtype, (max(case.rtol, 1e-3), max(case.atol, 1e-6)))
    if output.dtype.is_floating_point:
        output, expected = output.double(), expected.double()
    with contextlib.suppress(AssertionError):
        torch.testing.assert_close(output, expected, rtol=rtol, atol=atol, equal_nan=True)
        return ""
    return "other values"


def operator_of(outcome: Outcome, outcomes: Mapping[str, Outcome]) -> str:
    """The operator that a case tests. An expanded case has the nodes of which the operator's function is made."""
    original = outcomes.get(outcome.name.split("_expanded")[0], outcome)
    return original.operator
