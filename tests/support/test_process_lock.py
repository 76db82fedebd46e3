"""Several threads of one process get the same results as one thread."""

import os
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import scalepoint
from scalepoint.quantize import quantize
from scalepoint.support.torch_state import serialized

THREADS = 8


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2 + seed)).eval()


def in_threads(work, count: int = THREADS) -> None:
    """Call `work` with each number in a thread of its own, all at the same time."""
    barrier, errors = threading.Barrier(count), []

    def run(number: int) -> None:
        try:
            barrier.wait()
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_fault_47_eight_models_in_eight_threads_are_those_of_one() -> None:
    data = [torch.randn(2, 8, generator=torch.Generator().manual_seed(index)) for index in range(2)]
    models, out = [net(seed) for seed in range(THREADS)], sys.stdout

    def quantize_model(number: int) -> dict[str, torch.Tensor]:
        return quantize(models[number], data[0], forward_loop=data, target="onnxruntime").state_dict()

    alone, concurrent = {number: quantize_model(number) for number in range(THREADS)}, {}
    in_threads(lambda number: concurrent.update({number: quantize_model(number)}))
    for number, state in alone.items():
        assert list(concurrent[number]) == list(state)
        assert all(torch.equal(concurrent[number][name], value) for name, value in state.items())
    assert sys.stdout is out


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_two_models_deployed_concurrently_give_the_same_files_as_one_after_the_other(tmp_path: Path) -> None:
    data = [torch.randn(2, 8, generator=torch.Generator().manual_seed(index)) for index in range(2)]
    models = [net(seed) for seed in range(2)]

    def file_of(number: int, folder: str) -> bytes:
        output = tmp_path / folder / str(number)
        return scalepoint.deploy(
            models[number], data[0], data, output=output, smoke=True, progress=False
        ).path.read_bytes()

    alone, together = {number: file_of(number, "alone") for number in range(2)}, {}
    in_threads(lambda number: together.update({number: file_of(number, "together")}), count=2)
    assert together == alone


def test_one_thread_at_a_time_runs_and_may_call_again() -> None:
    inside: list[int] = []
    counts: list[int] = []

    @serialized
    def outer(number: int) -> None:
        inside.append(number)
        nested(number)
        inside.remove(number)

    @serialized
    def nested(number: int) -> None:
        counts.append(len(inside))

    in_threads(outer)
    assert counts == [1] * THREADS


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
def test_a_forked_process_does_not_wait_for_threads_of_its_parent() -> None:
    is_locked, done = threading.Event(), threading.Event()
    holder = threading.Thread(target=serialized(lambda: (is_locked.set(), done.wait())))
    holder.start()
    is_locked.wait()
    child = os.fork()
    if child == 0:
        serialized(lambda: os._exit(7))()
    done.set()
    holder.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
