"""Pairs of options of `deploy_checkpoint`.

Every combination ends in a file that its runtime runs, or in a predicted refusal.
"""

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import scalepoint
from scalepoint.errors import CalibrationError, ScalepointError, TargetError, UsageError
from scalepoint.runtimes import find_runtime
from scalepoint.support.progress import Event, callback_registered
from scalepoint.targets import find_target
from tests.pairwise import Case, as_parameters, contents, pairwise

FACTORS = {
    "target": ("gguf", "compressed-tensors", "ort-genai", "gptq", "awq"),
    "data": ("text", "jsonl", "tokens", "nothing"),
    "judge": ("text", "tokens", "nothing"),
    "accuracy": ("fast", "balanced"),
    "weight": ("default", "int8", "int4"),
    "run": ("new", "resume", "force", "not verified"),
    "cache": ("float", "int8", "fp8"),
}
CACHES = {("gguf", "int8"), ("ort-genai", "int8"), ("compressed-tensors", "fp8")}
COSTLY = [value for values in FACTORS.values() for value in values if value != "gguf"]
LIST, REPORTS = ".scalepoint-files.json", {"report.html", "report.json"}


def refusals(case: Case) -> list[str]:
    """The codes of the errors that a case can end in; none for a case that must end in a file."""
    codes = []
    if case["target"] == "awq" and case["weight"] == "int8":
        codes.append(TargetError.code)
    if case["cache"] != "float" and (case["target"], case["cache"]) not in CACHES:
        codes.append(UsageError.code)
    if case["data"] == "nothing" and (case["accuracy"] != "fast" or case["cache"] != "float"):
        codes.append(CalibrationError.code)  # tuning and the scales of the cache need data
    return codes


def make_text(kind: object, folder: Path, text_folder: Path, name: str) -> Any:
    """The same text as a file or as JSON lines; random tokens; None."""
    file = folder / f"{name}.txt"
    if kind == "jsonl":
        lines = text_folder / f"{name}.jsonl"
        lines.write_text("".join(json.dumps({"text": part}) + "\n" for part in file.read_text().split(" . ")))
        return lines
    generator = torch.Generator().manual_seed(len(name))
    tokens = [torch.randint(1, 300, (1, 32), generator=generator) for _ in range(6)]
    return {"text": file, "tokens": tokens, "nothing": None}[str(kind)]


def make_options(case: Case, folder: Path, text_folder: Path) -> dict[str, Any]:
    options: dict[str, Any] = {
        "target": case["target"],
        "data": make_text(case["data"], folder, text_folder, "calibration"),
        "judge": make_text(case["judge"], folder, text_folder, "judge"),
        "accuracy": case["accuracy"],
        "cache": None if case["cache"] == "float" else case["cache"],
        "verify": case["run"] != "not verified",
        "force": case["run"] == "force",
        "length": 32,
        "samples": 4,
        "progress": False,
    }
    if case["weight"] != "default":
        weight = {"n_bits": 8 if case["weight"] == "int8" else 4, "block_size": 32}
        options["config"] = {"weight": weight | ({"symmetric": False} if case["target"] == "awq" else {})}
    return options


class StopEarlyError(Exception):
    """Raised by a listener to interrupt a run."""


def deploy_resumed(folder: Path, output: Path, options: dict[str, Any]) -> scalepoint.Deployment:
    """Interrupt a run before it writes, resume it, and compare it with a run that was not interrupted."""
    blocks = []  # finished blocks with their times, before each run writes

    def listen(event: Event) -> None:
        if (event.kind, event.name) == ("start", "writing"):
            files = output.with_name(".out.work").rglob("piece-*.safetensors")
            blocks.append({file.name: file.stat().st_mtime_ns for file in files})
            if len(blocks) == 1:
                raise StopEarlyError

    with callback_registered(listen):
        with pytest.raises(StopEarlyError):
            scalepoint.deploy_checkpoint(folder, output, **options)
        done = scalepoint.deploy_checkpoint(folder, output, resume=True, **options)
    assert blocks[0]
    assert blocks[0] == blocks[1]
    uninterrupted = output.with_name("whole")
    scalepoint.deploy_checkpoint(folder, uninterrupted, **options | {"verify": False})
    assert without_reports(output) == without_reports(uninterrupted)
    return done


def without_reports(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in contents(folder).items() if name not in (*REPORTS, LIST)}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("case", as_parameters(pairwise(FACTORS, refusals), refusals, COSTLY))
def test_a_combination_of_options_ends_in_a_file_that_runs_or_a_refusal(
    wide: Path, case: Case, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    output, codes, options = tmp_path / "out", refusals(case), make_options(case, wide, tmp_path)
    runtime = find_runtime(str(find_target(str(case["target"])).runtime))
    if not runtime.is_installed:
        pytest.skip(f"{runtime.name} is not installed")
    if case["run"] == "force":
        output.mkdir()
        (output / "notes.txt").write_text("mine")
    before = contents(output)
    if codes:
        with pytest.raises(ScalepointError) as error:
            scalepoint.deploy_checkpoint(wide, output, **options)
        assert error.value.code in codes
        assert contents(output) == before
        record_property("matrix", f"refused with {error.value.code}")
        return
    if case["run"] == "resume":
        done = deploy_resumed(wide, output, options)
    else:
        done = scalepoint.deploy_checkpoint(wide, output, **options)
    is_verified = options["verify"] and not case["data"] == case["judge"] == "nothing"  # without text nothing to run
    result = done.report.language
    assert (result.runtime, result.status) == (runtime.name, "ok" if is_verified else "")
    assert (done.score is None) == (case["data"] == case["judge"] == "nothing")
    files = contents(output)
    ours = set(json.loads(files.pop(LIST))["files"])
    assert set(files) - ours == set(before)
    assert {name: files[name] for name in before} == before
    assert ours >= REPORTS
    assert not (tmp_path / ".out.work").exists()
    record_property("matrix", "file verified" if is_verified else "file not verified (not asked for)")
