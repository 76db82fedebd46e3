"""bom.cdx.json: a machine learning bill of materials in the format CycloneDX 1.6.

It lists what the file was made from (float model, calibration data, config, packages), the hash of every file of the
output folder, and the metrics.
"""

import json
import uuid
from collections.abc import Mapping
from typing import Any

import numpy as np

from scalepoint.report import Report
from scalepoint.support.formatting import to_one_line
from scalepoint.version import __version__

BOM_FORMAT, BOM_VERSION = "CycloneDX", "1.6"
MODEL, FLOAT_MODEL, DATA = "quantized-model", "float-model", "calibration-data"
NAMESPACE = uuid.UUID("6f1a6c1e-9f0b-5a53-9d4e-2b1d6f0c9a77")  # of the serial numbers


def build_bill_of_materials(
    report: Report, file: str, feeds: Mapping[str, np.ndarray], hashes: Mapping[str, str]
) -> str:
    """Return the JSON text.

    Args:
        report: The report of the run.
        file: Name of the file that the runtime reads.
        feeds: Example inputs by name.
        hashes: sha256 of every file of the output folder, by name.
    """
    fingerprints = {} if report.reproduction is None else dict(report.reproduction.marks)
    packages = {
        name: str(version)
        for name, version in report.environment.items()
        if name in ("torch", "onnx", "onnxscript", "onnxruntime", "openvino")
    }
    inputs = [
        {"format": f"{to_one_line(name)}: {value.dtype.name} {list(value.shape)}"} for name, value in feeds.items()
    ]
    document: dict[str, Any] = {
        "bomFormat": BOM_FORMAT,
        "specVersion": BOM_VERSION,
        "serialNumber": f"urn:uuid:{uuid.uuid5(NAMESPACE, json.dumps(sorted(hashes.items())))}",
        "version": 1,
        "metadata": {
            "timestamp": report.created,
            "tools": {"components": [{"type": "application", "name": "scalepoint", "version": __version__}]},
            "component": {
                "type": "machine-learning-model",
                "bom-ref": MODEL,
                "name": f"{to_one_line(report.title)} for {to_one_line(report.target)}",
                **({"hashes": _hash(hashes[file])} if file in hashes else {}),
                "modelCard": {
                    "modelParameters": {"datasets": [{"ref": DATA}], "inputs": inputs},
                    "quantitativeAnalysis": {"performanceMetrics": _metrics(report)},
                },
                "properties": _properties({**report.environment, "verdict": report.verdict()}),
            },
        },
        "components": [
            {
                "type": "machine-learning-model",
                "bom-ref": FLOAT_MODEL,
                "name": to_one_line(report.title),
                "properties": _properties({"fingerprint": fingerprints.get("model", "")}),
            },
            {
                "type": "data",
                "bom-ref": DATA,
                "name": "calibration data",
                "properties": _properties({"fingerprint": fingerprints.get("calibration data", "")}),
            },
            *(
                {"type": "file", "bom-ref": f"file:{name}", "name": name, "hashes": _hash(digest)}
                for name, digest in sorted(hashes.items())
            ),
            *(
                {
                    "type": "library",
                    "bom-ref": f"pkg:pypi/{name}@{version}",
                    "name": name,
                    "version": version,
                    "purl": f"pkg:pypi/{name}@{version}",
                }
                for name, version in packages.items()
            ),
        ],
        "dependencies": [{"ref": MODEL, "dependsOn": [FLOAT_MODEL, DATA]}],
    }
    return json.dumps(document, indent=1) + "\n"


def _hash(digest: str) -> list[dict[str, str]]:
    return [{"alg": "SHA-256", "content": digest}]


def _properties(values: Mapping[str, Any]) -> list[dict[str, str]]:
    return [
        {"name": f"scalepoint:{to_one_line(name)}", "value": to_one_line(value)}
        for name, value in values.items()
        if value
    ]


def _metrics(report: Report) -> list[dict[str, str]]:
    """Return score, agreement, speed and size, each with where it was measured."""
    verification = report.verification
    rows: list[tuple[str, Any, str]] = []
    for score in report.accuracy:
        rows += [(score.name, score.value, f"quantized, {score.where}"), (score.name, score.float_value, "float model")]
    if report.output_db is not None:
        rows.append(("signal-to-noise ratio of the outputs (dB)", report.output_db, "simulation against float model"))
    if verification is not None:
        rows.append(("size (bytes)", verification.size, "quantized"))
        if verification.holds:
            rows.append(("agreement with the simulation (dB)", verification.sqnr, verification.runtime))
        if verification.float_size:
            rows.append(("size (bytes)", verification.float_size, "float model"))
        if verification.latency is not None:
            rows.append(("speed relative to float", verification.latency.ratio, verification.latency.conditions))
    return [
        {
            "type": to_one_line(name),
            "value": f"{value:.6g}" if isinstance(value, float) else str(value),
            "slice": to_one_line(where),
        }
        for name, value, where in rows
    ]
