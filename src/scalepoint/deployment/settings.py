"""DeployConfig: everything deploy can be told, as a file: flag of the command line = key here = keyword of deploy."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field

from scalepoint.allocation import Budget, check_choices
from scalepoint.complaints import cause_of, complaints, told
from scalepoint.deployment.allocating import CHOICES
from scalepoint.documents import Places, dump_yaml, parse_json, parse_yaml
from scalepoint.errors import ConfigError, DocumentError, UsageError, nearest
from scalepoint.files import replace_text
from scalepoint.graph.free import axes_of
from scalepoint.processor import check_threads
from scalepoint.quantize.config import Config, QuantConfig
from scalepoint.spec.spec import SchemaGenerator
from scalepoint.untrusted import read_text


def _parts(value: Any) -> Any:
    """Values with commas between, as a flag has them, or a list."""
    return tuple(value.split(",")) if isinstance(value, str) else value


def _axes(value: Any) -> Any:
    try:
        return axes_of(value) or None
    except UsageError as error:
        raise ValueError(error.args[0].removeprefix("dynamic_axes: ")) from error


Count = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]  # what torch.manual_seed takes
Channels = Annotated[tuple[float, ...], BeforeValidator(_parts)]
Choices = Annotated[tuple[str, ...], BeforeValidator(_parts), AfterValidator(check_choices)]
FreeAxes = Annotated[dict[str, dict[int, str]] | None, BeforeValidator(_axes)]
Budgeted = Annotated[Budget | None, BeforeValidator(lambda value: None if value is None else Budget.build(value))]


def with_speed(config: QuantConfig, *, is_strict: bool, has_budget: bool) -> QuantConfig:
    """What deploy makes of a config that does not say `speed_first`: what int8 makes slower stays float, unless all is
    to be quantized (strict) or a budget says what every layer gets."""
    if config.speed_first is not None:
        return config
    return config.model_copy(update={"speed_first": not is_strict and not has_budget})


def check_options(given: Mapping[str, Any]) -> None:
    """What deploy was given, before any work, by the rules of a config file: it is written into one at the end."""
    try:
        DeployConfig.model_validate(given)
    except ConfigError as error:
        raise UsageError(error.args[0]) from error
    check_threads(given.get("threads", 1))


class DeployConfig(Config):
    """What to deploy, for what, and how well it must do."""

    model: str | None = None  # package.module:factory
    weights: str | None = None  # a state_dict for the model: .safetensors, or .pt that holds tensors alone
    random: bool = False  # of timm: and hf: models: random weights
    data: str | None = None
    batch_size: Count = 8  # of data from files and pictures
    size: Count | None = None  # of pictures: what the model wants
    mean: Channels | None = None
    std: Channels | None = None
    target: str = "onnxruntime"
    output: str = "out"
    root: str | None = None  # where modules and files are looked for; the folder of the config file if not said
    evaluate: str | None = None  # package.module:function
    accuracy: Literal["fast", "balanced", "best"] | None = None
    max_drop: Annotated[float, Field(ge=0)] | None = None
    min_speed: Annotated[float, Field(gt=0)] | None = None  # times the float file's, in the runtime
    max_trials: Count = 6
    budget: Budgeted = None  # size: 0.2, bits: 4.5 or speed: 1.8
    choices: Choices = CHOICES  # what a budget may give to a layer
    judge: str | None = None  # of language models: text that perplexity is measured on
    memory: int | str | None = None  # of language models: for activations, as 2GB
    length: Annotated[int, Field(ge=2)] = 512  # of language models: tokens in a sequence
    samples: Count = 16  # of language models: sequences that calibrate
    cache: str | None = None  # of language models: how keys and values are kept
    max_batches: Count | None = None
    on_nan: Literal["error", "skip"] = "error"
    leave: tuple[str, ...] = ()
    dynamic_axes: FreeAxes = None  # that may have other sizes: {x: {2: height, 3: width}}
    strict: bool = False
    allow_departure: bool = False
    float_dtype: Literal["float32", "float16", "bfloat16"] | None = None  # of what is not quantized
    cpu: Literal["auto", "vnni", "avx2"] = "auto"  # of onnxruntime and openvino: auto looks at this machine
    metadata: dict[str, Any] | str | None = None  # that the file keeps: labels, preprocessing, ...; or a file of it
    threads: Count = 1
    seed: Seed = 0  # of random numbers, on the command line also of the model's and the data's
    quantization: QuantConfig = QuantConfig()

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Read YAML or JSON, by the ending of the name."""
        path = Path(path)
        try:
            text = read_text(path)
        except OSError as error:
            raise DocumentError(f"{path} cannot be read: {error}") from error
        try:
            data = parse_json(text) if path.suffix == ".json" else parse_yaml(text)
        except DocumentError as error:
            raise DocumentError(f"{path}: {error.args[0]}") from error
        if not isinstance(data, dict):
            raise DocumentError(f"{path}: a config is a mapping of keys, not {type(data).__name__}")
        try:
            return cls.model_validate(data)
        except ConfigError as error:
            if (cause := cause_of(error)) is None:
                raise
            raise ConfigError(told(cause, data, str(path), Places(text))) from cause

    def updated(self, given: Mapping[str, Any]) -> Self:
        """The same with other values, which are checked."""
        return type(self).model_validate({**dict(self), **given})

    def to_file(self, path: str | Path) -> None:
        path = Path(path)
        fields = self.to_dict()
        as_json = json.dumps(self.model_dump(mode="json"), indent=2)  # pydantic's own fails on half a character
        replace_text(path, as_json if path.suffix == ".json" else dump_yaml(fields))

    def to_dict(self) -> dict[str, Any]:
        return {**self.model_dump(mode="json", exclude={"quantization"}), "quantization": self.quantization.to_dict()}

    @classmethod
    def model_json_schema(cls, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """JSON Schema, for editors that complete config files."""
        return super().model_json_schema(*args, **{"schema_generator": SchemaGenerator, **kwargs})


class SweepConfig(DeployConfig):
    """A config with a grid: every key of it has a list of values, and each combination of these is a run."""

    grid: dict[str, tuple[Any, ...]] = {}

    def checked_grid(self) -> dict[str, list[Any]]:
        """The values as the config has them, each checked."""
        found: dict[str, list[Any]] = {}
        plain = DeployConfig.model_validate({key: value for key, value in dict(self).items() if key != "grid"})
        for key, values in self.grid.items():
            if key not in DeployConfig.model_fields:
                raise ConfigError(f"grid: {key!r} is no key of a config: {nearest(key, DeployConfig.model_fields)}")
            try:
                found[key] = [getattr(plain.updated({key: value}), key) for value in values]
            except ConfigError as error:
                if (cause := cause_of(error)) is None:
                    raise
                said = "; ".join(each.message for each in complaints(cause, {key: values}))
                raise ConfigError(f"grid: {key}: {said}") from error
        return found
