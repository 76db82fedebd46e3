"""Jobs with deploy_checkpoint of a small Llama in folder/llama, by one process and by all ranks."""

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
from tests.ranks.jobs import result_or_error

FOUR = {"weight": {"n_bits": 4, "block_size": 32}, "activation": "float"}
EIGHT = {"weight": {"per_channel": True}, "activation": {"symmetric": True}}


def write_source(source: Path) -> None:
    """Write the checkpoint and text files."""
    from tests.language.conftest import WORDS, text, write_llama, write_tokenizer  # not needed by the ranks

    source.mkdir(parents=True)
    tokens = write_tokenizer(source).encode(text(400))
    write_llama(source, tokens, words=WORDS, steps=5)


@dataclass(frozen=True)
class Folder:
    """The folder with the checkpoint and the outputs."""

    path: Path

    @property
    def source(self) -> Path:
        return self.path / "llama"

    def deploy_once(self, name: str, **options: Any) -> Any:
        """Deploy, and return scores and the tuning result of every layer."""
        settings = {
            "target": "compressed-tensors", "config": FOUR, "data": self.source / "calibration.txt",
            "judge": self.source / "judge.txt", "length": 32, "samples": 13, "verify": False, "progress": False,
        }  # fmt: skip
        deployment = deploy_checkpoint(self.source, self.path / name, **{**settings, **options})
        rows = [] if deployment.tuned is None else [[row.name, row.after, row.rows] for row in deployment.tuned.layers]
        return [
            deployment.float_score,
            deployment.score,
            len(deployment.report.tuning.layers if deployment.report.tuning else ()),
            rows,
        ]

    def compare_ranks(self, name: str, **options: Any) -> Any:
        """Return the results of rank 0 alone and of all ranks, and whether they wrote the same weights."""
        one = distributed.run_on_main("alone", lambda: self.deploy_once(f"{name}-one", **options), Any)
        many = self.deploy_once(f"{name}-many", **options)
        return [one, many, self.digest(f"{name}-one") == self.digest(f"{name}-many")]

    def digest(self, name: str) -> str:
        """Return the sha256 of the written weights."""
        with distributed.phase("written"):
            pass
        return hashlib.sha256(
            b"".join(file.read_bytes() for file in self.path.glob(f"{name}/*.safetensors"))
        ).hexdigest()


def deploying(folder: Path) -> Any:
    """A failure, its resume, and inputs that are errors."""
    folder_of_llama = Folder(folder)
    results = {
        "failed": result_or_error(lambda: _interrupt_after_two_pieces(lambda: folder_of_llama.deploy_once("out")))
    }
    results["left"] = _list_files(folder)
    results["resumed"] = _without_warnings(lambda: folder_of_llama.deploy_once("out", resume=True))
    results["short"] = result_or_error(lambda: folder_of_llama.deploy_once("never", length=10**6))
    results["other"] = result_or_error(lambda: _deploy_another_checkpoint(folder_of_llama))
    results["all"] = _list_files(folder)
    return results


def comparing(folder: Path) -> Any:
    """Compare with one process: rounded, observed, tuned, fewer sequences than ranks, and resumed by all and by one."""
    folder_of_llama = Folder(folder)
    results = {"rounded": folder_of_llama.compare_ranks("rounded", accuracy="fast", data=None)}
    results["observed"] = folder_of_llama.compare_ranks("observed", accuracy="fast", config=EIGHT)
    results["few"] = folder_of_llama.compare_ranks("few", samples=1)
    results["tuned"] = folder_of_llama.compare_ranks("tuned")
    results["failed"] = result_or_error(
        lambda: _interrupt_after_two_pieces(lambda: folder_of_llama.deploy_once("again"))
    )
    if distributed.is_main():
        shutil.copytree(folder / ".again.work", folder / ".first.work")
    results["resumed"] = _without_warnings(lambda: folder_of_llama.deploy_once("again", resume=True))
    results["same bytes"] = folder_of_llama.digest("again") == folder_of_llama.digest("tuned-many")
    results["resumed by one"] = distributed.run_on_main(
        "alone", lambda: _without_warnings(lambda: folder_of_llama.deploy_once("first", resume=True)), Any
    )
    return results


def _list_files(folder: Path) -> list[str]:
    """List the files of a folder once all ranks are here, without the files of the test."""
    with distributed.phase("looking"):
        pass
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith(("result", "output", "store")))


def killed(folder: Path) -> Any:
    """Kill rank DIES at STEP: while blocks are tuned (store_piece), scored, or written (TunedCodes)."""
    step, dies = os.environ["STEP"], int(os.environ["DIES"])
    if step and distributed.rank() == dies:
        kill_at_call(Checkpoint if step == "store_piece" else language, step)
    return result_or_error(lambda: Folder(folder).deploy_once("out", resume=not step)[:2])


def kill_at_call(owner: Any, name: str) -> None:
    """Kill this process at the second call of `store_piece`, or at the first call of another function."""
    original, calls = getattr(owner, name), []

    def call(*args: Any, **options: Any) -> Any:
        calls.append(name)
        if len(calls) == (2 if name == "store_piece" else 1):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **options)

    setattr(owner, name, call)


def _interrupt_after_two_pieces(run: Any) -> Any:
    """Rank 0 raises an error after it has stored two pieces."""
    original, pieces = Checkpoint.store_piece, []

    def store_and_fail(self: Checkpoint, *args: Any) -> None:
        original(self, *args)
        pieces.append(args[0])
        if len(pieces) == 2 and distributed.is_main():
            raise RuntimeError("no more")

    Checkpoint.store_piece = store_and_fail  # type: ignore[method-assign]
    try:
        return run()
    finally:
        Checkpoint.store_piece = original  # type: ignore[method-assign]


def _without_warnings(run: Any) -> Any:
    """Run without warnings: a warning would say that stored pieces cannot be used."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", ScalepointWarning)
        return run()


def _deploy_another_checkpoint(folder_of_llama: Folder) -> Any:
    """Rank 1 gets a checkpoint with another config."""
    source = folder_of_llama.path / "other" if distributed.rank() else folder_of_llama.source
    if distributed.rank():
        shutil.copytree(folder_of_llama.source, source)
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    try:
        return deploy_checkpoint(
            source, folder_of_llama.path / "never", target="compressed-tensors", accuracy="fast", progress=False
        )
    finally:
        if distributed.rank():
            shutil.rmtree(source)
