"""The first layer whose codes differ in the runtime."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalepoint import export, verify
from scalepoint.errors import VerificationError
from scalepoint.formats.onnx.channels_first import CHANNELS_FIRST_SUFFIX
from scalepoint.quantize import quantize
from scalepoint.verification.departure import find_departure, match_calls
from tests.errors import raises

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class PaddedStem(nn.Module):
    """Like the stem of HGNetV2: a padded tensor feeds a convolution and a pool. The file pads in the convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.branch = nn.Conv2d(8, 8, 2)
        self.last = nn.Conv2d(16, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(torch.relu(self.first(x)), (0, 1, 0, 1))
        return self.last(torch.cat((torch.relu(self.branch(x)), F.max_pool2d(x, 2, 1)), 1))


class Sampling(nn.Module):
    """Like a variational autoencoder, which adds noise to its code. In eval mode the dropouts do nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.picture, self.drop = nn.Linear(32, 8), nn.Linear(8, 32), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        code = self.drop(self.mean(x))
        return self.picture(F.dropout(code + torch.randn_like(code), 0.5, self.training))


def test_random_numbers_in_the_model_are_named_as_the_cause(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(16, 32)
    quantized = quantize(Sampling().eval(), x, forward_loop=[x], target="onnxruntime", freeze_weights=True)
    export(quantized, tmp_path / "m.onnx", x)
    result = verify(tmp_path / "m.onnx", quantized, x)
    assert not result.holds
    with raises(VerificationError, "randn_like", "to the model as an input"):
        result.check()


def test_a_padding_that_the_exporter_folded_is_not_a_departure(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 16, 16)
    quantized = quantize(PaddedStem().eval(), x, forward_loop=[x], target="onnxruntime")
    export(quantized, tmp_path / "m.onnx", x)
    result = verify(tmp_path / "m.onnx", quantized, x)
    assert result.holds
    assert result.departure is None


CODES = {"a": [torch.zeros(4, 6, dtype=torch.int32), torch.ones(4, 5, dtype=torch.int32)]}
NODES = {"a/QuantizeLinear": "t0", "a/QuantizeLinear_1": "t1"}


def test_calls_are_paired_with_tensors_of_their_shape_in_order():
    outputs = {"t0": np.ones((4, 5), np.uint8)}
    ((call, array),) = match_calls("a", CODES["a"], NODES, outputs)
    assert call.shape == array.shape == (4, 5)
    assert match_calls("a", CODES["a"], NODES, {"t0": np.ones((9, 9), np.uint8)}) == []


def test_a_transposed_tensor_of_the_file_is_compared_in_the_layout_of_the_model():
    codes = torch.arange(24, dtype=torch.int32).view(2, 3, 4)
    nodes, outputs = (
        {"a/QuantizeLinear": f"t{CHANNELS_FIRST_SUFFIX}"},
        {f"t{CHANNELS_FIRST_SUFFIX}": codes.numpy().astype(np.uint8).transpose(0, 2, 1)},
    )
    ((call, array),) = match_calls("a", [codes], nodes, outputs)
    assert np.array_equal(call, array)
    assert find_departure({"a": [codes]}, nodes, outputs, (), ()) is None


def test_a_layer_with_very_different_codes_is_named():
    far = {"t0": np.full((4, 6), 9, np.uint8), "t1": np.ones((4, 5), np.uint8)}
    departure = find_departure(CODES, NODES, far, (), ())
    assert (departure.where, departure.equal, departure.largest) == ("a", 0.0, 9)
    near = {"t0": np.zeros((4, 6), np.uint8), "t1": np.ones((4, 5), np.uint8)}
    assert find_departure(CODES, NODES, near, (), ()) is None
