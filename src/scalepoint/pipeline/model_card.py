"""README.md of an output folder: a model card with what was quantized, what was measured, and how to run the file."""

import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from scalepoint.report import Report
from scalepoint.report.headline import describe_coverage, result_rows
from scalepoint.support.formatting import describe_runtime, shorten
from scalepoint.version import __version__

CARD = """\
# {title}, quantized for {target}

{verdict}

Made by scalepoint {version} from the float model `{model}`. Training data, intended use and license are those of the
float model; add them here. scalepoint does not overwrite this file once you have edited it.

## What was quantized

{coverage}

## Results

{results}

Accuracy of your task is in this table only if the run had a metric (`evaluate=`). Speed and size are compared with the
fastest float file, on this machine: {machine}.

## Run it

{run}

Inputs, with the sizes of the example:

{inputs}
{metadata}
## Files

{files}
"""
FILE_NOTES = {
    "float": "the float model in the same format",
    "float_plain": "the float model by torch.onnx.export alone",
    "original": "a copy of the file that was given",
    "report.html": "all results as a page",
    "report.json": "the same as data",
    "config.yaml": "all options of the run",
    "kept.yaml": "the options that make this file without a search",
    "reproduce.py": "runs the command again",
    "use.py": "runs the file with its runtime alone",
    "inputs.safetensors": "the inputs of the measurement",
    "bom.cdx.json": "bill of materials (CycloneDX): inputs, hashes, versions, metrics",
}


def build_model_card(
    report: Report,
    file: str,
    runtime: str | None,
    feeds: Mapping[str, np.ndarray],
    metadata: Mapping[str, object],
    file_names: Sequence[str],
) -> str:
    """Return the text of the model card.

    Args:
        report: The report of the run.
        file: Name of the file that the runtime reads.
        runtime: Key of the runtime; None if the target has none.
        feeds: Example inputs by name.
        metadata: What the file stores, such as labels.
        file_names: Names of all files in the folder.
    """
    environment = report.environment
    machine = ", ".join(str(environment[name]) for name in ("machine", "instructions") if name in environment)
    has_script = "use.py" in file_names
    run = f"`python use.py` runs `{file}` in {describe_runtime(runtime or '')}; the script has the packages to install."
    inputs = [(f"`{_cell(name)}`", value.dtype.name, str(tuple(value.shape))) for name, value in feeds.items()]
    stored = ", ".join(f"`{_cell(key)}`" for key in metadata)
    notes = [(name, _file_note(name, file)) for name in file_names if "/" not in name]
    return CARD.format(
        title=_cell(report.title),
        target=_cell(report.target),
        verdict=_cell(report.verdict()),
        version=__version__,
        model=_cell(report.title),
        coverage=f"{_cell(describe_coverage(report))}.",
        results=_table(("", ""), ((name, text) for name, text in result_rows(report) if name != "quantized")),
        machine=machine,
        run=run if has_script else f"`{file}` is read by the compiler or runtime of {_cell(report.target)}.",
        inputs=_table(("name", "type", "shape"), inputs),
        metadata=f"\nThe file stores as metadata: {stored}.\n" if stored else "",
        files=_table(("file", "content"), [(f"`{name}`", note) for name, note in notes if note]),
    )


def _file_note(name: str, file: str) -> str:
    stem = name.partition(".")[0]
    return "the quantized model" if name == file else FILE_NOTES.get(name, FILE_NOTES.get(stem, ""))


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *([_cell(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cell(text: str) -> str:
    """Return one line without markup. Names of layers and inputs are those of the user's model."""
    return re.sub(r"(?<!\\)([*\[<|])", r"\\\1", shorten(text, 300))
