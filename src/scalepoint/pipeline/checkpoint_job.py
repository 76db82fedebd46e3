"""CheckpointJob: the arguments of deploy_checkpoint, checked before any work, and the config with all defaults."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scalepoint.checkpoints import Source
from scalepoint.checkpoints.source import CONFIG
from scalepoint.errors import ConfigError, ScalepointError, StoreError, UsageError
from scalepoint.formats.checkpoint import CheckpointFormat
from scalepoint.formats.registry import find_checkpoint_format
from scalepoint.numerics import QuantizationFormulation, QuantizationScheme, get_format
from scalepoint.options import CheckpointOptions
from scalepoint.pipeline.accuracy import CLOSED_FORM
from scalepoint.pipeline.kv_cache import add_cache_quantization
from scalepoint.pipeline.workspace import CheckpointWorkspace
from scalepoint.quantize import QuantConfig
from scalepoint.quantize.config import FLOAT, Override, TensorQuantConfig
from scalepoint.quantize.placement import check_formulations
from scalepoint.spec import (
    DefaultQParamsCalculator,
    MinMaxRangeCalculator,
    PerBlockGranularity,
    QuantizationSpec,
    StaticQParamsCalculator,
)
from scalepoint.targets import Target, find_target, list_targets
from scalepoint.tuning import TuneConfig

# "intercept" corrects biases, and most layers of language models have none.
BALANCED_STEPS = tuple(step for step in CLOSED_FORM if step != "intercept")
DEFAULT_ACCURACY = "balanced"
PRESETS: dict[str, tuple[str, ...]] = {
    "fast": (),
    "balanced": BALANCED_STEPS,
    "best": (*BALANCED_STEPS, "sign_round", "clip"),
}


@dataclass(frozen=True)
class CheckpointJob:
    """One checked call of deploy_checkpoint.

    Attributes:
        source: The float checkpoint.
        workspace: The output and the work folder.
        target: The target, with weights in blocks that fit the checkpoint's layers.
        format: The format of the target.
        config: The completed config.
        options: The options of the call.
        tuning: Tuning steps and the memory limit.
    """

    source: Source
    workspace: CheckpointWorkspace
    target: Target
    format: CheckpointFormat
    config: QuantConfig
    options: CheckpointOptions
    tuning: TuneConfig

    @property
    def cache(self) -> str:
        """Data type of the KV cache; "" for float."""
        return self.options.cache or ""

    @property
    def path(self) -> Path:
        """The file or folder that the runtime reads."""
        return self.workspace.path


def prepare_checkpoint_job(
    source: str | Path,
    output: str | Path,
    *,
    target: str | Target,
    config: QuantConfig | Mapping[str, Any] | None,
    texts: Mapping[str, Any] | None = None,
    resume: bool = False,
    force: bool = False,
    **values: Any,
) -> CheckpointJob:
    """Check every argument and return the job.

    Args:
        source: Folder of the float checkpoint.
        output, target, config, resume, force: See deploy_checkpoint.
        texts: Calibration and evaluation texts, by description. Those that are paths must not lie in the output folder.
        **values: The options of deploy_checkpoint that `CheckpointOptions` checks.
    """
    base_target = find_target(target)
    if not base_target.is_language:
        raise UsageError(
            f"target {base_target.name!r} takes models, not checkpoints: choose a target (--target) from "
            f"{', '.join(list_targets(language=True))}; or load the model and call deploy"
        )
    converted = {"output": str(output), "target": base_target.name, "quantization": QuantConfig.build(config)}
    try:
        options = CheckpointOptions.model_validate({**values, **converted})
    except ConfigError as error:
        raise UsageError(error.args[0]) from error
    file_format = find_checkpoint_format(base_target.format)
    checkpoint = Source.open(source)
    workspace = CheckpointWorkspace(
        Path(output), name=checkpoint.folder.resolve().name, suffix=file_format.suffix, resume=resume, force=force
    )
    workspace.check({"checkpoint": checkpoint.folder, **_existing_files(texts or {})})
    job_target = replace(base_target, weight=_fit_blocks(base_target.weight, checkpoint, file_format))
    steps = PRESETS[options.accuracy or DEFAULT_ACCURACY]
    job_config = complete_config(options.quantization, job_target, is_untuned=not steps)
    check_formulations(job_config, job_target)
    _check_format(file_format, checkpoint, job_target, job_config)
    if options.cache is not None:
        job_target, job_config = add_cache_quantization(job_target, job_config, options.cache)
    tuning = TuneConfig(steps=steps)
    if options.memory is not None:
        try:
            tuning = TuneConfig.model_validate({"steps": steps, "memory": options.memory})
        except ConfigError:  # `memory` is the only value that comes from the user
            raise UsageError(
                f'memory={options.memory!r}: must be a number of bytes, at least 1,000,000, or text such as "2GB"'
            ) from None
    return CheckpointJob(
        source=checkpoint,
        workspace=workspace,
        target=job_target,
        format=file_format,
        config=job_config,
        options=options,
        tuning=tuning,
    )


def _existing_files(texts: Mapping[str, Any]) -> dict[str, Path]:
    """Return the texts that are files or folders. Other texts are checked when they are read."""
    return {
        description: Path(text)
        for description, text in texts.items()
        if isinstance(text, str | Path) and os.path.exists(text)
    }


def _check_format(file_format: CheckpointFormat, checkpoint: Source, target: Target, config: QuantConfig) -> None:
    """Refuse weights, activations or an architecture that the format cannot store."""
    activation = config.spec_for("input", names=(), types=())
    weight = config.spec_for("weight", names=(), types=())
    if weight is None:
        weight = target.weight
    try:
        file_format.check(checkpoint, _none_if_float(weight), _none_if_float(activation))
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        if isinstance(error, ScalepointError):
            raise
        raise StoreError(
            f"{file_format.name} cannot store what {checkpoint.folder / CONFIG} describes: {error}"
        ) from error


def _none_if_float(setting: QuantizationSpec | str | None) -> QuantizationSpec | None:
    """Return the spec, or None for FLOAT, the only text that a config has instead of a spec."""
    return None if isinstance(setting, str) else setting


def _fit_blocks(weight: QuantizationSpec, source: Source, file_format: CheckpointFormat) -> QuantizationSpec:
    """Return the target's weight spec with the largest blocks that divide the checkpoint's layers."""
    granularity = weight.granularity
    if not isinstance(granularity, PerBlockGranularity) or not isinstance(granularity.block_size, int):
        return weight
    size = file_format.choose_block_size(source, granularity.block_size)
    return weight.replace(granularity=PerBlockGranularity(axis=granularity.axis, block_size=size))


def complete_config(config: QuantConfig, target: Target, *, is_untuned: bool) -> QuantConfig:
    """Fill in the defaults for language models.

    Activations stay float by default. Without tuning (`is_untuned`) nothing else improves the scales, so they get a
    better search: signed block scales if the format has them, else scales of least squared error.
    """
    if config.migrations:
        raise ConfigError(
            f"migrate={list(config.migrations)} needs the whole model in memory: load the model and call quantize"
        )
    update: dict[str, Any] = {} if config.activation is not None else {"activation": FLOAT}
    if is_untuned:
        weight = target.weight if config.weight is None else config.weight
        spec = weight.weight_spec() if isinstance(weight, TensorQuantConfig) else weight
        if target.has_signed_scales and isinstance(spec, QuantizationSpec) and _can_have_signed_scales(spec):
            update["weight"] = spec.replace(qparam_calculator_cls="signed_scale")
        elif config.weight is None:
            update["weight"] = target.weight.replace(range_calculator_cls="mse")
    return config.model_copy(update=update)


def _can_have_signed_scales(spec: QuantizationSpec) -> bool:
    """Whether the spec is symmetric integers of 4 or 5 bits in blocks, with the default range and scales."""
    number_format, granularity = get_format(spec.dtype), spec.granularity
    has_default_range = spec.range_calculator_cls is MinMaxRangeCalculator and spec.float_range == (None, None)
    has_default_scales = spec.qparam_calculator_cls in (StaticQParamsCalculator, DefaultQParamsCalculator)
    is_symmetric = spec.qscheme == QuantizationScheme.SYMMETRIC and spec.qformulation == QuantizationFormulation.ZP
    has_signed_codes = not number_format.is_float and number_format.is_signed and spec.n_bits in (4, 5)
    has_blocks = isinstance(granularity, PerBlockGranularity) and not granularity.pad
    return has_default_range and has_default_scales and is_symmetric and has_signed_codes and has_blocks


def add_layer_overrides(
    config: QuantConfig, head: str | None, target: Target, float_layers: Sequence[str]
) -> QuantConfig:
    """Add overrides: `float_layers` stay float, and the head gets the target's precision unless the config sets it."""
    overrides = [*config.overrides, *(Override(name=name, weight=FLOAT) for name in float_layers)]
    if head is not None and head not in {override.name for override in overrides}:
        overrides.append(Override(name=head, weight=FLOAT if target.head is None else target.head))
    return config.model_copy(update={"overrides": tuple(overrides)})
