"""The toy runtime: runs a .toy file in numpy."""

import json

import numpy as np


class File:
    def __init__(self, path, options):
        with np.load(path) as file:
            self.arrays = {name: file[name] for name in file.files}
        self.steps = json.loads(self.arrays.pop("steps").tobytes())["steps"]
        self.inputs = ["x"]

    def run(self, feeds):
        x = feeds["x"]
        for step in self.steps:
            if step["op"] == "quantize":
                codes = np.clip(np.rint(x / np.float32(step["scale"])) + step["zero"], step["low"], step["high"])
                x = (codes - step["zero"]).astype(np.float32) * np.float32(step["scale"])
            elif step["op"] == "relu":
                x = np.maximum(x, 0)
            else:
                codes, scale, bias = (self.arrays[f"{step['name']}.{key}"] for key in ("codes", "scale", "bias"))
                x = x @ (codes * scale).T.astype(np.float32) + bias
        return [("output_0", x)]

    def executed(self):
        names = [step["name"] for step in self.steps if step["op"] == "linear"]
        is_low = {name: self.arrays[f"{name}.codes"].dtype == "int8" for name in names}
        return [{"name": name, "op": "linear", "low": is_low[name], "why": ""} for name in names]
