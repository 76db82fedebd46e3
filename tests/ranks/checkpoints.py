"""deploy_checkpoint over ranks: a small Llama in folder/llama, by one process and by all."""

import hashlib
import json
import os
import shutil
import signal
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalepoint import deploy_checkpoint, distributed
from scalepoint.errors import ScalepointWarning
from scalepoint.pipeline import deploy_checkpoint as language
from scalepoint.tuning.checkpoint import Checkpoint
from tests.ranks.jobs import outcome

FOUR = {"weight": {"n_bits": 4, "block_size": 32}, "activation": "float"}
EIGHT = {"weight": {"per_channel": True}, "activation": {"symmetric": True}}


def write_source(source: Path) -> None:
    """The checkpoint, and text."""
    from tests.language.conftest import WORDS, text, write_llama, write_tokenizer  # ranks need it not

    source.mkdir(parents=True)
    tokens = write_tokenizer(source).encode(text(400))
    write_llama(source, tokens, words=WORDS, steps=5)


@dataclass(frozen=True)
class Folder:
    """Where the llama is, and what is made of it."""

    path: Path

    @property
    def source(self) -> Path:
        return self.path / "llama"

    def deployed(self, name: str, **how: Any) -> Any:
        """Scores, and what tuning says of every layer."""
        asked = {
            "target": "compressed-tensors", "config": FOUR, "data": self.source / "calibration.txt",
            "judge": self.source / "judge.txt", "length": 32, "samples": 13, "verify": False, "progress": False,
        }  # fmt: skip
        done = deploy_checkpoint(self.source, self.path / name, **{**asked, **how})
        rows = [] if done.tuned is None else [[row.name, row.after, row.rows] for row in done.tuned.layers]
        return [done.float_score, done.score, len(done.report.tuning.layers if done.report.tuning else ()), rows]

    def both(self, name: str, **how: Any) -> Any:
        """By the first rank alone, by all, and whether they wrote the same weights."""
        one = distributed.run_on_main("alone", lambda: self.deployed(f"{name}-one", **how), Any)
        many = self.deployed(f"{name}-many", **how)
        return [one, many, self.mark(f"{name}-one") == self.mark(f"{name}-many")]

    def mark(self, name: str) -> str:
        """Of the weights as they were written."""
        with distributed.phase("written"):
            pass
        return hashlib.sha256(
            b"".join(each.read_bytes() for each in self.path.glob(f"{name}/*.safetensors"))
        ).hexdigest()


def deploying(folder: Path) -> Any:
    """Fails, and goes on; refuses what does not fit."""
    here = Folder(folder)
    found = {"failed": outcome(lambda: _interrupted(lambda: here.deployed("out")))}
    found["left"] = _names(folder)
    found["resumed"] = _unwarned(lambda: here.deployed("out", resume=True))
    found["short"] = outcome(lambda: here.deployed("never", length=10**6))
    found["other"] = outcome(lambda: _other(here))
    found["all"] = _names(folder)
    return found


def further(folder: Path) -> Any:
    """As one process would, rounded, observed, tuned; fewer sequences than ranks; what failed goes on, with all and
    with one, and ends in the same bytes."""
    here = Folder(folder)
    found = {"rounded": here.both("rounded", accuracy="fast", data=None)}
    found["observed"] = here.both("observed", accuracy="fast", config=EIGHT)
    found["few"] = here.both("few", samples=1)
    found["tuned"] = here.both("tuned")
    found["failed"] = outcome(lambda: _interrupted(lambda: here.deployed("again")))
    if distributed.is_main():
        shutil.copytree(folder / ".again.work", folder / ".first.work")
    found["resumed"] = _unwarned(lambda: here.deployed("again", resume=True))
    found["same bytes"] = here.mark("again") == here.mark("tuned-many")
    found["resumed by one"] = distributed.run_on_main(
        "alone", lambda: _unwarned(lambda: here.deployed("first", resume=True)), Any
    )
    return found


def _names(folder: Path) -> list[str]:
    """What is in a folder when all ranks have come here; without what the test itself leaves there."""
    with distributed.phase("looking"):
        pass
    return sorted(each.name for each in folder.iterdir() if not each.name.startswith(("result", "said", "store")))


def killed(folder: Path) -> Any:
    """Kill rank DIES at STEP: while blocks are tuned (store_piece), scored, or written (TunedCodes)."""
    step, dies = os.environ["STEP"], int(os.environ["DIES"])
    if step and distributed.rank() == dies:
        deadly(Checkpoint if step == "store_piece" else language, step)
    return outcome(lambda: Folder(folder).deployed("out", resume=not step)[:2])


def deadly(owner: Any, name: str) -> None:
    """The second call of it is the end: the first may be in the first block."""
    original, calls = getattr(owner, name), []

    def call(*args: Any, **how: Any) -> Any:
        calls.append(name)
        if len(calls) == (2 if name == "store_piece" else 1):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **how)

    setattr(owner, name, call)


def _interrupted(run: Any) -> Any:
    """The first rank fails after it has kept two pieces."""
    keep, kept = Checkpoint.store_piece, []

    def failing(self: Checkpoint, *args: Any) -> None:
        keep(self, *args)
        kept.append(args[0])
        if len(kept) == 2 and distributed.is_main():
            raise RuntimeError("no more")

    Checkpoint.store_piece = failing  # type: ignore[method-assign]
    try:
        return run()
    finally:
        Checkpoint.store_piece = keep  # type: ignore[method-assign]


def _unwarned(run: Any) -> Any:
    """What was kept fits: a warning would say that it does not."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", ScalepointWarning)
        return run()


def _other(here: Folder) -> Any:
    """The second rank is given a checkpoint with another config."""
    own = here.path / "other" if distributed.rank() else here.source
    if distributed.rank():
        shutil.copytree(here.source, own)
        said = json.loads((own / "config.json").read_text())
        (own / "config.json").write_text(json.dumps({**said, "rms_norm_eps": 0.5}))
    try:
        return deploy_checkpoint(own, here.path / "never", target="compressed-tensors", accuracy="fast", progress=False)
    finally:
        if distributed.rank():
            shutil.rmtree(own)
