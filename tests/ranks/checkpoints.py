"""deploy_checkpoint over ranks: a small Llama in folder/llama, by one process and by all."""

import hashlib
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

from torch import distributed

from scalepoint import deploy_checkpoint, ranks
from scalepoint.errors import ScalepointWarning
from scalepoint.tuning.checkpoint import Checkpoint
from tests.ranks.jobs import outcome

FOUR = {"weight": {"n_bits": 4, "block_size": 32}, "activation": "float"}
EIGHT = {"weight": {"per_channel": True}, "activation": {"symmetric": True}}


def deploying(folder: Path) -> Any:
    """Rounded, observed and tuned, as one process would; goes on alone after a failure; refuses what does not fit."""
    source = folder / "llama"

    def deployed(name: str, **how: Any) -> Any:
        asked = {"config": FOUR, "judge": source / "judge.txt", "length": 32, "samples": 13, "verify": False, **how}
        asked = {"data": source / "calibration.txt", **asked}
        done = deploy_checkpoint(source, folder / name, target="compressed-tensors", progress=False, **asked)
        rows = [] if done.tuned is None else [[row.name, row.after, row.rows] for row in done.tuned.layers]
        return [done.float_score, done.score, len(done.report.tuning.layers if done.report.tuning else ()), rows]

    def both(name: str, **how: Any) -> Any:
        one = _by_first(lambda: deployed(f"{name}-one", **how))
        many = deployed(f"{name}-many", **how)
        with ranks.agreed("both are there"):
            pass
        return [one, many, _mark(folder / f"{name}-one") == _mark(folder / f"{name}-many")]

    found = {"rounded": both("rounded", accuracy="fast", data=None)}
    found["observed"] = both("observed", accuracy="fast", config=EIGHT)
    found["tuned"] = both("tuned")
    found["few"] = both("few", samples=1)
    found["failed"] = outcome(lambda: _interrupted(lambda: deployed("again")))
    found["left"] = sorted(each.name for each in folder.iterdir() if "again" in each.name)
    found["resumed"] = _by_first(lambda: _unwarned(lambda: deployed("again", resume=True)))
    found["same bytes"] = _mark(folder / "again") == _mark(folder / "tuned-many")
    found["nan"] = outcome(lambda: deployed("never", length=10**6))
    found["other"] = outcome(lambda: _other(folder, source))
    found["all"] = sorted(each.name for each in folder.iterdir())
    return found


def _by_first(make: Any) -> Any:
    return ranks.told("alone", make)


def _mark(folder: Path) -> str:
    """Of the weights as they were written."""
    files = sorted(folder.glob("*.safetensors"))
    return hashlib.sha256(b"".join(each.read_bytes() for each in files)).hexdigest() if files else "nothing"




def _interrupted(run: Any) -> Any:
    """The first rank fails after it has kept two pieces."""
    keep, kept = Checkpoint.keep, []

    def failing(self: Checkpoint, *args: Any) -> None:
        keep(self, *args)
        kept.append(args[0])
        if len(kept) == 2 and ranks.is_main():
            raise RuntimeError("no more")

    Checkpoint.keep = failing  # type: ignore[method-assign]
    try:
        return run()
    finally:
        Checkpoint.keep = keep  # type: ignore[method-assign]


def _unwarned(run: Any) -> Any:
    """What was kept fits: a warning would say that it does not."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", ScalepointWarning)
        return run()


def _other(folder: Path, source: Path) -> Any:
    """The second rank is given a checkpoint with another config."""
    own = folder / "other" if ranks.rank() else source
    if ranks.rank():
        shutil.copytree(source, own)
        said = json.loads((own / "config.json").read_text())
        (own / "config.json").write_text(json.dumps({**said, "rms_norm_eps": 0.5}))
    try:
        return deploy_checkpoint(own, folder / "never", target="compressed-tensors", accuracy="fast", progress=False)
    finally:
        if distributed.get_rank():
            shutil.rmtree(own)
