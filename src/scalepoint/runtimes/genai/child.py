"""Child program that runs a folder in ONNX Runtime GenAI on the CPU.

`child_loop.py` starts it. It imports nothing of scalepoint.
"""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

LOW_PRECISION_OPERATORS = frozenset(("MatMulNBits", "QMoE", "GatherBlockQuantized"))
LEVELS = ort.GraphOptimizationLevel
LAST_POSITION_NODE = "/last"  # the node that keeps only the last token of every sequence
CACHE_DTYPES = {"tensor(float)": np.float32, "tensor(int8)": np.int8, "tensor(uint8)": np.uint8}
FLOAT_ACCURACY_LEVEL = 1  # accuracy_level of MatMulNBits and QMoE at which activations are not rounded to int8


class File:
    """A model folder. Options: threads (0: ONNX Runtime chooses), optimize, exact (activations are not rounded)."""

    def __init__(self, path: str, options: dict[str, Any]) -> None:
        self.folder, self.options = Path(path), options
        self.config = json.loads((self.folder / "genai_config.json").read_text("utf-8"))["model"]["decoder"]
        self.session: Any = None  # ONNX Runtime session, computes logits
        self.model: Any = None  # GenAI model, generates text
        self.inputs = ["input_ids"]

    def run(self, feeds: dict[str, np.ndarray]) -> list[tuple[str, np.ndarray]]:
        """Compute the logits of every token, with an empty KV cache."""
        tokens = np.ascontiguousarray(feeds["input_ids"], np.int64)
        self.session = self.session or self._create_session()
        return [("logits", self.session.run(["logits"], self._build_feeds(tokens))[0])]

    def generate(self, tokens: list[int], count: int) -> dict[str, Any]:
        """Generate `count` tokens greedily. Return them with the seconds for the prompt and for the generation."""
        import onnxruntime_genai as genai  # noqa: PLC0415  # logits do not need it

        self.session = None  # do not hold the weights twice
        if self.model is None:
            with self._model_folder() as folder:
                self.model = genai.Model(self._build_config(genai, folder))
        params = genai.GeneratorParams(self.model)
        total = len(tokens) + count
        params.set_search_options(do_sample=False, max_length=total, min_length=total)
        generator = genai.Generator(self.model, params)
        start = time.perf_counter()
        generator.append_tokens(np.asarray(tokens, np.int32))
        generator.generate_next_token()
        prefill_end = time.perf_counter()
        while not generator.is_done():
            generator.generate_next_token()
        end = time.perf_counter()
        generated = [int(token) for token in generator.get_sequence(0)][len(tokens) :]
        return {"tokens": generated, "prefill_seconds": prefill_end - start, "decode_seconds": end - prefill_end}

    def _build_config(self, genai: Any, folder: str) -> Any:
        config = genai.Config(folder)
        threads = self.options.get("threads", 1)
        config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
        return config

    @contextmanager
    def _model_folder(self) -> Iterator[str]:
        """Yield the folder to load; with "exact" a copy with a changed graph and the other files."""
        if not self.options.get("exact"):
            yield str(self.folder)
            return
        name = self.config["filename"]
        with tempfile.TemporaryDirectory(prefix=".scalepoint-", dir=self.folder.parent) as folder:
            for path in self.folder.iterdir():
                if path.name != name and path.is_file():
                    _link(path, Path(folder) / path.name)
            (Path(folder) / name).write_bytes(_change_graph(self.folder / name, is_exact=True))
            yield folder

    def executed(self) -> list[dict[str, Any]]:
        """Return the nodes of the graph in the file. It names the kernels already; no optimisation replaces them."""
        import onnx  # noqa: PLC0415  # not needed to run files

        nodes = onnx.load(self.folder / self.config["filename"], load_external_data=False).graph.node
        return [_describe_node(node) for node in nodes]

    def _build_feeds(self, tokens: np.ndarray) -> dict[str, np.ndarray]:
        """Return the tokens with their mask and positions, and empty KV caches."""
        feeds = {"input_ids": tokens, "attention_mask": np.ones_like(tokens)}
        batch, count = tokens.shape
        for node in self.session.get_inputs():
            if node.name == "position_ids":
                feeds[node.name] = np.tile(np.arange(count, dtype=np.int64), (batch, 1))
            elif node.name not in feeds:
                width = node.shape[-1] if isinstance(node.shape[-1], int) else self.config["head_size"]
                cache_shape = batch, self.config["num_key_value_heads"], 0, width
                feeds[node.name] = np.zeros(cache_shape, CACHE_DTYPES[node.type])
        return feeds

    def _create_session(self) -> Any:
        options = ort.SessionOptions()
        options.intra_op_num_threads = self.options.get("threads", 1)
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        is_optimized = self.options.get("optimize", True)
        options.graph_optimization_level = LEVELS.ORT_ENABLE_ALL if is_optimized else LEVELS.ORT_DISABLE_ALL
        path, is_exact = self.folder / self.config["filename"], bool(self.options.get("exact"))
        graph = _change_graph(path, is_exact=is_exact, has_all_logits=True)
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(self.folder))
        return ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)


def _change_graph(path: Path, *, is_exact: bool, has_all_logits: bool = False) -> bytes:
    """Return the graph with changes.

    `is_exact` selects kernels that do not round activations. `has_all_logits` outputs the logits of all tokens instead
    of those of the last token.
    """
    import onnx  # noqa: PLC0415

    model = onnx.load(path, load_external_data=False)
    for node in model.graph.node:
        if has_all_logits and node.name == LAST_POSITION_NODE:
            node.op_type = "Identity"
            del node.input[1:], node.attribute[:]
        for attribute in node.attribute:
            if is_exact and attribute.name == "accuracy_level":
                attribute.i = FLOAT_ACCURACY_LEVEL
    data: bytes = model.SerializeToString()
    return data


def _describe_node(node: Any) -> dict[str, Any]:
    low, why = None, ""
    if node.op_type in LOW_PRECISION_OPERATORS:
        low = True
    elif node.op_type == "FusedMatMul":
        low, why = False, "its weight is float"
    return {"name": node.name, "op": node.op_type, "low": low, "why": why}
