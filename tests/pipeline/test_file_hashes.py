"""The bytes of ten files, without their metadata, are those of an earlier commit.

A change that is meant to leave files as they are proves it here. The values of these networks are small multiples of
1/16, so float sums are exact in any order, and the hashes hold on every CPU and for every number of threads. All files
are made for CPUs without VNNI. After a change that is meant to change files,
`python -m tests.pipeline.test_file_hashes` prints the new table.
"""

import hashlib
import tempfile
import warnings
from pathlib import Path
from unittest.mock import patch

import onnx
import pytest
import torch
from torch import Tensor, nn

from scalepoint import export
from scalepoint.quantize.config import QuantConfig
from scalepoint.quantize.quantize_model import quantize
from scalepoint.targets import Target
from scalepoint.targets.registry import find_target, has_cpu_option
from tests.pace import fast

# .tflite and .pte files contain the version of scalepoint, so the hashes are those of files by this version.
HASHED_VERSION = "0.1.0.dev0"
SUFFIXES = {"litert": "tflite", "executorch": "pte"}
CASES = {
    "convolutions, onnxruntime": ("convolutions", "onnxruntime", {}),
    "convolutions, onnxruntime, 4-bit weights": (
        "convolutions",
        "onnxruntime",
        {"weight": {"n_bits": 4, "per_channel": True}},
    ),
    "convolutions, openvino": ("convolutions", "openvino", {}),
    "convolutions, tensorrt": ("convolutions", "tensorrt", {}),
    "convolutions, litert": ("convolutions", "litert", {}),
    "convolutions, executorch": ("convolutions", "executorch", {}),
    "linear layers, onnxruntime": ("linear layers", "onnxruntime", {}),
    "linear layers, litert": ("linear layers", "litert", {}),
    "linear layers, onnxruntime, weights only": ("linear layers", "onnxruntime", QuantConfig.weight_only("int4", 32)),
    "linear layers, tensorrt, histogram": (
        "linear layers",
        "tensorrt",
        {"activation": {"calibration_method": "percentile"}},
    ),
}
HASHES = {
    "convolutions, onnxruntime": "b71295bcdabc7b80",
    "convolutions, onnxruntime, 4-bit weights": "95381af79071b04a",
    "convolutions, openvino": "ce1cff25bd0e5942",
    "convolutions, tensorrt": "45dbef2eceaa8de4",
    "convolutions, litert": "f83a3f31a786830c",
    "convolutions, executorch": "2ab210cc8165e63b",
    "linear layers, onnxruntime": "70cb770e924bf166",
    "linear layers, litert": "4c30fbc361c51221",
    "linear layers, onnxruntime, weights only": "c4d102b3b94d0ecd",
    "linear layers, tensorrt, histogram": "d8582c55dd959116",
}


def grid(*shape: int) -> Tensor:
    """Random multiples of 1/16 from -1 to 1."""
    return torch.randint(-16, 17, shape).float() / 16


def network(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    if name == "convolutions":
        model = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, groups=16),
            nn.ReLU(),
            nn.Conv2d(16, 8, 1),
        )
        x = grid(4, 3, 16, 16)
    else:
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
        x = grid(8, 64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(grid(*parameter.shape))
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):  # running_var + eps is 1, so that folding is exact
                module.eps = 2.0**-10
                module.running_var.fill_(1 - 2.0**-10)
    return model.eval(), x


def choose_target(name: str) -> Target:
    target = find_target(name)
    return find_target(name, "avx2") if has_cpu_option(target) else target


def file_hash(case: str, folder: Path) -> str:
    """Return the sha256 of the file that a case writes, without metadata for ONNX files."""
    name, target, options = CASES[case]
    # Bias correction averages products of arbitrary scales, whose sums depend on their order.
    config = QuantConfig.build(options).model_copy(update={"correct_bias": False})
    model, x = network(name)
    suffix = SUFFIXES.get(target, "onnx")
    with warnings.catch_warnings(), patch("scalepoint.formats.metadata.__version__", HASHED_VERSION):
        warnings.simplefilter("ignore")
        loop = None if isinstance(options, QuantConfig) else [x]
        quantized = quantize(model, (x,), config, target=choose_target(target), forward_loop=loop, progress=False)
        path = export(quantized, folder / f"model.{suffix}", (x,))
    if suffix == "onnx":
        file = onnx.load(path)
        del file.metadata_props[:]
        return hashlib.sha256(file.SerializeToString(deterministic=True)).hexdigest()[:16]
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


@pytest.mark.parametrize("case", fast(CASES, *(case for case in CASES if "executorch" not in case)))
def test_the_bytes_of_a_file_have_not_changed(case, tmp_path):
    if "litert" in case and not torch.__version__.startswith("2.13."):
        pytest.skip("other versions of torch decompose some operations in another way")
    assert file_hash(case, tmp_path) == HASHES[case]


if __name__ == "__main__":
    for case in CASES:
        with tempfile.TemporaryDirectory() as temporary_folder:
            print(f'    "{case}": "{file_hash(case, Path(temporary_folder))}",')  # noqa: T201
