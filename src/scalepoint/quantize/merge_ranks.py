"""What the ranks saw of the data, brought together between observing and deriving.

Every rank gets the statistics of all, and merges them in the order of ranks: they end with the same bits everywhere,
ranges and histograms with those of one process.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from scalepoint import distributed
from scalepoint.quantize.quantizers import QuantStub
from scalepoint.quantize.smooth import SmoothQuantObserver, get_linear_weight
from scalepoint.spec.running import RunningRangeMixin


def set_batch_recording(stubs: Sequence[QuantStub], on: bool) -> None:
    """With several ranks, let averages keep what they need to be merged in the order of the batches.

    Each rank sees whole batches here, not parts of one as in training.
    """
    for stub in stubs:
        stub.calculator.replicas = 1
        if isinstance(stub.calculator, RunningRangeMixin):
            stub.calculator.record(on and distributed.world_size() > 1)


def merge_ranges(stubs: Sequence[QuantStub]) -> None:
    """Each stub has observed what all ranks gave it, and is disabled when one of them had to."""
    own_states = [[stub.quantizer.is_disabled(), stub.quantizer.reason] for stub in stubs]
    states = distributed.gather_values("merging ranges", own_states)
    own = {f"{i} {name}": value for i, stub in enumerate(stubs) for name, value in stub.calculator.statistics().items()}
    found = [_group_by_stub(part, len(stubs)) for part in distributed.gather_tensors(own, "merging ranges")]
    for index, stub in enumerate(stubs):
        stub.quantizer.reason = next((part[index][1] for part in states if part[index][1]), "")
        if any(part[index][0] for part in states):
            stub.quantizer.switch("disabled", True)
        elif not stub.is_fixed:
            stub.calculator.merge_all([part[index] for part in found])


def _group_by_stub(tensors: dict[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    found: list[dict[str, Tensor]] = [{} for _ in range(count)]
    for key, value in tensors.items():
        index, _, name = key.partition(" ")
        found[int(index)][name] = value
    return found


def merge_smoothing(observers: Sequence[SmoothQuantObserver]) -> None:
    """The largest magnitude of every channel over all ranks, and the mean square of all batches."""
    own: dict[str, Tensor] = {}
    for index, each in enumerate(observers):
        if each.activation_max is not None and each.mean_square is not None:
            own |= {f"{index} max": each.activation_max, f"{index} square": each.mean_square * each.count}
            own[f"{index} count"] = torch.tensor(each.count)
    found = distributed.gather_tensors(own, "merging norms")
    for index, each in enumerate(observers):
        parts = [part for part in found if f"{index} count" in part]
        each.reset()
        if parts:
            device = (
                get_linear_weight(each.downstream_linears[0]).device if each.downstream_linears else torch.device("cpu")
            )
            each.count = sum(int(part[f"{index} count"]) for part in parts)
            each.activation_max = torch.stack([part[f"{index} max"] for part in parts]).amax(0).to(device)
            each.mean_square = torch.stack([part[f"{index} square"] for part in parts]).sum(0).to(device) / each.count
