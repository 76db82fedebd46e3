"""Jobs that train over ranks with DDP and FSDP2, next to one process with the full batch."""

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
from tests.ranks.jobs import batches, net, quantized_net, result_or_error

STEPS, BATCH = 6, 8


def data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(BATCH, 3, 8, 8, generator=generator) * (1 + step / 4) for step in range(STEPS)]
    return [(batch, torch.randint(0, 5, (BATCH,), generator=generator)) for batch in inputs]


def prepare_model(start: fx.GraphModule, **options: Any) -> fx.GraphModule:
    model = prepare_qat(copy.deepcopy(start), **options)
    freeze_bn_stats(model)  # statistics of a part of a batch differ from those of the batch
    return model


def train(model: nn.Module, step: Callable[[], None] = lambda: None) -> list[float]:
    """Train, and return the loss of the full batch for each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    part = BATCH // distributed.world_size()
    for inputs, labels in data():
        shard = slice(distributed.rank() * part, (distributed.rank() + 1) * part)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs[shard]), labels[shard])
        loss.backward()
        optimizer.step()
        total_loss = loss.detach().clone()
        if distributed.world_size() > 1:
            torch.distributed.all_reduce(total_loss)
        losses.append(float(total_loss) / distributed.world_size())
    return losses


def scales(model: nn.Module) -> dict[str, list[float]]:
    kinds = (QuantStub, WeightFakeQuantize)
    return {
        name: module.scale.flatten().tolist() for name, module in model.named_modules() if isinstance(module, kinds)
    }


def training(folder: Path) -> Any:
    with distributed.single_process():
        start = calibrate(quantized_net(), batches(3), progress=False)
    results: dict[str, Any] = {}
    for name, options in (("observed", {"observe": True}), ("learned", {"learn_scales": True})):
        with distributed.single_process():
            one = prepare_model(start, **options)
            results[f"{name} by one"] = [train(one), scales(one)]
        model = prepare_model(start, **options)
        results[f"{name} by DDP"] = [train(DistributedDataParallel(model)), scales(model)]
        model = prepare_model(start, **options)
        fully_shard(model, mesh=init_device_mesh("cpu", (distributed.world_size(),)))
        results[f"{name} by FSDP2"] = [train(model), scales(model)]
        results[f"{name} saved"] = _check_saved(model, folder / name)
    results["nan"] = result_or_error(lambda: _with_nan(start))
    results["calibrated again"] = scales(calibrate(prepare_model(start, observe=True), batches(5), progress=False))
    return results


def _check_saved(model: fx.GraphModule, folder: Path) -> list[bool]:
    """Whether a plain model with the saved folder, or with the full state, has the outputs of the sharded model."""
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
    model = DistributedDataParallel(prepare_model(start, observe=True))
    inputs = torch.randn(2, 3, 8, 8)
    if distributed.rank() == 1:
        inputs[0, 0, 0, 0] = float("nan")
    return float(model(inputs).sum())
