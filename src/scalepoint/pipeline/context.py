"""StageContext: what all stages of a run share, with the captured graph of the model.

The model is captured once per run; each trial works on a copy of the graph. `sweep` captures it once for all its runs.
"""

import copy
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import fx

from scalepoint.errors import CaptureError, ScalepointWarning
from scalepoint.formats import ExportRequest, FileFormat, find_format
from scalepoint.graph.dynamic_axes import Axes
from scalepoint.graph.user_traceback import user_level
from scalepoint.pipeline.cache import Stage
from scalepoint.pipeline.fingerprints import fingerprint, fingerprint_model
from scalepoint.pipeline.job import Job
from scalepoint.pipeline.workspace import PLAIN_STEM, SOURCE_STEM, DeployWorkspace
from scalepoint.support.progress import timed_phase, write_line
from scalepoint.transformation import (
    TransformationResult,
    apply_transformation_plan,
    capture_for_plan,
    plan_captured_graph,
)

# Graphs that `captures_reused` shares between runs, by the fingerprint of what they depend on.
_captures: ContextVar[dict[str, fx.GraphModule] | None] = ContextVar("_captures", default=None)


@contextmanager
def captures_reused() -> Iterator[None]:
    """Inside this context, runs of one model with the same example inputs and free axes capture it once."""
    token = _captures.set({})
    try:
        yield
    finally:
        _captures.reset(token)


@dataclass(kw_only=True)
class StageContext:
    """The state that all stages of one run share.

    Attributes:
        job: The checked arguments.
        workspace: The output folder, and the cache in it.
        timings: Seconds per kind of step, for the report.
        trial_count: Trials made so far.
        data_fingerprint: Set by the first `quantize`; None if the data can be read only once.
    """

    job: Job
    workspace: DeployWorkspace
    timings: dict[str, float] = field(default_factory=dict)
    data_fingerprint: str | None = None
    trial_count: int = 0

    def fingerprint_data(self) -> str | None:
        """Read the calibration data for its fingerprint, and store that for the report."""
        self.data_fingerprint = self.job.data.fingerprint()
        return self.data_fingerprint

    def count_trial(self) -> int:
        """Return the number of the next trial. A resumed run makes the same trials in the same order."""
        self.trial_count += 1
        return self.trial_count - 1

    @cached_property
    def format(self) -> FileFormat:
        return find_format(self.job.target.format)

    @cached_property
    def model_fingerprint(self) -> str:
        return fingerprint_model(self.job.model)

    @cached_property
    def captured(self) -> TransformationResult:
        """The graph of the model with the target's fusions. torch.export runs here, once per run."""
        job = self.job
        with self.timed("capturing"):
            result = self._transform()
            if self.format.check is not None:
                self.format.check(result.model, ExportRequest(job.example, job.target))
        return result

    def _transform(self) -> TransformationResult:
        job = self.job
        job.target.check_free_sizes(job.dynamic_axes)
        try:
            graph = self._capture(job.dynamic_axes)
        except CaptureError as error:
            if not (job.may_fix_axes and job.dynamic_axes):
                raise
            names = sorted({name for labels in job.dynamic_axes.values() for name in labels.values()})
            message = (
                f"the axes {', '.join(names)} are free in {job.source_file}, but the model computes with their sizes. "
                f"They are fixed to those of the example: {error.args[0]}"
            )
            warnings.warn(ScalepointWarning(message), stacklevel=user_level())
            graph = self._capture({})
        return apply_transformation_plan(plan_captured_graph(graph, target=job.target))

    def _capture(self, dynamic_axes: Axes) -> fx.GraphModule:
        """Capture the model. Inside `captures_reused` an earlier run may have done it: no target matters for it."""
        job, earlier = self.job, _captures.get()
        options: dict[str, Any] = {"leave": job.options.leave, "dynamic": not job.options.fixed_sizes}
        options["dynamic_axes"] = dynamic_axes
        if earlier is None:
            return capture_for_plan(job.model, job.example.args, job.example.kwargs, **options)
        key = fingerprint(self.model_fingerprint, job.example.fingerprint(), options)
        if key not in earlier:  # shares the parameters with the model, each run has its own
            earlier[key] = capture_for_plan(job.model, job.example.args, job.example.kwargs, copy=False, **options)
        return copy.deepcopy(earlier[key])

    def path(self, folder: Path, name: str) -> Path:
        """Return the path of a file, with the suffix of the target's format."""
        return folder / f"{name}{self.format.suffix}"

    @property
    def plain_path(self) -> Path | None:
        """The float model as torch.onnx.export writes it, or the file it was read from; None if it was not written."""
        path = self.path(self.workspace.work, PLAIN_STEM if self.job.source_file is None else SOURCE_STEM)
        return path if path.is_file() else None

    def timed(self, doing: str, *, is_phase: bool = True) -> AbstractContextManager[None]:
        """Time a step and show its progress. Pass is_phase=False for a step that shows its own progress."""
        return timed_phase(self.timings, doing, show=self.job.progress, is_phase=is_phase)

    @contextmanager
    def stage(self, name: str, doing: str, inputs: Any, *, is_timed: bool = True) -> Iterator[Stage]:
        """Enter a cached stage, see `stages.py`. Pass is_timed=False for a stage whose parts are timed."""
        with self.workspace.cache.stage(name, inputs) as stage:
            if not stage.must_run and self.job.progress is not False:
                write_line(f"{doing}: from the cache")
            with self.timed(doing) if stage.must_run and is_timed else nullcontext():
                yield stage
