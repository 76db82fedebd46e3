"""Quantization-aware training: the same graph, with fake quantization on while the weights learn.

prepare_qat -> train -> (disable observers, freeze batch norm statistics) -> eval -> export
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from scalepoint import distributed
from scalepoint.compat.torch_names import BatchNormBase
from scalepoint.errors import ConfigError, UsageError
from scalepoint.graph import Operation
from scalepoint.quantize.quantized_layers import QuantizedLayer
from scalepoint.quantize.quantizers import QuantizerBase, QuantStub, WeightFakeQuantize
from scalepoint.quantize.record import update_record
from scalepoint.support.torch_state import serialized


@serialized
def prepare_qat(model: nn.Module, *, learn_scales: bool = False, observe: bool | None = None) -> nn.Module:
    """Prepare a model for quantization-aware training: train mode, live weights, fake quantization on.

    With torch.distributed the ranks train one model, each with its part of the batch (DDP, fully_shard): ranges are
    those of the whole batch, and learned scales get the same updates as in one process.

    Args:
        model: A model with quantizers. It is changed in place.
        learn_scales: Make every scale a Parameter (LSQ). Build the optimizer afterwards, so that it contains them.
        observe: Update all activation ranges during training (True) or none (False). None updates only those that
            calibration did not set.

    Returns:
        The same model.
    """
    quantizers = _get_quantizers(model)
    for quantizer in quantizers:
        if isinstance(quantizer, QuantStub):
            quantizer.calculator.replicas = distributed.world_size()
    for quantizer in quantizers:
        if isinstance(quantizer, WeightFakeQuantize):
            quantizer.unfreeze()
    for module in model.modules():
        if isinstance(module, QuantizedLayer) and module.norm is not None:
            module.set_bias_shift(None)  # live statistics take up what it did
    model.train()
    if learn_scales:
        _learn_scales(model, quantizers)
    if observe is not None:
        enable_observer(model, observe)
    else:
        _observe_uncalibrated(quantizers)
    enable_fake_quant(model)
    return model


def _observe_uncalibrated(quantizers: list[QuantizerBase]) -> None:
    for quantizer in quantizers:
        if isinstance(quantizer, QuantStub) and not quantizer.has_observed and not quantizer.skip_reason:
            quantizer.set_calculator("moving_average")
            quantizer.observes_in_training = True


def _learn_scales(model: nn.Module, quantizers: list[QuantizerBase]) -> None:
    for module in model.modules():
        if isinstance(module, QuantizedLayer) and not module.weight_quant.calculator.is_initialized:
            module.freeze()
            module.weight_quant.unfreeze()
    for quantizer in quantizers:
        if isinstance(quantizer, QuantStub) and not quantizer.has_observed:
            raise UsageError(f"{quantizer.name} has no range to learn from: calibrate before prepare_qat")
        is_dynamic = quantizer.calculator.always_called and not quantizer.is_learned
        if not is_dynamic and quantizer.spec.scale_dtype is None and not quantizer.quantizer.is_disabled():
            quantizer.learn_scale()


def enable_fake_quant(model: nn.Module) -> None:
    """Quantize and dequantize in every forward.

    Args:
        model: A calibrated model.
    """
    quantizers = _get_quantizers(model)
    stubs = [each for each in quantizers if isinstance(each, QuantStub)]
    blind = [stub.name for stub in stubs if not (stub.has_observed or stub.observes_in_training or stub.skip_reason)]
    if blind:
        raise UsageError(
            f"{len(blind)} stubs have no range and do not observe, {blind[0]} first: calibrate before this"
        )
    for quantizer in quantizers:
        if isinstance(quantizer, QuantStub):
            quantizer.apply_new_statistics()
        quantizer.enabled = not (isinstance(quantizer, QuantStub) and quantizer.skip_reason)


def disable_fake_quant(model: nn.Module) -> None:
    """Compute in float. Observers keep their state.

    Args:
        model: A model with quantizers.
    """
    for quantizer in _get_quantizers(model):
        quantizer.enabled = False


def enable_observer(model: nn.Module, enabled: bool = True) -> None:
    """Update the ranges of activations by a moving average in every forward.

    Args:
        model: A model with quantizers.
        enabled: False stops it.
    """
    for quantizer in _get_quantizers(model):
        if isinstance(quantizer, QuantStub) and not quantizer.is_fixed and not quantizer.is_learned:
            if enabled:
                quantizer.set_calculator("moving_average")
            else:
                quantizer.apply_new_statistics()
            quantizer.observes_in_training = enabled


def disable_observer(model: nn.Module) -> None:
    """Stop updating the ranges of activations.

    Args:
        model: A model with quantizers.
    """
    enable_observer(model, False)


def freeze_bn_stats(model: nn.Module, frozen: bool = True) -> None:
    """Stop updating the statistics of all batch norms, also after a later train(). Their affine parameters still learn.

    Call it again after loading a plain state_dict into a model with batch norms outside fused groups.

    Args:
        model: A model with quantizers.
        frozen: False lets the statistics update again.
    """
    folded = set()
    update_record(model, is_norm_frozen=frozen)
    for module in model.modules():
        if isinstance(module, QuantizedLayer) and module.norm is not None:
            module.freeze_norm(frozen)
            folded.add(id(module.norm))
    for module in model.modules():
        is_function = isinstance(module, Operation) and module.kind == "batch_norm"
        if (isinstance(module, BatchNormBase) or is_function) and id(module) not in folded:
            _freeze_single_norm(module, frozen)


def _freeze_single_norm(norm: nn.Module, frozen: bool) -> None:
    """A batch norm outside any group: in eval whenever it runs."""
    for key, hook in list(norm._forward_pre_hooks.items()):
        if hook is _set_eval:
            del norm._forward_pre_hooks[key]
    if frozen:
        norm.register_forward_pre_hook(_set_eval)


def _set_eval(module: nn.Module, inputs: Any) -> None:
    module.training = False


def _get_quantizers(model: nn.Module) -> list[QuantizerBase]:
    found = [module for module in model.modules() if isinstance(module, QuantizerBase)]
    if not found:
        raise UsageError("this model has no quantizers: train what insert_qdq made, not the float model")
    return found


def set_pruning_progress(model: nn.Module, progress: float = 1.0) -> None:
    """How far the weights of a model in training that are to be sparse have come, from 0 to 1 of the time."""
    left = 1 - min(max(progress, 0.0), 1.0)
    for module in model.modules():
        if isinstance(module, WeightFakeQuantize) and module.sparsity is not None:
            module.pruning_progress = 1 - left**3


@dataclass
class QATSchedule:
    """When the phases of quantization-aware training begin, in optimizer steps. Call `step(model)` once per step.

    Attributes:
        enable_observer: From here activation ranges are updated.
        enable_fake_quant: From here values are quantized.
        disable_observer: From here activation ranges are constant.
        freeze_bn: From here batch norm statistics are constant.
        steps: Number of steps done.
        prune_from, prune_until: Between these steps sparse weights lose their share s, most of it early:
            s_t = s (1 - (1 - t)^3) (Zhu and Gupta 2017). If not given, they lose it at once.
    """

    enable_observer: int = 0
    enable_fake_quant: int = 0
    disable_observer: int | None = None
    freeze_bn: int | None = None
    steps: int = 0
    prune_from: int = 0
    prune_until: int | None = None

    def __post_init__(self) -> None:
        marks = (self.enable_observer, self.enable_fake_quant, self.disable_observer, self.freeze_bn, self.prune_from)
        if self.prune_until is not None and self.prune_until <= self.prune_from:
            raise ConfigError(f"pruning ends at step {self.prune_until}, it begins at {self.prune_from}")
        if any(mark is not None and mark < 0 for mark in marks):
            raise ConfigError(f"a schedule counts steps from 0: {self}")
        if self.enable_fake_quant < self.enable_observer:
            raise ConfigError(
                f"fake quantization from step {self.enable_fake_quant} needs ranges, observers start at "
                f"{self.enable_observer}"
            )
        if self.disable_observer is not None and self.disable_observer <= self.enable_observer:
            raise ConfigError(f"observers end at step {self.disable_observer}, before they saw anything")

    def step(self, model: nn.Module) -> None:
        """Before the forward of each step."""
        for mark, change in self._marks(model):
            if mark == self.steps:
                change()
        if self.prune_until is not None:
            set_pruning_progress(model, (self.steps - self.prune_from) / (self.prune_until - self.prune_from))
        self.steps += 1

    def _marks(self, model: nn.Module) -> Iterator[tuple[int | None, Any]]:
        if self.steps == 0:
            disable_fake_quant(model)
            disable_observer(model)
        yield self.enable_observer, lambda: enable_observer(model)
        yield self.enable_fake_quant, lambda: enable_fake_quant(model)
        yield self.disable_observer, lambda: disable_observer(model)
        yield self.freeze_bn, lambda: freeze_bn_stats(model)

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = int(state["steps"])
