"""`scalepoint deploy FOLDER`: the folder of a language model's checkpoint instead of the name of a model."""

# ruff: noqa: PLC0415  # what needs torch is imported when a command runs
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import scalepoint
from scalepoint import distributed
from scalepoint.cli.exit_codes import Code, report_interrupt
from scalepoint.cli.flags import RunFlags
from scalepoint.cli.output import say, show, show_json
from scalepoint.errors import UsageError, VerificationError
from scalepoint.options import CheckpointOptions, DeployConfig, changed_values

# Keys of a config that are used for a checkpoint.
USED_OPTIONS = {"model", "data", "root", *CheckpointOptions.model_fields}


def is_folder(name: str | None) -> bool:
    """Whether the name of a model is a folder, which then is the checkpoint of a language model."""
    return bool(name) and Path(str(name)).is_dir()


def checkpoint_keywords(settings: DeployConfig) -> dict[str, Any]:
    """Return the keyword arguments of scalepoint.deploy_checkpoint that a config contains."""
    options = dict(settings.part(CheckpointOptions))
    config = options.pop("quantization")
    del options["output"]
    return {**options, "config": config}


@dataclass(frozen=True)
class CheckpointRun:
    """One run of `scalepoint deploy` on a checkpoint, with its settings."""

    settings: DeployConfig
    flags: RunFlags

    @property
    def output(self) -> Path:
        """The output folder or file."""
        return Path(self.settings.output)

    def check(self) -> bool:
        """Check that all options apply to a checkpoint. Return whether to continue an interrupted run."""
        from scalepoint.pipeline.workspace import CheckpointWorkspace

        for name in ("smoke", "dry_run"):
            if getattr(self.flags, name):
                raise UsageError(f"--{name.replace('_', '-')} cannot be used with checkpoints of language models")
        for name in changed_values(self.settings):
            if name not in USED_OPTIONS:
                flag = f"--{name.replace('_', '-')}"
                raise UsageError(f"{flag} cannot be used with checkpoints of language models")
        return self.flags.resume or (distributed.is_restarted() and CheckpointWorkspace(self.output).is_unfinished())

    def run(self) -> int:
        """Deploy, print the result and return the exit code."""
        resume = distributed.run_on_main("checking the output folder", self.check, bool)
        settings = self.settings
        if not self.flags.quiet:
            say(f"scalepoint {scalepoint.__version__}: {settings.model} for {settings.target} into {self.output}")
        try:
            deployment = scalepoint.deploy_checkpoint(
                settings.model,
                self.output,
                data=settings.data,
                **checkpoint_keywords(settings),
                resume=resume,
                force=self.flags.force,
                progress=not self.flags.quiet,
            )
        except VerificationError as error:
            if error.deployment is None:
                raise
            deployment = error.deployment  # the exit code tells what is wrong
        except KeyboardInterrupt:
            return report_interrupt(self._describe_interrupted())
        return self._show_result(deployment)

    def _describe_interrupted(self) -> str:
        from scalepoint.pipeline.workspace import CheckpointWorkspace

        if not CheckpointWorkspace(self.output).is_unfinished():
            return f"nothing was written into {self.output}; run the same command again"
        return "finished blocks are kept; the same command with --resume continues from there"

    def _show_result(self, deployment: Any) -> int:
        """Print the result and return the exit code."""
        from scalepoint.results import DEPARTS

        result = deployment.report.language
        departs = result.status == DEPARTS
        is_allowed = departs and self.settings.allow_departure
        code = Code.DONE if result.status == "ok" or is_allowed else Code.UNVERIFIED
        if self.flags.json:
            fields = {
                "exit_code": int(code),
                "version": scalepoint.__version__,
                "target": self.settings.target,
                "path": deployment.path,
                "float_score": deployment.float_score,
                "score": deployment.score,
                "higher_is_better": deployment.higher_is_better,
                "summary": deployment.report.summary(),
                "coverage": deployment.coverage.to_list(),
            }
            show_json("deploy", fields)
        else:
            show(*deployment.report.summary(), f"written: {deployment.path}")
        if result.status != "ok":
            hint = " (--allow-departure accepts it)" if departs and not is_allowed else ""
            say(f"not verified: {result.runtime}: {result.message or 'no text to evaluate on'}{hint}", style="yellow")
        return code
