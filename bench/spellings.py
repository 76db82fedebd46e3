"""Whether what a target writes in other words still pays: ONNX Runtime's time with the rule against without.

A float transformer block (post-norm and pre-norm, two sizes) as two files that differ in one operator: the residual add
before a layer norm as Sum, and as Add, which ONNX Runtime fuses into SkipLayerNormalization. Sessions of both run in
turn in one process, one thread, CPU time, medians. A ratio of 1 or more says that the runtime has become better, and
that the rule should go.
"""

import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from torch import Tensor, nn

from measure import Row, interleave, report
from scalepoint.formats import export
from scalepoint.quantize import quantize

OUT = Path(__file__).parent.parent / "out"
SIZES = {"32 tokens of 384": (32, 384), "197 tokens of 768": (197, 768)}


class Block(nn.Module):
    """An attention-free block: its adds and norms weigh as much as in a real one of this width."""

    def __init__(self, width: int, is_first: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.is_first = is_first

    def forward(self, x: Tensor) -> Tensor:
        for norm in self.norms:
            y = self.down(torch.nn.functional.gelu(self.up(norm(x) if self.is_first else x)))
            x = x + y if self.is_first else norm(x + y)
        return x


def files(folder: Path, tokens: int, width: int, is_first: bool) -> dict[str, onnxruntime.InferenceSession]:
    model, x = Block(width, is_first).eval(), torch.randn(1, tokens, width)
    quantized = quantize(model, x, forward_loop=[x], target="onnxruntime", freeze_weights=True)
    path = export(quantized, folder / "sum.onnx", x)
    proto = onnx.load(path)
    for node in proto.graph.node:
        node.op_type = "Add" if node.op_type == "Sum" else node.op_type
    onnx.save(proto, folder / "add.onnx")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return {
        name: onnxruntime.InferenceSession(folder / f"{name}.onnx", options, providers=["CPUExecutionProvider"])
        for name in ("sum", "add")
    }


def main() -> int:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    rows = []
    for title, (tokens, width) in SIZES.items():
        for is_first in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                sessions = files(Path(folder), tokens, width, is_first)
            x = {"x": np.random.default_rng(0).normal(size=(1, tokens, width)).astype(np.float32)}
            runs = {name: lambda each=session: each.run(None, x) for name, session in sessions.items()}  # noqa: B023
            taken = interleave(runs, repeats=31, inner=5)
            name = f"Sum before {'pre' if is_first else 'post'}-norm, {title}"
            rows.append(Row(name, taken["sum"] / taken["add"], 1.0, "Add, fused", onnxruntime.__version__))
    return 0 if report("What is written in other words for ONNX Runtime", rows, OUT / "spellings.json") else 1


if __name__ == "__main__":
    sys.exit(main())
