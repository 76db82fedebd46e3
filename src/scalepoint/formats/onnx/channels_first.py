"""Converts tensors that a file stores with channels first, although the model has them last.

The names of such tensors end in CHANNELS_FIRST_SUFFIX (see linear_as_conv.py).
"""

import numpy as np

CHANNELS_FIRST_SUFFIX = ".turned"


def to_model_layout(name: str, value: np.ndarray, rank: int) -> np.ndarray:
    """Convert a tensor of a file to the layout of the model, which has `rank` axes. Others are returned unchanged."""
    if not name.endswith(CHANNELS_FIRST_SUFFIX):
        return value
    value = np.moveaxis(value, 1, -1)
    return value[0] if value.ndim > rank else value  # vectors: the file has a batch axis of 1 before them


def to_file_layout(name: str, value: np.ndarray) -> np.ndarray:
    """Convert a tensor of the model to the layout of the file."""
    if not name.endswith(CHANNELS_FIRST_SUFFIX):
        return value
    return np.moveaxis(value[None] if value.ndim == 2 else value, -1, 1)
