"""The options that commands share. A flag is a keyword of the function is a key of the config file."""

from pathlib import Path
from typing import Annotated, Any, get_args

import typer

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="package.module:name",
        help="A model, or a class or function without arguments that makes it; it may return (model, example_inputs). "
        "Or timm:NAME, or hf:FOLDER, from this machine alone. Or the folder of a language model's checkpoint.",
        show_default=False,
    ),
]
Folder = Annotated[Path, typer.Argument(metavar="OUT", help="The folder that deploy wrote.")]
Config = Annotated[
    Path | None, typer.Option("--config", "-c", help="A YAML or JSON config; what is given here as a flag wins.")
]
Target = Annotated[str | None, typer.Option("--target", "-t", help="Where it will run: see `scalepoint targets`.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, for machines.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error, and all warnings.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads of the runtime.")]
Runtime = Annotated[
    str | None,
    typer.Option(
        help="The runtime, such as onnxruntime or openvino; that of the file unless given.", show_default=False
    ),
]

Data = Annotated[
    str | None,
    typer.Option(
        "--data",
        "-d",
        help="Data: a .npz or .safetensors file (samples along the first axis), a folder of pictures with --size, "
        "--mean and --std, or package.module:function that returns batches. For language models a text file, a .jsonl, "
        "or a folder of such.",
    ),
]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Samples a batch, for files and pictures; 8 if not said.")]
MaxBatches = Annotated[int | None, typer.Option(min=1, help="Use at most so many batches.")]
OnNan = Annotated[
    str | None, typer.Option(help="Batches with NaN or infinity: error, or skip to leave them out; error if not said.")
]
Size = Annotated[
    int | None, typer.Option(min=1, help="Pictures: the shorter side is made so long, then the middle square is cut.")
]
Mean = Annotated[str | None, typer.Option(help="Pictures: mean of each channel of values in 0..1, as 0.5,0.5,0.5.")]
Std = Annotated[str | None, typer.Option(help="Pictures: standard deviation of each channel, as 0.25,0.25,0.25.")]
Seed = Annotated[int | None, typer.Option(help="Of random numbers, also the model's and the data's; 0 if not said.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Also say when phases start, numbers and files.")]
Leave = Annotated[
    list[str] | None,
    typer.Option(help="A submodule that is called as it is, without looking into it; may be repeated."),
]
DynamicAxes = Annotated[
    list[str] | None,
    typer.Option(
        metavar="<axes>",
        help="Axes of an input that may have other sizes than the example's, as x:2=height,3=width or x:2,3; may be "
        "repeated.",
    ),
]

Weights = Annotated[
    str | None,
    typer.Option(help="A state_dict for the model: a .safetensors file, or a .pt file that holds tensors alone."),
]
Random = Annotated[bool | None, typer.Option("--random", help="timm: and hf: models with random weights.")]
Output = Annotated[str | None, typer.Option("--output", "-o", help="The folder to write; `out` if not said.")]
Evaluate = Annotated[
    str | None, typer.Option(help="package.module:function(run) -> float, your metric; higher is better.")
]
Accuracy = Annotated[
    str | None,
    typer.Option(
        help="fast: biases, balanced: codes and scales too are chosen by data, best: also by gradients; balanced below "
        "8 bits if not said."
    ),
]
MaxDrop = Annotated[float | None, typer.Option(min=0, help="How far the metric may fall; needs --evaluate.")]
MinSpeed = Annotated[
    float | None,
    typer.Option(help="Times the speed of the float file in the runtime: layers that lose time go to float."),
]
MaxTrials = Annotated[
    int | None, typer.Option(min=1, help="Files to try for --max-drop or --min-speed; 6 if not said.")
]
Budget = Annotated[
    str | None,
    typer.Option(
        help="size=0.2 of the float file, bits=4.5 a weight on average, or speed=1.8 by MACs: every layer gets one of "
        "--choices so that the output loses least.",
    ),
]
Choices = Annotated[
    str | None, typer.Option(help="Formats of weights that --budget may give; int4,int8,float if not said.")
]
Judge = Annotated[
    str | None,
    typer.Option(help="Language models: text that perplexity is measured on; the end of --data if not said."),
]
Memory = Annotated[
    str | None, typer.Option(help="Language models: for activations between blocks, as 2GB; what is beyond is on disk.")
]
Length = Annotated[int | None, typer.Option(min=2, help="Language models: tokens in a sequence; 512 if not said.")]
Samples = Annotated[int | None, typer.Option(min=1, help="Language models: sequences that calibrate; 16 if not said.")]
Cache = Annotated[
    str | None,
    typer.Option(help="Language models: keys and values of earlier tokens in int8, int4 or fp8; float if not said."),
]
Strict = Annotated[bool | None, typer.Option("--strict", help="A layer that stays float unasked is an error.")]
AllowDeparture = Annotated[
    bool | None, typer.Option("--allow-departure", help="Accept a file that departs from the simulation.")
]
FloatDtype = Annotated[
    str | None, typer.Option(help="Type of what is not quantized, for TensorRT: float32, float16 or bfloat16.")
]
Cpu = Annotated[
    str | None,
    typer.Option(
        help="The CPU that the file is for, of onnxruntime and openvino: vnni uses all 8 bits of the weights, avx2 is "
        "exact without VNNI too; this machine's if not said."
    ),
]
Metadata = Annotated[
    str | None,
    typer.Option(
        help="A .yaml or .json file of what the file keeps by key: labels, preprocessing, author, ...; see `inspect`."
    ),
]
Root = Annotated[
    str | None,
    typer.Option(help="Where modules and files are looked for first; the folder of the config if not said."),
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Run code that is not installed: of the folder of the config file or of the current directory.",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Capture and show the plan; write nothing.")]
Smoke = Annotated[
    bool, typer.Option("--smoke", help="All stages, fast: two batches, one trial, no float file. Does the road hold?")
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on where a run into this folder ended; what changed since is done again.")
]
Force = Annotated[bool, typer.Option("--force", "-f", help="Overwrite files that are there; no other file is deleted.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No talk on stderr, only errors.")]

# What stands together in the help; the rest stands first.
PANELS: dict[str, tuple[Any, ...]] = {
    "Accuracy and limits": (
        Evaluate, Accuracy, MaxDrop, MinSpeed, MaxTrials, Budget, Choices, Leave, Strict, AllowDeparture, FloatDtype,
    ),
    "Language models": (Judge, Memory, Length, Samples, Cache),
    "Data": (BatchSize, MaxBatches, OnNan, Size, Mean, Std),
    "Model and file": (Weights, Random, Trust, Root, DynamicAxes, Cpu, Metadata),
    "How it is run": (Threads, Seed, DryRun, Smoke, Resume, Force),
    "What is said": (Quiet, Verbose, Json, Debug),
}  # fmt: skip
for _title, _options in PANELS.items():
    for _option in _options:
        get_args(_option)[1].rich_help_panel = _title
