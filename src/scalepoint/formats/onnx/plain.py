"""The float model as people export it themselves: what a quantized file has to beat."""

from pathlib import Path

import torch
from torch import nn

from scalepoint.formats.format import Writing
from scalepoint.graph.export import quiet
from scalepoint.graph.modes import evaluating


def write_plain(model: nn.Module, path: Path, writing: Writing) -> None:
    """torch.onnx.export of the model as it is, for the example's shape; raises what that raises."""
    args, kwargs = writing.inputs
    with evaluating(model), torch.no_grad(), quiet():
        torch.onnx.export(model, args, str(path), kwargs=kwargs or None, external_data=False, verbose=False)
