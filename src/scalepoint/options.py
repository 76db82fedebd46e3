"""Every option of deploy, deploy_checkpoint, sweep and the command line, declared once. Imports no torch.

    DeployOptions       keywords of scalepoint.deploy
    CheckpointOptions   keywords of scalepoint.deploy_checkpoint
    RunOptions          keywords of both that are not part of a config file
    SourceOptions       where model, data and metric of a command come from
    DeployConfig        all but RunOptions: the keys of a config file
    SweepConfig         a DeployConfig with a grid

Each field has its type, default, help, group and the pipeline stages whose result depends on it. Command line flags
(`cli/flags.py`), YAML keys, the JSON schema, config.yaml, the reproduction call and the cache keys of stages are made
from these declarations. Tests compare them with the signatures of the public functions, which pass them on by name.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, core_schema

from scalepoint.budget import Budget
from scalepoint.errors import ConfigError, DocumentError, UsageError, did_you_mean
from scalepoint.support.documents import DocumentPositions, dump_yaml, parse_json, parse_yaml
from scalepoint.support.files import replace_text
from scalepoint.support.untrusted import read_text
from scalepoint.support.validation_errors import Config, describe_errors_in_file, find_validation_error, list_problems

Accuracy = Literal["fast", "balanced", "best"]
Placement = Literal["measured", "predicted", "int8"]
DEFAULT_CHOICES = ("int4", "int8", "float")
# Headings of `--help`.
LIMITS_GROUP = "Accuracy and limits"
LANGUAGE_GROUP = "Language models"
DATA_GROUP = "Data"
FILE_GROUP = "Model and file"
RUN_GROUP = "How it is run"
StageName = Literal["quantize", "export", "export float", "verify"]
Subject = Literal["onnx files", "images", "library models"]
OptionsT = TypeVar("OptionsT", bound=Config)


@dataclass(frozen=True)
class Option:
    """Metadata of an option, in addition to type and default.

    Attributes:
        help: One or two sentences, for the command line and the reference.
        group: Heading under which `--help` lists the option; "" lists it first.
        stages: Pipeline stages whose result depends on the option: its value is part of their cache keys.
        flags: Names on the command line. Default: `--` and the name of the field.
        metavar: Placeholder in `--help`, if the type does not say enough.
        is_repeated: Whether the flag may be given several times.
        only_for: What the option is for; "" for every model and data of `deploy`.
    """

    help: str
    group: str = ""
    stages: tuple[StageName, ...] = ()
    flags: tuple[str, ...] = ()
    metavar: str | None = None
    is_repeated: bool = False
    only_for: Subject | Literal[""] = ""


def get_option(field: FieldInfo) -> Option:
    """Return the Option in the annotation of a field."""
    return next(item for item in field.metadata if isinstance(item, Option))


def options_for(subject: Subject) -> list[str]:
    """Return the names of the options that are only for one kind of model or data."""
    return [name for name, field in DeployConfig.model_fields.items() if get_option(field).only_for == subject]


def stage_values(options: BaseModel, stage: StageName) -> dict[str, Any]:
    """Return the options that the result of a stage depends on, by name."""
    fields = type(options).model_fields
    return {name: getattr(options, name) for name, field in fields.items() if stage in get_option(field).stages}


def changed_values(options: BaseModel) -> dict[str, Any]:
    """Return the options that differ from their defaults, by name, in the order of their declaration."""
    fields = type(options).model_fields
    return {name: value for name, field in fields.items() if (value := getattr(options, name)) != field.get_default()}


class QuantizationField:
    """The type of `quantization`: a QuantConfig. Its module loads torch, so it is imported only to validate a value."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> CoreSchema:
        serialization = core_schema.plain_serializer_function_ser_schema(lambda config: config.to_dict())
        return core_schema.no_info_plain_validator_function(_build_quantization, serialization=serialization)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: Any) -> Any:
        from scalepoint.quantize.config import QuantConfig  # noqa: PLC0415  # loads torch

        return handler.resolve_ref_schema(handler(QuantConfig.__pydantic_core_schema__))


def _build_quantization(value: Any) -> Any:
    from scalepoint.quantize.config import QuantConfig  # noqa: PLC0415  # loads torch

    return QuantConfig.model_validate({} if value is None else value)


def _check_choices(value: tuple[str, ...]) -> tuple[str, ...]:
    if value != DEFAULT_CHOICES:
        from scalepoint.allocation import check_choices  # noqa: PLC0415  # loads torch

        check_choices(value)
    return value


def _parse_axes(value: Any) -> Any:
    from scalepoint.graph.dynamic_axes import parse_axes  # noqa: PLC0415  # loads torch

    try:
        return parse_axes(value) or None
    except UsageError as error:
        raise ValueError(error.args[0].removeprefix("dynamic_axes").lstrip(": ")) from error


def _parse_shapes(value: Any) -> Any:
    """Convert flags such as x=1,3,224,224 to shapes by name. A shape without a name has its number as the name."""
    if not isinstance(value, list | tuple):
        return {str(name): tuple(shape) for name, shape in value.items()} if isinstance(value, Mapping) else value
    shapes = {}
    for number, text in enumerate(value):
        name, _, sizes = str(text).rpartition("=")
        try:
            shapes[name or str(number)] = tuple(int(size) for size in sizes.replace("x", ",").split(","))
        except ValueError as error:
            raise ValueError(
                f"a shape must be whole numbers separated by commas, such as x=1,3,224,224: {error}"
            ) from error
    return shapes or None


def _parse_fixed_inputs(value: Any) -> Any:
    """Convert flags such as rate=16000 to numbers by name."""
    if not isinstance(value, list | tuple):
        return value
    pairs = [str(text).rpartition("=") for text in value]
    if not all(name for name, _, _ in pairs):
        raise ValueError("a fixed input must be written as name=number, such as rate=16000")
    return {name: _parse_number(number) for name, _, number in pairs} or None


def _parse_number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        return float(text)


Count = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]  # what torch.manual_seed takes
Choices = Annotated[tuple[str, ...], AfterValidator(_check_choices)]
InputShapes = Annotated[dict[str, tuple[Count, ...]] | None, BeforeValidator(_parse_shapes)]
FixedInputs = Annotated[dict[str, Any] | None, BeforeValidator(_parse_fixed_inputs)]
FreeAxes = Annotated[dict[str, dict[int, str]] | None, BeforeValidator(_parse_axes)]
OptionalBudget = Annotated[Budget | None, BeforeValidator(lambda value: None if value is None else Budget.build(value))]


class CommonOptions(Config):
    """Options of both deploy and deploy_checkpoint."""

    target: Annotated[
        str, Option("Where the file will run; `scalepoint targets` lists the names.", flags=("--target", "-t"))
    ] = "onnxruntime"
    output: Annotated[
        str,
        Option("The folder to write; it must be empty or new unless you resume or force.", flags=("--output", "-o")),
    ] = "out"
    accuracy: Annotated[
        Accuracy | None,
        Option(
            "How much work goes into accuracy. fast: corrected biases; balanced: also codes and scales chosen in "
            "closed form; best: also gradient steps. balanced below 8 bits if not given.",
            LIMITS_GROUP,
            ("quantize",),
        ),
    ] = None
    allow_departure: Annotated[bool, Option("Accept a file that does not match the simulation.", LIMITS_GROUP)] = False
    quantization: Annotated[
        Any,
        QuantizationField,
        Option("Data types and granularity, globally and per layer; the target's defaults if empty."),
    ] = Field(default=None, validate_default=True)


class DeployOptions(CommonOptions):
    """Keywords of `deploy` that are data, not Python objects."""

    max_drop: Annotated[
        Annotated[float, Field(ge=0)] | None,
        Option(
            "Largest allowed drop of the metric. Layers get more precision until a file is within the limit.",
            LIMITS_GROUP,
        ),
    ] = None
    min_speed: Annotated[
        Annotated[float, Field(gt=0)] | None,
        Option(
            "Smallest allowed speed relative to the float file. Layers that are slower in int8 are left in float.",
            LIMITS_GROUP,
        ),
    ] = None
    max_trials: Annotated[
        Count, Option("Largest number of files made for max_drop or min_speed; 6 if not given.", LIMITS_GROUP)
    ] = 6
    budget: Annotated[
        OptionalBudget,
        Option(
            "What the file may cost: size=0.2 of the float file, bits=4.5 per weight, or speed=1.8 times the float "
            "model by multiply-accumulates. Each layer gets one of the choices so that the output error is smallest.",
            LIMITS_GROUP,
        ),
    ] = None
    choices: Annotated[
        Choices, Option("Weight formats that the budget may use; int4,int8,float if not given.", LIMITS_GROUP)
    ] = DEFAULT_CHOICES
    max_batches: Annotated[
        Count | None, Option("Use at most this many batches of the calibration data.", DATA_GROUP, ("quantize",))
    ] = None
    on_nan: Annotated[
        Literal["error", "skip"],
        Option(
            "What to do with a batch that contains NaN or infinity: error, or skip to leave it out.",
            DATA_GROUP,
            ("quantize",),
        ),
    ] = "error"
    leave: Annotated[
        tuple[str, ...],
        Option(
            "A submodule that is not captured: the graph calls it as it is, and it stays float. May be repeated.",
            LIMITS_GROUP,
            ("quantize", "export float"),
            is_repeated=True,
        ),
    ] = ()
    dynamic_axes: Annotated[
        FreeAxes,
        Option(
            "Input axes whose size may change, such as x:2=height,3=width or x:2,3. May be repeated.",
            FILE_GROUP,
            ("quantize", "export float"),
            metavar="<axes>",
            is_repeated=True,
        ),
    ] = None
    fixed_sizes: Annotated[
        bool,
        Option(
            "Fix all sizes of the file to those of the example. Otherwise the batch can change at run time, which "
            "makes small networks a little slower.",
            FILE_GROUP,
            ("quantize", "export", "export float"),
        ),
    ] = False
    strict: Annotated[
        bool,
        Option(
            "Fail if a layer with weights stays float although the config did not ask for it.",
            LIMITS_GROUP,
            ("quantize",),
        ),
    ] = False
    shape: Annotated[
        InputShapes,
        Option(
            "Shape of an input, such as x=1,3,224,224; without a name for models with one input. deploy takes it for "
            ".onnx files, whose own shapes are the default. May be repeated.",
            FILE_GROUP,
            metavar="<sizes>",
            is_repeated=True,
            only_for="onnx files",
        ),
    ] = None
    fixed_inputs: Annotated[
        FixedInputs,
        Option(
            "An .onnx file: the value of an input that becomes a constant, such as rate=16000. May be repeated.",
            FILE_GROUP,
            metavar="<value>",
            is_repeated=True,
            only_for="onnx files",
        ),
    ] = None
    requantize: Annotated[
        bool,
        Option(
            "An .onnx file that is already quantized: read its weights back as real numbers and quantize them again.",
            FILE_GROUP,
            only_for="onnx files",
        ),
    ] = False
    float_dtype: Annotated[
        Literal["float32", "float16", "bfloat16"] | None,
        Option(
            "Data type of tensors that are not quantized, for TensorRT: float32, float16 or bfloat16.",
            LIMITS_GROUP,
            ("export", "export float"),
        ),
    ] = None
    cpu: Annotated[
        Literal["auto", "vnni", "avx2", "arm"],
        Option(
            "The CPU that files of onnxruntime and openvino are for. vnni uses all 8 bits of the weights; avx2 is also "
            "exact without VNNI; arm is for ARM CPUs (onnxruntime); auto checks this machine.",
            FILE_GROUP,
        ),
    ] = "auto"
    placement: Annotated[
        Placement | None,
        Option(
            "How layers are chosen that stay float because int8 is slower. measured (default): the runtime times them "
            "on this machine, which takes up to 3 files; times are kept for the next run. predicted: by times of other "
            "CPUs that scalepoint ships; the same on every machine. int8: every layer that the target can run in int8 "
            "is int8.",
            LIMITS_GROUP,
        ),
    ] = None
    metadata: Annotated[
        dict[Any, Any] | str | None,
        Option(
            "Further data to store in the file, by key: labels, preprocessing, author. On the command line a "
            ".yaml or .json file.",
            FILE_GROUP,
        ),
    ] = None
    threads: Annotated[
        Count, Option("Threads of the runtime when the file is verified and timed.", RUN_GROUP, ("verify",))
    ] = 1
    seed: Annotated[
        Seed,
        Option(
            "Seed of all random numbers, on the command line also of the model's and the data's; 0 if not given.",
            RUN_GROUP,
            ("quantize",),
        ),
    ] = 0


class CheckpointOptions(CommonOptions):
    """Keywords of `deploy_checkpoint` that are data, not Python objects."""

    judge: Annotated[
        str | None, Option("Text that perplexity is measured on; the end of the data if not given.", LANGUAGE_GROUP)
    ] = None
    memory: Annotated[
        int | str | None,
        Option("Memory for activations between blocks, such as 2GB; the rest goes to disk.", LANGUAGE_GROUP),
    ] = None
    length: Annotated[Annotated[int, Field(ge=2)], Option("Tokens per sequence; 512 if not given.", LANGUAGE_GROUP)] = (
        512
    )
    samples: Annotated[Count, Option("Sequences that calibrate; 16 if not given.", LANGUAGE_GROUP)] = 16
    cache: Annotated[
        str | None,
        Option(
            "Data type of the keys and values of earlier tokens: int8, int4 or fp8; float if not given.", LANGUAGE_GROUP
        ),
    ] = None


class RunOptions(Config):
    """How a run treats its output folder, and whether it is only tried out; not part of a config file."""

    smoke: Annotated[
        bool,
        Option("A quick run to find errors: two batches, one trial, no timing. The numbers mean nothing.", RUN_GROUP),
    ] = False
    resume: Annotated[
        bool,
        Option("Continue an interrupted run; finished stages are reused if their inputs did not change.", RUN_GROUP),
    ] = False
    force: Annotated[
        bool, Option("Overwrite files of an earlier run. Other files are kept.", RUN_GROUP, flags=("--force", "-f"))
    ] = False


class SourceOptions(Config):
    """Where the model, the data and the metric of a command come from, by name."""

    model: Annotated[
        str | None,
        Option(
            "A model, or a class or function without arguments that creates it; it may return (model, example_inputs). "
            "Or an .onnx file. Or timm:NAME or hf:FOLDER, without download. Or the folder of a language model's "
            "checkpoint.",
            metavar="package.module:name",
        ),
    ] = None
    data: Annotated[
        str | None,
        Option(
            "Data: a .npz, .npy or .safetensors file (samples along the first axis), a folder of arrays, one batch "
            "each; a folder of images with --size, --mean and --std; package.module:function that returns batches; "
            "random for an .onnx file: its accuracy then means nothing. For language models a text file, a .jsonl "
            "file, or a folder of such files.",
            flags=("--data", "-d"),
        ),
    ] = None
    evaluate: Annotated[
        str | None, Option("package.module:function(run) -> float, your metric; higher is better.", LIMITS_GROUP)
    ] = None
    batch_size: Annotated[Count, Option("Samples per batch, for files and images; 8 if not given.", DATA_GROUP)] = 8
    size: Annotated[
        Count | None,
        Option(
            "Images: the shorter side is scaled to this length, then the central square is used.",
            DATA_GROUP,
            only_for="images",
        ),
    ] = None
    mean: Annotated[
        tuple[float, ...] | None,
        Option("Images: mean of each channel of values in 0..1, such as 0.5,0.5,0.5.", DATA_GROUP, only_for="images"),
    ] = None
    std: Annotated[
        tuple[float, ...] | None,
        Option("Images: standard deviation of each channel, such as 0.25,0.25,0.25.", DATA_GROUP, only_for="images"),
    ] = None
    weights: Annotated[
        str | None,
        Option("A state_dict for the model: a .safetensors file, or a .pt file that holds only tensors.", FILE_GROUP),
    ] = None
    random: Annotated[
        bool, Option("timm: and hf: models with random weights.", FILE_GROUP, only_for="library models")
    ] = False
    root: Annotated[
        str | None,
        Option(
            "Folder that is searched first for modules and files; the config file's folder if not given.", FILE_GROUP
        ),
    ] = None


@dataclass(frozen=True)
class Command:
    """The command line that started a run, from which the run can be repeated.

    Attributes:
        sources: The names of model, data and metric. `root` is an absolute path.
        trust: Whether the command had --trust.
    """

    sources: SourceOptions
    trust: bool = False


class DeployConfig(DeployOptions, CheckpointOptions, SourceOptions):
    """A config file: the options of a run, and where its model and data come from."""

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Read a config file.

        Args:
            path: A .json file, or YAML with any other suffix.

        Raises:
            DocumentError: The file cannot be read.
            ConfigError: A key or value is invalid. The message has the line and column.
        """
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
            raise DocumentError(f"{path}: a config must be a mapping of keys, got {type(data).__name__}")
        try:
            return cls.model_validate(data)
        except ConfigError as error:
            if (cause := find_validation_error(error)) is None:
                raise
            raise ConfigError(describe_errors_in_file(cause, data, str(path), DocumentPositions(text))) from cause

    def updated(self, values: Mapping[str, Any]) -> Self:
        """Return a copy with other values. The values are validated."""
        return type(self).model_validate({**dict(self), **values})

    def part(self, options: type[OptionsT]) -> OptionsT:
        """Return the options that another class declares, as an instance of that class."""
        return options.model_validate({name: getattr(self, name) for name in options.model_fields})

    def to_file(self, path: str | Path) -> None:
        """Write all options, including defaults.

        Args:
            path: A .json file, or YAML with any other suffix.
        """
        path = Path(path)
        fields = self.to_dict()
        # Not model_dump_json: it fails on unpaired surrogates, which file names may contain.
        replace_text(path, json.dumps(fields, indent=2) if path.suffix == ".json" else dump_yaml(fields))

    def to_dict(self, *groups: type[Config]) -> dict[str, Any]:
        """Return plain values by key, in the order of a config file; only keys of `groups` if there are any."""
        dumped = self.model_dump(mode="json")
        keys = {name for group in groups or (type(self),) for name in group.model_fields}
        return {name: dumped[name] for name in self.file_keys() if name in keys}

    @classmethod
    def file_keys(cls) -> list[str]:
        """Return all keys in the order of a config file: model and data first, the long `quantization` last."""
        names = [*SourceOptions.model_fields, *cls.model_fields]
        return list(dict.fromkeys([*(name for name in names if name != "quantization"), "quantization"]))

    @classmethod
    def model_json_schema(cls, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the JSON Schema, with which editors complete config files."""
        from scalepoint.spec.spec import SchemaGenerator  # noqa: PLC0415  # loads torch

        return super().model_json_schema(*args, **{"schema_generator": SchemaGenerator, **kwargs})


class SweepConfig(DeployConfig):
    """A config file of a sweep. `grid` has a list of values for some keys; each combination is one run."""

    grid: Annotated[dict[str, tuple[Any, ...]], Option("A list of values for each key.")] = {}

    def validate_grid(self) -> dict[str, list[Any]]:
        """Return the grid with every value validated and converted as in a config."""
        grid: dict[str, list[Any]] = {}
        base = DeployConfig.model_validate({key: value for key, value in dict(self).items() if key != "grid"})
        for key, values in self.grid.items():
            if key not in DeployConfig.model_fields:
                raise ConfigError(f"grid: unknown key {key!r}: {did_you_mean(key, DeployConfig.model_fields)}")
            try:
                grid[key] = [getattr(base.updated({key: value}), key) for value in values]
            except ConfigError as error:
                if (cause := find_validation_error(error)) is None:
                    raise
                message = "; ".join(complaint.message for complaint in list_problems(cause, {key: values}))
                raise ConfigError(f"grid: {key}: {message}") from error
        return grid
