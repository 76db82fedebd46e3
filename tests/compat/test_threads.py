"""While a patch is active, other threads of the user run torch as it is."""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from scalepoint.compat.autocast import autocast_ignored
from scalepoint.compat.transformers import parameters_without_memory


def run_in_thread(function):
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(function).result()


def multiply_in_autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


def test_another_thread_can_use_autocast_while_a_model_is_captured():
    blocks = []
    with autocast_ignored(blocks.append):
        assert multiply_in_autocast() == torch.float32
        assert run_in_thread(multiply_in_autocast) == torch.bfloat16
    assert blocks == [torch.bfloat16]


def test_another_thread_can_build_modules_while_a_module_tree_gets_no_memory():
    with parameters_without_memory():
        assert nn.Linear(2, 2).weight.is_meta
        assert not run_in_thread(lambda: nn.Linear(2, 2)).weight.is_meta
