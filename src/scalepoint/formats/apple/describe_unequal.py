"""Describe how a tensor of a file differs from the tensor of the model."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor


def describe_unequal(path: str, what: str, file_value: Any, model_value: Tensor) -> Iterator[str]:
    expected = model_value.detach().numpy()
    array = np.asarray(file_value)
    array = array.astype(expected.dtype) if array.dtype != expected.dtype else array
    if array.shape != expected.shape:
        yield f"{path}: {what} of shape {array.shape} in the file, {expected.shape} in the model"
    elif array.tobytes() != np.ascontiguousarray(expected).tobytes():
        differences = np.flatnonzero(array.reshape(-1) != expected.reshape(-1))
        first = int(differences[0]) if len(differences) else 0
        yield (
            f"{path}: {len(differences)} of {array.size} {what} differ in the file, the first is "
            f"{array.reshape(-1)[first]} instead of {expected.reshape(-1)[first]}"
        )
