"""SmolLM2-135M in 4 bits beside other tools: the same weights, calibration texts and judging texts.

    python -m venv PEER; PEER/bin/pip install torch==2.13.0 auto-round
    python bench/language_peers.py --python PEER/bin/python [--only auto-round]

Weights alone, symmetric in groups of 64, embedding and head float, 16 texts of 512 words; each tool as its own
documentation uses it, one thread, in a process of its own. What its codes stand for is put into the same model, which
reads the same 12 texts: the score is perplexity.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1] / "demo"))

from measure import publish
from scalepoint.support.cpu import child_environment
from smollm import folder as smollm
from tuned import language
from tuned.rows import BALANCED, NEAREST, Kept, Row, shown
from tuned.subject import Plain, Subject, error, judged, prepared, score

OUT = Path(__file__).parents[1] / "out"
CHILD = Path(__file__).parent / "tuned" / "language_peer.py"
WAYS = {"auto-round": "auto-round, 50 iterations", "nncf": "NNCF, AWQ and scale estimation"}
PRECISION = "int4 blocks of 64"


def theirs(subject: Subject, how: str, python: str) -> float | None:
    """The model with what a tool's codes stand for, and the seconds that it took; None where it refuses."""
    data, output = OUT / "peers" / "smollm.safetensors", OUT / "peers" / f"smollm-{how}.safetensors"
    data.parent.mkdir(parents=True, exist_ok=True)
    save_file({"calibration": torch.cat(list(subject.calibration))}, data)
    if not output.exists():
        command = [python, str(CHILD), how, str(smollm()), str(data), "4", str(output)]
        run = subprocess.run(command, env=child_environment(), capture_output=True, text=True, check=False)
        if run.returncode:
            print(f"{how}: {(run.stderr.strip().splitlines() or ['it ended'])[-1][-300:]}", flush=True)
            return None
    found = load_file(output)
    seconds = float(found.pop("seconds"))
    for name, weight in found.items():
        own = name.replace("model.layers.", "blocks.").replace("self_attn", "attention")
        subject.model.get_parameter(f"{own}.weight").data.copy_(weight)
    return seconds


def row(subject: Subject, how: str, run: torch.nn.Module, plain: Plain, seconds: float) -> Row:
    found, level = judged(subject, run, plain)
    reached, apart = score(subject, found.marks), error(subject, found.marks, plain.marks)
    return Row(subject.name, PRECISION, how, reached, apart, level, seconds, is_perplexity=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", required=True, help="of an environment that has the tool")
    parser.add_argument("--only", default="", help="a tool; without one both, and ours")
    given = parser.parse_args()
    torch.set_num_threads(1)
    subject, kept = language.smollm(), Kept(OUT / "language-peers.json")
    plain, _ = judged(subject, subject.model)
    kept.add(Row(subject.name, "float", "float", score(subject, plain.marks), 0.0, None, 0.0, is_perplexity=True))
    for how in (NEAREST, BALANCED):
        name = f"scalepoint, {how}"
        if (subject.name, PRECISION, name) not in kept.rows:
            model, seconds = prepared(subject, PRECISION, how)
            kept.add(row(subject, name, model, plain, seconds))
    for how, name in WAYS.items():
        if given.only in how and (seconds := theirs(subject, how, given.python)) is not None:
            kept.add(row(subject, name, subject.model, plain, seconds))
    found = kept.ordered()
    sys.exit(not publish(shown(found), found, OUT / "language-peers.json"))


if __name__ == "__main__":
    main()
