"""Every python block of the README and the docs is a test."""

import pytest
import torch
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

torch.set_num_threads(1)  # small tensors gain nothing from more, and a shared machine loses much

pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser()],
    patterns=["*.md"],
    setup=lambda namespace: torch.manual_seed(0),
).pytest()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
