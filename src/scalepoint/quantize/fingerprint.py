"""Fingerprint of a float model: identifies the model that a saved quantized model was made from."""

import hashlib

import torch
from torch import Tensor, nn

from scalepoint.numerics import dtype_name


def fingerprint_model(model: nn.Module) -> dict[str, str]:
    """Return dtype, shape and a checksum of the values of every parameter and buffer, by name."""
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    return {name: _fingerprint_tensor(tensor) for name, tensor in sorted(tensors.items())}


def _fingerprint_tensor(tensor: Tensor) -> str:
    description = f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
    if tensor.is_meta:
        return f"{description} without values"
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().data if flat.numel() else b""
    return f"{description} {hashlib.sha256(data).hexdigest()[:16]}"
