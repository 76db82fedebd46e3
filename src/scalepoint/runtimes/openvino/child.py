"""Child program that runs a file in OpenVINO on the CPU.

`child_loop.py` starts it. It imports nothing of scalepoint.
"""

import os
import statistics
from typing import Any

import numpy as np
import openvino

WEIGHTED_KINDS = ("Convolution", "GroupConvolution", "Deconvolution", "FullyConnected", "MatMul")
WEIGHT_CONVERSIONS = ("Transpose", "Reorder", "Reshape", "Convert")  # may stand between a constant and its product
INT8_SUFFIXES = ("_i8", "_u8")
# The parent sets this limit if the CPU announces AMX but AMX instructions fail. OpenVINO would still choose bfloat16,
# which is slow without AMX.
ISA_WITHOUT_AMX = "AVX512_CORE_BF16"


class File:
    """A compiled file.

    Options: threads (0: OpenVINO chooses), profile, accurate (compute floats in float32), shapes (of inputs by name).
    """

    def __init__(self, path: str, options: dict[str, Any]) -> None:
        self.path, self.options = path, options
        settings = {"INFERENCE_NUM_THREADS": options["threads"]} if options.get("threads") else {}
        if os.environ.get("ONEDNN_MAX_CPU_ISA") == ISA_WITHOUT_AMX:
            settings |= {"INFERENCE_PRECISION_HINT": "f32"}
        settings |= {"PERF_COUNT": "YES"} if options.get("profile") else {}
        settings |= {"EXECUTION_MODE_HINT": "ACCURACY"} if options.get("accurate") else {}
        core = openvino.Core()
        model = core.read_model(path)
        if options.get("shapes"):
            model.reshape(options["shapes"])
        self.compiled = core.compile_model(model, "CPU", settings)
        self.inputs = [port.get_any_name() for port in self.compiled.inputs]
        self.outputs = [_output_name(port, index) for index, port in enumerate(self.compiled.outputs)]

        self.request = self.compiled.create_infer_request()
        self.profiles = bool(options.get("profile"))
        self.runs = 0
        # Seconds of a node, by (name, operator): the average of all runs, and the time of each run.
        self.averages: dict[tuple[str, str], float] = {}
        self.run_times: dict[tuple[str, str], list[float]] = {}

    def run(self, feeds: dict[str, np.ndarray]) -> list[tuple[str, np.ndarray]]:
        result = self.request.infer(feeds)
        self.runs += 1
        for node in self.request.profiling_info if self.profiles else ():
            key = (node.node_name, f"{node.node_type} {node.exec_type}")
            if node.status == openvino.ProfilingInfo.Status.EXECUTED or key in self.run_times:
                self._add_time(key, node.real_time.total_seconds())
        return [(name, result[index]) for index, name in enumerate(self.outputs)]

    def with_fixed_sizes(self, feeds: dict[str, np.ndarray]) -> "File | None":
        """Return this file with its free axes fixed to the sizes of these inputs; None if it has no free axis."""
        if not any(port.partial_shape.is_dynamic for port in self.compiled.inputs):
            return None
        return File(self.path, {**self.options, "shapes": {name: list(value.shape) for name, value in feeds.items()}})

    def _add_time(self, key: tuple[str, str], average: float) -> None:
        """Compute the time of this run from the new average.

        OpenVINO (2026.4) reports the average of all runs since the file was compiled. The first run compiles kernels
        and takes up to 1000 times as long, so the average itself cannot be used. A node counts as not executed while
        its average is below a microsecond.
        """
        total_before = (self.runs - 1) * self.averages.get(key, 0.0)
        self.run_times.setdefault(key, [0.0] * (self.runs - 1)).append(self.runs * average - total_before)
        self.averages[key] = average

    def profiled(self) -> list[dict[str, Any]]:
        """Return the median time of each node. The first run compiles kernels and is not counted."""
        # Averages are rounded to microseconds, so the time of a single run can be negative.
        return [
            {"name": name, "op": op, "seconds": max(0.0, statistics.median(times[1:] or times))}
            for (name, op), times in self.run_times.items()
        ]

    def executed(self) -> list[dict[str, Any]]:
        """Return the nodes of the compiled graph."""
        return [_describe_node(op) for op in self.compiled.get_runtime_model().get_ops()]


def _output_name(port: Any, index: int) -> str:
    """Return the name of an output. Optimisations can remove names."""
    names = sorted(port.get_names())
    return names[0] if names else f"output_{index}"


def _describe_node(op: Any) -> dict[str, Any]:
    """Describe a node of the compiled graph.

    It runs in low precision if its primitive is an int8 kernel, or if it is a float product with an integer weight.
    """
    info = op.get_rt_info()
    kind, primitive = str(info["layerType"].value), str(info["primitiveType"].value)
    low = None
    if kind in WEIGHTED_KINDS:
        weight = op.input_value(1) if len(op.inputs()) > 1 else None
        type_name = "" if weight is None else weight.get_element_type().get_type_name()
        has_integer_weight = type_name.startswith(("i", "u"))
        while weight is not None and _kind(weight) in WEIGHT_CONVERSIONS:
            weight = weight.get_node().input_value(0)
        if kind != "MatMul" or (weight is not None and _kind(weight) == "Const"):
            low = has_integer_weight or primitive.lower().endswith(INT8_SUFFIXES)
    return {"name": op.get_friendly_name(), "op": f"{kind} {primitive}", "low": low, "why": ""}


def _kind(value: Any) -> str:
    return str(value.get_node().get_rt_info()["layerType"].value)
