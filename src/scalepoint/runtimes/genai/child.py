"""A folder in ONNX Runtime GenAI, on the CPU; started by `scalepoint.runtimes`, of which nothing is imported."""

import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

LOW = frozenset(("MatMulNBits", "QMoE", "GatherBlockQuantized"))
LEVELS = ort.GraphOptimizationLevel
LAST = "/last"  # the node that leaves the last word of every text
CACHES = {"tensor(float)": np.float32, "tensor(int8)": np.int8, "tensor(uint8)": np.uint8}
IN_FLOAT = 1  # accuracy_level of MatMulNBits and QMoE: activations are not rounded


class File:
    """options: threads (0: it chooses), optimize, exact (activations stay float)."""

    def __init__(self, path: str, options: dict[str, Any]) -> None:
        self.folder, self.options = Path(path), options
        self.config = json.loads((self.folder / "genai_config.json").read_text())["model"]["decoder"]
        self.session: Any = None  # of ONNX Runtime, for logits
        self.model: Any = None  # of GenAI, for text
        self.inputs = ["input_ids"]

    def run(self, feeds: dict[str, np.ndarray]) -> list[tuple[str, np.ndarray]]:
        """Logits of every word, nothing said before."""
        words = np.ascontiguousarray(feeds["input_ids"], np.int64)
        self.session = self.session or self._session()
        return [("logits", self.session.run(["logits"], self._feeds(words))[0])]

    def generate(self, tokens: list[int], count: int) -> dict[str, Any]:
        """So many further tokens, each the likeliest, and the seconds for the prompt and for the others."""
        import onnxruntime_genai as genai  # noqa: PLC0415  # logits do not need it

        self.session = None  # the weights are here once
        if self.model is None:
            with self._loaded() as folder:
                self.model = genai.Model(self._config(genai, folder))
        params = genai.GeneratorParams(self.model)
        total = len(tokens) + count
        params.set_search_options(do_sample=False, max_length=total, min_length=total)
        generator = genai.Generator(self.model, params)
        start = time.perf_counter()
        generator.append_tokens(np.asarray(tokens, np.int32))
        generator.generate_next_token()
        prefilled = time.perf_counter()
        while not generator.is_done():
            generator.generate_next_token()
        ended = time.perf_counter()
        made = [int(each) for each in generator.get_sequence(0)][len(tokens) :]
        return {"tokens": made, "prefill_seconds": prefilled - start, "decode_seconds": ended - prefilled}

    def _config(self, genai: Any, folder: str) -> Any:
        config = genai.Config(folder)
        threads = self.options.get("threads", 1)
        config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
        return config

    @contextmanager
    def _loaded(self) -> Iterator[str]:
        """The folder, or one beside it with another graph and the same data."""
        if not self.options.get("exact"):
            yield str(self.folder)
            return
        name = self.config["filename"]
        with tempfile.TemporaryDirectory(prefix=".scalepoint-", dir=self.folder.parent) as other:
            for each in self.folder.iterdir():
                if each.name != name and each.is_file():
                    os.link(each, Path(other) / each.name)
            (Path(other) / name).write_bytes(_graph(self.folder / name, is_exact=True))
            yield other

    def executed(self) -> list[dict[str, Any]]:
        """The nodes of the graph: the kernels of GenAI are named in it, no optimisation puts others in their place."""
        import onnx  # noqa: PLC0415  # only this needs it

        nodes = onnx.load(self.folder / self.config["filename"], load_external_data=False).graph.node
        return [{"name": each.name, "op": each.op_type, "low": _is_low(each), "why": _why(each)} for each in nodes]

    def _feeds(self, words: np.ndarray) -> dict[str, np.ndarray]:
        feeds = {"input_ids": words, "attention_mask": np.ones_like(words)}
        batch, count = words.shape
        for each in self.session.get_inputs():
            if each.name == "position_ids":
                feeds[each.name] = np.tile(np.arange(count, dtype=np.int64), (batch, 1))
            elif each.name not in feeds:
                width = each.shape[-1] if isinstance(each.shape[-1], int) else self.config["head_size"]
                sizes = batch, self.config["num_key_value_heads"], 0, width
                feeds[each.name] = np.zeros(sizes, CACHES[each.type])
        return feeds

    def _session(self) -> Any:
        options = ort.SessionOptions()
        options.intra_op_num_threads = self.options.get("threads", 1)
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        is_optimized = self.options.get("optimize", True)
        options.graph_optimization_level = LEVELS.ORT_ENABLE_ALL if is_optimized else LEVELS.ORT_DISABLE_ALL
        graph = _graph(self.folder / self.config["filename"], is_exact=bool(self.options.get("exact")), is_whole=True)
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(self.folder))
        return ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def _graph(path: Path, *, is_exact: bool, is_whole: bool = False) -> bytes:
    """The graph; with kernels that leave activations float, or with the logits of all words and not of the last."""
    import onnx  # noqa: PLC0415

    model = onnx.load(path, load_external_data=False)
    for node in model.graph.node:
        if is_whole and node.name == LAST:
            node.op_type = "Identity"
            del node.input[1:], node.attribute[:]
        for attribute in node.attribute:
            if is_exact and attribute.name == "accuracy_level":
                attribute.i = IN_FLOAT
    data: bytes = model.SerializeToString()
    return data


def _is_low(node: Any) -> bool | None:
    return True if node.op_type in LOW else False if node.op_type == "FusedMatMul" else None


def _why(node: Any) -> str:
    return "its weight is float" if node.op_type == "FusedMatMul" else ""
