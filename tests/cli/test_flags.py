"""Flags, config keys, cache keys and calls follow the declarations of options; cheap commands do not load torch."""

import inspect
import subprocess
import sys
from importlib import import_module
from typing import Annotated

import pytest
import torch
import typer
from torch import nn
from typer.testing import CliRunner

import scalepoint
from scalepoint.cli.app import app
from scalepoint.cli.flags import takes
from scalepoint.options import (
    CheckpointOptions,
    Command,
    DeployConfig,
    DeployOptions,
    Option,
    RunOptions,
    SourceOptions,
    get_option,
    stage_values,
)
from scalepoint.pipeline import reproduction
from scalepoint.pipeline.context import StageContext
from scalepoint.pipeline.inputs import DataSource, Example
from scalepoint.pipeline.job import Job
from scalepoint.pipeline.reproduction import options_as_source
from scalepoint.pipeline.result import Trial
from scalepoint.pipeline.workspace import DeployWorkspace
from scalepoint.quantize import QuantConfig
from scalepoint.targets import describe, find_target
from tests.cli.conftest import child

COMMANDS_WITHOUT_TORCH = ("--help", "deploy --help", "report out", "report out --json", "doctor")
PROGRAM = """
import sys
from scalepoint.cli.app import run
codes = [run(line.split()) for line in sys.argv[1:]]
print(codes, "torch" in sys.modules, file=sys.stderr)
"""
# Keywords of deploy that no option declares.
OBJECTS = {"example_inputs", "calibration_data", "model", "evaluate", "kwargs", "progress", "callback", "command"}
TRIAL = Trial(QuantConfig(), None, None, None, None, None)
RENAMED = {"quantization": "config"}  # key of a config file -> keyword in Python


def keywords(*classes):
    return {RENAMED.get(name, name): field for options in classes for name, field in options.model_fields.items()}


def test_commands_that_only_read_files_do_not_load_torch(deployed) -> None:
    command = [sys.executable, "-c", PROGRAM, *COMMANDS_WITHOUT_TORCH]
    done = subprocess.run(command, cwd=deployed.folder, capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr.splitlines()[-1] == f"{[0] * len(COMMANDS_WITHOUT_TORCH)} False"


@pytest.mark.parametrize("cpu", ["vnni", "avx2"])
def test_the_description_of_a_target_names_its_cpu(cpu) -> None:
    assert ("made with cpu=", cpu) in describe(find_target("onnxruntime", cpu))[0].rows


def test_every_name_of_a_lazy_package_can_be_imported() -> None:
    done = child("targets", "nowhere")
    known = "onnxruntime, openvino, ort-genai, reference, tensorrt"
    assert (done.returncode, known in " ".join(done.stderr.split())) == (2, True)
    for package in ("checking", "report", "targets", "verification"):
        module = import_module(f"scalepoint.{package}")
        assert all(getattr(module, name) is not None for name in module.__all__)
        with pytest.raises(AttributeError, match="has no attribute 'nowhere'"):
            module.nowhere  # noqa: B018


def test_the_keywords_and_defaults_of_deploy_are_those_of_the_options() -> None:
    declared = keywords(DeployOptions, RunOptions)
    parameters = inspect.signature(scalepoint.deploy).parameters
    assert set(parameters) - OBJECTS == set(declared)
    for name in set(declared) - {"config", "output"}:  # None means the same there
        assert parameters[name].default == declared[name].default, name


def test_the_keywords_and_defaults_of_deploy_checkpoint_are_those_of_the_options() -> None:
    declared = keywords(CheckpointOptions, RunOptions)
    parameters = inspect.signature(scalepoint.deploy_checkpoint).parameters
    # smoke runs and a switch for verification differ; text is what a checkpoint is calibrated with
    assert set(parameters) - {"source", "data", "verify", "progress"} == set(declared) - {"smoke"}
    for name in ("judge", "memory", "length", "samples", "cache", "allow_departure", "resume", "force"):
        assert parameters[name].default == declared[name].default, name


class StopError(Exception):
    pass


@pytest.mark.parametrize(
    ("function", "prepare", "not_in_the_job"),
    [
        ("deploy", "prepare_job", {"resume", "force", "callback"}),
        ("deploy_checkpoint", "prepare_checkpoint_job", {"data", "judge", "verify", "progress"}),
    ],
)
def test_every_keyword_reaches_the_job(function, prepare, not_in_the_job, monkeypatch) -> None:
    keywords_of_job = {}

    def stop(*_: object, **keywords: object) -> None:
        keywords_of_job.update(keywords)
        raise StopError

    monkeypatch.setattr(import_module(f"scalepoint.pipeline.{function}"), prepare, stop)
    signature = inspect.signature(getattr(scalepoint, function))
    values = {name: f"the {name}" for name, value in signature.parameters.items() if value.kind == value.KEYWORD_ONLY}
    with pytest.raises(StopError):
        getattr(scalepoint, function)(*["first"] * (len(signature.parameters) - len(values)), **values)
    keywords_of_job.pop("texts", None)
    assert keywords_of_job == {name: value for name, value in values.items() if name not in not_in_the_job}


def test_every_option_of_deploy_can_be_swept_or_is_an_option_of_the_sweep() -> None:
    sweep = inspect.signature(scalepoint.sweep).parameters
    assert set(sweep) >= {"output", "resume", "force"}
    done = scalepoint.sweep
    with pytest.raises(scalepoint.errors.UsageError) as error:
        done(nn.Linear(2, 2), torch.ones(1, 2), [], grid={"nowhere": [1]})
    known = keywords(DeployOptions, RunOptions)
    assert all(name in str(error.value) for name in known if name not in ("output", "resume", "force"))


def test_the_keys_of_a_config_file_are_the_flags_of_deploy() -> None:
    command = typer.main.get_command(app).commands["deploy"]
    other_flags = {"config", "trust", "dry_run", "quiet", "verbose", "json", "debug", "help"}
    flags = {parameter.name for parameter in command.params} - other_flags
    assert flags == {*DeployConfig.model_fields, *RunOptions.model_fields} - {"quantization"}


def test_every_option_has_a_help_text_and_language_options_a_group() -> None:
    for options in (DeployConfig, RunOptions):
        for name, field in options.model_fields.items():
            assert get_option(field).help.endswith("."), name
    language = set(CheckpointOptions.model_fields) - set(DeployOptions.model_fields)
    assert {get_option(CheckpointOptions.model_fields[name]).group for name in language} == {"Language models"}


class TestAnAddedOption:
    """An option that is declared once is a flag, a config key, a cache key and a keyword."""

    class Config(DeployConfig):
        flavour: Annotated[str | None, Option("How it tastes.", "Data", ("quantize", "verify"))] = None

    def test_is_a_flag_with_its_help(self) -> None:
        parameters = {}

        @takes("model", "flavour", options=self.Config)
        def command(context: typer.Context) -> int:
            parameters.update(context.params)
            return 0

        runner, test_app = CliRunner(), typer.Typer()
        test_app.command()(command)
        text = runner.invoke(test_app, ["--help"]).stdout
        assert "--flavour" in text
        assert "How it tastes." in text
        runner.invoke(test_app, ["net", "--flavour", "sweet"], catch_exceptions=False)
        assert parameters == {"model": "net", "flavour": "sweet"}

    def test_is_a_key_of_config_files_and_of_their_schema(self, tmp_path) -> None:
        path = tmp_path / "config.yaml"
        self.Config(flavour="sweet").to_file(path)
        assert "flavour: sweet" in path.read_text()
        assert self.Config.from_file(path).flavour == "sweet"
        assert "flavour" in self.Config.model_json_schema()["properties"]

    def test_is_in_the_cache_keys_of_the_stages_that_read_it(self) -> None:
        config = self.Config(flavour="sweet")
        assert stage_values(config, "quantize")["flavour"] == "sweet"
        assert stage_values(config, "verify")["flavour"] == "sweet"
        assert "flavour" not in stage_values(config, "export")

    def job(self, **values) -> Job:
        return Job(
            model=nn.Linear(2, 2),
            example=Example((torch.ones(1, 2),), {}),
            data=DataSource([]),
            target=find_target("reference"),
            config=QuantConfig(),
            options=self.Config(flavour="sweet", **values),
            placement="int8",
            command=Command(SourceOptions(model="nets:net", root=".")),
        )

    def test_is_in_the_call_that_repeats_a_run(self) -> None:
        assert options_as_source(self.job(), TRIAL) == {"flavour": "'sweet'", "threads": "1", "seed": "0"}

    def test_is_in_the_config_that_reproduce_py_runs(self, tmp_path, monkeypatch) -> None:
        monkeypatch.setattr(reproduction, "DeployConfig", self.Config)
        workspace = DeployWorkspace(tmp_path / "out")
        with workspace.open():
            job = self.job(output=str(workspace.output))
            reproduction.write_run_files(StageContext(job=job, workspace=workspace), TRIAL, [TRIAL])
        assert self.Config.from_file(tmp_path / "out" / "config.yaml").flavour == "sweet"
        assert '"config.yaml"' in (tmp_path / "out" / "reproduce.py").read_text()
