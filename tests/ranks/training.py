"""Training over ranks: what every way of it gives, against one process with the whole batch."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from scalepoint import distributed
from scalepoint.quantize import QuantStub, WeightFakeQuantize, calibrate, freeze_bn_stats, load, prepare_qat, save
from tests.ranks.jobs import batches, inserted, net, outcome

STEPS, BATCH = 6, 8


def data() -> list[tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(3)
    inputs = [torch.randn(BATCH, 3, 8, 8, generator=made) * (1 + step / 4) for step in range(STEPS)]
    return [(each, torch.randint(0, 5, (BATCH,), generator=made)) for each in inputs]


def prepared(start: fx.GraphModule, **how: Any) -> fx.GraphModule:
    model = prepare_qat(copy.deepcopy(start), **how)
    freeze_bn_stats(model)  # statistics of a part of a batch are not those of the whole
    return model


def trained(model: nn.Module, step: Callable[[], None] = lambda: None) -> list[float]:
    """The losses of the whole batch, step by step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    part = BATCH // distributed.world_size()
    for inputs, wanted in data():
        mine = slice(distributed.rank() * part, (distributed.rank() + 1) * part)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs[mine]), wanted[mine])
        loss.backward()
        optimizer.step()
        told = loss.detach().clone()
        if distributed.world_size() > 1:
            torch.distributed.all_reduce(told)
        losses.append(float(told) / distributed.world_size())
    return losses


def scales(model: nn.Module) -> dict[str, list[float]]:
    kinds = (QuantStub, WeightFakeQuantize)
    return {name: each.scale.flatten().tolist() for name, each in model.named_modules() if isinstance(each, kinds)}


def training(folder: Path) -> Any:
    with distributed.single_process():
        start = calibrate(inserted(), batches(3), progress=False)
    found: dict[str, Any] = {}
    for name, how in (("observed", {"observe": True}), ("learned", {"learn_scales": True})):
        with distributed.single_process():
            one = prepared(start, **how)
            found[f"{name} by one"] = [trained(one), scales(one)]
        model = prepared(start, **how)
        found[f"{name} by DDP"] = [trained(DistributedDataParallel(model)), scales(model)]
        model = prepared(start, **how)
        fully_shard(model, mesh=init_device_mesh("cpu", (distributed.world_size(),)))
        found[f"{name} by FSDP2"] = [trained(model), scales(model)]
        found[f"{name} saved"] = _saved(model, folder / name)
    found["nan"] = outcome(lambda: _with_nan(start))
    found["calibrated again"] = scales(calibrate(prepared(start, observe=True), batches(5), progress=False))
    return found


def _saved(model: fx.GraphModule, folder: Path) -> list[bool]:
    """Whether a folder, and a whole state, of the sharded model give a plain one with the same outputs."""
    model.eval()
    inputs = batches(1)[0]
    with torch.no_grad():
        expected = model(inputs)
    save(model, folder)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    with distributed.phase("saved"):
        pass
    with distributed.single_process(), torch.no_grad():
        plain = load(folder, net(), inputs)
        from_folder = bool(torch.equal(plain(inputs), expected))
        for value in plain.parameters():
            value.zero_()
        same = True
        if not torch.distributed.get_rank():
            plain.load_state_dict(state)
            same = bool(torch.equal(plain.eval()(inputs), expected))
    return [from_folder, same]


def _with_nan(start: fx.GraphModule) -> Any:
    model = DistributedDataParallel(prepared(start, observe=True))
    inputs = torch.randn(2, 3, 8, 8)
    if distributed.rank() == 1:
        inputs[0, 0, 0, 0] = float("nan")
    return float(model(inputs).sum())
