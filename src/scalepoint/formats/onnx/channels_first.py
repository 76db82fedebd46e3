"""Tensors that a file has with channels in the second place and the model in the last: known by their names."""

import numpy as np

CHANNELS_FIRST_SUFFIX = ".turned"


def to_model_layout(name: str, value: np.ndarray, rank: int) -> np.ndarray:
    """A tensor of a file as the model has it, with so many axes; one that is not turned comes back as it is."""
    if not name.endswith(CHANNELS_FIRST_SUFFIX):
        return value
    value = np.moveaxis(value, 1, -1)
    return value[0] if value.ndim > rank else value  # vectors: their batch is what a convolution goes over


def to_file_layout(name: str, value: np.ndarray) -> np.ndarray:
    """The other way."""
    if not name.endswith(CHANNELS_FIRST_SUFFIX):
        return value
    return np.moveaxis(value[None] if value.ndim == 2 else value, -1, 1)
