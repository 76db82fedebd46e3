"""Core ML files of five networks: what is proven of each off macOS, and what it takes on disk.

    python bench/coreml.py [--json FILE] [NAME ...]

Needs coremltools. A row is a network in one way of quantizing: tensors of the file that are not the model's bit by bit
(none must be), agreement of the evaluated program with the simulation, and its size against the float16 file.
"""

import argparse
import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

import scalepoint
from networks import SUBJECTS
from scalepoint.formats import find_format
from scalepoint.quantize import QuantConfig
from scalepoint.quantize.shortcut import quantize

NAMES = ("resnet18", "mobilenet", "lite0", "minilm", "small_vit")
WAYS = {
    "int8": QuantConfig(),
    "w int4 / channel": QuantConfig.weight_only("int4", None),
    "w int4 / 32": QuantConfig.weight_only("int4", 32),
    "palette 4": QuantConfig.palettes(4),
    "palette 2 / 16": QuantConfig.palettes(2, 16),
}


def rows_of(name: str) -> list[dict[str, Any]]:
    subject = SUBJECTS[name](None)
    named = isinstance(subject.inputs, dict)
    args, kwargs = ((), subject.inputs) if named else ((subject.inputs,), {})
    form = find_format("coreml")
    rows = []
    for way, config in WAYS.items():
        data = subject.calibration[:2] if way == "int8" else None
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of layers that blocks or groups do not divide
            made = quantize(
                subject.model, args, config, kwargs=kwargs, forward_loop=data, target="coreml", freeze_weights=True
            ).eval()
            path, plain = Path(folder) / "m.mlpackage", Path(folder) / "f.mlpackage"
            scalepoint.export(made, path, args, kwargs=kwargs, float_path=plain)
            found = scalepoint.verify(path, made, args, kwargs=kwargs)
            size, whole = (form.about(each).size for each in (path, plain))
        row = {"model": subject.title, "way": way, "different": len(found.differences), "db": found.sqnr}
        row |= {"low": found.low_precision, "mb": size / 1e6, "of float16": size / whole, "status": found.status.value}
        rows.append(row)
        print(
            f"{row['model']:34} {way:18} {row['different']} differ, {row['db']:6.1f} dB, {row['low']:3} narrow, "
            f"{row['mb']:6.2f} MB, {row['of float16']:.3f} of float16, {row['status']}",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for name in given.names for row in rows_of(name)]
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
