"""Every block of the README and the docs is a test."""

from scalepoint.processor import cap

cap()  # before torch is loaded: no test may die of what the processor only announces

# ruff: noqa: E402
import pytest
import torch
from sybil import Sybil
from tests.docs.blocks import Blocks, enter, leave

torch.set_num_threads(1)  # small tensors gain nothing from more, and a shared machine loses much

pytest_collect_file = Sybil(parsers=[Blocks()], patterns=["*.md"], setup=enter, teardown=leave).pytest()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
