"""Merges what the ranks observed, after the data was read and before parameters are computed.

Every rank gets the statistics of all ranks and merges them in rank order. So all ranks compute the same bits; ranges
and histograms equal those of a single process.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from scalepoint import distributed
from scalepoint.quantize.quantizers import QuantStub
from scalepoint.quantize.smooth import SmoothQuantObserver, get_linear_weight
from scalepoint.spec.running import RunningRangeMixin


def set_batch_recording(stubs: Sequence[QuantStub], *, enabled: bool) -> None:
    """With several ranks, make moving averages record the range of each batch, so that they merge in batch order.

    Also resets the number of replicas: each rank sees complete batches here, but parts of batches in training.
    """
    for stub in stubs:
        stub.calculator.replicas = 1
        if isinstance(stub.calculator, RunningRangeMixin):
            stub.calculator.record(enabled and distributed.world_size() > 1)


def merge_ranges(stubs: Sequence[QuantStub]) -> None:
    """Merge the statistics of each quantizer over the ranks. One that a rank had to disable is disabled on all."""
    local_states = [[stub.quantizer.is_disabled(), stub.quantizer.reason] for stub in stubs]
    states = distributed.gather_values("merging ranges", local_states)
    local_tensors = {
        f"{index} {name}": tensor
        for index, stub in enumerate(stubs)
        for name, tensor in stub.calculator.statistics().items()
    }
    statistics = [
        _group_by_stub(tensors, len(stubs)) for tensors in distributed.gather_tensors(local_tensors, "merging ranges")
    ]
    for index, stub in enumerate(stubs):
        states_of_stub = [rank_states[index] for rank_states in states]
        stub.quantizer.reason = next((reason for _, reason in states_of_stub if reason), "")
        if any(is_disabled for is_disabled, _ in states_of_stub):
            stub.quantizer.switch("disabled", True)
        elif not stub.is_fixed:
            stub.calculator.merge_all([rank_statistics[index] for rank_statistics in statistics])


def _group_by_stub(tensors: dict[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    """Split keys such as "3 running_min" into the index of the quantizer and the name of the statistic."""
    groups: list[dict[str, Tensor]] = [{} for _ in range(count)]
    for key, tensor in tensors.items():
        index, _, name = key.partition(" ")
        groups[int(index)][name] = tensor
    return groups


def merge_smoothing(observers: Sequence[SmoothQuantObserver]) -> None:
    """Merge the largest magnitude of every channel over all ranks, and the mean square of all batches."""
    local: dict[str, Tensor] = {}
    for index, observer in enumerate(observers):
        if observer.activation_max is not None and observer.mean_square is not None:
            local[f"{index} max"] = observer.activation_max
            local[f"{index} square"] = observer.mean_square * observer.count
            local[f"{index} count"] = torch.tensor(observer.count)
    per_rank = distributed.gather_tensors(local, "merging smoothing")
    for index, observer in enumerate(observers):
        parts = [tensors for tensors in per_rank if f"{index} count" in tensors]
        observer.reset()
        if not parts:
            continue
        linears = observer.downstream_linears
        device = get_linear_weight(linears[0]).device if linears else torch.device("cpu")
        observer.count = sum(int(part[f"{index} count"]) for part in parts)
        observer.activation_max = torch.stack([part[f"{index} max"] for part in parts]).amax(0).to(device)
        square_sum = torch.stack([part[f"{index} square"] for part in parts]).sum(0).to(device)
        observer.mean_square = square_sum / observer.count
