"""What is kept beside the files, so that a run can be understood and repeated: all that was asked, and a log."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from scalepoint.allocation import Budget
from scalepoint.deployment.run import MODEL, Run
from scalepoint.deployment.settings import DeployConfig, check_options
from scalepoint.deployment.trials import Trial
from scalepoint.documents import dump_yaml
from scalepoint.errors import VerificationError
from scalepoint.files import replace_text
from scalepoint.progress import Event, tell
from scalepoint.quantize import QuantConfig
from scalepoint.report.folder import HTML_FILE, JSON_FILE
from scalepoint.targets.registry import has_cpu_option
from scalepoint.verification import Status, extract_failing
from scalepoint.verification.extraction import NAMES as EXTRACTED
from scalepoint.verification.inputs import INPUTS_FILE

CONFIG, LOG, FAILING = "config.yaml", "log.txt", "failing"
# Files and folders in an output folder, except those of the target's format. The command line writes the last two.
NAMES = (MODEL, FAILING, CONFIG, LOG, JSON_FILE, HTML_FILE, INPUTS_FILE, "kept.yaml", "reproduce.py")
OBJECTS = ("model", "data", "evaluate")
BY_PYTHON = """\
# A call from Python: its model, data and metric were objects, which have no name here. Name them to run this again:
#   scalepoint deploy package.module:model --data package.module:data -c config.yaml -o again
"""


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
        if extract_failing(best.path, best.model, args, folder, kwargs=kwargs, force=True):
            run.written += (folder / name for name in EXTRACTED)
            tell(Event("file", str(folder / "run.py")))


def keep(
    run: Run,
    config: QuantConfig,
    limits: tuple[float | None, float | None],
    most: int,
    budget: Budget | None,
    choices: Sequence[str],
) -> None:
    """config.yaml with every default written out (what Python gives as objects is left out), and the log."""
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
    told: dict[str, Any] = {name: getattr(run, name) for name in same} | {"max_batches": run.asked_batches}
    folder = run.journal.folder.parent
    asked = DeployConfig(
        target=run.target.name,
        cpu=run.target.options["cpu"] if has_cpu_option(run.target) else "auto",
        output=str(folder),
        max_drop=limits[0],
        min_speed=limits[1],
        max_trials=most,
        budget=budget,
        choices=tuple(choices),
        quantization=config,
        **told,
    )
    fields = {key: value for key, value in asked.to_dict().items() if key not in OBJECTS}
    replace_text(folder / CONFIG, BY_PYTHON + dump_yaml(fields))
    run.written.append(folder / CONFIG)
    log = run.journal.folder / LOG
    if log.is_file():
        replace_text(folder / LOG, log.read_text(encoding="utf-8"))
        run.written.append(folder / LOG)
