"""scalepoint deploy: run the whole pipeline."""

# ruff: noqa: PLC0415  # what needs torch is imported when a command runs
import os
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer

import scalepoint
from scalepoint import distributed
from scalepoint.cli import flags
from scalepoint.cli.deploy_checkpoint import CheckpointRun, is_folder
from scalepoint.cli.exit_codes import Code, report_interrupt, usage_error
from scalepoint.cli.flags import takes
from scalepoint.cli.inspect import load_model_and_data, preview
from scalepoint.cli.load_objects import ObjectLoader, load_evaluate, load_public
from scalepoint.cli.metadata import with_metadata
from scalepoint.cli.output import say, show, show_json
from scalepoint.cli.run_config import (
    check_inputs,
    check_names,
    check_runtime,
    check_settings,
    load_settings,
    object_loader,
)
from scalepoint.options import DeployConfig, DeployOptions, RunOptions, changed_values
from scalepoint.support.files import replace_text
from scalepoint.support.formatting import decibel, ratio, value_of

REPRODUCE_SCRIPT = '''"""Makes the kept file again, as scalepoint {version} made it: python reproduce.py [FOLDER]"""

import sys
from pathlib import Path

from scalepoint.cli.app import run

here = Path(__file__).resolve().parent
output = sys.argv[1] if len(sys.argv) > 1 else "again"
sys.exit(run(["deploy", "-c", str(here / "{file}"), "-o", output, *{flags!r}]))
'''


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
    """Quantize a model, or the checkpoint of a language model, for a target, verify it in its runtime, and write file
    and report."""
    distributed.init_from_torchrun()
    with distributed.participating():
        return _run_deploy(context.params)


def _run_deploy(given: dict[str, Any]) -> int:
    model, config, output = (given[name] for name in ("model", "config", "output"))
    dry_run, resume, quiet, json = (bool(given[name]) for name in ("dry_run", "resume", "quiet", "json"))
    may_exist = bool(given["force"]) or dry_run
    if not is_folder(model):  # torch takes seconds to load: what can be refused before is
        check_names(given)
        if config is None and not distributed.is_restarted():
            _check_output_folder(Path(output or "out"), may_exist, resume)
    settings = load_settings(given)
    if is_folder(settings.model):
        for flag in ("smoke", "dry_run"):
            if given[flag]:
                raise usage_error(f"--{flag.replace('_', '-')} is not for checkpoints of language models")
        return CheckpointRun(settings, resume, bool(given["force"]), quiet, json).go()
    finder = object_loader(settings, given)
    check_settings(settings, finder)
    settings = with_metadata(settings, finder)
    check_inputs(settings, finder)
    folder = Path(settings.output)
    resume = resume or (distributed.is_restarted() and bool(_finished_stages(folder)))
    _check_output_folder(folder, may_exist, resume)
    if dry_run:
        if settings.evaluate:
            load_evaluate(settings.evaluate, finder)
        code = preview(settings, finder, "deploy", json=json)
        _print_status("dry run: nothing was written", quiet)
        return code
    check_runtime(settings)
    return DeployRun(settings, finder, bool(given["smoke"]), resume, quiet, json, bool(given["verbose"])).go()


def _check_output_folder(folder: Path, may_exist: bool, resume: bool) -> None:
    """Rank 0 checks the output folder: it soon writes there."""
    from scalepoint.pipeline.workspace import check_output

    distributed.run_on_main("looking at the output", lambda: check_output(folder, force=may_exist, resume=resume))


def _finished_stages(folder: Path) -> list[str]:
    from scalepoint.pipeline.workspace import list_finished_stages

    return list_finished_stages(folder)


def print_event(event: Any) -> None:
    """Print what --verbose adds to finished phases: phases that start, numbers, files."""
    if event.kind in ("start", "metric", "file"):
        say(f"{event.kind}: {event.name if event.kind == 'start' else event}")


def seed_all(seed: int) -> None:
    """Before the user's model and data are made."""
    import random

    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed)  # what a user's module may draw from
    torch.manual_seed(seed)


def _print_status(text: str, quiet: bool) -> None:
    if not quiet:
        say(text)


def deploy_keywords(settings: Any) -> dict[str, Any]:
    """The keywords of scalepoint.deploy that a config gives."""
    options = dict(settings.part(DeployOptions))
    config = options.pop("quantization")
    del options["output"]
    return {**options, "config": config, "allow_departure": True}  # the exit code reports a departure, after the result


def _options_text(settings: Any) -> str:
    """The options that differ from their defaults, for the first lines on stderr."""
    hidden = ("model", "target", "output", "quantization", "metadata", "root")
    values = {name: value for name, value in changed_values(settings).items() if name not in hidden}
    return ", ".join(f"{name}={value}" for name, value in values.items())


@dataclass(frozen=True)
class DeployRun:
    """One run: the settings, and how to talk."""

    settings: Any
    finder: ObjectLoader
    smoke: bool
    resume: bool
    quiet: bool
    json: bool
    verbose: bool = False

    @property
    def folder(self) -> Path:
        return Path(self.settings.output)

    def go(self) -> int:
        try:
            done = self._call_deploy()
        except KeyboardInterrupt:
            return report_interrupt(self._describe_interrupted())
        except Exception:
            if _finished_stages(self.folder):
                _print_status(self._describe_interrupted(), self.quiet)
            raise
        return self._finish(done)

    def _call_deploy(self) -> Any:
        settings = self.settings
        seed_all(settings.seed)
        evaluate = load_evaluate(settings.evaluate, self.finder) if settings.evaluate else None
        model, inputs, batches = load_model_and_data(settings, self.finder)
        _print_status(
            f"scalepoint {scalepoint.__version__}: {settings.model} for {settings.target} into {self.folder}/",
            self.quiet,
        )
        _print_status(f"  {_options_text(settings)}", self.quiet)
        done = load_public("deploy")(
            model,
            inputs,
            [] if batches is None else batches,
            output=self.folder,
            evaluate=evaluate,
            smoke=self.smoke,
            resume=self.resume,
            force=True,  # what may not be overwritten was refused before
            progress=not self.quiet,
            callback=print_event if self.verbose else None,
            **deploy_keywords(settings),
        )
        return self.write_run_files(done)

    def write_run_files(self, done: Any) -> Any:
        """Write the configs and reproduce.py. Returns the deployment with the command in its report."""
        from scalepoint.pipeline.workspace import CONFIG_FILE, SCRIPT_FILE
        from scalepoint.report import write
        from scalepoint.report.html import HTML_FILE, JSON_FILE
        from scalepoint.support.output_folder import WrittenFiles

        if not distributed.is_main():
            return done
        file, command = self._write_configs(done)
        paths = [self.folder / CONFIG_FILE, file, self.folder / SCRIPT_FILE]
        if done.report.reproduction is not None:
            again = replace(done.report.reproduction, command=command)
            done = replace(done, report=replace(done.report, reproduction=again))
            write(done.report, self.folder)
            paths += [self.folder / JSON_FILE, self.folder / HTML_FILE]
        WrittenFiles(self.folder).add(paths)
        return done

    def _write_configs(self, done: Any) -> tuple[Path, str]:
        """config.yaml is what was asked; after a search kept.yaml is what came of it. Returns that file, and the
        command that makes the kept file again, from wherever it is typed."""
        from scalepoint.pipeline.workspace import BEST_CONFIG_FILE, CONFIG_FILE, SCRIPT_FILE

        cpu = getattr(done.report, "environment", {}).get("target cpu", self.settings.cpu)  # as it was made
        here = self.settings.updated({"root": os.path.relpath(self.finder.root, self.folder), "cpu": cpu})
        file = self.folder / CONFIG_FILE
        here.to_file(file)
        if len(getattr(done.report, "trials", ())) > 1 or self.settings.budget is not None:
            file = self.folder / BEST_CONFIG_FILE
            kept = {"max_drop": None, "min_speed": None, "budget": None, "quantization": done.report.config}
            here.updated(kept).to_file(file)
        flags = ["--trust"] * self.finder.trust + ["--smoke"] * self.smoke
        script = REPRODUCE_SCRIPT.format(version=scalepoint.__version__, file=file.name, flags=flags)
        replace_text(self.folder / SCRIPT_FILE, script)
        return file, shlex.join(["scalepoint", "deploy", "-c", str(file.resolve()), "-o", "again", *flags])

    def _describe_interrupted(self) -> str:
        """Which stages of an interrupted run are finished, and how to continue."""
        done = _finished_stages(self.folder)
        if not done:
            return f"nothing was written into {self.folder}; run the same command again"
        return f"done so far: {', '.join(done)}; the same command with --resume goes on from there"

    def _finish(self, done: Any) -> int:
        """Show what was made, and judge it."""
        settings, page = self.settings, self.folder / "report.html"
        code, why = _exit_code(done, settings.max_drop, settings.min_speed, settings.allow_departure)
        if self.json:
            result = {
                "exit_code": int(code),
                "why": why,
                "version": scalepoint.__version__,
                "target": settings.target,
                "path": done.path,
                "float_path": done.float_path,
                "report": page,
                "float_score": done.float_score,
                "score": done.score,
                "summary": done.report.summary(),
                "next": done.report.next_steps(),
                "coverage": done.coverage.to_list(),
                "verification": None if done.verification is None else done.verification.to_dict(),
            }
            show_json("deploy", result)
        else:
            show(done.report.table(), f"file: {done.path}", f"report: {page}")
        if why:
            say(f"{'note' if code == Code.DONE else 'failed'}: {why}", style="yellow" if code == Code.DONE else "red")
        return code


def _exit_code(done: Any, max_drop: float | None, min_speed: float | None, allow_departure: bool) -> tuple[Code, str]:
    """The exit code, and why it is not plainly 0."""
    from scalepoint.results import is_within

    found = done.verification
    if found is not None and found.is_refuted and (why := _describe_failure(found, allow_departure)):
        return Code.UNVERIFIED, why
    drop = done.drop
    if max_drop is not None and drop is not None and not is_within(done.float_score, done.score, max_drop):
        lost = f"loses {value_of(drop)}" if drop == drop else "has a score of NaN"  # noqa: PLR0124  # only NaN differs
        return Code.LIMIT, f"the best file {lost}, more than the {max_drop:g} allowed; it was kept"
    speed = None if found is None or found.latency is None else found.latency.ratio
    if min_speed is not None and speed is not None and speed < min_speed:
        why = f"the fastest file has {ratio(speed)} the speed of the float one, less than {ratio(min_speed)}"
        return Code.LIMIT, f"{why}; it was kept"
    if found is None:
        return Code.DONE, "not verified: no runtime of this target is known here"
    return Code.DONE, "" if found.status.value != "not verified here" else f"not verified here: {found.message}"


def _describe_failure(found: Any, allow_departure: bool) -> str:
    """What is wrong with the file; "" where that is accepted."""
    if found.status.value not in ("ok", "not verified here"):
        return f"exported, not verified: {found.runtime}: {found.status.value}: {found.message}"
    if allow_departure:
        return ""
    if found.differences:
        return f"the file differs from the model: {found.differences[0]}"
    why = f"{found.runtime} agrees to {decibel(found.sqnr)} dB, less than {found.bound:.0f}"
    return f"{why} (--allow-departure accepts it)"
