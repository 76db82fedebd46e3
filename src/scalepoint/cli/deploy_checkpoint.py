"""deploy of a language model: a checkpoint's folder in the place of a model's name."""

# ruff: noqa: PLC0415  # what needs torch is imported when a command runs
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import scalepoint
from scalepoint import distributed
from scalepoint.cli.exit_codes import Code, report_interrupt, usage_error
from scalepoint.cli.load_objects import load_public
from scalepoint.cli.output import say, show, show_json
from scalepoint.options import CheckpointOptions, changed_values

# Keys of a config that the run of a checkpoint reads.
USED_OPTIONS = {"model", "data", "root", *CheckpointOptions.model_fields}


def is_folder(name: str | None) -> bool:
    """Whether a model's name is the folder of a checkpoint."""
    return bool(name) and Path(str(name)).is_dir()


def checkpoint_keywords(settings: Any) -> dict[str, Any]:
    """The keywords of scalepoint.deploy_checkpoint that a config gives."""
    options = dict(settings.part(CheckpointOptions))
    config = options.pop("quantization")
    for name in ("output", "allow_departure"):
        del options[name]
    return {**options, "config": config, "accuracy": settings.accuracy or "balanced"}


@dataclass(frozen=True)
class CheckpointRun:
    """One run: the settings, and how to talk."""

    settings: Any
    resume: bool
    force: bool
    quiet: bool
    json: bool

    @property
    def output(self) -> Path:
        return Path(self.settings.output)

    def check(self) -> bool:
        """Check what needs no model. Returns whether to continue an interrupted run."""
        from scalepoint.pipeline.job import check_runtime_installed
        from scalepoint.pipeline.workspace import CheckpointWorkspace
        from scalepoint.support.output_folder import check_path
        from scalepoint.targets import find_target, list_targets

        target = find_target(self.settings.target)
        if not target.is_language:
            raise usage_error(
                f"{self.settings.model} is a folder, the checkpoint of a language model: --target is one of "
                f"{', '.join(list_targets(language=True))}, not {self.settings.target!r}"
            )
        if given := [name for name in changed_values(self.settings) if name not in USED_OPTIONS]:
            raise usage_error(f"--{given[0].replace('_', '-')} is not for checkpoints of language models")
        if not self.settings.allow_departure and (self.settings.data or self.settings.judge):
            check_runtime_installed(target, allow_departure=False)
        check_path(self.output)
        return self.resume or (distributed.is_restarted() and CheckpointWorkspace(self.output).has_finished_blocks)

    def go(self) -> int:
        resume = distributed.run_on_main("looking at the output", self.check, bool)
        settings = self.settings
        if not self.quiet:
            say(f"scalepoint {scalepoint.__version__}: {settings.model} for {settings.target} into {self.output}")
        try:
            done = load_public("deploy_checkpoint")(
                settings.model,
                self.output,
                data=settings.data,
                **checkpoint_keywords(settings),
                allow_departure=True,  # the exit code says it, after the result
                resume=resume,
                force=self.force,
                progress=not self.quiet,
            )
        except KeyboardInterrupt:
            return report_interrupt(self._describe_interrupted())
        return self._finish(done)

    def _describe_interrupted(self) -> str:
        from scalepoint.pipeline.workspace import CheckpointWorkspace

        if not CheckpointWorkspace(self.output).has_finished_blocks:
            return f"nothing was written into {self.output}; run the same command again"
        return "finished blocks are kept; the same command with --resume goes on from there"

    def _finish(self, done: Any) -> int:
        from scalepoint.results import DEPARTS

        found = done.report.language
        is_allowed = found.status == DEPARTS and self.settings.allow_departure
        code = Code.DONE if found.status == "ok" or is_allowed else Code.UNVERIFIED
        if self.json:
            result = {
                "exit_code": int(code),
                "version": scalepoint.__version__,
                "target": self.settings.target,
                "path": done.path,
                "float_score": done.float_score,
                "score": done.score,
                "higher_is_better": done.higher_is_better,
                "summary": done.report.summary(),
                "coverage": done.coverage.to_list(),
            }
            show_json("deploy", result)
        else:
            show(*done.report.summary(), f"written: {done.path}")
        if found.status != "ok":
            hint = " (--allow-departure accepts it)" if found.status == DEPARTS and not is_allowed else ""
            say(f"not verified: {found.runtime}: {found.message or 'no text to judge by'}{hint}", style="yellow")
        return code
