"""Four-bit weights beside other tools: the same networks, calibration pictures and judging pictures.

    python -m venv PEERS; PEERS/bin/pip install -c constraints.txt torch brevitas nncf h5py pillow safetensors
    python bench/tuning_peers.py --python PEERS/bin/python [--photographs FOLDER]

Weights 4 bits per channel, activations 8 bits asymmetric per tensor; Lite0 with 8 bits at both ends. Each tool as its
own documentation and examples use it; one thread each, in a process of its own.
"""

# ruff: noqa: PLC0415  # the networks bring their data along, which takes long
import argparse
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "demo"))

from measure import publish
from tuned.rows import BALANCED, NEAREST, Kept, Limit, Row, shown
from tuned.subject import Plain, Subject, error, judged, prepared, score, with_limits

OUT = Path(__file__).parents[1] / "out"
CHILD = Path(__file__).parent / "tuned" / "peer.py"
WAYS = {
    "Brevitas GPTQ + bias correction": "brevitas:gptq",
    "Brevitas Qronos + bias correction": "brevitas:qronos",
    "NNCF fast bias correction": "nncf:",
}


def theirs(how: str, network: str, python: str, data: Path) -> tuple[Tensor, float] | None:
    """Outputs on the judging pictures, and the seconds of quantizing, of an earlier run where there was one; None where
    the tool refuses."""
    output = data.with_name(f"{data.stem}-{how.replace(':', '-')}.safetensors")
    if not output.exists():
        command = [python, str(CHILD), how, network, str(data), str(output)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            print(f"{how} on {network}: {run.stderr.strip().splitlines()[-1]}", flush=True)
            return None
    found = load_file(output)
    return found["outputs"], float(found["seconds"])


def row(subject: Subject, how: str, plain: Plain, run: object, seconds: float) -> Row:
    found, level = judged(subject, run, plain)  # type: ignore[arg-type]
    reached, apart = score(subject, found.marks), error(subject, found.marks, plain.marks)
    return Row(subject.name, "W4A8", how, reached, apart, level, seconds)


def compared(subject: Subject, network: str, python: str, kept: Kept) -> None:
    data = OUT / "peers" / f"{network}.safetensors"
    data.parent.mkdir(parents=True, exist_ok=True)
    test = torch.cat([images for images, _ in subject.judging()])
    save_file({"calibration": torch.cat(list(subject.calibration)), "test": test}, data)
    plain, _ = judged(subject, subject.model)
    kept.add(Row(subject.name, "float", "float", score(subject, plain.marks), 0.0, None, 0.0))
    for name, how in WAYS.items():
        if (subject.name, "W4A8", name) in kept.rows:
            continue
        found = theirs(how, network, python, data)
        if found is not None:
            parts = iter(found[0].split([len(answers) for _, answers in subject.judging()]))
            kept.add(row(subject, name, plain, lambda _, parts=parts: next(parts), found[1]))
    for how in (NEAREST, BALANCED):
        model, seconds = prepared(subject, "W4A8", how)
        kept.add(row(subject, f"scalepoint, {how}", plain, model, seconds))
    ours = kept.rows[subject.name, "W4A8", f"scalepoint, {BALANCED}"]
    limits = [Limit("decibels", 0.0, name) for name in WAYS if (subject.name, "W4A8", name) in kept.rows]
    judgement = with_limits(ours, limits, list(kept.rows.values()))
    kept.add(replace(judgement, limits="dB ahead of each"))


def main() -> None:
    from tuned import vision

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", required=True, help="of an environment with brevitas and nncf")
    parser.add_argument("--photographs", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    kept = Kept(OUT / "tuning-peers.json")
    compared(vision.resnet8(), "resnet8", given.python, kept)
    if given.photographs:
        compared(vision.lite0(given.photographs), "lite0", given.python, kept)
    found = kept.ordered()
    sys.exit(not publish(shown(found), found, OUT / "tuning-peers.json"))


if __name__ == "__main__":
    main()
