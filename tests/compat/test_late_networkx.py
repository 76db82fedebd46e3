"""torch.export runs without networkx, which torch's partitioner still gets when it uses it."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys
import torch
from scalepoint.graph import capture

capture(torch.nn.Linear(4, 2), torch.randn(2, 4))
print("networkx" in sys.modules)
from torch._functorch._activation_checkpointing import knapsack_evaluator

graph = knapsack_evaluator.nx.DiGraph([(1, 2)])
print(list(knapsack_evaluator.nx.topological_sort(graph)), "networkx" in sys.modules)
"""


@pytest.mark.parametrize(("no_patches", "is_imported"), [("0", "False"), ("1", "True")])
def test_a_capture_imports_networkx_only_without_patches(no_patches, is_imported):
    environment = {**os.environ, "SCALEPOINT_NO_PATCHES": no_patches}
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, env=environment)
    assert run.stdout.splitlines() == [is_imported, "[1, 2] True"]
