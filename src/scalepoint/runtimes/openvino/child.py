"""A file in OpenVINO, on the CPU; started by `scalepoint.runtimes`, of which nothing is imported."""

import os
import statistics
from typing import Any

import numpy as np
import openvino

MULTIPLY = ("Convolution", "GroupConvolution", "Deconvolution", "FullyConnected", "MatMul")
MOVES = ("Transpose", "Reorder", "Reshape", "Convert")  # between a weight and its product
INT8 = ("_i8", "_u8")
CAPPED = "AVX512_CORE_BF16"  # AMX is announced, and dies: bfloat16, which OpenVINO chooses for it, is slower without


class File:
    """options: threads (0: OpenVINO chooses), profile, accurate (floats stay float32)."""

    def __init__(self, path: str, options: dict[str, Any]) -> None:
        settings = {"INFERENCE_NUM_THREADS": options["threads"]} if options.get("threads") else {}
        if os.environ.get("ONEDNN_MAX_CPU_ISA") == CAPPED:
            settings |= {"INFERENCE_PRECISION_HINT": "f32"}
        settings |= {"PERF_COUNT": "YES"} if options.get("profile") else {}
        settings |= {"EXECUTION_MODE_HINT": "ACCURACY"} if options.get("accurate") else {}
        self.compiled = openvino.Core().compile_model(path, "CPU", settings)
        self.inputs = [each.get_any_name() for each in self.compiled.inputs]
        self.outputs = [_name(each, place) for place, each in enumerate(self.compiled.outputs)]

        self.request = self.compiled.create_infer_request()
        self.profiles = bool(options.get("profile"))
        self.runs = 0
        self.averages: dict[tuple[str, str], float] = {}  # seconds of a node in the runs so far
        self.taken: dict[tuple[str, str], list[float]] = {}  # seconds of a node in each run

    def run(self, feeds: dict[str, np.ndarray]) -> list[tuple[str, np.ndarray]]:
        result = self.request.infer(feeds)
        self.runs += 1
        for node in self.request.profiling_info if self.profiles else ():
            key = (node.node_name, f"{node.node_type} {node.exec_type}")
            if node.status == openvino.ProfilingInfo.Status.EXECUTED or key in self.taken:
                self._keep_time(key, node.real_time.total_seconds())
        return [(name, result[place]) for place, name in enumerate(self.outputs)]

    def _keep_time(self, key: tuple[str, str], average: float) -> None:
        """The time of this run: OpenVINO (2026.4) gives the average of all runs since the file was compiled.

        The first run, which compiles kernels, takes up to a thousand times as long and never leaves that average. A
        node counts as not executed while its average is below a microsecond.
        """
        before = self.averages.get(key, 0.0)
        self.taken.setdefault(key, [0.0] * (self.runs - 1)).append(self.runs * average - (self.runs - 1) * before)
        self.averages[key] = average

    def profiled(self) -> list[dict[str, Any]]:
        """Medians; averages are whole microseconds, so a single run can come out below zero."""
        return [
            {"name": name, "op": op, "seconds": max(0.0, statistics.median(times[1:] or times))}
            for (name, op), times in self.taken.items()
        ]

    def executed(self) -> list[dict[str, Any]]:
        return [_node(op) for op in self.compiled.get_runtime_model().get_ops()]


def _name(output: Any, place: int) -> str:
    """An output may have lost its name to an optimisation."""
    names = sorted(output.get_names())
    return names[0] if names else f"output_{place}"


def _node(op: Any) -> dict[str, Any]:
    """What a node of the compiled graph runs: its primitive says; or a float product reads its weight as integers."""
    info = op.get_rt_info()
    kind, primitive = str(info["layerType"].value), str(info["primitiveType"].value)
    low = None
    if kind in MULTIPLY:
        weight = op.input_value(1) if len(op.inputs()) > 1 else None
        type_name = "" if weight is None else weight.get_element_type().get_type_name()
        is_narrow = type_name.startswith(("i", "u"))
        while weight is not None and _kind(weight) in MOVES:
            weight = weight.get_node().input_value(0)
        if kind != "MatMul" or (weight is not None and _kind(weight) == "Const"):
            low = is_narrow or primitive.lower().endswith(INT8)
    return {"name": op.get_friendly_name(), "op": f"{kind} {primitive}", "low": low, "why": ""}


def _kind(value: Any) -> str:
    return str(value.get_node().get_rt_info()["layerType"].value)
