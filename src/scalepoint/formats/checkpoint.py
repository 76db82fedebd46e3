"""CheckpointFormat: the declaration of a format for language models.

    CheckpointFormat("gguf", ".gguf", write=write, check=check, scale_dtype=torch.float16)

`check` raises before any work starts if the format cannot store the requested precision. `write` stores a quantized
checkpoint one tensor at a time; a failed write leaves an old file unchanged.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from scalepoint.spec import QuantizationSpec

if TYPE_CHECKING:
    from scalepoint.checkpoints import QuantizedCheckpoint, Source

RoundScales = Callable[[QuantizationSpec, int, Tensor], Tensor]  # (spec, columns, scales (rows, blocks)) -> scales
RoundScalesAndMinima = Callable[[QuantizationSpec, int, Tensor, Tensor], tuple[Tensor, Tensor]]
CheckSource = Callable[["Source", QuantizationSpec | None, QuantizationSpec | None], None]


@dataclass(frozen=True)
class CheckpointFormat:
    """A file or folder format for quantized language models.

    Args:
        name: The name, by which targets refer to the format.
        suffix: The suffix of the file; "" if the format is a folder.
        write: (checkpoint, path): write the checkpoint to this path.
        check: (source, weight spec, activation spec): raise TargetError or ExportError, with what to do instead, if
            the format cannot store the model with these specs.
        scale_dtype: The dtype that scales are stored in. Scales are rounded to it before codes are chosen. None stands
            for the dtype of the source's weight.
        summary: One line for lists of formats.
        round_scales: (spec, columns, scales): round the scales of blocks to values that the format can store, where
            `scale_dtype` is not enough. Called before codes are chosen.
        round_scales_and_minima: (spec, columns, scales, minima): the same for weights with a minimum; None if the
            format stores no minima.
        choose_block_size: (source, size): the largest block size up to `size` that fits all layers. It replaces the
            block size of the target's default.
        can_quantize: (source, name): whether the format can store this weight quantized.
        tensor_bytes: (path): the total size of the written tensors in bytes; None: the size of the file or folder.
        describe_wider_type: (spec, columns): why codes take more bits in the file than in the spec; "" if they do not.
    """

    name: str
    suffix: str
    write: Callable[["QuantizedCheckpoint", Path], None]
    check: CheckSource
    scale_dtype: torch.dtype | None = torch.float32
    summary: str = ""
    round_scales: RoundScales | None = None
    round_scales_and_minima: RoundScalesAndMinima | None = None
    choose_block_size: Callable[["Source", int], int] = lambda source, size: size
    can_quantize: Callable[["Source", str], bool] = lambda source, name: True
    tensor_bytes: Callable[[Path], int] | None = None
    describe_wider_type: Callable[[QuantizationSpec, int], str] = lambda spec, columns: ""
