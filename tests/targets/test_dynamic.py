"""Dynamic activations are refused before any work by targets whose files store constant scales."""

import pytest
import torch
from torch import nn

from scalepoint.errors import TargetError
from scalepoint.quantize import QuantConfig, insert_qdq
from scalepoint.spec import QuantizationSpec
from scalepoint.transformation import transform

DTYPES = {"onnxruntime": "uint8", "openvino": "uint8", "coreml": "uint8", "executorch": "int8", "litert": "int8"}


def inserted(target, **spec):
    model, x = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)), torch.randn(4, 32)
    result = transform(model, x, target=target)
    config = QuantConfig(activation=QuantizationSpec(qparam_calculator_cls="dynamic", **spec))
    return insert_qdq(result.model, result.matches, config)


@pytest.mark.parametrize(("target", "dtype"), [*DTYPES.items(), ("tensorrt", "int8")])
def test_dynamic_activations_per_tensor_are_refused_at_insert(target, dtype):
    with pytest.raises(TargetError, match=r"dynamic.*constant scales"):
        inserted(target, dtype=dtype, qscheme="symmetric" if target == "tensorrt" else "asymmetric")


@pytest.mark.parametrize("target", ["executorch", "litert"])
def test_dynamic_activations_per_token_are_accepted_if_kernels_support_them(target):
    inserted(target, dtype="int8", qscheme="asymmetric", granularity={"type": "per_token"})


def test_the_reference_target_accepts_them():
    inserted("reference", dtype="int8")
