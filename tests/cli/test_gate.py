"""The quality gate for CI: `scalepoint gate`, the GitHub Action, and a repository whose model gets worse."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

import scalepoint
from scalepoint.cli.exit_codes import Code
from scalepoint.errors import StoreError, UsageError
from scalepoint.report.quality_gate import parse_size
from tests.cli.conftest import child
from tests.report.example_reports import EVIL, ordinary
from tests.warm import warm

REPOSITORY = Path(__file__).with_name("gate_repository")
ACTION = Path(__file__).parents[2] / "action.yml"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example repository, deployed into good/, and into bad/ after a change that only int8 suffers from."""
    folder = tmp_path_factory.mktemp("repository")
    shutil.copytree(REPOSITORY, folder, dirs_exist_ok=True)
    workflow = yaml.safe_load((folder / ".github" / "workflows" / "quantize.yml").read_text())
    command = next(step["run"] for step in workflow["jobs"]["quantize"]["steps"] if "deploy" in step.get("run", ""))
    arguments = command.split()[1:]

    def deploy(output: str) -> None:
        done = child(*[output if argument == "out" else argument for argument in arguments], cwd=folder, python=warm())
        assert done.returncode == 0, done.stderr

    deploy("good")
    source = folder / "classifier.py"
    source.write_text(source.read_text().replace("GAIN = 1.0", "GAIN = 1000.0"))
    deploy("bad")
    return folder


def run_action(cwd: Path, summary: Path, **inputs: str) -> subprocess.CompletedProcess[str]:
    """Run the last step of action.yml, as GitHub does: its script in bash, with the inputs as variables."""
    action = yaml.safe_load(ACTION.read_text())
    values = {name: str(declared["default"]) for name, declared in action["inputs"].items()} | inputs
    assert set(inputs) <= set(action["inputs"])
    step = action["runs"]["steps"][-1]
    variables = {
        name: values[text.removeprefix("${{ inputs.").removesuffix(" }}")] for name, text in step["env"].items()
    }
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, **variables, "PATH": path, "GITHUB_STEP_SUMMARY": str(summary)}
    script = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
    return subprocess.run(script, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=120)


def test_the_action_passes_a_good_model_and_fails_on_a_planted_drop(repository, tmp_path) -> None:
    workflow = yaml.safe_load((REPOSITORY / ".github" / "workflows" / "quantize.yml").read_text())
    inputs = {name: str(value) for name, value in workflow["jobs"]["quantize"]["steps"][-1]["with"].items()}
    good = run_action(repository, tmp_path / "good.md", **{**inputs, "folder": "good"})
    assert good.returncode == 0, good.stderr
    assert (tmp_path / "good.md").read_text() == good.stdout
    assert "scalepoint gate: passed" in good.stdout
    bad = run_action(repository, tmp_path / "bad.md", **{**inputs, "folder": "bad"})
    assert bad.returncode == Code.LIMIT, bad.stderr
    rows = [line for line in (tmp_path / "bad.md").read_text().splitlines() if "**fail**" in line]
    assert len(rows) == 1
    assert rows[0].startswith("| drop of score | 100.00 -> ")
    assert "failed: drop of score" in bad.stderr


def test_an_input_of_the_action_is_never_run_as_a_command(repository, tmp_path) -> None:
    done = run_action(repository, tmp_path / "summary.md", folder="good", **{"max-size": "$(touch planted)`touch x`"})
    assert done.returncode == Code.USAGE
    assert not (repository / "planted").exists()


def test_the_command_and_the_function_give_the_same_result(repository, call) -> None:
    code, out, err = call("gate", repository / "bad", "--max-drop", "0.5", "--max-size", "1kB", "--json", trust=False)
    result = scalepoint.gate(repository / "bad", max_drop=0.5, max_size=1000)
    assert code == Code.LIMIT
    assert json.loads(out) == {"schema": 1, "command": "gate", "exit_code": 5, **result.to_dict()}
    assert [check.name for check in result.with_outcome("fail")] == ["drop of score", "size"]
    assert "failed: drop of score, size" in err


def test_a_file_that_changed_after_it_was_measured_fails(repository, tmp_path) -> None:
    shutil.copytree(repository / "good", tmp_path / "out")
    assert scalepoint.gate(tmp_path / "out").passed
    with (tmp_path / "out" / "model.onnx").open("ab") as file:
        file.write(b"x")
    changed = scalepoint.gate(tmp_path / "out")
    assert [check.measured for check in changed.with_outcome("not verified")] == [
        "model.onnx changed after it was measured"
    ]


def write_report(folder: Path, **changes) -> Path:
    (folder / "report.json").write_text(replace(ordinary(), **changes).to_json())
    return folder


@pytest.mark.parametrize(
    ("changes", "arguments", "expected"),
    [
        ({}, ("--max-drop", "5", "--min-speed", "1.5", "--max-size", "30MB"), Code.DONE),
        ({}, ("--min-speed", "3"), Code.LIMIT),
        ({}, ("--max-size", "1MB"), Code.LIMIT),
        ({"accuracy": ()}, ("--max-drop", "5"), Code.USAGE),
        ({"warnings": ("a smoke run: 2 batches",)}, (), Code.USAGE),
        ({"verification": None}, (), Code.UNVERIFIED),
        ({"verification": None}, ("--allow-unverified",), Code.DONE),
        ({"verification": None}, ("--allow-unverified", "--min-speed", "1"), Code.USAGE),
    ],
)
def test_the_exit_code_says_what_failed(call, tmp_path, changes, arguments, expected) -> None:
    assert call("gate", write_report(tmp_path, **changes), *arguments, trust=False)[0] == expected


def test_a_file_that_departs_fails_even_if_unverified_files_are_accepted(call, tmp_path) -> None:
    verification = replace(ordinary().verification, differences=("the scale of conv1 is 2, not 1",))
    write_report(tmp_path, verification=verification)
    assert call("gate", tmp_path, "--allow-unverified", trust=False)[0] == Code.UNVERIFIED


@pytest.mark.parametrize("name", EVIL, ids=range(len(EVIL)))
def test_names_of_a_report_cannot_add_markup_or_rows_to_the_summary(tmp_path, name) -> None:
    text = scalepoint.gate(write_report(tmp_path, title=name), max_drop=1).to_markdown()
    assert len(text.splitlines()) == 8
    assert all(character.isprintable() or character == "\n" for character in text)
    assert "<" not in text.replace("\\<", "")


def test_a_report_that_cannot_be_read_is_an_error(call, tmp_path) -> None:
    for text in ("{", "[]", '{"schema": 1}', '{"schema": 2}'):
        (tmp_path / "report.json").write_text(text)
        with pytest.raises(StoreError):
            scalepoint.gate(tmp_path)
        assert call("gate", tmp_path, trust=False)[0] == Code.USAGE
    with pytest.raises(UsageError):
        scalepoint.gate(tmp_path / "nowhere")


def test_sizes_have_decimal_and_binary_units() -> None:
    sizes = {"30MB": 30_000_000, "8MiB": 8 * 2**20, "1.5 kB": 1500, "700": 700, 2e6: 2_000_000, "1G": 10**9}
    assert {text: parse_size(text) for text in sizes} == sizes
    for text in ("30 megabytes", "", "-1", "nan", -1, float("nan")):
        with pytest.raises(UsageError):
            parse_size(text)
