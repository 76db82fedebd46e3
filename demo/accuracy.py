"""Accuracy first: 4-bit weights cost the sentence encoder some points; max_drop=0.1 wins them back.

The same model and sentences as `sentences.py`. deploy tries other ranges, then gives 8 bits, then float, to the layers
where that removes most error for its cost, until the file in ONNX Runtime is at most 0.1 points below the float model;
then it tries less again.
"""

from pathlib import Path

from rich.console import Console

import scalepoint
from scalepoint.quantize import QuantConfig
from scalepoint.spec import PerBlockGranularity, QuantizationSpec
from scalepoint.support.cpu import cap_instruction_set
from sentences import prepared

OUT = Path(__file__).parent.parent / "out" / "minilm-accuracy"
INT4 = QuantizationSpec(
    dtype="int4",
    qscheme="symmetric_with_clipping",
    granularity=PerBlockGranularity(axis=1, block_size=32),
    qparam_calculator_cls="static",
)
MAX_DROP = 0.1
MAX_SHOWN = 3


def main() -> None:
    cap_instruction_set()  # before the first product
    console = Console()
    task = prepared()
    done = scalepoint.deploy(
        task.model,
        task.calibration[0],
        task.calibration,
        config=QuantConfig(activation="float", weight=INT4),
        output=OUT,
        force=True,
        evaluate=task.accuracy,
        max_drop=MAX_DROP,
    )
    console.print(done.report.table())
    for index, trial in enumerate(done.trials):
        steps = [f"{change.layer or 'all layers'} to {change.to}" for change in trial.precision_changes]
        more = f" and {len(steps) - MAX_SHOWN} more" if len(steps) > MAX_SHOWN else ""
        raised = ", ".join(steps[:MAX_SHOWN]) + more or "as configured"
        console.print(
            f"file {index}: {trial.score:.1f} ({(trial.score or 0) - (done.float_score or 0):+.1f})  {raised}"
        )
    console.print(f"\nthe report    {OUT / 'report.html'}")


if __name__ == "__main__":
    main()
