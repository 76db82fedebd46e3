"""Tensors that use memory only while they contain values."""

from pathlib import Path

import torch

from scalepoint.checkpoints.paged_tensors import PagedTensors


def private_memory_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def test_a_tensor_uses_memory_only_between_fill_and_drop():
    paged_tensors = PagedTensors()
    before = private_memory_bytes()
    tensors = [paged_tensors.make((1 << 25,)) for _ in range(64)]  # 8 GB
    assert private_memory_bytes() - before < 50e6
    paged_tensors.fill(tensors[0], torch.ones(1).expand(1 << 25))
    assert private_memory_bytes() - before > 120e6
    assert bool(tensors[0].all())
    paged_tensors.drop(tensors[0])
    assert private_memory_bytes() - before < 50e6
    assert not bool(tensors[0][::4096].any())


def test_fill_and_drop_increment_the_version_counter():
    paged_tensors = PagedTensors()
    tensor = torch.nn.Parameter(paged_tensors.make((4, 4)))
    created = tensor._version
    paged_tensors.fill(tensor, torch.ones(4, 4))
    filled = tensor._version
    paged_tensors.drop(tensor)
    assert created < filled < tensor._version


def test_a_tensor_without_elements_needs_no_pages():
    assert PagedTensors().make((0, 4)).shape == (0, 4)
