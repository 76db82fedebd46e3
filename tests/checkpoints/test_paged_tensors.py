"""Tensors that take memory only while something is in them."""

from pathlib import Path

import torch

from scalepoint.checkpoints.paged_tensors import PagedTensors


def own_memory():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def test_memory_is_taken_while_values_are_in_them():
    hollows = PagedTensors()
    before = own_memory()
    tensors = [hollows.make((1 << 25,)) for _ in range(64)]  # 8 GB
    assert own_memory() - before < 50e6
    hollows.fill(tensors[0], torch.ones(1).expand(1 << 25))
    assert own_memory() - before > 120e6
    assert bool(tensors[0].all())
    hollows.drop(tensors[0])
    assert own_memory() - before < 50e6
    assert not bool(tensors[0][::4096].any())


def test_writes_and_drops_are_noticed():
    hollows = PagedTensors()
    tensor = torch.nn.Parameter(hollows.make((4, 4)))
    first = tensor._version
    hollows.fill(tensor, torch.ones(4, 4))
    second = tensor._version
    hollows.drop(tensor)
    assert first < second < tensor._version


def test_no_elements_need_no_pages():
    assert PagedTensors().make((0, 4)).shape == (0, 4)
