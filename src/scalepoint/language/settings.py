"""What deploy_checkpoint was asked for, checked before any work."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scalepoint import distributed
from scalepoint.checkpoints import Source
from scalepoint.checkpoints.source import CONFIG
from scalepoint.errors import ConfigError, ScalepointError, StoreError, UsageError
from scalepoint.formats.checkpoint import CheckpointFormat
from scalepoint.formats.registry import find_checkpoint_format
from scalepoint.language.cache import with_cached
from scalepoint.numerics import QuantizationFormulation, QuantizationScheme, format_of
from scalepoint.options import Accuracy
from scalepoint.pipeline.accuracy import CLOSED_FORM, check_accuracy
from scalepoint.quantize import QuantConfig
from scalepoint.quantize.config import FLOAT, Override, TensorQuantConfig
from scalepoint.quantize.placement import check_formulations
from scalepoint.report.folder import HTML_FILE, JSON_FILE
from scalepoint.spec import (
    DefaultQParamsCalculator,
    MinMaxRangeCalculator,
    PerBlockGranularity,
    QuantizationSpec,
    StaticQParamsCalculator,
)
from scalepoint.support.output_folder import LIST, WrittenFiles, check_inputs, check_links, check_path
from scalepoint.targets import Target, find_target, list_targets
from scalepoint.tuning import TuneConfig

STEPS = tuple(step for step in CLOSED_FORM if step != "intercept")  # most layers have no bias that could take it up
PRESETS: dict[str, tuple[str, ...]] = {"fast": (), "balanced": STEPS, "best": (*STEPS, "sign_round", "clip")}
REPORTS = (JSON_FILE, HTML_FILE)
TUNING, STAGED = "tuning", "written"  # in the folder of a run: chosen codes, the folder that is being written


@dataclass(frozen=True)
class Asked:
    """All of it."""

    source: Source
    output: Path
    target: Target
    format: CheckpointFormat
    config: QuantConfig
    tuning: TuneConfig
    cache: str = ""  # how keys and values are kept; "": float

    @property
    def path(self) -> Path:
        """The file, or the folder, that the runtime reads."""
        if not self.format.suffix or self.output.suffix == self.format.suffix:
            return self.output
        return self.output / f"{self.source.folder.resolve().name}{self.format.suffix}"

    @property
    def report_folder(self) -> Path:
        """Where the report goes: next to the file, or into the folder."""
        return self.path if not self.format.suffix else self.path.parent

    @property
    def work(self) -> Path:
        return work_of(self.output)


def has_blocks(work: Path) -> bool:
    """Whether the folder of a run has finished blocks to go on from."""
    return any((work / TUNING).glob("piece-*.safetensors"))


def work_of(output: Path) -> Path:
    """Where a killed run goes on from."""
    place = output if output.name not in ("", "..") else output.resolve()
    return place.with_name(f".{place.name}.work")


def asked(
    source: str | Path,
    output: str | Path,
    target: str | Target,
    config: QuantConfig | Mapping[str, Any] | None,
    accuracy: Accuracy,
    memory: int | str | None,
    cache: str | None = None,
    texts: Mapping[str, Any] | None = None,
    *,
    may_exist: bool = False,
    resume: bool = False,
) -> Asked:
    """Everything resolved; what cannot be is refused here."""
    chosen = find_target(target)
    if not chosen.is_language:
        raise UsageError(
            f"target {chosen.name!r} takes models, not checkpoints: choose from "
            f"{', '.join(list_targets(language=True))}; or load the model and call deploy"
        )
    check_accuracy(accuracy)
    form = find_checkpoint_format(chosen.format)
    opened = Source.open(source)
    where = Path(output)
    check_path(where)
    check_inputs(where, {"checkpoint": opened.folder, **_files_of(texts or {})})
    if where.is_file() and where.suffix != (form.suffix or None):
        raise UsageError(f"{where} is a file: choose a folder as output")
    chosen = replace(chosen, weight=_fitting(chosen.weight, opened, form))
    complete = complete_config(QuantConfig.build(config), chosen, is_rounded=not PRESETS[accuracy])
    check_formulations(complete, chosen)
    activation = complete.spec_for("input", (), ())
    weight = complete.spec_for("weight", (), ())
    try:
        form.check(
            opened,
            chosen.weight if weight is None else None if isinstance(weight, str) else weight,
            None if isinstance(activation, str) else activation,
        )
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        if isinstance(error, ScalepointError):
            raise
        raise StoreError(f"{opened.folder / CONFIG} says what {form.name} cannot tell: {error}") from error
    if cache is not None:
        chosen, complete = with_cached(chosen, complete, cache)
    steps = PRESETS[accuracy]
    try:
        tuning = TuneConfig(steps=steps, **({} if memory is None else {"memory": memory}))
    except ValueError:
        raise UsageError(f'memory={memory!r}: a number of bytes from 1,000,000 on, or text as "2GB"') from None
    job = Asked(opened, where, chosen, form, complete, tuning, cache or "")
    distributed.run_on_main("looking at the output", lambda: check_output(job, force=may_exist, resume=resume))
    return job


def _files_of(texts: Mapping[str, Any]) -> dict[str, Path]:
    """The texts that are files or folders; what else they may be is looked at when they are read."""
    return {what: Path(text) for what, text in texts.items() if isinstance(text, str | Path) and os.path.exists(text)}


def check_output(job: Asked, *, force: bool, resume: bool) -> None:
    """Refuse an output that contains something, unless force=True may overwrite files there or a run goes on."""
    check_links(job.work.parent, [job.work.name])
    check_links(job.report_folder, (LIST, *REPORTS, *([] if job.path == job.report_folder else [job.path.name])))
    is_left = has_blocks(job.work)
    if force or (resume and is_left):
        return
    if is_left:
        raise UsageError(
            f"{job.output} contains an unfinished run: continue it with resume=True, or start again with force=True"
        )
    if job.output.is_dir() and any(job.output.iterdir()):
        raise UsageError(f"{job.output} is not empty: choose another output, or overwrite files there with force=True")
    written = WrittenFiles(job.report_folder)
    others = [name for name in REPORTS if (job.report_folder / name).exists() and name not in written]
    there = [job.output.name] if job.output.is_file() else others
    if there:
        raise UsageError(
            f"{job.report_folder / there[0]} is there already: choose another output, or overwrite it with force=True"
        )


def _fitting(weight: QuantizationSpec, source: Source, form: CheckpointFormat) -> QuantizationSpec:
    """The target's own weights, in the largest blocks that the checkpoint's layers can have."""
    granularity = weight.granularity
    if not isinstance(granularity, PerBlockGranularity) or not isinstance(granularity.block_size, int):
        return weight
    size = form.blocks(source, granularity.block_size)
    return weight.replace(granularity=PerBlockGranularity(axis=granularity.axis, block_size=size))


def complete_config(config: QuantConfig, target: Target, *, is_rounded: bool) -> QuantConfig:
    """Complete the config with what language models want: float activations; and where no tuning will choose scales,
    those of the format's own rounding or better (blocks with signed scales), else those of least squared error."""
    if config.migrations:
        raise ConfigError(
            f"migrate={list(config.migrations)}: rewrites need the whole model at once; load it and call "
            "quantize for that"
        )
    said: dict[str, Any] = {} if config.activation is not None else {"activation": FLOAT}
    if is_rounded:
        weight = target.weight if config.weight is None else config.weight
        plain = weight.weight_spec() if isinstance(weight, TensorQuantConfig) else weight
        if target.has_signed_scales and isinstance(plain, QuantizationSpec) and _can_be_signed(plain):
            said["weight"] = plain.replace(qparam_calculator_cls="signed_scale")
        elif config.weight is None:
            said["weight"] = target.weight.replace(range_calculator_cls="mse")
    return config.model_copy(update=said)


def _can_be_signed(spec: QuantizationSpec) -> bool:
    """Whether these are plain integers of 4 or 5 bits in blocks, with the default range and scales."""
    is_plain = spec.range_calculator_cls is MinMaxRangeCalculator and spec.float_range == (None, None)
    is_nearest = spec.qparam_calculator_cls in (StaticQParamsCalculator, DefaultQParamsCalculator)
    is_symmetric = spec.qscheme == QuantizationScheme.SYMMETRIC and spec.qformulation == QuantizationFormulation.ZP
    is_narrow = not format_of(spec.dtype).is_float and format_of(spec.dtype).is_signed and spec.n_bits in (4, 5)
    granularity = spec.granularity
    is_blocked = isinstance(granularity, PerBlockGranularity) and not granularity.pad
    return is_plain and is_nearest and is_symmetric and is_narrow and is_blocked


def with_head(config: QuantConfig, head: str | None, target: Target, left: Sequence[str] = ()) -> QuantConfig:
    """The last layer as the target wants it, unless the config names it; and float what the format cannot hold."""
    own = [Override(name=name, weight=FLOAT) for name in left]
    if head is not None and head not in (*left, *(each.name for each in config.overrides)):
        own.append(Override(name=head, weight=FLOAT if target.head is None else target.head))
    return config.model_copy(update={"overrides": (*config.overrides, *own)})
