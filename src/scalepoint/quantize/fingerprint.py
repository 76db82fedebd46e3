"""What a float model was: every tensor by name, so that a saved quantized model knows the one it was made from."""

import hashlib

import torch
from torch import Tensor, nn

from scalepoint.numerics import dtype_name


def fingerprint_model(model: nn.Module) -> dict[str, str]:
    """Every parameter and buffer by name: type, shape and a checksum of its values."""
    named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    return {name: _fingerprint_tensor(value) for name, value in sorted(named.items())}


def _fingerprint_tensor(tensor: Tensor) -> str:
    if tensor.is_meta:
        return f"{dtype_name(tensor.dtype)} {list(tensor.shape)} without values"
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().data if flat.numel() else b""
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)} {hashlib.sha256(data).hexdigest()[:16]}"
