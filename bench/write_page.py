"""Write the tables of docs/measured/*.md from the results in out/. docs/generate.py makes the summary from them.

The results of RAW are also stored next to the tables, in docs/measured/raw/, and read from there if out/ does not have
them.
"""

import json
import math
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from onnx_files import ANSWERS, NNCF, OURS, OURS_VNNI, QUANTIZE_STATIC
from placement import TINY

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "measured"
RAW_FOLDER = PAGES / "raw"
RAW = ("placement", "first_file", "timing", "palettes")


def table(path: Path) -> str:
    rows = json.loads(path.read_text())
    lines = ["| row | ratio | limit | against |", "|---|---|---|---|"]
    for row in rows:
        ratio = f"{row['ratio']:.2f}" + ("" if row["holds"] else " **missed**")
        lines.append(f"| {row['name']} | {ratio} | {row['limit']:.2f} | {row['against']} |")
    return "\n".join(lines)


def plain_table(path: Path) -> str:
    """Rows of any keys, one column each."""
    rows = json.loads(path.read_text())
    if isinstance(rows, dict):
        rows = [{"tool": name, **(row if isinstance(row, dict) else {"note": row})} for name, row in rows.items()]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = (row.get(column) for column in columns)
        texts = ("" if cell is None else f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in cells)
        lines.append("| " + " | ".join(texts) + " |")
    return "\n".join(lines)


Rows = list[list[str]]


def load_table(path: Path) -> str:
    """What is held after little and after much."""
    rows = [table_row for part in json.loads(path.read_text()).values() for table_row in part]
    cells = [[row["what"], row["before"], marked(row["after"], row["holds"])] for row in rows]
    return markdown(["", "before", "after"], cells)


LEAST_SPEED = 0.95  # of the runtime's own tool
LEAST_AGREEMENT = {"onnxruntime": 35.0, "openvino": 30.0}
LEAST_EQUAL = 0.999
EXACT = 200.0  # dB, beyond what float32 tells apart
LONGEST = 240  # of a reason


def markdown(columns: list[str], rows: Rows) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def narrow_table(path: Path) -> str:
    """Files with narrow weights; no dB to the simulation is an exact agreement."""
    rows: Rows = []
    for row in json.loads(path.read_text()):
        agreed = "" if row["how"] == "float" else "exactly" if row["simulation"] is None else f"{row['simulation']:.2f}"
        numbers = [f"{row['score']:.2f}", row["int8"], agreed, f"{row['speed']:.2f}", f"{row['size']:.2f}"]
        rows.append([row["network"], row["how"], *numbers])
    return markdown(["network", "how", "score", "int8", "simulation", "speed", "size"], rows)


def marked(text: str, holds: bool) -> str:
    return text if holds else f"{text} **missed**"


def files_table(path: Path, runtime: str, other_ways: str) -> str:
    """Our file of each network, and the one of the tool that its users would reach for."""
    rows: Rows = []
    for network in json.loads(path.read_text()).values():
        files = {row["how"]: row for row in network.get(runtime, [])}
        least = 0.0 if network["is_transformer"] else LEAST_AGREEMENT[runtime]
        for how in (OURS, OURS_VNNI, other_ways):
            if how in files:
                rows.append([network["title"], how, *file_cells(files[how], least, files.get(other_ways))])
    return markdown(["model", "", "int8", "dB against float", "dB to the simulation", "speed", "size"], rows)


def file_cells(row: dict[str, Any], least: float, other: dict[str, Any] | None) -> list[str]:
    int8, error, agreement, speed = row["int8"], f"{row['against_float']:.1f}", "", f"{row['speed']:.2f}x"
    if row["agreement"] is not None:  # ours
        low, _, all_of_them = int8.partition(" of ")
        left = row.get("left", 0)
        int8 = marked(f"{int8}, {left} float for speed" if left else int8, int(low) + left >= int(all_of_them))
        agreement = marked(f"{row['agreement']:.1f}", row["agreement"] >= least)
        if other is not None:
            speed = marked(speed, row["speed"] >= LEAST_SPEED * other["speed"])
            error = marked(error, row["against_float"] >= other["against_float"])
    return [int8, error, agreement, speed, f"{row['size']:.2f}x"]


def saturation_table(path: Path) -> str:
    """Four answers to u8 x s8 products that are added in pairs of 16 bits."""
    rows, answers = [], [*ANSWERS, OURS]
    for network in json.loads(path.read_text()).values():
        files = {row["how"]: row for row in network.get("onnxruntime", [])}
        if not all(how in files for how in answers):
            continue
        cells = (f"{files[how]['against_float']:.1f} dB, {files[how]['speed']:.2f}x" for how in answers)
        rows.append([network["title"], *cells])
    return markdown(["model", *answers], rows)


def layers_table(path: Path) -> str:
    rows = []
    for network in json.loads(path.read_text()).values():
        for row in network.get("layers", []):
            equal, codes = f"{row['least_equal']:.4%}", str(row["largest_codes"])
            if row["how"] in (OURS, OURS_VNNI):
                equal = marked(equal, row["least_equal"] >= LEAST_EQUAL)
                codes = marked(codes, row["largest_codes"] <= 1)
            steps = f"{row['largest_float_steps']:.2g}"
            rows.append([network["title"], row["how"], str(row["tensors"]), row["int8"], equal, codes, steps])
    return markdown(["model", "", "tensors", "int8", "equal codes, worst", "codes apart", "float32 steps apart"], rows)


def accuracy_table(path: Path) -> str:
    results = json.loads(path.read_text())
    extra_columns = [name for name in ("speed", "size") if any(row.get(name) for row in results)]
    rows: Rows = []
    for row in results:
        limit = row["limit"]
        drop = marked(f"{row['drop']:.2f}", limit is None or row["drop"] <= limit)
        limit_text = "" if limit is None else f"{limit:.2f}"
        extra = [f"{row[name]:.2f}x" if row[name] else "" for name in extra_columns]
        rows.append([row["model"], row["how"], f"{row['accuracy']:.2f}", drop, limit_text, *extra])
    return markdown(["model", "how", "accuracy", "drop", "limit", *extra_columns], rows)


OUTCOMES = {"runs": "run", "refused": "refused before any work", "departs": "depart", "fails": "fail"}


def coverage_table(path: Path) -> str:
    """How many architectures come out how, then each of them."""
    results = list(json.loads(path.read_text()).values())
    counts = Counter(row["outcome"] for row in results)
    foreign = sum(row["foreign"] for row in results)
    summary = ", ".join(f"{counts[outcome]} {words}" for outcome, words in OUTCOMES.items())
    rows: Rows = []
    for row in results:
        share = "" if row["quantized"] is None else f"{row['quantized']:.0%}"
        agreement = "" if row["sqnr"] is None else "exactly" if row["sqnr"] > EXACT else f"{row['sqnr']:.1f}"
        where = row["outcome"] if row["outcome"] == "runs" else f"**{row['outcome']}** at {row['stage']}"
        low = "" if row["low"] is None else str(row["low"])
        rows.append([row["name"], where, share, low, agreement, reason_of(row)])
    columns = ["model", "", "MACs quantized", "operations in int8", "dB to the simulation", "why"]
    return f"Of {len(results)}: {summary}; {foreign} foreign exceptions.\n\n{markdown(columns, rows)}"


def sizes_table(path: Path) -> str:
    """How many models take other sizes in each runtime, then each of them."""
    row_by_model = {tuple(name.split()): row for name, row in json.loads(path.read_text()).items()}
    runtimes = list(dict.fromkeys(runtime for _, runtime in row_by_model))
    notes = []
    for runtime in runtimes:
        counts = Counter(row["outcome"] for (_, where), row in row_by_model.items() if where == runtime)
        notes.append(f"{runtime}: {counts['runs']} of {sum(counts.values())} run")
    rows: Rows = []
    for name in dict.fromkeys(name for name, _ in row_by_model):
        model_rows = [row_by_model.get((name, runtime)) for runtime in runtimes]
        first_row = next(row for row in model_rows if row)
        cells = ["" if row is None else _sizes_cell(row) for row in model_rows]
        free = ", ".join(_free_cell(first_row, label) for label in _labels(first_row))
        rows.append([name, free, *cells, next((reason_of(row) for row in model_rows if row and row["reason"]), "")])
    return f"{'; '.join(notes)}.\n\n{markdown(['model', 'free', *runtimes, 'why not'], rows)}"


def _labels(row: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(label for input_axes in row.get("free", {}).values() for label in input_axes.values()))


def _free_cell(row: dict[str, Any], label: str) -> str:
    step = row.get("steps", {}).get(label, 1)
    return f"{label} in steps of {step}" if step > 1 else label


def _sizes_cell(row: dict[str, Any]) -> str:
    """Return the agreement at the sizes of the example and the worst one at other sizes, for a file that runs."""
    if row["outcome"] not in ("runs", "departs"):
        return f"**{row['outcome']}**"
    first, *agreements = (
        "exactly" if level > EXACT else f"{level:.0f}" for level in (row["agreed"][0], min(row["agreed"][1:]))
    )
    return f"{'' if row['outcome'] == 'runs' else '**departs** '}{first}, {agreements[0]}"


def coverage_count(path: Path) -> str:
    """How many architectures come out how, and what does not run, with the reason."""
    lines = coverage_table(path).splitlines()
    return "\n".join([*lines[:4], *(line for line in lines[4:] if "| runs |" not in line)])


def reason_of(row: dict[str, Any]) -> str:
    """Short, without paths of a machine, as a cell of a table."""
    text = re.sub(r"/\S*/(?=[\w.]+:\d+)|/(?:[\w.-]+/)+(?=[\w-]+\.\w+)", "", row["reason"])
    text = text.replace("|", "/").replace("<", "").replace(">", "")
    return text if len(text) < LONGEST else f"{text[:LONGEST].rstrip()} ..."


def tuning_table(path: Path, models: tuple[str, ...] = ()) -> str:
    """Nearest codes and chosen ones, network by network; of all networks, or of those whose names begin so."""
    rows: Rows = []
    results = [row for row in json.loads(path.read_text()) if not models or row["model"].startswith(models)]
    for row in results:
        score, level = f"{row['score']:.2f}", row["decibels"]
        if row["precision"] == "float":
            rows.append([row["model"], "float", "", score, "", "", ""])
            continue
        cells = [row["model"], row["precision"], row["how"], f"{score} +-{row['error']:.2f}"]
        limits = row["limits"] if row["holds"] else f"{row['limits']}; **missed**: {row['missed']}"
        rows.append([*cells, "" if level is None else f"{level:.1f}", f"{row['seconds']:.0f}", limits])
    score = "perplexity" if results and results[0]["is_perplexity"] else "score"
    return markdown(["network", "", "how", score, "dB", "CPU s", "limits"], rows)


def palettes_table(path: Path) -> str:
    """Palettes by network, width and tool."""
    rows: Rows = []
    for row in json.loads(path.read_text()):
        if row["variant"] == "float":
            rows.append([row["network"], "", "float", f"{row['score']:.1f}", "", ""])
            continue
        score = marked(f"{row['score']:.1f} +-{row['error']:.1f}", row["holds"])
        numbers = [f"{row['decibels']:.1f}", f"{row['seconds']:.1f}"]
        rows.append([row["network"], str(row["bits"]), row["variant"], score, *numbers])
    return markdown(["network", "bits", "how", "score", "dB", "CPU s"], rows)


def costs_table(path: Path) -> str:
    """Seconds and memory of tools, network by network."""
    rows: Rows = []
    for row in json.loads(path.read_text()):
        numbers = [row["quantizing"], row["to a file"]]
        seconds = ["" if number is None else f"{number:.1f}" for number in numbers]
        memory = "" if row["MB"] is None else f"{row['MB']:.0f} MB"
        rows.append([row["network"], row["tool"], *seconds, memory, row.get("note") or ""])
    return markdown(["network", "tool", "quantizing, CPU s", "to a file, CPU s", "memory", ""], rows)


def small_table(path: Path) -> str:
    """Small networks: all in int8, and what wins alone."""
    rows: Rows = [
        [
            row["name"],
            f"{row['parameters']:,}",
            str(row["size"]),
            f"{row['everything']:.2f}",
            marked(f"{row['speed']:.2f}", row["holds"]),
            f"{row['smaller']:.2f}",
            f"{row['left']} of {row['layers']}",
        ]
        for row in json.loads(path.read_text())
    ]
    columns = [
        "network",
        "parameters",
        "pixels",
        "speed, all in int8",
        "speed first",
        "smaller",
        "left float for speed",
    ]
    return markdown(columns, rows)


def litert_table(path: Path) -> str:
    """Our files and the other quantizer's, network by network."""
    rows: Rows = []
    for row in json.loads(path.read_text()):
        level = row["simulation"]
        simulated = "" if level is None else "exactly" if level > EXACT else f"{level:.1f}"
        shares = [f"{row['delegated']:.0%}", f"{row['integer']:.0%}"]
        numbers = [f"{row['size']:.3f}", f"{row['speed']:.2f}", simulated, f"{row['against_float']:.1f}"]
        rows.append(
            [row["network"], row["how"], str(row["pieces"]), *shares, str(row["low"]), *numbers, f"{row['top1']:.0%}"]
        )
    columns = ["network", "how", "pieces", "XNNPACK", "integer", "low", "size", "speed", "dB to the simulation"]
    return markdown([*columns, "dB against float", "top-1"], rows)


def coreai_table(path: Path) -> str:
    """Core AI files next to those of coreai-opt; all run in Core AI's own runtime."""
    results = {(row["network"], row["way"], row["tool"]): row for row in json.loads(path.read_text())}

    def number(row: dict[str, Any], key: str) -> str:
        return f"{row[key]:,.1f}" if key in row else "failed" if "error" in row else "not run"

    rows: Rows = []
    for network, way in dict.fromkeys((network, way) for network, way, _ in results):
        ours, peer = (results.get((network, way, tool), {}) for tool in ("scalepoint", "coreai-opt"))
        is_compared = "db" in ours and "db" in peer
        holds = not is_compared or (round(ours["db"], 1) >= round(peer["db"], 1) and ours["kb"] <= peer["kb"])
        numbers = [number(row, key) for key in ("kb", "db") for row in (ours, peer)]
        rows.append([network, way, *numbers[:2], marked(numbers[2], holds), numbers[3], number(ours, "agrees")])
    columns = ["network", "form", "kB", "kB, coreai-opt", "dB", "dB, coreai-opt", "dB to the simulation"]
    return markdown(columns, rows)


def llamacpp_table(path: Path) -> str:
    """Files in llama.cpp, its own quantizer's first."""
    rows: Rows = []
    for row in json.loads(path.read_text())["rows"]:
        alike = [
            "" if row[name] is None else f"{row[name]:.1f}, {' / '.join(map(str, row[same]))}"
            for name, same in (("decibels", "same"), ("exact", "same_exact"))
        ]
        simulated = "" if row["simulated"] is None else f"{row['simulated']:.3f}"
        numbers = [f"{row['megabytes']:.0f}", f"{row['perplexity']:.3f}", simulated]
        rows.append([row["name"], *numbers, *alike, f"{row['seconds']:.0f}" if row["seconds"] else ""])
    columns = ["file", "MB", "perplexity", "simulated", "dB, tokens alike", "dB, tokens alike, exact"]
    return markdown([*columns, "CPU s"], rows)


def genai_table(path: Path) -> str:
    """Folders in ONNX Runtime GenAI, its own builder's first."""
    rows = [
        [
            row["name"], f"{row['bytes'] / 1e6:.1f}", f"{row['prefill']:.0f}", f"{row['decode']:.1f}",
            f"{row['prefill_ratio']:.2f}", f"{row['decode_ratio']:.2f}", f"{row['perplexity']:.2f}",
        ]
        for row in json.loads(path.read_text())["rows"]
    ]  # fmt: skip
    return markdown(["folder", "MB", "prefill", "decode", "ratio of prefill", "of decode", "perplexity"], rows)


def vllm_table(path: Path) -> str:
    """Folders in vLLM, against transformers with the same folder."""
    rows: Rows = []
    for row in json.loads(path.read_text()):
        reached = "" if row["in_vllm"] is None else marked(f"{row['in_vllm']:.3f}", row["holds"])
        rows.append([row["name"], f"{row['simulated']:.3f}", reached, row["alike"], row["failed"].replace("|", "/")])
    return markdown(["folder", "perplexity, transformers", "vLLM", "first words alike, of 50", ""], rows)


def trained_onnx_table(path: Path) -> str:
    """Each file of others at its own task: the float one, ours in two runtimes, and ONNX Runtime's own tools."""
    rows: Rows = []
    for name, result in json.loads(path.read_text()).items():
        files = result["files"]
        before = files["float"]
        rows.append(
            [f"{name}: {result['title']}", "float", f"{before['score']:.1f} {result['metric']}", "", "", "", ""]
        )
        for how, row in list(files.items())[1:]:
            if "refused" in row:
                rows.append([name, how, f"**no file**: {reason_of({'reason': row['refused']})}", "", "", "", ""])
                continue
            is_kept = row["score"] >= before["score"] - 2 or how.startswith("quantize")
            score = marked(f"{row['score']:.1f}", is_kept)
            macs = f"{row['macs']:.0%}" if "macs" in row else ""
            agreement = "" if "agreement" not in row else f"{row['agreement']:.0f}"
            speed = f"{row['speed']:.2f}x" if "speed" in row else ""
            rows.append([name, how, score, macs, agreement, speed, f"{row['bytes'] / before['bytes']:.2f}x"])
    return markdown(["file", "", "score", "MACs in int8", "dB to the simulation", "speed", "size"], rows)


def packages_table(path: Path) -> str:
    """Every file of the packages: how close its module is to ONNX Runtime, or why it is refused."""
    results = json.loads(path.read_text())
    compared = [row["decibels"] for row in results.values() if "decibels" in row]
    near_zero = sum("about 0" in row.get("outcome", "") for row in results.values())
    summary = (
        f"{len(results)} files: {len(compared)} agree with ONNX Runtime to {min(compared):.0f} dB or more, {near_zero} "
        "are read but give outputs of about 0 on random inputs, so that nothing could be compared."
    )
    rows = [
        [name, f"{row['decibels']:.0f} dB" if "decibels" in row else "", reason_of({"reason": _why_not_compared(row)})]
        for name, row in results.items()
    ]
    return f"{summary}\n\n{markdown(['file', 'agreement', ''], rows)}"


def _why_not_compared(row: dict[str, Any]) -> str:
    text = row.get("refused") or row.get("foreign") or row["outcome"]
    return "" if text == "read" else text


def round_trip_table(path: Path) -> str:
    """Layers in int8 and dB against float of an architecture, from PyTorch and from each exporter's file."""
    results = json.loads(path.read_text())
    lost = 0
    rows: Rows = []
    for name, by_exporter in results.items():
        reference = by_exporter["PyTorch"]
        cells = []
        for row in by_exporter.values():
            if "layers" not in row:
                cells.append("not exported" if "not exported" in row else "**refused**")
                lost += "not exported" not in row
                continue
            holds = row["layers"] >= reference["layers"] and row["macs"] >= reference["macs"] - 0.001
            holds &= row["decibels"] >= reference["decibels"] - 0.5
            lost += not holds
            cells.append(marked(f"{row['layers']}, {row['macs']:.0%}, {row['decibels']:.1f} dB", holds))
        rows.append([name, *cells, *[""] * (4 - len(cells))])
    files = sum(len(row) for row in results.values()) - len(results)
    summary = f"{len(results)} architectures, {files} files, of which {lost} lose layers, MACs or more than 0.5 dB."
    columns = ["architecture", "PyTorch", "TorchScript file", "dynamo file", "scalepoint's float file"]
    return f"{summary}\n\n{markdown(columns, rows)}"


def node_tests_table(path: Path) -> str:
    """The node tests of the onnx package by operator, and why some are refused."""
    results = json.loads(path.read_text())
    totals = {kind: sum(row[kind] for row in results.values()) for kind in ("right", "refused", "wrong", "foreign")}
    summary = ", ".join(f"{count:,} {kind}" for kind, count in totals.items())
    rows = [
        [name, str(row["right"]), str(row["refused"] or ""), reason_of({"reason": "; ".join(row["reasons"])})]
        for name, row in results.items()
    ]
    return f"{sum(totals.values()):,} tests: {summary}.\n\n{markdown(['operator', 'right', 'refused', 'why'], rows)}"


SPEED_GOAL = 0.99  # of the other tool, or of the float file
LEAST_DECIBELS = -0.1  # against the file with all layers in int8: less is noise of the calibration
WAYS = ("measured", "measured again", "int8", "predicted")


def placement_results(path: Path, runtime: str, *, is_tiny: bool = False, tables: bool = False) -> list[dict[str, Any]]:
    """The results of one part of bench/placement.py; each has its rows by file."""
    results = []
    for key, result in json.loads(path.read_text()).items():
        is_part = result["runtime"] == runtime and bool(result["tables"]) == tables
        if is_part and (tables or (key.rpartition("/")[2] in TINY) == is_tiny):
            results.append({**result, "files": {row["file"]: row for row in result["rows"]}})
    return results


def conditions(results: list[dict[str, Any]]) -> list[str]:
    """The batch sizes and numbers of threads that were timed."""
    names = dict.fromkeys(name for result in results for row in result["rows"] for name in row)
    return [name for name in names if name.startswith("batch")]


def peers_table(path: Path, runtime: str) -> str:
    """Measured placement, all layers in int8, and the fastest and the most accurate file of the runtime's own tool."""
    results = placement_results(path, runtime)
    timed = conditions(results)
    rows: Rows = []
    for result in results:
        ours = result["files"]["measured"]
        all_int8 = result["files"].get("int8", ours)
        theirs = [row for name, row in result["files"].items() if name not in WAYS]
        cells = [result["network"]]
        for name in timed:
            fastest = max((row[name] for row in theirs if name in row), default=None)
            if name not in ours:
                cells.append("")
            else:
                other = "refused" if fastest is None else f"{fastest:.2f}"
                holds = fastest is None or ours[name] >= SPEED_GOAL * fastest
                cells.append(marked(f"{ours[name]:.2f} / {all_int8[name]:.2f} / {other}", holds))
        most = max((row["dB"] for row in theirs if "dB" in row), default=None)
        level = f"{ours['dB']:.1f} / {all_int8['dB']:.1f} / {'' if most is None else f'{most:.1f}'}"
        least = max(all_int8["dB"], -math.inf if most is None else most) + LEAST_DECIBELS
        cells.append(marked(level, ours["dB"] >= least))
        smallest = min((row["size"] for row in theirs if "size" in row), default=None)
        cells.append(f"{ours['size']:.2f} / {'' if smallest is None else f'{smallest:.2f}'}")
        rows.append([*cells, f"{ours['float for speed']}", f"{ours['files']}", result["commit"]])
    columns = ["network", *(f"speed, {name.replace(', 1 threads', '')}" for name in timed), "dB", "size"]
    return markdown([*columns, "float layers", "files", "commit"], rows)


def tiny_table(path: Path) -> str:
    """Tiny networks: no file may be slower than the float file, and the second deploy needs one file."""
    rows: Rows = []
    for result in placement_results(path, "onnxruntime", is_tiny=True):
        files = result["files"]
        name = conditions([result])[0]
        theirs = [row[name] for tool, row in files.items() if tool not in WAYS and name in row]
        # Without --again there is no second deploy.
        deploys = [files[way] for way in WAYS[:2] if way in files]
        speeds = [marked(f"{row[name]:.2f}", row[name] >= SPEED_GOAL) for row in deploys] + [""] * (2 - len(deploys))
        cells = [*speeds, f"{files.get('int8', files['measured'])[name]:.2f}", f"{max(theirs, default=0):.2f}"]
        rows.append([result["network"], *cells, ", ".join(str(row["files"]) for row in deploys)])
    return markdown(["network", "first deploy", "second deploy", "all int8", "quantize_static", "files"], rows)


def wrong_tables_table(path: Path) -> str:
    """What a shipped table of another CPU predicts, and what measuring makes of it."""
    rows: Rows = []
    for result in placement_results(path, "onnxruntime", tables=True):
        files = result["files"]
        for name in conditions([result]):
            best = max(files[way][name] for way in ("int8", "predicted") if way in files)
            speeds = [f"{files[way][name]:.2f}" if way in files else "" for way in ("predicted", "int8")]
            measured = marked(f"{files['measured'][name]:.2f}", files["measured"][name] >= SPEED_GOAL * best)
            rows.append(
                [f"{result['network']}, {name.replace(', 1 threads', '')}", result["tables"], *speeds, measured]
            )
    return markdown(["network", "table", "placed by the table", "all int8", "measured"], rows)


TABLES: dict[str, tuple[str, Callable[[Path], str]]] = {
    "bench-tensor": ("bench-tensor", table),
    "bench-graph": ("bench-graph", table),
    "bench-import": ("bench-import", table),
    "qat": ("qat", table),
    "ptq_time": ("ptq_time", costs_table),
    "export_time": ("export_time", table),
    "smoke": ("smoke", table),
    "first_file": ("first_file", plain_table),
    "timing": ("timing", plain_table),
    "load": ("load", load_table),
    "placement": ("placement", partial(peers_table, runtime="onnxruntime")),
    "placement-openvino": ("placement", partial(peers_table, runtime="openvino")),
    "placement-tiny": ("placement", tiny_table),
    "placement-tables": ("placement", wrong_tables_table),
    "calibration_time": ("calibration_time", table),
    "spellings": ("spellings", table),
    "small_cnns": ("small_cnns-vnni", small_table),
    "small_cnns-avx2": ("small_cnns-avx2", small_table),
    "small_cnns-openvino": ("small_cnns-openvino-avx2", small_table),
    "accuracy": ("accuracy", accuracy_table),
    "accuracy-runtime": ("accuracy-runtime", accuracy_table),
    "deployed": ("deployed", partial(files_table, runtime="onnxruntime", other_ways=QUANTIZE_STATIC)),
    "deployed-vnni": ("deployed-vnni", partial(files_table, runtime="onnxruntime", other_ways=QUANTIZE_STATIC)),
    "layers": ("deployed", layers_table),
    "saturation": ("deployed", saturation_table),
    "bias_correction": ("bias_correction", plain_table),
    "pair_safe": ("pair_safe", plain_table),
    "narrow": ("narrow", narrow_table),
    "openvino": ("deployed-vnni", partial(files_table, runtime="openvino", other_ways=NNCF)),
    "openvino-avx2": ("deployed", partial(files_table, runtime="openvino", other_ways=NNCF)),
    "xnnpack": ("xnnpack", plain_table),
    "litert": ("litert", litert_table),
    "core-ai": ("../docs/measured/core-ai", coreai_table),
    "weight_only": ("weight_only", plain_table),
    "tuning": ("tuning", partial(tuning_table, models=("ResNet", "CIFAR", "Efficient"))),
    "tuning-transformers": ("tuning", partial(tuning_table, models=("ViT", "MiniLM"))),
    "tuning-language": ("tuning", partial(tuning_table, models=("Llama", "SmolLM2"))),
    "tuning-peers": ("tuning-peers", tuning_table),
    "llamacpp": ("llamacpp", llamacpp_table),
    "genai": ("genai", genai_table),
    "vllm": ("vllm", vllm_table),
    "language-peers": ("language-peers", tuning_table),
    "palettes": ("palettes", palettes_table),
    "tuning-cost": ("tuning-cost", table),
    "coverage-tests": ("coverage-tests", coverage_table),
    "coverage-further": ("coverage-further", coverage_table),
    "dynamic_axes": ("dynamic_axes", sizes_table),
    "coverage-more": ("coverage-more", coverage_table),
    "coverage-openvino": ("coverage-more-openvino", coverage_count),
    "coverage-litert": ("coverage-more-litert", coverage_count),
    "onnx-trained": ("onnx_input-trained", trained_onnx_table),
    "onnx-packages": ("onnx_input-packages", packages_table),
    "onnx-round-trip": ("onnx_input-round-trip", round_trip_table),
    "onnx-large-file": ("onnx_input-large-file", table),
    "onnx-operators": ("onnx_input-operators", node_tests_table),
}


def main() -> int:
    pages = {path: path.read_text() for path in sorted(PAGES.glob("*.md"))}
    for name, (source, make) in TABLES.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        page = next((path for path, text in pages.items() if begin in text), None)
        if page is None:
            raise SystemExit(f"no page of {PAGES} has {begin}")
        path = (ROOT / "out" / f"{source}.json").resolve()  # without out/, too: some results are in docs/
        if source in RAW:
            if path.exists():
                RAW_FOLDER.mkdir(exist_ok=True)
                shutil.copyfile(path, RAW_FOLDER / path.name)
            path = RAW_FOLDER / path.name
        if not path.exists():
            print(f"{path.name} does not exist: its table is not changed")
            continue
        body = f"{begin}\n{make(path)}\n{end}"
        pattern = f"{re.escape(begin)}.*?{re.escape(end)}"
        pages[page] = re.sub(pattern, lambda _, text=body: text, pages[page], flags=re.DOTALL)
    for path, text in pages.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
