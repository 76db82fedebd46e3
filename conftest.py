"""Settings and fixtures of all tests. Every page of the README and the docs is a test too."""

import gc
import os
import sys

from scalepoint.support.cpu import cap_instruction_set

sys.dont_write_bytecode = False  # hundreds of processes import the package: compile it once
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Tiny networks are slower in int8, and measured times differ from run to run. Tests of placement choose it themselves.
os.environ["SCALEPOINT_PLACEMENT"] = "int8"

# Before torch is loaded: on some machines the CPU announces AMX, but processes that use it are killed.
cap_instruction_set()

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

# Tests whose child processes start without preloaded modules, as for users.
COLD_START_TESTS = (
    "tests/language/test_cold_start.py",
    "tests/runtimes/test_cold_start.py",
    "tests/runtimes/test_process.py",
    "tests/verification/test_verify.py",
)
torch.set_num_threads(1)  # small tensors gain nothing from more, and a shared machine loses much


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> PageFile | None:
    return PageFile.from_parent(parent, path=file_path) if file_path.suffix == ".md" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Raise an error for tests whose names differ between processes: pytest-xdist needs equal names."""
    for item in items:
        if " at 0x" in item.nodeid or "frozenset({" in item.nodeid:
            raise pytest.UsageError(f"{item.nodeid[:200]}: another name in each process: give ids= to parametrize")


def pytest_collection_finish() -> None:
    """Exclude all objects that exist now from garbage collection, and collect less often: both save time."""
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
def fast_gc_collect() -> None:
    """Exclude all objects that exist before the test from gc.collect(), which would take a second to visit them."""
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _cached_onnx_operator_table() -> Iterator[None]:
    """Build torch.onnx's table of operators once. torch builds it for each export, which takes half a second."""
    with pytest.MonkeyPatch.context() as patch:
        original = torch.onnx.export

        def export(*args: Any, **kwargs: Any) -> Any:
            _cache_operator_table(patch)
            return original(*args, **kwargs)

        patch.setattr(torch.onnx, "export", export)
        yield


@pytest.fixture(autouse=True, scope="session")
def _preloaded_runtimes() -> Iterator[None]:
    """Fork the child process of a runtime from a process that has the runtime loaded, except in COLD_START_TESTS."""
    from scalepoint.runtimes import process  # noqa: PLC0415  # by now torch is loaded

    original_command = process.child_command

    def command(runtime: process.Runtime) -> list[str]:
        python, *rest = original_command(runtime)
        is_cold = os.environ.get("PYTEST_CURRENT_TEST", "").startswith(COLD_START_TESTS)
        return [python, *rest] if is_cold else [*warm(rest[-1]), *rest]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "child_command", command)
        yield


@cache
def _cache_operator_table(patch: pytest.MonkeyPatch) -> None:
    from torch.onnx._internal.exporter._registration import ONNXRegistry  # noqa: PLC0415  # loads onnxscript

    build = cache(ONNXRegistry.from_torchlib)

    def copied(**options: Any) -> ONNXRegistry:
        registry = build(**options)
        copied_registry = ONNXRegistry()
        copied_registry._opset_version = registry._opset_version
        # Copy the lists: an export adds its own operators to them.
        copied_registry.functions = {name: list(rows) for name, rows in registry.functions.items()}
        return copied_registry

    patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(copied))
