"""Quantization-aware training: trains the weights of a quantized model with fake quantization enabled.

prepare_qat -> train -> (disable observers, freeze batch norm statistics) -> eval -> export
"""

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
    """Prepare a model for quantization-aware training: train mode, unfrozen weights, fake quantization on.

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
            module.set_bias_shift(None)  # batch statistics compensate the error that the shift corrected
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
    """Let quantizers without a range observe during training."""
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
            raise UsageError(f"{quantizer.name} has no range to start from: call calibrate before prepare_qat")
        is_dynamic = quantizer.calculator.always_called and not quantizer.is_learned
        if not is_dynamic and quantizer.spec.scale_dtype is None and not quantizer.quantizer.is_disabled():
            quantizer.learn_scale()


def enable_fake_quant(model: nn.Module) -> None:
    """Quantize and dequantize in every forward.

    Args:
        model: A calibrated model.
    """
    quantizers = _get_quantizers(model)
    stubs = [quantizer for quantizer in quantizers if isinstance(quantizer, QuantStub)]
    without_range = [
        stub.name for stub in stubs if not (stub.has_observed or stub.observes_in_training or stub.skip_reason)
    ]
    if without_range:
        raise UsageError(
            f"{len(without_range)} quantizers have no range and do not observe, such as {without_range[0]}: call "
            "calibrate first"
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
        enabled: False stops the updates.
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
    folded_norms = set()
    update_record(model, is_norm_frozen=frozen)
    for module in model.modules():
        if isinstance(module, QuantizedLayer) and module.norm is not None:
            module.freeze_norm(frozen)
            folded_norms.add(id(module.norm))
    for module in model.modules():
        is_function = isinstance(module, Operation) and module.kind == "batch_norm"
        if (isinstance(module, BatchNormBase) or is_function) and id(module) not in folded_norms:
            _freeze_single_norm(module, frozen)


def _freeze_single_norm(norm: nn.Module, frozen: bool) -> None:
    """Keep a batch norm outside of fused groups in eval mode, by a hook before every call."""
    for key, hook in list(norm._forward_pre_hooks.items()):
        if hook is _set_eval:
            del norm._forward_pre_hooks[key]
    if frozen:
        norm.register_forward_pre_hook(_set_eval)


def _set_eval(module: nn.Module, inputs: Any) -> None:
    module.training = False


def _get_quantizers(model: nn.Module) -> list[QuantizerBase]:
    quantizers = [module for module in model.modules() if isinstance(module, QuantizerBase)]
    if not quantizers:
        raise UsageError("this model has no quantizers: pass the model that insert_qdq returned, not the float model")
    return quantizers


def set_pruning_progress(model: nn.Module, progress: float) -> None:
    """Set how much of the final sparsity sparse weights have. `progress` is the elapsed share of the pruning time."""
    remaining = 1 - min(max(progress, 0.0), 1.0)
    for module in model.modules():
        if isinstance(module, WeightFakeQuantize) and module.sparsity is not None:
            module.pruning_progress = 1 - remaining**3


@dataclass
class QATSchedule:
    """Start of the phases of quantization-aware training, in optimizer steps. Call `step(model)` once per step.

    Attributes:
        enable_observer: From here activation ranges are updated.
        enable_fake_quant: From here values are quantized.
        disable_observer: From here activation ranges are constant.
        freeze_bn: From here batch norm statistics are constant.
        steps: Number of steps done.
        prune_from, prune_until: Between these steps the sparsity rises from 0 to the requested share s, fast at first:
            s_t = s (1 - (1 - t)^3) (Zhu and Gupta 2017). Without prune_until weights are pruned at once.
    """

    enable_observer: int = 0
    enable_fake_quant: int = 0
    disable_observer: int | None = None
    freeze_bn: int | None = None
    steps: int = 0
    prune_from: int = 0
    prune_until: int | None = None

    def __post_init__(self) -> None:
        starts = (self.enable_observer, self.enable_fake_quant, self.disable_observer, self.freeze_bn, self.prune_from)
        if self.prune_until is not None and self.prune_until <= self.prune_from:
            raise ConfigError(f"prune_until must be after prune_from={self.prune_from}, got {self.prune_until}")
        if any(start is not None and start < 0 for start in starts):
            raise ConfigError(f"steps of a schedule must be 0 or more, got {self}")
        if self.enable_fake_quant < self.enable_observer:
            raise ConfigError(
                f"enable_fake_quant must not be before enable_observer={self.enable_observer}, got "
                f"{self.enable_fake_quant}: fake quantization needs ranges"
            )
        if self.disable_observer is not None and self.disable_observer <= self.enable_observer:
            raise ConfigError(
                f"disable_observer must be after enable_observer={self.enable_observer}, got {self.disable_observer}"
            )

    def step(self, model: nn.Module) -> None:
        """Switch what changes at this step. Call it before the forward of each step."""
        if self.steps == 0:
            disable_fake_quant(model)
            disable_observer(model)
        changes = (
            (self.enable_observer, enable_observer),
            (self.enable_fake_quant, enable_fake_quant),
            (self.disable_observer, disable_observer),
            (self.freeze_bn, freeze_bn_stats),
        )
        for start, change in changes:
            if start == self.steps:
                change(model)
        if self.prune_until is not None:
            set_pruning_progress(model, (self.steps - self.prune_from) / (self.prune_until - self.prune_from))
        self.steps += 1

    def state_dict(self) -> dict[str, int]:
        """Return the number of training steps, to save with a checkpoint of the training."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue at the training step that state_dict recorded."""
        self.steps = int(state["steps"])
