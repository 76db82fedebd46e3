"""Write the pages that are generated from the code: `python docs/generate.py`. A test compares them with the files."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from inspect import isclass, isfunction
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from typer.main import get_command

import scalepoint
from scalepoint import _FUNCTIONS as TOP_LEVEL
from scalepoint import errors
from scalepoint.allocation import Budget
from scalepoint.checking import describe_rules
from scalepoint.cli.app import EXIT_CODES, app
from scalepoint.cli.init import TEMPLATE_FILES, TEMPLATES
from scalepoint.options import DeployConfig, get_option
from scalepoint.quantize import (
    Override,
    QuantConfig,
    SmoothQuantConfig,
    TensorQuantConfig,
)
from scalepoint.quantize.config import Config
from scalepoint.quantize.migrations import MIGRATIONS
from scalepoint.spec.spec import SchemaGenerator
from scalepoint.support.cpu import CPU_CHOICES
from scalepoint.targets import (
    Section,
    Target,
    describe,
    find_target,
    onnxruntime_target,
    openvino_target,
)
from scalepoint.targets.describe_target import format_spec
from scalepoint.tuning.steps import (
    INTERCEPT,
    LayerStep,
    PieceStep,
    StubStep,
    find_step,
    step_names,
)

DOCS = Path(__file__).parent
SOURCE = Path(scalepoint.__file__).parent
GENERATED = (
    "<!-- made by docs/generate.py: change the code it is made from, and run it -->\n\n"
)
# Pages must not depend on the CPU of this machine: they describe CPUs without VNNI, and the differences of others.
CPU_TARGETS: dict[str, Callable[..., Target]] = {
    "onnxruntime": onnxruntime_target,
    "openvino": openvino_target,
}
PLAIN_CPU = "avx2"
VERIFICATION = {
    "onnxruntime": "running the file in ONNX Runtime",
    "openvino": "running the file in OpenVINO (`pip install 'scalepoint[openvino]'`)",
    "tensorrt": "static rules over the file: `scalepoint check`",
    "executorch": "running the file in ExecuTorch (`pip install 'scalepoint[executorch]'`)",
    "litert": "running the file in LiteRT (`pip install 'scalepoint[litert]'`)",
    "coreml": "reading the file back, bit by bit, and evaluating it; on macOS by running it "
    "(`pip install 'scalepoint[coreml]'`)",
    "coreai": "reading the file back, bit by bit, and running it in Core AI's own runtime, on a CPU "
    "(`pip install 'scalepoint[coreai]'`)",
    "reference": "nothing: it is a simulation",
}
NOT_RUN = {
    "coreai": """Files were run with coreai-core 1.0.0b3 on Linux x86_64, on the CPU. Not run:

- No Apple device: neither macOS 27 nor iOS 27, no Neural Engine, no GPU. The runtime on Linux has none of
  their kernels.
- No integer kernels: it computes `quantize` and `dequantize` as float operations. Which of them a device fuses into an
  integer convolution is unknown here.
- No speed and no memory: times of this runtime say nothing about a device, so none is reported.
- No large program in float16: products in float16 take about 100 times as long as in float32. Above 10 million
  multiplications the float16 numbers are converted to float32, without rounding, before the run. An overflow of
  float16 sums is not found then.
- No program with more than 20 billion multiplications: a program of the same model for smaller inputs runs instead
  (one sample, then also about half, a quarter and an eighth of its size; images in multiples of 32 pixels, so 224
  gives 96 and 32). The codes, scales and tables of both files are compared bit by bit, and the message names the
  inputs. If the model takes inputs of one size only, nothing runs.
- No state, such as a KV cache: see below.

## What the compiler and the runtime accept

Each row was written and run with float32 tensors by `tests/formats/apple/test_coreai.py`; channels and blocks along the
first two axes. "Refused" names who refuses: scalepoint refuses all of these before any work.

| tensor | dtypes | granularities | zero points | scales |
| --- | --- | --- | --- | --- |
| weight | int8, int4, int2, uint8, uint4, uint2 | tensor, channel, blocks, tiles | zero point, float minimum | float |
| weight | float8_e4m3fn, float8_e5m2 | the same | none | float, e8m0 (MXFP8) |
| weight | float4_e2m1fn | the same | none | e8m0 (MXFP4) |
| weight, pruned | int8, uint8 | the same | none | float |
| palette | uint1, uint2, uint3, uint4, uint6, uint8 | groups of output channels | none | float entries |
| palette of vectors | the same indices | the same | none | entries for 2 or more neighbouring channels |
| palette, pruned | the same indices | the same | none | float entries, without vectors |
| activation | int8, int4, uint8, uint4 | tensor, channel | zero point, float minimum | float |
| activation | float8_e4m3fn, float8_e5m2, float4_e2m1fn | tensor, channel | none | float; e8m0 is stored as float |
| activation | int8, dynamic | a row of a linear layer's input | none | computed by the program |

| refused | by |
| --- | --- |
| weights of 1, 3, 5, 6, 7, 16 bits; fp6 | the compiler |
| fp4 weights with float scales, fp8 weights with e4m3 scales | the compiler |
| NVFP4: fp4 weights with e4m3 scales | the runtime ends its process |
| activations of 1, 2, 3, 5, 6, 7, 16 bits; in blocks | the compiler |
| activations with the scheme symmetric_with_clipping | the operation clips to the whole range of the dtype |
| dynamic activations per tensor, or with zero points | not written by scalepoint |
| integer weights with e8m0 scales | the spec, as in coreai-opt; the compiler and the runtime accept them |
| palettes of 5 bits, tables of int4 or fp4 | the compiler |
| pruned palettes of vectors | the spec |
| pruned weights of less than 8 bits | stored with their zeros: the compiler has no sparse tensors of these dtypes |

A dynamic scale is max|x| * (1 / 127.5) in the runtime and max|x| / 127.5 in the simulation. The largest value of a row
is always on the border of two codes, so a few codes differ by one.

## State and KV caches

scalepoint writes programs without state: a language model computes all positions of its example. Small programs with
a cache as state were converted by coreai-torch and run in two steps on Linux:

| update of the cache | result |
| --- | --- |
| `cache.index_copy_(2, position, k)` | runs; both steps are in the cache |
| the same with an int8 or uint8 cache and `(k / scale).round()` | runs; both steps equal PyTorch |
| `cache.copy_(torch.where(mask, k, cache))` | runs; both steps are in the cache |
| `cache[:, :, position] = k`, `cache[position] = k` | the process ends in scatter_nd: "Index 1 is out of bounds" |

The cause is in coreai-torch 0.4.3: Python's assignment removes leading axes of size 1 from `k`, and the converter of
index_put does not broadcast the values again if the indices are inputs. The program then has more values than indices.

So the runtime holds quantized caches. scalepoint does not write them: it captures a model as a function of its inputs,
and has no state that a call changes.
""",
}


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(map(_cell, line))} |\n" for line in lines)


def _cell(text: str) -> str:
    """Return a text as one line of a table, with Markdown characters escaped."""
    return (
        " ".join(str(text).split())
        .replace("|", "\\|")
        .replace("<", "&lt;")
        .replace("*", "\\*")
    )


def code(text: str) -> str:
    return f"`{text}`" if text else ""


# targets ---------------------------------------------------------------------------------------------------------


def target_of(name: str) -> Target:
    return CPU_TARGETS[name](PLAIN_CPU) if name in CPU_TARGETS else find_target(name)


TARGETS = """A target is one declaration: what its compiler fuses, where Q/DQ must be, which types it can run, and which
operations are faster in float. Only what a pattern of the target names is quantized. `scalepoint targets NAME` prints
what these pages show. A [target of your own](../guides/target.md) is one Python object.
"""


def targets_page() -> str:
    rows = []
    for name, proof in VERIFICATION.items():
        target = target_of(name)
        tensors = (
            format_spec(target.activation, "activation"),
            format_spec(target.weight, "weight"),
        )
        rows.append((f"[{name}]({name}.md)", *tensors, target.bias, proof))
    listed = table(("target", "activations", "weights", "bias", "verified by"), rows)
    end = (
        "These are the defaults; each page lists everything that its target accepts.\n"
    )
    return "\n".join((f"# Targets\n\n{GENERATED}{TARGETS}", listed, end))


def target_page(name: str) -> str:
    target = target_of(name)
    parts = [
        f"# {name}\n\n{GENERATED}{target.summary}.\n\nVerified by {VERIFICATION[name]}.\n"
    ]
    if name in NOT_RUN:
        parts.append(f"## What was not run\n\n{NOT_RUN[name]}")
    if name in CPU_TARGETS:
        parts.append(_options(name))
    parts += [
        _section(section) for section in (*describe(target), *describe_rules(name))
    ]
    return "\n".join(parts)


def _options(name: str) -> str:
    """Describe the `cpu` option of the CPU targets, and what it changes."""
    factory = CPU_TARGETS[name]
    summary = " ".join((factory.__doc__ or "").split())
    own_options, shared_options = (
        {tuple(row): None for section in describe(factory(cpu)) for row in section.rows}
        for cpu in (PLAIN_CPU, "vnni")
    )
    rest = [row[0] for row in own_options if row not in shared_options]
    changed = ", ".join(
        f'"{option_name}"'
        for option_name in dict.fromkeys(rest)
        if not option_name.startswith(("made with", "measured"))
    )
    # OpenVINO was never run on an ARM CPU.
    choices = ", ".join(
        code(cpu) for cpu in CPU_CHOICES if cpu != "arm" or name == "onnxruntime"
    )
    return (
        f"## Options\n\n`scalepoint.targets.{name}_target(cpu=...)`: one of {choices}.\n{summary}\n\n"
        f'Below is `cpu="{PLAIN_CPU}"`; `cpu="vnni"` differs in the rows {changed}.\n'
    )


LEGENDS = {
    "Patterns": """Longer patterns are tried first. `[ ]` is optional; `( )` is a condition; *another tensor* comes from
outside of the chain. Q/DQ are inserted at the operands in the last column only.""",
    "Accepts": "Other precisions are refused with an error that names the nearest supported one.",
    "Left float": "Operations that stay float although a pattern matches; the coverage has the reason.",
    "Before patterns are matched": "These rewrites are repeated until nothing changes.",
    "Static checks": """`scalepoint check model.onnx` applies these rules to an ONNX file, without the compiler. A fast
engine needs a file without findings, but such a file may still be slow.""",
}


def _section(section: Section) -> str:
    parts = [f"## {section.title}\n"]
    parts += [LEGENDS[section.title] + "\n"] if section.title in LEGENDS else []
    parts += [table(section.columns, map(_coded, section.rows))] if section.rows else []
    parts += [_cell(section.note) + "\n"] if section.note else []
    return "\n".join(parts)


def _coded(row: Sequence[str]) -> tuple[str, ...]:
    """Format the first cell as code if it is a name."""
    first, *rest = row
    return (code(first) if re.fullmatch(r"\w+", first) else first, *rest)


# the command line ------------------------------------------------------------------------------------------------


COMMANDS = """Results are printed to stdout, messages to stderr. `--json` prints one JSON document for machines. A flag
here is a keyword of the Python function and a key of the [config file](config.md).
"""


def command_line_page() -> str:
    root: Any = get_command(app)
    codes = [
        item.strip(" .").split(" ", 1)
        for item in EXIT_CODES.removeprefix("Exit codes: ").split(";")
    ]
    parts = [
        f"# Command line\n\n{GENERATED}{COMMANDS}",
        "## Exit codes\n",
        table(("code", "meaning"), codes),
    ]
    for name, command in root.commands.items():
        inner = getattr(command, "commands", None)
        for item, title in (
            [(one, f"{name} {key}") for key, one in inner.items()]
            if inner is not None
            else [(command, name)]
        ):
            parts.append(_command(item, f"scalepoint {title}"))
    return "\n".join(parts)


def _command(command: Any, title: str) -> str:
    arguments = [
        parameter
        for parameter in command.params
        if parameter.param_type_name == "argument"
    ]
    options = [
        parameter
        for parameter in command.params
        if parameter.param_type_name == "option" and parameter.name != "help"
    ]
    usage = " ".join(
        [title, *(parameter.metavar or parameter.name for parameter in arguments)]
    )
    parts = [f"## {title}\n", f"{_sentence(command.help)}\n", f"`{usage}`\n"]
    if arguments:
        parts.append(
            table(
                ("argument", "what it is"),
                [
                    (code(parameter.metavar), parameter.help or "")
                    for parameter in arguments
                ],
            )
        )
    has_config = any(parameter.name == "config" for parameter in options)
    rows = [
        (
            code(", ".join(parameter.opts)),
            parameter.help or "",
            _default(parameter, has_config),
        )
        for parameter in options
    ]
    parts.append(table(("option", "what it does", "default"), rows))
    lines = [line.strip() for line in (command.epilog or "").splitlines()]
    lines = [line for line in lines if line and line != "Examples:"]
    if lines:
        parts.append("Examples:\n\n" + "".join(f"- {code(line)}\n" for line in lines))
    return "\n".join(parts)


def _default(option: Any, has_config: bool) -> str:
    """Its own, or where a config file is read the config's."""
    value = option.default
    if value is None and has_config and option.name in DeployConfig.model_fields:
        value = DeployConfig.model_fields[option.name].default
    silent = value is None or value is False or value == () or callable(value)
    return "" if silent else code(str(value))


def _sentence(text: str | None) -> str:
    return " ".join((text or "").split())


# config and errors -----------------------------------------------------------------------------------------------


CONFIG = """`scalepoint init` writes this file; `scalepoint deploy -c scalepoint.yaml --trust` reads it, and
`scalepoint config schema` prints its JSON Schema for editors. An unknown key is an error that names the nearest
known one.
"""


def config_page() -> str:
    template = (TEMPLATES / TEMPLATE_FILES["scalepoint.yaml"]).read_text(
        encoding="utf-8"
    )
    parts = [
        f"# Config file\n\n{GENERATED}{CONFIG}",
        f'```yaml title="scalepoint.yaml"\n{template}```\n',
    ]
    models: tuple[tuple[type[Config], str], ...] = (
        (DeployConfig, "the whole file; `DeployConfig.from_file` and `to_file`"),
        (
            QuantConfig,
            "the key `quantization`, and `config=` in Python. What is absent is the target's choice",
        ),
        (
            Override,
            "one entry of `overrides`. The most specific wins: name, then glob, then type; then the later",
        ),
        (
            TensorQuantConfig,
            "the short form of a tensor's spec; a whole `QuantizationSpec` may stand in its place",
        ),
        (SmoothQuantConfig, "the key `smooth_quant`"),
        (
            Budget,
            "the key `budget`: exactly one of them; as text `size=0.2`",
        ),
    )
    for model, what in models:
        parts.append(f"## {model.__name__}\n\n{what[0].upper()}{what[1:]}.\n")
        if model is DeployConfig:
            columns = ("key", "what it is", "may be", "default")
            parts.append(table(columns, _option_rows(dict(_key_rows(model)))))
        else:
            rows = [(code(name), *cells) for name, cells in _key_rows(model)]
            parts.append(table(("key", "may be", "default"), rows))
    return "\n".join(parts)


def _option_rows(
    rows: dict[str, tuple[str, str]],
) -> Iterator[tuple[str, str, str, str]]:
    for name in DeployConfig.file_keys():
        what = get_option(DeployConfig.model_fields[name]).help
        yield (code(name), what, *rows[name])


def _key_rows(model: type[Config]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Type and default of each key, from the schema that editors use."""
    schema = model.model_json_schema(schema_generator=SchemaGenerator)
    for name, entry in schema["properties"].items():
        default = model.model_fields[name].default
        type_text = (
            "defaults"
            if isinstance(default, Config)
            else "none"
            if default is None
            else f"`{default!s}`"
        )
        types = _type(entry, schema.get("$defs", {}))
        yield name, (types, re.sub(r"`(\(\)|{})`", "empty", type_text))


def _type(entry: dict[str, Any], known: dict[str, Any]) -> str:  # a table of cases
    """A JSON Schema type in words."""
    if entry.get("title") == "QuantConfig":
        return "QuantConfig"
    if "$ref" in entry:
        name = entry["$ref"].rpartition("/")[2]
        choices = known.get(name, {}).get("enum")
        return ", ".join(map(code, choices)) if choices else name
    if "anyOf" in entry:
        words = [
            _type(option, known)
            for option in entry["anyOf"]
            if option.get("type") != "null"
        ]
        return " or ".join(dict.fromkeys(words))
    if "const" in entry:
        return code(entry["const"])
    if entry.get("type") == "array":
        return f"list of {_type(entry.get('items', {}), known)}"
    if entry.get("type") == "object" and "additionalProperties" in entry:
        values = entry["additionalProperties"]
        return f"mapping of names to {_type({} if values is True else values, known)}"
    names = {
        "object": "a tensor's config",
        "string": "text",
        "integer": "whole number",
        "boolean": "true or false",
    }
    return names.get(entry.get("type", ""), entry.get("type", "anything"))


ERRORS = """Every error says what was passed, what is allowed, where, and what to do, and ends with its code. All
classes derive from `scalepoint.errors.ScalepointError` and from the built-in class in the table. Fields of specs and
configs are checked by pydantic: its `ValidationError` is the cause of the `SpecError` or `ConfigError`.
"""
WARNINGS = """Something that works differently from what a user may expect (a batch size that the model fixes) is a
`ScalepointWarning`, which is a `UserWarning`. [Troubleshooting](../troubleshooting.md) is sorted by symptom.
"""


def errors_page() -> str:
    """The tree of the module's docstring, as a table."""
    rows = []
    for name, key, when in re.findall(
        r"(\w+Error)(?: \(\w+\))? +(SP-\w+) +(.+)", errors.__doc__ or ""
    ):
        kind = getattr(errors, name)
        builtin = next(
            base.__name__ for base in kind.__mro__ if base.__module__ == "builtins"
        )
        rows.append((key, code(name), builtin, when))
    listed = table(("code", "class", "builtin", "when"), sorted(rows))
    return "\n".join((f"# Errors\n\n{GENERATED}{ERRORS}", listed, WARNINGS))


# the API ---------------------------------------------------------------------------------------------------------

MODULES = {
    "pipeline": "the whole pipeline in one call",
    "options": "every option of deploy, and config files",
    "transformation": "a model as one graph of fused groups",
    "allocation": "a precision for every layer under a budget",
    "onnx_reader": "ONNX files as PyTorch modules",
    "tuning": "codes, scales and biases chosen by data",
    "quantize": "where quantizers go, how they get their ranges, training, saving",
    "formats": "the files that runtimes read: ONNX",
    "runtimes": "where files run, each in a process of its own",
    "verification": "the file in its runtime, and its speed",
    "checking": "the static rules of a target",
    "analysis": "where a quantized model departs, and which layers matter",
    "results": "results of analysis, allocation, tuning and a run, which a report holds",
    "report": "what was found, as data, in the terminal and as a page",
    "targets": "declarations of deployment targets",
    "tensorrt": "formats and patterns of TensorRT, ready to pass",
    "patterns": "the pattern language",
    "spec": "the tensor layer: specs, granularities, calculators, fake quantizers",
    "numerics": "the arithmetic as pure functions",
}


# Packages whose names stand in modules of theirs: name -> module.
HOMES = {
    "pipeline": {
        "deploy": "scalepoint.pipeline.deploy",
        "deploy_checkpoint": "scalepoint.pipeline.deploy_checkpoint",
        "sweep": "scalepoint.pipeline.sweep",
        "perplexity": "scalepoint.pipeline.perplexity",
        "sign": "scalepoint.pipeline.signature",
        "verify_signature": "scalepoint.pipeline.signature",
        "Deployment": "scalepoint.pipeline.result",
        "Trial": "scalepoint.pipeline.result",
    },
    "options": {
        "DeployConfig": "scalepoint.options",
        "SweepConfig": "scalepoint.options",
    },
}


API = """Everything on these pages is public; everything else may change. `import scalepoint` is fast: a module is
imported when one of its names is first used.
"""


def api_index() -> str:
    order = list(MODULES)
    rows = []
    pages = {name: module.partition(".")[0] for name, module in TOP_LEVEL.items()}
    for name, module in sorted(
        pages.items(), key=lambda pair: (order.index(pair[1]), pair[0])
    ):
        summary = _sentence(
            (getattr(scalepoint, name).__doc__ or "").strip().partition("\n\n")[0]
        )
        rows.append((f"[`{name}`]({module}.md#{anchor(module, name)})", summary))
    modules = [
        (f"[`scalepoint.{name}`]({name}.md)", what) for name, what in MODULES.items()
    ]
    parts = (
        f"# Python API\n\n{GENERATED}{API}",
        "## Names of `scalepoint`\n",
        table(("name", "what it does"), rows),
    )
    return "\n".join(
        (*parts, "## By module\n", table(("module", "what it holds"), modules))
    )


def api_page(module: str) -> str:
    """What its package only passes on is looked up through it; a function named as a file there, where it stands."""
    names = public_names(module)
    members = "".join(
        f"        - {name}\n" for name in names if not _is_file(module, name)
    )
    listed = f"\n      members:\n{members}" if members else "\n      members: []\n"
    parts = [
        f"# scalepoint.{module}\n\n{GENERATED}::: scalepoint.{module}\n    options:{listed}"
    ]
    files = [name for name in names if _is_file(module, name)]
    parts += [
        f"::: {anchor(module, name)}\n    options:\n      show_root_heading: true\n"
        for name in files
    ]
    return "\n".join(parts)


def _is_file(module: str, name: str) -> bool:
    return module in HOMES or (SOURCE / module / f"{name}.py").is_file()


def anchor(module: str, name: str) -> str:
    if module in HOMES:
        return f"{HOMES[module][name]}.{name}"
    if not _is_file(module, name):
        return f"scalepoint.{module}.{name}"
    return f"{getattr(import_module(f'scalepoint.{module}'), name).__module__}.{name}"


def public_names(module: str) -> list[str]:
    """What `__all__` says; for a module without one, what it defines."""
    if module in HOMES:
        return list(HOMES[module])
    module_object = import_module(f"scalepoint.{module}")
    if hasattr(module_object, "__all__"):
        return list(module_object.__all__)
    return [
        name
        for name, value in vars(module_object).items()
        if not name.startswith("_") and is_own(value, module_object.__name__)
    ]


def is_own(value: Any, module: str) -> bool:
    return (isclass(value) or isfunction(value)) and value.__module__ == module


def decisions_page() -> str:
    """Return the index of all decisions: number and title of each."""
    lines = []
    for path in sorted((DOCS / "decisions").glob("0*.md")):
        heading = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        number, _, title = heading.partition(". ")
        lines.append(f"| {number} | [{title}]({path.name}) |\n")
    start = (
        "# Decisions\n\n"
        + GENERATED
        + "Short records of design decisions and their reasons.\n\n| | |\n|---|---|\n"
    )
    return start + "".join(lines)


# Algorithms: what their files say ---------------------------------------------------------------------------------

OVER = {
    LayerStep: "a layer",
    StubStep: "the range of an activation",
    PieceStep: "a block",
}


def steps_page() -> str:
    """Return the page with the docstrings of all tuning steps and migrations."""
    text = (
        "# Steps and migrations, one by one\n\n"
        + GENERATED
        + "The docstring of each step and migration. [Tuning](tuning.md) and [migrations](migrations.md) show how "
        "they are used.\n\n## Steps of tuning\n\n"
    )
    for name in step_names():
        step = None if name == INTERCEPT else find_step(name)
        if step is not None and step.run.__module__.startswith("scalepoint."):
            over = (
                "the whole net"
                if getattr(step, "over", "") == "model"
                else OVER[type(step)]
            )
            text += f"### `{name}`: {over}\n\n{_explained(step.run.__module__)}\n\n"
    text += "## Migrations\n\n"
    for name, migration in MIGRATIONS.builtin.items():
        text += f"### `{name}`\n\n{_explained(migration.find.__module__)}\n\n"
    return text.rstrip() + "\n"


def _explained(module: str) -> str:
    """Return the docstring of a module, with its formulas in code blocks."""
    text, fenced, result = (import_module(module).__doc__ or "").strip(), False, []
    for line in text.split("\n"):
        is_formula = line.startswith("    ")
        if is_formula != fenced and line:
            result.append("```formula" if is_formula else "```")
            fenced = is_formula
        result.append(line.removeprefix("    ") if is_formula else line)
    return "\n".join([*result, "```"] if fenced else result).replace(
        "\n\n```\n", "\n```\n\n"
    )


# Measured ----------------------------------------------------------------------------------------------------------

COLUMNS = ("dB against float", "speed", "size")
# Tables of docs/measured/ in the summary: title, other tool, and the columns of dB, speed and size.
SUMMARIZED = {
    "deployed": ("ONNX Runtime, without VNNI", "quantize_static", COLUMNS),
    "deployed-vnni": ("ONNX Runtime, VNNI", "quantize_static", COLUMNS),
    "openvino-avx2": ("OpenVINO, without VNNI", "NNCF", COLUMNS),
    "openvino": ("OpenVINO, VNNI", "NNCF", COLUMNS),
    "xnnpack": (
        "ExecuTorch (XNNPACK), server CPU",
        "XNNPACKQuantizer",
        ("against_float", "speed", "size"),
    ),
    "litert": (
        "LiteRT (XNNPACK), server CPU",
        "ai-edge-quantizer",
        COLUMNS,
    ),
}


def measured_text() -> str:
    """All pages of docs/measured/, one after the other."""
    paths = sorted((DOCS / "measured").glob("*.md"))
    return "\n".join(path.read_text(encoding="utf-8") for path in paths)


def rows_of(text: str, name: str) -> list[dict[str, str]]:
    """The rows of a table between its markers, by column. The first column without a title is `how`."""
    part = text.partition(f"<!-- begin {name} -->")[2]
    part = part.partition(f"<!-- end {name} -->")[0]
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in part.split("\n")
        if "|" in line
    ]
    if not lines:
        return []
    columns = [column or "how" for column in lines[0]]
    return [dict(zip(columns, cells, strict=True)) for cells in lines[2:]]


def is_missed(cell: str) -> bool:
    return "**missed**" in cell


def without_mark(cell: str) -> str:
    return cell.replace("**missed**", "").strip()


def readme() -> str:
    """The README with its tables taken from docs/measured/."""
    text = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    measured = measured_text()
    task_columns = ("model", "float", "file", "score", "speed", "size")
    text = replace_table(text, "task", task_columns, task_rows(measured))
    columns = ("network", "speed, batch 1", "speed, batch 8", "dB", "size")
    return replace_table(text, "compared", columns, compared_rows(measured))


def replace_table(
    text: str, name: str, columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> str:
    """Replace the table between the markers of a name; a text without rows or markers stays."""
    begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (rows and found_begin and found_end):
        return text
    return before + begin + table(columns, rows) + end + after


def task_rows(measured: str) -> list[tuple[str, ...]]:
    """Return the task metric of trained models: the file of scalepoint and the best one of quantize_static."""
    rows: list[tuple[str, ...]] = []
    by_model: dict[str, list[dict[str, str]]] = {}
    for row in rows_of(measured, "accuracy-runtime"):
        by_model.setdefault(row["model"], []).append(row)
    for model, results in by_model.items():
        by_file = {row["how"]: row for row in results}
        static_rows = [
            row for row in results if row["how"].startswith("quantize_static")
        ]
        if "scalepoint" not in by_file or not static_rows:
            continue
        best = max(static_rows, key=lambda row: float(row["accuracy"]))
        for row in (by_file["scalepoint"], best):
            result = (row["how"], row["accuracy"], row["speed"], row["size"])
            rows.append((model, by_file["float32"]["accuracy"], *result))
    return rows


def compared_rows(measured: str) -> list[tuple[str, ...]]:
    """Return scalepoint / quantize_static for each network, from cells such as "ours / all int8 / theirs"."""
    rows = []
    for row in rows_of(measured, "placement"):
        cells = []
        for name in ("speed, batch 1", "speed, batch 8", "dB", "size"):
            values = without_mark(row[name]).split(" / ")
            mark = " (behind)" if is_missed(row[name]) else ""
            cells.append(f"{values[0]} / {values[-1]}{mark}")
        rows.append((weights_named(row["network"]), *cells))
    return rows


def weights_named(model: str) -> str:
    """The model with a remark if its weights are random. Titles of trained models end with "trained"."""
    return model if model.endswith("trained") else f"{model}, random"


Numbers = tuple[float, float, float]


def pairs(
    rows: list[dict[str, str]], other: str, columns: Sequence[str]
) -> dict[str, tuple[Numbers, Numbers]]:
    """Numbers of scalepoint and of the other tool's file nearest to float, for models that have both."""
    title = "model" if rows and "model" in rows[0] else "network"
    ours: dict[str, Numbers] = {}
    theirs: dict[str, Numbers] = {}
    for row in rows:
        model = row[title]
        decibels, speed, size = (
            float(without_mark(row[name]).rstrip("x")) for name in columns
        )
        if row["how"].startswith("scalepoint"):
            ours.setdefault(model, (decibels, speed, size))
        elif other in row["how"] and (
            model not in theirs or decibels > theirs[model][0]
        ):
            theirs[model] = (decibels, speed, size)
    return {
        model: (ours[model], numbers)
        for model, numbers in theirs.items()
        if model in ours
    }


def summary(measured: str) -> str:
    """Medians for each runtime, then the rows of trained models."""
    runtimes, trained = [], []
    for name, (title, other, columns) in SUMMARIZED.items():
        column_pairs = pairs(rows_of(measured, name), other, columns)
        medians = [
            tuple(
                median(pair[side][column_index] for pair in column_pairs.values())
                for side in (0, 1)
            )
            for column_index in range(len(COLUMNS))
        ]
        runtimes.append((title, other, str(len(column_pairs)), *format_pairs(medians)))
        for model, (ours, theirs) in column_pairs.items():
            if model.endswith("trained"):
                row = format_pairs(list(zip(ours, theirs, strict=True)))
                trained.append((title, model.removesuffix(", trained"), *row))
    columns = ("dB, scalepoint / other", "speed", "size")
    return (
        "Medians over all models *(mostly random)*:\n\n"
        + table(("runtime", "other tool", "models", *columns), runtimes)
        + "\nTrained models:\n\n"
        + table(("runtime", "model", *columns), trained)
    )


def format_pairs(number_pairs: Sequence[tuple[float, ...]]) -> list[str]:
    (decibels, speed, size) = number_pairs
    return [
        f"{decibels[0]:.1f} / {decibels[1]:.1f}",
        f"{speed[0]:.2f}x / {speed[1]:.2f}x",
        f"{size[0]:.2f}x / {size[1]:.2f}x",
    ]


def missed() -> str:
    """All rows of docs/measured/ that miss their goal: page, row, and the cells that miss."""
    rows = []
    for path in sorted((DOCS / "measured").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"<!-- begin ([\w-]+) -->", text):
            for row in rows_of(text, name):
                cells = [
                    (column, without_mark(cell))
                    for column, cell in row.items()
                    if is_missed(cell)
                ]
                if cells:
                    limit = f" (limit {row['limit']})" if row.get("limit") else ""
                    values = ", ".join(f"{column} {cell}" for column, cell in cells)
                    label = next(iter(row.values()))
                    if "how" in row:
                        label += f", {row['how']}"
                    rows.append(
                        (f"[{path.stem}](measured/{path.name})", label, values + limit)
                    )
    return table(("page", "row", "value"), rows)


def measured_page() -> str:
    """docs/measured.md with its generated tables."""
    page = (DOCS / "measured.md").read_text(encoding="utf-8")
    for name, text in {"summary": summary(measured_text()), "missed": missed()}.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        before, _, rest = page.partition(begin)
        page = before + begin + "\n" + text + end + rest.partition(end)[2]
    return page


ROWS = re.compile(
    r"(<!-- begin (?P<table>[\w-]+): (?P<names>[^>]*) -->\n).*?(<!-- end -->)",
    re.DOTALL,
)


def recipes() -> str:
    """The page of recipes with its tables taken from docs/measured/: rows that have all words of one of the names."""
    measured = measured_text()
    page = (DOCS / "guides" / "recipes.md").read_text(encoding="utf-8")

    def select_rows(marker: re.Match[str]) -> str:
        name = marker["table"]
        part = measured.partition(f"<!-- begin {name} -->\n")[2]
        head, line, *rows = part.partition(f"<!-- end {name} -->")[0].splitlines()
        names = [words.split() for words in marker["names"].split(",")]
        selected = [
            row
            for row in rows
            if any(all(word in row for word in words) for words in names)
        ]
        return "".join((marker[1], "\n".join((head, line, *selected)), "\n", marker[4]))

    return ROWS.sub(select_rows, page)


# llms.txt ----------------------------------------------------------------------------------------------------------


def llms_index() -> str:
    """Index of all pages in the order of mkdocs.yml: title and first sentence, for readers of Markdown."""
    site = yaml.safe_load((DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8"))
    lines = ["# scalepoint", "", f"> {site['site_description']}"]
    for section in site["nav"]:
        for title, entry in section.items():
            lines += ["", f"## {title}", ""]
            lines += [f"- {page_summary(path)}" for path in nav_paths(entry)]
    return "\n".join(lines) + "\n"


def nav_paths(entry: object) -> Iterator[str]:
    """Yield the paths below an entry of the nav."""
    if isinstance(entry, str):
        yield entry
    elif isinstance(entry, dict):
        for value in entry.values():
            yield from nav_paths(value)
    elif isinstance(entry, list):
        for value in entry:
            yield from nav_paths(value)


def page_summary(path: str) -> str:
    """Link to a page with the first sentence of its first paragraph."""
    text = (DOCS / path).read_text(encoding="utf-8")
    title = re.search(r"^# (.*)$", text, re.MULTILINE)
    prose = re.sub(
        r"<!--.*?-->|^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE
    )
    paragraphs = [
        " ".join(part.split())
        for part in re.split(r"\n\s*\n", prose)
        if part.strip() and part.strip()[0] not in "#|-!=:"
    ]
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", paragraphs[0]) if paragraphs else ""
    sentence = re.match(r".*?[.:](?= |$)", plain)
    link = f"[{title[1] if title else path}]({path})"
    return f"{link}: {sentence[0].rstrip(':')}" if sentence else link


def pages() -> dict[Path, str]:
    """All generated pages by their path in docs/."""
    contents = {
        Path("targets") / f"{name}.md": target_page(name) for name in VERIFICATION
    }
    contents |= {
        Path("reference/api") / f"{name}.md": api_page(name) for name in MODULES
    }
    return contents | {
        Path("reference/api/index.md"): api_index(),
        Path("targets/index.md"): targets_page(),
        Path("decisions/index.md"): decisions_page(),
        Path("algorithms/steps.md"): steps_page(),
        Path("reference/command-line.md"): command_line_page(),
        Path("reference/config.md"): config_page(),
        Path("reference/errors.md"): errors_page(),
    }


if __name__ == "__main__":
    for page_path, text in pages().items():
        (DOCS / page_path).parent.mkdir(parents=True, exist_ok=True)
        (DOCS / page_path).write_text(text, encoding="utf-8")
    (DOCS.parent / "README.md").write_text(readme(), encoding="utf-8")
    (DOCS / "guides" / "recipes.md").write_text(recipes(), encoding="utf-8")
    (DOCS / "measured.md").write_text(measured_page(), encoding="utf-8")
    (DOCS / "llms.txt").write_text(llms_index(), encoding="utf-8")
