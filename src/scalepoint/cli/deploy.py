"""The command `scalepoint deploy`: the whole pipeline from a model to a verified file with a report."""

# ruff: noqa: PLC0415  # what needs torch is imported when a command runs
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isnan
from pathlib import Path
from typing import Any

import typer

import scalepoint
from scalepoint import distributed
from scalepoint.cli import flags
from scalepoint.cli.deploy_checkpoint import CheckpointRun, is_folder
from scalepoint.cli.exit_codes import Code, report_interrupt
from scalepoint.cli.flags import RunFlags, takes
from scalepoint.cli.inspect import preview
from scalepoint.cli.load_objects import ObjectLoader, load_evaluate
from scalepoint.cli.metadata import with_metadata
from scalepoint.cli.model_and_data import load_for_deploy
from scalepoint.cli.output import say, show, show_json
from scalepoint.cli.run_config import (
    check_deploy_options,
    check_installed,
    check_names,
    check_settings,
    input_paths,
    load_settings,
    object_loader,
)
from scalepoint.errors import VerificationError
from scalepoint.options import Command, DeployConfig, DeployOptions, RunOptions, SourceOptions, changed_values
from scalepoint.support.formatting import format_decibels, format_ratio, format_value


@takes(*(name for name in DeployConfig.file_keys() if name != "quantization"), *RunOptions.model_fields)
def deploy(
    context: typer.Context,
    config: flags.Config = None,
    trust: flags.Trust = False,
    dry_run: flags.DryRun = False,
    quiet: flags.Quiet = False,
    verbose: flags.Verbose = False,
    json: flags.Json = False,
    debug: flags.Debug = False,
) -> int:
    """Quantize a model, or the checkpoint folder of a language model, for a target.

    Write the file into the output folder, verify it in the target's runtime, and write a report. A model and --data are
    enough to start. All other options have defaults. They can also be keys of a config file; `scalepoint init` writes
    one.
    """
    distributed.init_from_torchrun()
    with distributed.participating():
        return _run_deploy(context.params)


def _run_deploy(parameters: dict[str, Any]) -> int:
    run_flags, config = RunFlags.from_parameters(parameters), parameters["config"]
    if not is_folder(parameters["model"]):  # check as much as possible before torch is loaded, which takes seconds
        loader = check_names(parameters)
        if config is None:
            run_flags = _check_output(parameters, loader, run_flags)
    settings = load_settings(parameters, DeployConfig)
    if is_folder(settings.model):
        return CheckpointRun(settings, run_flags).run()
    loader = object_loader(settings, parameters)
    check_settings(settings, loader)
    settings = with_metadata(settings, loader)
    check_deploy_options(settings, smoke=run_flags.smoke)
    if config is not None:
        run_flags = _check_output(dict(settings), loader, run_flags)
    if run_flags.dry_run:
        if settings.evaluate:
            load_evaluate(settings.evaluate, loader)
        code = preview(settings, loader, "deploy", json=run_flags.json)
        _print_status("dry run: nothing was written", run_flags.quiet)
        return code
    check_installed(settings)
    return DeployRun(settings, loader, run_flags).run()


def _check_output(values: Mapping[str, Any], loader: ObjectLoader, run_flags: RunFlags) -> RunFlags:
    """Check the output folder before anything is loaded. A restarted process continues the interrupted run."""
    from scalepoint.pipeline.workspace import DeployWorkspace

    folder = Path(values["output"] or "out")
    resume = run_flags.resume or (distributed.is_restarted() and bool(_finished_stages(folder)))
    workspace = DeployWorkspace(folder, resume=resume, force=run_flags.force or run_flags.dry_run)
    workspace.check(input_paths(values, loader))
    return replace(run_flags, resume=resume)


def _finished_stages(folder: Path) -> list[str]:
    from scalepoint.pipeline.workspace import list_finished_stages

    return list_finished_stages(folder)


def print_event(event: Any) -> None:
    """Print the events that --verbose adds: starts of phases, metrics and files."""
    if event.kind in ("start", "metric", "file"):
        say(f"{event.kind}: {event.name if event.kind == 'start' else event}")


def seed_all(seed: int) -> None:
    """Seed all random generators that the user's model and data may use."""
    import random

    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed)  # the global generator, which user code may use
    torch.manual_seed(seed)


def _print_status(text: str, quiet: bool) -> None:
    if not quiet:
        say(text)


def deploy_keywords(settings: DeployConfig) -> dict[str, Any]:
    """Return the keyword arguments of scalepoint.deploy that a config contains."""
    options = dict(settings.part(DeployOptions))
    config = options.pop("quantization")
    del options["output"]
    return {**options, "config": config}


def make_command(settings: DeployConfig, loader: ObjectLoader) -> Command:
    """Return what deploy needs to write config.yaml and reproduce.py."""
    sources = settings.updated({"root": str(loader.root.absolute())}).part(SourceOptions)
    return Command(sources, trust=loader.trust)


def _options_text(settings: DeployConfig) -> str:
    """List the options that differ from their defaults, for the first lines on stderr."""
    hidden = ("model", "target", "output", "quantization", "metadata", "root")
    values = {name: value for name, value in changed_values(settings).items() if name not in hidden}
    return ", ".join(f"{name}={value}" for name, value in values.items())


@dataclass(frozen=True)
class DeployRun:
    """One run of `scalepoint deploy` with its settings."""

    settings: DeployConfig
    loader: ObjectLoader
    flags: RunFlags

    @property
    def folder(self) -> Path:
        """The output folder."""
        return Path(self.settings.output)

    def run(self) -> int:
        """Deploy, print the result and return the exit code."""
        try:
            deployment = self._call_deploy()
        except KeyboardInterrupt:
            return report_interrupt(self._describe_interrupted())
        except Exception:
            if _finished_stages(self.folder):
                _print_status(self._describe_interrupted(), self.flags.quiet)
            raise
        return self._show_result(deployment)

    def _call_deploy(self) -> Any:
        settings = self.settings
        seed_all(settings.seed)
        evaluate = load_evaluate(settings.evaluate, self.loader) if settings.evaluate else None
        inputs = load_for_deploy(settings, self.loader)
        title = f"scalepoint {scalepoint.__version__}: {settings.model} for {settings.target} into {self.folder}/"
        _print_status(title, self.flags.quiet)
        _print_status(f"  {_options_text(settings)}", self.flags.quiet)
        try:
            return scalepoint.deploy(
                *inputs,
                output=self.folder,
                evaluate=evaluate,
                smoke=self.flags.smoke,
                resume=self.flags.resume,
                force=self.flags.force,
                progress=not self.flags.quiet,
                callback=print_event if self.flags.verbose else None,
                command=make_command(settings, self.loader),
                **deploy_keywords(settings),
            )
        except VerificationError as error:
            if error.deployment is None:
                raise
            return error.deployment  # the exit code tells what is wrong

    def _describe_interrupted(self) -> str:
        """List the finished stages of an interrupted run, and say how to continue."""
        stages = _finished_stages(self.folder)
        if not stages:
            return f"nothing was written into {self.folder}; run the same command again"
        return f"finished stages: {', '.join(stages)}; the same command with --resume continues from there"

    def _show_result(self, deployment: Any) -> int:
        """Print the result and return the exit code."""
        settings, page = self.settings, self.folder / "report.html"
        code, reason = _exit_code(deployment, settings.max_drop, settings.min_speed, settings.allow_departure)
        if self.flags.json:
            result = {
                "exit_code": int(code),
                "why": reason,
                "version": scalepoint.__version__,
                "target": settings.target,
                "path": deployment.path,
                "float_path": deployment.float_path,
                "report": page,
                "float_score": deployment.float_score,
                "score": deployment.score,
                "summary": deployment.report.summary(),
                "next": deployment.report.next_steps(),
                "coverage": deployment.coverage.to_list(),
                "verification": None if deployment.verification is None else deployment.verification.to_dict(),
            }
            show_json("deploy", result)
        else:
            show(deployment.report.table(verbose=self.flags.verbose), f"file: {deployment.path}", f"report: {page}")
        if reason:
            is_note = code == Code.DONE
            say(f"{'note' if is_note else 'failed'}: {reason}", style="yellow" if is_note else "red")
        return code


def _exit_code(
    deployment: Any, max_drop: float | None, min_speed: float | None, allow_departure: bool
) -> tuple[Code, str]:
    """Return the exit code and the reason for it; the reason is "" if everything is verified and within the limits."""
    from scalepoint.results import is_within

    verification = deployment.verification
    if verification is not None and verification.is_refuted:
        failure = _describe_failure(verification, allow_departure)
        if failure:
            return Code.UNVERIFIED, failure
    drop = deployment.drop
    if max_drop is not None and drop is not None and not is_within(deployment.float_score, deployment.score, max_drop):
        result = "has a score of NaN" if isnan(drop) else f"loses {format_value(drop)}"
        return Code.LIMIT, f"the best file {result}, but at most {max_drop:g} is allowed; it was kept"
    latency = None if verification is None else verification.latency
    if min_speed is not None and latency is not None and not latency.reaches(min_speed):
        limit = f"at least {format_ratio(min_speed)} is required"
        return (
            Code.LIMIT,
            f"the fastest file has {format_ratio(latency.ratio)} the speed of the float file, but {limit}; it was kept",
        )
    if verification is None:
        return Code.DONE, "not verified: no runtime of this target is known here"
    if verification.status.value == "not verified here":
        return Code.DONE, f"not verified here: {verification.message}"
    return Code.DONE, ""


def _describe_failure(verification: Any, allow_departure: bool) -> str:
    """Describe what is wrong with the file; "" if it only departs from the simulation and that is allowed."""
    status, runtime = verification.status.value, verification.runtime
    if status not in ("ok", "not verified here"):
        return f"exported, but not verified: {runtime}: {status}: {verification.message}"
    if allow_departure:
        return ""
    if verification.differences:
        return f"the file differs from the model: {verification.differences[0]}"
    sqnr, bound = format_decibels(verification.sqnr), f"{verification.bound:.0f}"
    return f"{runtime} agrees to {sqnr} dB, but {bound} dB are required (--allow-departure accepts it)"
