"""Fourier transforms and windows."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from scalepoint.onnx_reader.operators import Node, add_operator, operator, require
from scalepoint.onnx_reader.values import Value, as_number, check_size, torch_dtype


@operator("DFT", known_inputs=(1, 2))
def dft(node: Node, x: Tensor, length: Value | None = None, axis: Value | None = None) -> Any:
    """Compute a Fourier transform. The last axis of x has the real part, or the real and the imaginary part."""
    along = (node.get("axis", 1) if axis is None else as_number(axis, "axis")) % x.ndim
    require(along != x.ndim - 1, "a transform of the last axis")
    is_inverse, is_onesided = bool(node.get("inverse", 0)), bool(node.get("onesided", 0))
    size = x.shape[along] if length is None else as_number(length, "length")
    if is_inverse and is_onesided:
        size = 2 * (x.shape[along] - 1) if length is None else size
        half = torch.view_as_complex(x.transpose(along, -2).contiguous())
        return torch.fft.irfft(half, n=size).unsqueeze(-1).transpose(along, -2)
    x = x.narrow(along, 0, min(size, x.shape[along])).transpose(along, -2)
    if x.shape[-1] == 1:
        x = F.pad(x, (0, 1))  # imaginary parts of 0
    signal = torch.view_as_complex(x.contiguous())
    result = torch.fft.ifft(signal, n=size) if is_inverse else torch.fft.fft(signal, n=size)
    if is_onesided:
        result = result[..., : size // 2 + 1]
    return torch.view_as_real(result).transpose(along, -2)


@operator("STFT", known_inputs=(1, 3))
def stft(node: Node, x: Tensor, step: Value, window: Tensor | None = None, length: Value | None = None) -> Tensor:
    """Compute the transform as a convolution with cosines and sines, which every runtime has, unlike torch.stft."""
    require(window is not None or length is not None, "STFT without window and length")
    size = int(as_number(length, "length")) if length is not None else window.shape[0]  # type: ignore[union-attr]
    hop = int(as_number(step, "step"))
    signal = x.reshape(x.shape[0], -1) if x.ndim == 2 or x.shape[-1] == 1 else None
    require(signal is not None, "STFT of complex numbers")
    bins = size // 2 + 1 if node.get("onesided", 1) else size
    basis = _fourier_basis(size, bins, x.dtype)
    if window is not None:
        offset = (size - window.shape[0]) // 2
        basis = basis * F.pad(window, (offset, size - window.shape[0] - offset))
    result = F.conv1d(signal.unsqueeze(1), basis.unsqueeze(1), stride=hop)  # type: ignore[union-attr]
    parts = result.reshape(result.shape[0], 2, bins, result.shape[-1])
    return parts.permute(0, 3, 2, 1)  # (batch, frames, bins, 2)


def _fourier_basis(size: int, bins: int, dtype: torch.dtype) -> Tensor:
    """Return the real, then the imaginary parts of the Fourier matrix: (2 * bins, size)."""
    check_size([2 * bins, size])
    products = torch.arange(bins, dtype=torch.float64).unsqueeze(1) * torch.arange(size, dtype=torch.float64)
    angles = 2 * math.pi / size * torch.remainder(products, size)  # large angles would lose precision
    return torch.cat([torch.cos(angles), -torch.sin(angles)]).to(dtype)


def _cosine_window(node: Node, size: Value, *weights: float) -> Tensor:
    """Return weights[0] + weights[1] * cos(angle) + weights[2] * cos(2 * angle)."""
    count = int(as_number(size, "size"))
    check_size([count])
    steps = count if node.get("periodic", 1) else count - 1
    angle = 2 * math.pi / max(steps, 1) * torch.arange(count, dtype=torch.float64)
    total = sum(weight * torch.cos(index * angle) for index, weight in enumerate(weights))
    return torch.as_tensor(total).to(torch_dtype(node.get("output_datatype", 1)))


add_operator("HannWindow", lambda node, size: _cosine_window(node, size, 0.5, -0.5), known_inputs=(0,))
add_operator("HammingWindow", lambda node, size: _cosine_window(node, size, 25 / 46, -21 / 46), known_inputs=(0,))
add_operator("BlackmanWindow", lambda node, size: _cosine_window(node, size, 0.42, -0.5, 0.08), known_inputs=(0,))


@operator("MelWeightMatrix", known_inputs=(0, 1, 2, 3, 4))
def mel_weight_matrix(node: Node, *settings: Any) -> Tensor:
    """Return triangles that overlap, one for each band: (bins of the transform, bands)."""
    bands, dft_size, sample_rate, low_hertz, high_hertz = (as_number(value, "setting") for value in settings)
    bins = int(dft_size) // 2 + 1
    check_size([bins, int(bands)])
    low_mel, high_mel = (2595 * math.log10(1 + hertz / 700) for hertz in (low_hertz, high_hertz))
    step = (high_mel - low_mel) / (bands + 2)
    mels = torch.arange(int(bands) + 2, dtype=torch.float64) * step + low_mel
    edges = torch.floor((dft_size + 1) * 700 * (10 ** (mels / 2595) - 1) / sample_rate)
    matrix = torch.zeros(bins, int(bands), dtype=torch.float64)
    for band in range(int(bands)):
        lower, center, upper = (int(edge) for edge in edges[band : band + 3])
        if lower == center:
            matrix[center, band] = 1
        for position in range(lower, center + 1):
            matrix[position, band] = (position - lower) / (center - lower) if center > lower else 1.0
        for position in range(center, upper):
            matrix[position, band] = (upper - position) / (upper - center)
    return matrix.to(torch_dtype(node.get("output_datatype", 1)))
