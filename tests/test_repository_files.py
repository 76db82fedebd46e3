"""Files that services read: GitHub workflows, issue templates, the action, the citation file, the hooks."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

import scalepoint

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
SCRIPTS = re.compile(r"(?:^|\s)((?:tests|tools|docs|bench|\.ci)/[\w./-]+)")


def run_lines(path):
    steps = [step for job in yaml.safe_load(path.read_text())["jobs"].values() for step in job["steps"]]
    return [step["run"] for step in steps if "run" in step]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_names_targets_and_scripts_that_exist(path):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    lines = run_lines(path)
    assert {name for line in lines for name in re.findall(r"\bmake ([\w-]+)", line)} <= targets
    assert [name for line in lines for name in SCRIPTS.findall(line) if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_only_read_unless_a_job_needs_more(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    assert all("secrets" not in str(job) for job in workflow["jobs"].values())
    assert all("${{" not in line for line in run_lines(path))  # an expression in a script could run a command


def test_every_path_and_layer_in_the_architecture_page_exists():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    package = ROOT / "src" / "scalepoint"
    layers = re.search(r"\| layer \|.*?\n\n", text, re.DOTALL)[0]
    rows = layers.strip().splitlines()[2:]
    names = {name for row in rows for name in re.findall(r"`([\w/]+)`", row.split("|")[1])}
    assert {"cli", "graph", "compat"} <= names
    paths = {path for path in re.findall(r"`([\w./-]+)`", text) if "/" in path or path.endswith(".py")}
    assert len(paths) > 30
    missing_layers = [name for name in names if not ((package / name).is_dir() or (package / f"{name}.py").is_file())]
    missing_paths = [path for path in paths if not ((package / path).exists() or (ROOT / path).exists())]
    assert (missing_layers, missing_paths) == ([], [])


def test_the_lower_bounds_of_dependencies_are_the_versions_that_the_tests_run_with():
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for name, lines in project["optional-dependencies"].items() if name != "dev" for line in lines]
    for line in (*project["dependencies"], *extras):
        name, bound = re.match(r"([\w-]+)[>=]=([\w.]+)", line).groups()
        assert f"{pins[name]}.".startswith(f"{bound}."), line


def test_the_citation_and_the_hooks_have_the_versions_of_the_project():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == scalepoint.__version__
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    ruff = next(repo["rev"] for repo in hooks if "ruff" in repo["repo"])
    assert f"ruff=={ruff.removeprefix('v')}" in (ROOT / "constraints.txt").read_text()
