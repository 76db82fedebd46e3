"""Every page of the README and the docs is a test; what all tests have in common."""

import gc
import os
import sys

from scalepoint.support.cpu import cap_instruction_set

sys.dont_write_bytecode = False  # hundreds of processes import the package: it is compiled once
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Tiny networks are slower in int8, and measured times differ from run to run. Tests of placement choose it themselves.
os.environ["SCALEPOINT_PLACEMENT"] = "int8"

cap_instruction_set()  # before torch is loaded: no test may die of what the processor only announces

# ruff: noqa: E402
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.docs.blocks import PageFile
from tests.warm import warm

COLD = (
    "tests/language/test_cold_start.py",
    "tests/runtimes/test_cold_start.py",
    "tests/runtimes/test_process.py",
    "tests/verification/test_verify.py",
)
torch.set_num_threads(1)  # small tensors gain nothing from more, and a shared machine loses much


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> PageFile | None:
    return PageFile.from_parent(parent, path=file_path) if file_path.suffix == ".md" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test has the same name in every process, or the processes that share the run refuse it."""
    for item in items:
        if " at 0x" in item.nodeid or "frozenset({" in item.nodeid:
            raise pytest.UsageError(f"{item.nodeid[:200]}: another name in each process: give ids= to parametrize")


def pytest_collection_finish() -> None:
    """What is there by now stays: the garbage collector need not look at it again and again, nor as often."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print how the combinations of options ended (tests/pairwise.py)."""
    passed = terminalreporter.getreports("passed")
    ended = Counter(value for report in passed for name, value in report.user_properties if name == "matrix")
    if ended:
        counts = ", ".join(f"{count} {outcome}" for outcome, count in ended.most_common())
        terminalreporter.write_line(f"combinations of options: {ended.total()} as predicted: {counts}")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def own_garbage() -> None:
    """gc.collect() looks at what the test makes, and not for a second at all that was ever imported."""
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _one_table_of_operators() -> Iterator[None]:
    """torch.onnx makes its table of operators anew for each export, which takes half a second: here it is made once."""
    with pytest.MonkeyPatch.context() as patch:
        original = torch.onnx.export

        def export(*args: Any, **kwargs: Any) -> Any:
            _keep_table(patch)
            return original(*args, **kwargs)

        patch.setattr(torch.onnx, "export", export)
        yield


@pytest.fixture(autouse=True, scope="session")
def _loaded_runtimes() -> Iterator[None]:
    """The child of a runtime is forked from one that has it loaded; not so in the tests of such processes."""
    from scalepoint.runtimes import process  # noqa: PLC0415  # by now torch is loaded

    shipped = process.child_command

    def command(runtime: process.Runtime) -> list[str]:
        python, *rest = shipped(runtime)
        is_cold = os.environ.get("PYTEST_CURRENT_TEST", "").startswith(COLD)
        return [python, *rest] if is_cold else [*warm(rest[-1]), *rest]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "child_command", command)
        yield


@cache
def _keep_table(patch: pytest.MonkeyPatch) -> None:
    from torch.onnx._internal.exporter._registration import ONNXRegistry  # noqa: PLC0415  # loads onnxscript

    build = cache(ONNXRegistry.from_torchlib)

    def copied(**options: Any) -> ONNXRegistry:
        registry = build(**options)
        copied_registry = ONNXRegistry()
        copied_registry._opset_version = registry._opset_version
        copied_registry.functions = {
            name: list(rows) for name, rows in registry.functions.items()
        }  # an export adds its own to it
        return copied_registry

    patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(copied))
