"""Saves the inputs of deploy's measurement next to the file, so that `scalepoint bench` can repeat it."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from scalepoint.errors import DocumentError, StoreError
from scalepoint.support.files import replace_file
from scalepoint.support.untrusted import open_tensors

INPUTS_FILE = "inputs.safetensors"


def save_inputs(folder: Path, feeds: Mapping[str, np.ndarray]) -> Path:
    """Write the arrays, by input name, and return the path."""
    path = folder / INPUTS_FILE
    arrays = {name: np.array(value, order="C") for name, value in feeds.items()}  # safetensors needs contiguous arrays
    replace_file(path, lambda temporary: save_file(arrays, temporary))
    return path


def load_inputs(path: Path) -> dict[str, np.ndarray]:
    """Read the arrays that `save_inputs` wrote."""
    try:
        with open_tensors(path, framework="np") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a mapping
    except (DocumentError, SafetensorError, OSError, ValueError, TypeError) as error:
        raise StoreError(
            f"{path} cannot be read as inputs ({error}): delete it to measure with random inputs, or deploy again"
        ) from error
