"""deploy: the whole road. inspect: what it would do, before any data."""

# ruff: noqa: PLC0415  # what needs torch is imported when a command runs
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

import scalepoint
from scalepoint.cli import options
from scalepoint.cli.data import Batches, Reading, check_data, load_data
from scalepoint.cli.ending import Code, interrupted, usage
from scalepoint.cli.naming import check_name, load_evaluate, load_model, public
from scalepoint.cli.screen import Listing, say, show, show_json
from scalepoint.errors import nearest

SMOKE_BATCHES = 2


def deploy(
    model: options.Model = None,
    data: options.Data = None,
    target: options.Target = None,
    output: options.Output = None,
    config: options.Config = None,
    evaluate: options.Evaluate = None,
    max_drop: options.MaxDrop = None,
    max_trials: options.MaxTrials = None,
    max_batches: options.MaxBatches = None,
    leave: options.Leave = None,
    strict: options.Strict = None,
    threads: options.Threads = None,
    allow_departure: options.AllowDeparture = False,
    batch_size: options.BatchSize = 8,
    size: options.Size = None,
    mean: options.Mean = None,
    std: options.Std = None,
    dry_run: options.DryRun = False,
    smoke: options.Smoke = False,
    force: options.Force = False,
    quiet: options.Quiet = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> int:
    """Quantize a model for a target, verify it in its runtime, and write file and report."""
    given: dict[str, Any] = {"model": model, "data": data, "target": target, "output": output, "evaluate": evaluate}
    given |= {"max_drop": max_drop, "max_trials": max_trials, "max_batches": max_batches, "strict": strict}
    given |= {"leave": tuple(leave) if leave else None, "threads": threads}
    _check_given(given, force or dry_run or config is not None)
    settings = settings_of(config, given)
    plan = _Plan(settings, batch_size, size, mean, std, smoke, quiet, json)
    plan.check(force or dry_run)
    if dry_run:
        return plan.preview()
    return plan.go(allow_departure)


def inspect(
    model: options.Model = None,
    target: options.Target = None,
    shape: Annotated[
        list[str] | None, typer.Option(help="Shape of an input, as 1,3,224,224; repeat for more inputs.")
    ] = None,
    data: options.Data = None,
    config: options.Config = None,
    batch_size: options.BatchSize = 8,
    size: options.Size = None,
    mean: options.Mean = None,
    std: options.Std = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> int:
    """What a target would quantize of a model and what not, and why; no data needed."""
    given = {"model": model, "target": target, "data": data}
    _check_given(given, True)
    plan = _Plan(settings_of(config, given), batch_size, size, mean, std, False, True, json)
    plan.check(True, needs_data=False)
    return plan.preview("inspect", _random(shape or []))


def _check_given(given: dict[str, Any], may_exist: bool) -> None:
    """What can be refused at once, before the seconds that torch takes to load."""
    for key in ("model", "evaluate"):
        if given.get(key):
            check_name(given[key], key)
    if given.get("max_drop") is not None and not given.get("evaluate") and not may_exist:
        raise usage("--max-drop needs --evaluate: the metric that must not drop")
    if not may_exist:
        refuse_overwrite(Path(given.get("output") or "out"))


def refuse_overwrite(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise usage(f"output {str(folder)!r} is a file, not a folder: choose another with -o")
    if folder.is_dir() and any(folder.iterdir()):
        raise usage(f"output folder {str(folder)!r} is not empty: choose another with -o, or overwrite it with --force")


def settings_of(config: Path | None, given: dict[str, Any]) -> Any:
    """The config file, and over it what was given as flags."""
    from scalepoint.deployment import DeployConfig

    settings = DeployConfig.from_file(config) if config is not None else DeployConfig()
    return settings.model_copy(update={key: value for key, value in given.items() if value is not None})


def check_target(name: str) -> None:
    from scalepoint.targets import list_targets

    if name not in list_targets():
        raise usage(f"no target {name!r}: {nearest(name, list_targets())}")


def example_of(model: Any, batch: Any) -> Any:
    """A batch as example inputs: what comes after the model's own inputs, such as labels, is left away."""
    from scalepoint.quantize.calibrate import inputs_of

    args, kwargs = inputs_of(batch, model)
    return kwargs or args


def _random(shapes: list[str]) -> Any:
    import torch

    try:
        sizes = [[int(side) for side in shape.replace("x", ",").split(",")] for shape in shapes]
    except ValueError as error:
        raise usage(f"--shape is whole numbers with commas between, as 1,3,224,224: {error}") from error
    if any(side < 1 for size in sizes for side in size):
        raise usage("--shape is made of numbers from 1 on, as 1,3,224,224")
    return tuple(torch.randn(size) for size in sizes) or None


@dataclass
class _Plan:
    """One run: the settings, how data is read, and how to talk."""

    settings: Any
    batch_size: int
    size: int | None
    mean: str | None
    std: str | None
    smoke: bool
    quiet: bool
    json: bool

    @property
    def reading(self) -> Reading:
        limit = SMOKE_BATCHES if self.smoke else self.settings.max_batches
        return Reading(self.batch_size, limit, self.size, self.mean, self.std)

    def check(self, may_exist: bool, needs_data: bool = True) -> None:
        """All that can be told wrong before the model is made."""
        settings = self.settings
        if not settings.model:
            raise usage("which model? Name it as package.module:name, or as `model:` in a config given with -c")
        check_name(settings.model, "model")
        check_target(settings.target)
        if not settings.data and needs_data and settings.quantization.activation != "float":
            raise usage("which data? Give --data, or `data:` in a config given with -c")
        if settings.data:
            check_data(settings.data, self.reading)
        if settings.max_drop is not None and not settings.evaluate:
            raise usage("--max-drop needs --evaluate: the metric that must not drop")
        if not may_exist:
            refuse_overwrite(Path(settings.output))

    def talk(self, text: str) -> None:
        if not self.quiet:
            say(text)

    def model_and_data(self, example: Any = None) -> tuple[Any, Any, Batches | None]:
        model, inputs = load_model(self.settings.model)
        batches = load_data(self.settings.data, self.reading) if self.settings.data else None
        if example is not None:
            inputs = example
        elif inputs is None and batches is not None:
            inputs = example_of(model, batches.first())
        return model, inputs, batches

    def preview(self, command: str = "deploy", example: Any = None) -> int:
        """Capture and coverage only."""
        model, inputs, _ = self.model_and_data(example)
        settings = self.settings
        found = _coverage(model, inputs, settings)
        if settings.strict:
            found.check()
        if self.json:
            show_json(
                command,
                {"exit_code": 0, "dry_run": True, "target": settings.target, "coverage": found.to_list()},
            )
            return Code.DONE
        show(coverage_listing(found), f"{settings.target}: {found.summary()}")
        if command == "deploy":
            self.talk("dry run: nothing was written")
        return Code.DONE

    def go(self, allow_departure: bool) -> int:
        """The real thing."""
        folder = Path(self.settings.output)
        existed = folder.exists()
        try:
            done = self._deployed(folder)
            self.settings.to_file(folder / "config.yaml")
        except KeyboardInterrupt:
            return interrupted(_left_behind(folder, existed))
        return self.finish(done, allow_departure)

    def _deployed(self, folder: Path) -> Any:
        settings = self.settings
        evaluate = load_evaluate(settings.evaluate) if settings.evaluate else None
        model, inputs, batches = self.model_and_data()
        self.talk(f"scalepoint {scalepoint.__version__}: {settings.model} for {settings.target} into {folder}/")
        self.talk(f"  {', '.join(f'{key}={value}' for key, value in self._told().items())}")
        return public("deploy")(
            model,
            inputs,
            [] if batches is None else batches,
            target=settings.target,
            config=settings.quantization,
            output=folder,
            evaluate=evaluate,
            max_drop=settings.max_drop,
            max_trials=1 if self.smoke else settings.max_trials,
            leave=settings.leave,
            strict=settings.strict,
            allow_departure=True,  # told by the exit code, after the result is shown
            threads=settings.threads,
            progress=not self.quiet,
        )

    def _told(self) -> dict[str, Any]:
        names = ("data", "evaluate", "max_drop", "max_trials", "max_batches", "leave", "strict", "threads")
        return {name: getattr(self.settings, name) for name in names}

    def finish(self, done: Any, allow_departure: bool) -> int:
        """Show what was made, and judge it."""
        settings = self.settings
        code, why = _judged(done, settings.max_drop, allow_departure)
        if self.json:
            result = {
                "exit_code": int(code),
                "why": why,
                "version": scalepoint.__version__,
                "target": settings.target,
                "path": done.path,
                "float_path": done.float_path,
                "report": str(Path(settings.output) / "report.html"),
                "float_score": done.float_score,
                "score": done.score,
                "summary": done.report.summary(),
                "coverage": done.coverage.to_list(),
                "verification": None if done.verification is None else done.verification.to_dict(),
            }
            show_json("deploy", result)
        else:
            show(done.report.table(), f"file: {done.path}", f"report: {Path(settings.output) / 'report.html'}")
        if why:
            say(f"{'note' if code == Code.DONE else 'failed'}: {why}", style="yellow" if code == Code.DONE else "red")
        for line in self._next(done):
            self.talk(line)
        return code

    def _next(self, done: Any) -> list[str]:
        folder = self.settings.output
        if self.settings.target == "tensorrt":
            return [f"Next: scalepoint check {done.path} --target tensorrt", f"      scalepoint report {folder}"]
        return [
            f"Next: scalepoint bench {done.float_path} {done.path}",
            f"      scalepoint compare {folder} -c {folder}/config.yaml",
        ]


def _coverage(model: Any, inputs: Any, settings: Any) -> Any:
    """What inspect says; with submodules that are left as they are, what insertion says."""
    if not settings.leave:
        return public("inspect")(model, inputs, target=settings.target, config=settings.quantization)
    result = public("transform")(model, inputs, target=settings.target, leave=settings.leave, copy=False)
    return public("coverage")(public("insert_qdq")(result.model, result.matches, settings.quantization, copy=False))


def _judged(done: Any, max_drop: float | None, allow_departure: bool) -> tuple[Code, str]:
    """The exit code, and why it is not plainly 0."""
    found = done.verification
    if found is not None and found.status.value != "ok":
        return Code.UNVERIFIED, f"exported, not verified: {found.runtime}: {found.status.value}: {found.message}"
    if found is not None and not found.holds and not allow_departure:
        why = f"{found.runtime} agrees to {found.sqnr:.1f} dB, less than {found.bound:.0f}"
        return Code.UNVERIFIED, f"{why} (--allow-departure accepts it)"
    drop = done.drop
    if max_drop is not None and drop is not None and not drop <= max_drop:
        return Code.LIMIT, f"the best file loses {drop:.4g}, more than the {max_drop:.4g} allowed; it was kept"
    if found is None:
        return Code.DONE, "not verified: no runtime of this target is known here; the numbers are the simulation's"
    return Code.DONE, ""


def _left_behind(folder: Path, existed: bool) -> str:
    """What an interrupted run has done: whole files stay, an empty folder goes."""
    files = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if (
        folder.is_dir()
        and not existed
        and not any(path.is_file() and path.name != ".lock" for path in folder.rglob("*"))
    ):
        shutil.rmtree(folder, ignore_errors=True)
        files = []
    if not files:
        return f"nothing was written into {folder}; run the same command again"
    return f"in {folder}: {', '.join(files)}; run the same command again with --force"


def coverage_listing(found: Any) -> Listing:
    rows = [
        (row.name, row.kind, row.precision, row.reason, "?" if row.macs is None else row.macs, row.parameters)
        for row in found.operations
    ]
    return Listing(("operation", "kind", "runs in", "why", "MACs", "weights"), rows, numbers=(4, 5))
