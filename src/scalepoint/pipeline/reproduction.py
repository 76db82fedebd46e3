"""How to repeat a run: config.yaml, kept.yaml, reproduce.py, and the call and the command in the report.

    config.yaml     all options of the run, including defaults; no keys of language models
    kept.yaml       after a search: the same, with the config of the best file and without a search
    reproduce.py    runs `scalepoint deploy -c` with one of them

A run that a command started has all three. A call from Python has objects without a name, so it has only config.yaml,
without the keys that say where model, data and metric come from.
"""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from pprint import pformat
from typing import Any

from scalepoint import targets
from scalepoint.options import DeployConfig, Placement, SourceOptions, changed_values
from scalepoint.pipeline.context import StageContext
from scalepoint.pipeline.fingerprints import fingerprint
from scalepoint.pipeline.job import Job
from scalepoint.pipeline.result import Trial
from scalepoint.pipeline.stages import package_version
from scalepoint.pipeline.workspace import BEST_CONFIG_FILE, SCRIPT_FILE
from scalepoint.report import Reproduction
from scalepoint.report.model import CONFIG_FILE
from scalepoint.support.documents import dump_yaml
from scalepoint.support.jsonable import to_jsonable
from scalepoint.targets.registry import has_cpu_option
from scalepoint.version import __version__

REPORTED_PACKAGES = ("torch", "onnx", "onnxscript", "onnxruntime", "openvino")
CONFIG_HEADER = """\
# Written by a call from Python. Its model, data and metric are objects without a name. Name them to run this again:
#   scalepoint deploy package.module:model --data package.module:data -c config.yaml -o again
"""
SCRIPT = '''"""Writes the file again, as scalepoint {version} did: python reproduce.py [FOLDER]"""

import sys
from pathlib import Path

from scalepoint.cli.app import run

folder = Path(__file__).resolve().parent
output = sys.argv[1] if len(sys.argv) > 1 else "again"
sys.exit(run(["deploy", "-c", str(folder / "{file}"), "-o", output, *{flags!r}]))
'''
# Options that the reproduction call omits, because it makes the best file directly, without a search.
SEARCH_OPTIONS = ("max_drop", "min_speed", "max_trials", "budget", "choices")
SEPARATE_OPTIONS = ("target", "cpu", "output", "quantization", "metadata", "allow_departure", "threads", "seed")
OMITTED_OPTIONS = frozenset((*SEARCH_OPTIONS, *SEPARATE_OPTIONS))


def write_run_files(context: StageContext, best: Trial, trials: Sequence[Trial]) -> None:
    """Write config.yaml. For a run that a command started also kept.yaml after a search, and reproduce.py."""
    job, workspace = context.job, context.workspace
    config = build_config(job)
    if job.command is None:
        workspace.write_text(CONFIG_FILE, CONFIG_HEADER + dump_yaml(config.to_dict(type(job.options))))
        return
    workspace.write_text(CONFIG_FILE, dump_yaml(config.to_dict(SourceOptions, type(job.options))))
    if has_searched(job, trials):
        no_search = {"max_drop": None, "min_speed": None, "budget": None}
        best_values = {**no_search, "placement": _placement(job, best), "quantization": best.config}
        best_config = config.updated(best_values).to_dict(SourceOptions, type(job.options))
        workspace.write_text(BEST_CONFIG_FILE, dump_yaml(best_config))
    script = SCRIPT.format(version=__version__, file=_config_file(job, trials), flags=_command_flags(job))
    workspace.write_text(SCRIPT_FILE, script)


def build_config(job: Job) -> DeployConfig:
    """Return all options of the run, and the names in the command that started it."""
    values = {
        **dict(job.options),
        "cpu": job.target.options["cpu"] if has_cpu_option(job.target) else "auto",
        "metadata": to_jsonable(job.options.metadata),
    }
    if job.command is not None:
        sources = job.command.sources
        values |= {**dict(sources), "root": os.path.relpath(sources.root or "", job.options.output)}
    return DeployConfig.model_validate(values)


def has_searched(job: Job, trials: Sequence[Trial]) -> bool:
    """Whether the config of the best file was found by trials or a budget."""
    return len(trials) > 1 or job.options.budget is not None


def _placement(job: Job, best: Trial) -> Placement | None:
    """Return the placement of the best file: measured layers can all be in int8, and then no layer may stay float."""
    return "int8" if job.options.placement is not None and best.config.speed_first is False else job.options.placement


def _config_file(job: Job, trials: Sequence[Trial]) -> str:
    """Return the name of the config that makes the best file without a search."""
    return BEST_CONFIG_FILE if has_searched(job, trials) else CONFIG_FILE


def _command_flags(job: Job) -> list[str]:
    """Return the flags that a config file cannot have."""
    is_trusted = job.command is not None and job.command.trust
    return ["--trust"] * is_trusted + ["--smoke"] * job.is_smoke


def build_reproduction(context: StageContext, best: Trial, trials: Sequence[Trial]) -> Reproduction:
    """Return the call and the command that make the best file without a search, and fingerprints of its inputs."""
    versions = {name: package_version(name) for name in REPORTED_PACKAGES}
    pinned = [f"{name}=={number}" for name, number in versions.items() if number]
    return Reproduction(
        install=f"pip install scalepoint=={__version__} {' '.join(pinned)}",
        call=_python_call(context.job, best),
        command=_shell_command(context.job, trials),
        marks={
            "model": context.model_fingerprint,
            "calibration data": context.data_fingerprint or "read once, no fingerprint",
            "example inputs": context.job.example.fingerprint(),
            "config": fingerprint(best.config.to_dict()),
        },
    )


def _python_call(job: Job, best: Trial) -> str:
    """Return the Python source that makes the best file."""
    config = best.config.to_dict()
    has_both = bool(job.example.args and job.example.kwargs)  # inputs only by name are passed as a dict
    your_objects = "model, example_inputs, calibration_data" + (" and kwargs" if has_both else "")
    lines = [f"# {your_objects} are yours", "import scalepoint"]
    arguments = {"target": repr(job.target.name), **options_as_source(job, best)}
    if has_both:
        arguments["kwargs"] = "kwargs"
    if hasattr(targets, f"{job.target.name}_target") and job.target.options:
        lines.append("from scalepoint import targets")
        values = ", ".join(f"{name}={value!r}" for name, value in job.target.options.items())
        arguments["target"] = f"targets.{job.target.name}_target({values})"
    if config:
        text = pformat(config, width=100, sort_dicts=False)
        lines += ["from scalepoint.quantize import QuantConfig", "", f"config = QuantConfig.from_dict(\n{text}\n)"]
        arguments["config"] = "config"
    keywords = "".join(f"    {name}={value},\n" for name, value in arguments.items())
    lines += ["", f"done = scalepoint.deploy(\n    model,\n    example_inputs,\n    calibration_data,\n{keywords})"]
    return "\n".join(lines)


def _shell_command(job: Job, trials: Sequence[Trial]) -> str:
    """Return the command that makes the best file, from any folder; "" for a call from Python."""
    if job.command is None:
        return ""
    file = Path(job.options.output).resolve() / _config_file(job, trials)
    return shlex.join(["scalepoint", "deploy", "-c", str(file), "-o", "again", *_command_flags(job)])


def options_as_source(job: Job, best: Trial) -> dict[str, str]:
    """Return the options that differ from the defaults, as Python source. `threads` and `seed` are always included."""
    values: dict[str, Any] = {
        name: value for name, value in changed_values(job.options).items() if name not in OMITTED_OPTIONS
    }
    if job.options.placement is not None:
        values["placement"] = _placement(job, best)
    if job.options.metadata:
        values["metadata"] = to_jsonable(job.options.metadata)
    if job.is_smoke:
        values["smoke"] = True
    if best.verification is not None and not best.verification.holds:
        values["allow_departure"] = True
    values |= {"threads": job.options.threads, "seed": job.options.seed}
    return {name: pformat(value, width=100, sort_dicts=False) for name, value in values.items()}
