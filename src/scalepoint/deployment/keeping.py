"""What is kept beside the files, so that a run can be understood and repeated: all that was asked, and a log."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from scalepoint.allocation import Budget
from scalepoint.deployment.run import Run
from scalepoint.deployment.settings import DeployConfig, check_options
from scalepoint.deployment.trials import Trial
from scalepoint.errors import VerificationError
from scalepoint.files import replace_text
from scalepoint.progress import Event, tell
from scalepoint.quantize import QuantConfig
from scalepoint.verification import Status, extract_failing

CONFIG, LOG, FAILING = "config.yaml", "log.txt", "failing"


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers of torch and Python from this seed on; afterwards theirs go on as they were."""
    check_options({"seed": seed})
    before = random.getstate()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(before)


class Log:
    """Listens to a run, and writes down when what ended, was measured or was written."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, event: Event) -> None:
        if event.kind not in ("start", "advance"):
            now = datetime.now(UTC).isoformat(timespec="seconds")
            with self.path.open("a", encoding="utf-8") as file:
                file.write(f"{now} {event.kind} {event}\n")


def keep_failing(run: Run, best: Trial) -> None:
    """Where the file departs: the first layer that does so alone, as a file of its own with a script, in failing/."""
    found = best.verification
    if found is None or found.holds or found.status != Status.OK or found.runtime != "onnxruntime":
        return
    args, kwargs = run.inputs
    folder = run.journal.folder.parent / FAILING
    with suppress(VerificationError):  # a file that does not run has no layer to look at
        if extract_failing(best.path, best.model, args, folder, kwargs=kwargs):
            tell(Event("file", str(folder / "run.py")))


def keep(
    run: Run,
    config: QuantConfig,
    limits: tuple[float | None, float | None],
    most: int,
    budget: Budget | None,
    choices: Sequence[str],
) -> None:
    """config.yaml with every default written out (what Python gives as objects is empty there), and the log."""
    same = (
        "accuracy",
        "max_batches",
        "on_nan",
        "leave",
        "dynamic_axes",
        "strict",
        "float_dtype",
        "metadata",
        "threads",
        "seed",
    )
    told: dict[str, Any] = {name: getattr(run, name) for name in same}
    folder = run.journal.folder.parent
    asked = DeployConfig(
        target=run.target.name,
        output=str(folder),
        max_drop=limits[0],
        min_speed=limits[1],
        max_trials=most,
        budget=budget,
        choices=tuple(choices),
        quantization=config,
        **told,
    )
    asked.to_file(folder / CONFIG)
    log = run.journal.folder / LOG
    if log.is_file():
        replace_text(folder / LOG, log.read_text(encoding="utf-8"))
