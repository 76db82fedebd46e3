"""A step of quantization-aware training against the float step: CPU time and peak memory, and torchao's PT2E beside.

ResNet-18, batch 8 of 3 x 112 x 112, forward, backward and SGD, one thread, interleaved in one process.
"""

import json
import os
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from measure import Row, interleave, peak_extra_bytes, report
from plain_models import resnet18
from scalepoint.quantize import QuantConfig, TensorQuantConfig, prepare_qat, quantize

MEMORY = "--memory"
OUT = Path(__file__).parent.parent / "out"
X = torch.randn(8, 3, 112, 112)
CONFIG = QuantConfig(activation=TensorQuantConfig(symmetric=False), weight=TensorQuantConfig(per_channel=True))


def stepper(model: nn.Module) -> Callable[[], object]:
    """One training step of a model."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-4)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(X).square().mean().backward()
        optimizer.step()

    return step


def ours(*, observe: bool, learn: bool = False) -> nn.Module:
    quantized = quantize(resnet18(), X[:2], CONFIG, forward_loop=[X], freeze_weights=False)
    return prepare_qat(quantized, learn_scales=learn, observe=None if learn else observe)


def torchao_pt2e() -> nn.Module | None:
    """torchao's way, or None when it is not installed."""
    try:
        from torchao.quantization.pt2e import move_exported_model_to_train  # noqa: PLC0415
        from torchao.quantization.pt2e.quantize_pt2e import prepare_qat_pt2e  # noqa: PLC0415
        from torchao.testing.pt2e import _xnnpack_quantizer as xnnpack  # noqa: PLC0415
    except ImportError as error:
        print(f"torchao is left out: {error}")
        return None
    config = xnnpack.get_symmetric_quantization_config(is_per_channel=True, is_qat=True)
    quantizer = xnnpack.XNNPACKQuantizer().set_global(config)
    exported = torch.export.export(resnet18().train(), (X,)).module()
    prepared = prepare_qat_pt2e(exported, quantizer)
    move_exported_model_to_train(prepared)
    return prepared


def peaks() -> dict[str, float]:
    """Peak memory of each step, in a process where large blocks go back when they are freed: holes are nobody's memory,
    but that costs time, so times are taken elsewhere."""
    setting = {"MALLOC_MMAP_THRESHOLD_": "65536"}
    child = subprocess.run(  # this file
        [sys.executable, __file__, MEMORY], env=os.environ | setting, check=True, capture_output=True, text=True
    )
    found: dict[str, float] = json.loads(child.stdout.splitlines()[-1])
    return found


def main() -> int:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    models = {
        "float": resnet18().train(),
        "ours, ranges held": ours(observe=False),
        "ours, observing": ours(observe=True),
        "ours, learned scales": ours(observe=False, learn=True),
    }
    theirs = torchao_pt2e()
    if theirs is not None:
        models["torchao PT2E"] = theirs
    steps = {name: stepper(model) for name, model in models.items()}
    if MEMORY in sys.argv:
        found = {name: statistics.median(peak_extra_bytes(step) for _ in range(5)) for name, step in steps.items()}
        print(json.dumps(found))
        return 0
    times, memory = interleave(steps, repeats=7), peaks()
    rows = []
    for name in list(models)[1:]:
        is_ours = name.startswith("ours")
        base = "the float step"
        rows.append(Row(f"{name}: time", times[name] / times["float"], 1.4 if is_ours else 99.0, base))
        rows.append(Row(f"{name}: peak memory", memory[name] / memory["float"], 1.35 if is_ours else 99.0, base))
    if theirs is not None:
        for name in ("ours, observing",):
            rows.append(Row(f"{name}: time", times[name] / times["torchao PT2E"], 1.0, "torchao PT2E"))
            rows.append(Row(f"{name}: peak memory", memory[name] / memory["torchao PT2E"], 1.0, "torchao PT2E"))
    return 0 if report("QAT step", rows, OUT / "qat.json") else 1


if __name__ == "__main__":
    sys.exit(main())
