"""Runs of one file in its runtime, compared with the simulation.

inputs --simulate--> expected, codes
inputs --file in the runtime (child process)--> outputs  --compare--> agreement per output
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from scalepoint.graph.dry_run import BoundInputs
from scalepoint.runtimes import Runtime, Status, Variant
from scalepoint.runtimes.process import ExchangeFiles, TaskResult, run_task
from scalepoint.runtimes.runtime import ExecutedNodes
from scalepoint.support.files import TemporaryFolder
from scalepoint.verification.agreement import Agreement, compare_outputs, worst_sqnr
from scalepoint.verification.choices import FollowChoices, RuntimeChoice, read_runtime_choices
from scalepoint.verification.file_formats import find_file_format
from scalepoint.verification.result import SURE_DB, Choice
from scalepoint.verification.simulation import simulate

Feeds = Mapping[str, np.ndarray]
Codes = Mapping[str, list[Tensor]]


class Simulation(NamedTuple):
    """A model, its inputs, and the results of its simulation."""

    model: nn.Module
    inputs: BoundInputs
    expected: list[Tensor]
    codes: Codes


class ComparedRun(NamedTuple):
    """Agreement of a run with the simulation.

    If the runtime chose differently among equal scores, the simulation was repeated with these `choices`.
    """

    agreements: tuple[Agreement, ...]
    codes: Codes  # of the simulation that was compared
    choices: tuple[Choice, ...] = ()


@dataclass(frozen=True)
class RuntimeRun:
    """A file, its runtime and limits, and the simulation that its runs are compared with.

    Attributes:
        runtime: The runtime.
        path: The file.
        simulation: The simulation.
        feeds: The inputs as arrays, by the names of the file's inputs.
        files: The files through which inputs and outputs are exchanged with the child process.
        threads: Threads of the runtime.
        seconds: Time limit of a run.
        memory: Memory limit in bytes; None for the memory of the machine.
        bound: Smallest SQNR in dB that counts as agreement.
    """

    runtime: Runtime
    path: Path
    simulation: Simulation
    feeds: Feeds
    files: ExchangeFiles
    threads: int
    seconds: float
    memory: int | None
    bound: float

    def run_file(self, *, executed: bool = False, **options: Any) -> TaskResult:
        """Run the file. With `executed` the result lists the nodes of the compiled graph."""
        request = {
            "task": "run",
            "path": str(self.path),
            "options": {"threads": self.threads, **options},
            "executed": executed,
            **self.files.paths,
        }
        return run_task(self.runtime, request, seconds=self.seconds, memory=self.memory)

    def run_variants(self, executed: ExecutedNodes) -> dict[str, Any]:
        """Run the file with the runtime's other settings. Return the fields of `Verification` that this gives."""
        variants = [variant for variant in self.runtime.variants if variant.applies(executed)]
        # A variant is called like the field of its agreement.
        agreements: dict[str, Any] = {variant.name: self._run_variant(variant) for variant in variants}
        return agreements | {"rounded": " ".join(variant.why for variant in variants if variant.why)}

    def _run_variant(self, variant: Variant) -> tuple[Agreement, ...]:
        answer = self.run_file(**variant.options)
        return self.compare(answer, **variant.options).agreements if answer.status == Status.OK else ()

    def compare(self, answer: TaskResult, **options: Any) -> ComparedRun:
        """Compare the outputs of a successful run with the simulation.

        If they do not agree well, try a simulation with the choices of the runtime among equal scores (see choices.py).
        Keep the second comparison only if it agrees, and better than the first.
        """
        outputs = self.files.outputs(answer)
        agreements = compare_outputs(self.simulation.expected, outputs, self.feeds)
        plain = ComparedRun(agreements, self.simulation.codes)
        if worst_sqnr(agreements) >= SURE_DB:
            return plain
        follow = FollowChoices(self._read_choices(**options), self.bound)
        if not follow.choices:
            return plain
        with follow:
            expected, codes = simulate(self.simulation.model, self.simulation.inputs)
        followed = ComparedRun(compare_outputs(expected, outputs, self.feeds), codes, follow.followed)
        sqnr = worst_sqnr(followed.agreements)
        is_explained = followed.choices and sqnr >= self.bound and sqnr > worst_sqnr(agreements)
        return followed if is_explained else plain

    def _read_choices(self, **options: Any) -> list[RuntimeChoice]:
        """Run a copy of the file that outputs the scores and indices of its choices; [] if the format has none."""
        show_choices = find_file_format(self.path, self.runtime).show_choices
        if show_choices is None:
            return []
        with TemporaryFolder() as folder:
            copy = folder / self.path.name
            choice_outputs = show_choices(self.path, copy)
            if choice_outputs is None:  # the file has no top-k, sort or argmax
                return []
            answer = replace(self, path=copy).run_file(**options)
            if answer.status != Status.OK:
                return []
            return read_runtime_choices(choice_outputs, self.files.outputs(answer))
