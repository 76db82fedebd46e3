"""A format of language models as a declaration: what it can hold, and how a quantized checkpoint is written as it.

    CheckpointFormat("gguf", ".gguf", write=write, check=check, scale_dtype=torch.float16)

`check(source, weight, activation)` refuses before any work what the format cannot hold; `write(checkpoint, path)` puts
it there whole or not at all, a tensor at a time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from scalepoint.checkpoints import QuantizedCheckpoint, Source
from scalepoint.spec import QuantizationSpec

RoundScales = Callable[[QuantizationSpec, int, Tensor], Tensor]  # (spec, columns, scales (rows, blocks)) -> the same
RoundScalesAndMinima = Callable[[QuantizationSpec, int, Tensor, Tensor], tuple[Tensor, Tensor]]
CheckSource = Callable[[Source, QuantizationSpec | None, QuantizationSpec | None], None]


@dataclass(frozen=True)
class CheckpointFormat:
    """One format of language models."""

    name: str
    suffix: str  # of the file; "": it is a folder
    write: Callable[[QuantizedCheckpoint, Path], None]
    check: CheckSource  # (source, weight, activation): TargetError or ExportError with the way out
    # What it stores scales in: they are rounded to it before codes are chosen. None: the type of the source's weight.
    scale_dtype: torch.dtype | None = torch.float32
    summary: str = ""
    snap: RoundScales | None = (
        None  # where scales of blocks must lie beyond that; they are moved before codes are chosen
    )
    # The same for weights with a minimum, (spec, columns, scales, minima) -> scales and minima; None: it holds none.
    snap_minima: RoundScalesAndMinima | None = None
    # The largest blocks, up to a size, that all its layers can have: what the target's default becomes.
    blocks: Callable[[Source, int], int] = lambda source, size: size
    holds: Callable[[Source, str], bool] = lambda source, name: True  # whether it can hold this weight quantized
    tensor_bytes: Callable[[Path], int] | None = None  # bytes of all tensors in what was written; None: its whole size
    # (spec, columns): why codes are stored with more bits than their type has; "": they are not.
    wider: Callable[[QuantizationSpec, int], str] = lambda spec, columns: ""
