"""Which concats and adds are quantized."""

import pytest
import torch
from torch import nn

from scalepoint.transformation import transform


class Tokens(nn.Module):
    """A convolution whose output is joined with a class token, or with the output of another convolution."""

    def __init__(self, has_class_token):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 8, 1))
        self.first, self.second = nn.Conv1d(3, 8, 4), nn.Conv1d(3, 8, 4)
        self.has_class_token = has_class_token

    def forward(self, x):
        other = self.token if self.has_class_token else self.second(x)
        return torch.cat([other, self.first(x)], 2)


@pytest.mark.parametrize("target", ["onnxruntime", "openvino", "litert"])
def test_a_concat_of_convolutions_is_quantized_but_not_one_with_a_class_token(target):
    x = torch.randn(1, 3, 16)
    for has_class_token in (True, False):
        report = transform(Tokens(has_class_token).eval(), x, target=target, dynamic=False).report
        assert ("ConcatPattern" in report.counts()) != has_class_token


class Decoded(nn.Module):
    """Offsets that a convolution computes, added to a grid of the input's size or to another convolution."""

    def __init__(self, has_grid):
        super().__init__()
        self.offset, self.other = nn.Conv1d(3, 1, 1), nn.Conv1d(3, 1, 1)
        self.has_grid = has_grid

    def forward(self, x):
        grid = torch.arange(x.shape[2], dtype=torch.float32).reshape(1, 1, x.shape[2])
        return self.offset(x) + (grid if self.has_grid else self.other(x))


class DecodedWithDtype(Decoded):
    """The grid takes its dtype, and its start, from a tensor that depends on the input, as in YOLO."""

    def forward(self, x):
        offset = self.offset(x)
        grid = torch.arange(x.shape[2], device=x.device).type_as(offset) + torch.full_like(offset[0, 0], 0.5)
        return offset + (grid.reshape(1, 1, x.shape[2]) if self.has_grid else self.other(x))


@pytest.mark.parametrize("decoder", [Decoded, DecodedWithDtype])
@pytest.mark.parametrize("target", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("axes", [{"x": {2: "length"}}, None], ids=["free length", "fixed length"])
def test_an_add_of_convolutions_is_quantized_but_not_one_of_a_grid(target, decoder, axes):
    for has_grid in (True, False):
        report = transform(decoder(has_grid).eval(), torch.randn(2, 3, 16), target=target, dynamic_axes=axes).report
        assert ("AddReLUPattern" in report.counts()) != has_grid
