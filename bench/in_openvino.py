"""The files in OpenVINO: ours, and NNCF's own quantization of the same float file where nncf is installed."""

from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

import scalepoint
from files import File, share, speeds
from scalepoint.quantize import quantize
from scalepoint.targets import openvino_target
from scalepoint.verification import Verification
from subjects import Subject
from ways import NNCF, OURS, arrays


def in_openvino(subject: Subject, folder: Path) -> dict[str, Any]:
    plain, path = folder / "float.onnx", folder / "openvino.onnx"
    quantized = quantize(
        subject.model, subject.inputs, forward_loop=subject.calibration, target=openvino_target("avx2")
    )
    scalepoint.export(quantized, path, subject.inputs, float_path=plain)
    paths, agreements = {OURS: path}, {OURS: judged(path, quantized, subject).sqnr}
    if find_spec("nncf"):
        paths[NNCF] = folder / "nncf.xml"
        batches = [arrays(subject.model, batch) for batch in subject.calibration]
        is_transformer = any(isinstance(module, nn.LayerNorm) for module in subject.model.modules())
        by_nncf(plain, paths[NNCF], batches, is_transformer=is_transformer)
    ratios = speeds([plain, *paths.values()], arrays(subject.model, subject.inputs), "openvino")[1:]
    files = []
    for (how, each), ratio in zip(paths.items(), ratios, strict=True):
        found = judged(each, subject.model, subject)
        int8 = share(found.low_precision, found.fallbacks)
        size = size_of(each) / size_of(plain)
        files.append(asdict(File(how, int8, found.sqnr, agreements.get(how), ratio, size)))
    return {"openvino": files}


def judged(path: Path, model: nn.Module, subject: Subject) -> Verification:
    found = scalepoint.verify(path, model, subject.inputs, runtime="openvino", layers=False)
    if found.message:
        raise SystemExit(f"{path.name} in OpenVINO: {found.message}")
    return found


def size_of(path: Path) -> int:
    """With the weights beside it."""
    weights = path.with_suffix(".bin")
    return path.stat().st_size + (weights.stat().st_size if weights.exists() else 0)


def by_nncf(plain: Path, path: Path, batches: list[dict[str, np.ndarray]], *, is_transformer: bool) -> None:
    """Its defaults, and its own setting for transformers."""
    import nncf  # noqa: PLC0415
    import openvino  # noqa: PLC0415

    model = openvino.Core().read_model(plain)
    names = [each.get_any_name() for each in model.inputs]
    dataset = nncf.Dataset([dict(zip(names, batch.values(), strict=True)) for batch in batches])
    kind = nncf.ModelType.TRANSFORMER if is_transformer else None
    openvino.save_model(nncf.quantize(model, dataset, model_type=kind), path, compress_to_fp16=False)
