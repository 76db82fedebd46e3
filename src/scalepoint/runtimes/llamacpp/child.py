"""A GGUF file in llama.cpp, through its C interface; started by `scalepoint.runtimes`, of which nothing is imported.

    SCALEPOINT_LLAMACPP=folder    where the library is looked for, in any depth; else in ~/.cache/scalepoint/llamacpp

The structures of that interface have the layout of one release: another one is refused, not guessed.
"""

import ctypes
import os
import platform
import tempfile
import time
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int8, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

RELEASE = "0.5.0"  # of llama.cpp, which node-llama-cpp 3.22 has
NAME = f"libllama.v{RELEASE}.so"
PLACE = "SCALEPOINT_LLAMACPP"
DEFAULT = Path(os.path.expanduser("~")) / ".cache" / "scalepoint" / "llamacpp"  # also without a home
PACKAGES = {"x86_64": "linux-x64", "aarch64": "linux-arm64"}  # of npm: @node-llama-cpp/...
CACHES = {"f32": 0, "f16": 1, "int4": 2, "int8": 8}  # types of ggml: the last two are Q4_0 and Q8_0
KINDS = {"F32": 0, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q2_K": 10, "Q3_K_M": 12, "Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18}


def library() -> Path | None:
    """Where llama.cpp lies; None where it does not."""
    folder = Path(os.environ.get(PLACE) or DEFAULT)
    own = PACKAGES.get(platform.machine(), "")
    return next((path for path in sorted(folder.rglob(NAME)) if path.parent.name == own), None)


class ModelSettings(ctypes.Structure):
    _fields_ = [
        ("devices", c_void_p), ("overrides", c_void_p), ("gpu_layers", c_int32), ("split", c_int32), ("load", c_int32),
        ("lazy", c_int32), ("main_gpu", c_int32), ("tensor_split", c_void_p), ("progress", c_void_p),
        ("progress_data", c_void_p), ("pairs", c_void_p), ("vocabulary_only", c_bool), ("check_tensors", c_bool),
        ("repack", c_bool), ("no_host", c_bool), ("no_alloc", c_bool), ("load_mtp", c_bool),
    ]  # fmt: skip


class ContextSettings(ctypes.Structure):
    _fields_ = [
        ("context", c_uint32), ("batch", c_uint32), ("micro_batch", c_uint32), ("sequences", c_uint32),
        ("snapshots", c_uint32), ("outputs", c_uint32), ("outputs_each", c_uint32), ("threads", c_int32),
        ("threads_batch", c_int32), ("kind", c_int32), ("rope", c_int32), ("pooling", c_int32), ("attention", c_int32),
        ("flash", c_int32), ("rope_base", c_float), ("rope_scale", c_float), ("yarn_ext", c_float),
        ("yarn_attn", c_float), ("yarn_fast", c_float), ("yarn_slow", c_float), ("yarn_context", c_uint32),
        ("defrag", c_float), ("callback", c_void_p), ("callback_data", c_void_p), ("type_k", c_int32),
        ("type_v", c_int32), ("abort", c_void_p), ("abort_data", c_void_p), ("embeddings", c_bool),
        ("offload_kqv", c_bool), ("no_perf", c_bool), ("offload", c_bool), ("full_window", c_bool),
        ("unified", c_bool), ("samplers", c_void_p), ("sampler_count", c_size_t), ("other", c_void_p),
    ]  # fmt: skip


class QuantizeSettings(ctypes.Structure):
    _fields_ = [
        ("threads", c_int32), ("kind", c_int32), ("output_type", c_int32), ("embedding_type", c_int32),
        ("again", c_bool), ("output", c_bool), ("only_copy", c_bool), ("pure", c_bool), ("keep_split", c_bool),
        ("dry_run", c_bool), ("importance", c_void_p), ("pairs", c_void_p), ("overrides", c_void_p),
        ("prune", c_void_p), ("buffer", c_size_t),
    ]  # fmt: skip


class Batch(ctypes.Structure):
    _fields_ = [
        ("count", c_int32), ("tokens", POINTER(c_int32)), ("embeddings", c_void_p), ("places", POINTER(c_int32)),
        ("sequence_counts", POINTER(c_int32)), ("sequences", POINTER(POINTER(c_int32))), ("wanted", POINTER(c_int8)),
    ]  # fmt: skip


LOGGER = ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)
CALLS: dict[str, tuple[Any, list[Any]]] = {
    "llama_version": (c_char_p, []),
    "llama_log_set": (None, [LOGGER, c_void_p]),
    "llama_backend_init": (None, []),
    "llama_model_default_params": (ModelSettings, []),
    "llama_context_default_params": (ContextSettings, []),
    "llama_model_quantize_default_params": (QuantizeSettings, []),
    "llama_model_quantize": (c_uint32, [c_char_p, c_char_p, POINTER(QuantizeSettings)]),
    "llama_model_load_from_file": (c_void_p, [c_char_p, ModelSettings]),
    "llama_model_get_vocab": (c_void_p, [c_void_p]),
    "llama_model_n_ctx_train": (c_int32, [c_void_p]),
    "llama_model_size": (c_uint64, [c_void_p]),
    "llama_vocab_n_tokens": (c_int32, [c_void_p]),
    "llama_tokenize": (c_int32, [c_void_p, c_char_p, c_int32, POINTER(c_int32), c_int32, c_bool, c_bool]),
    "llama_init_from_model": (c_void_p, [c_void_p, ContextSettings]),
    "llama_get_memory": (c_void_p, [c_void_p]),
    "llama_memory_clear": (None, [c_void_p, c_bool]),
    "llama_batch_init": (Batch, [c_int32, c_int32, c_int32]),
    "llama_batch_free": (None, [Batch]),
    "llama_decode": (c_int32, [c_void_p, Batch]),
    "llama_get_logits_ith": (POINTER(c_float), [c_void_p, c_int32]),
    "llama_free": (None, [c_void_p]),
}


class Llama:
    """The library, and the first thing that it complained of."""

    def __init__(self) -> None:
        path = library()
        if path is None:
            raise SystemExit(f"llama.cpp is not installed: no {NAME} in {os.environ.get(PLACE) or DEFAULT}")
        base = ctypes.CDLL(str(path.parent / f"libggml.v{RELEASE}.so"), mode=ctypes.RTLD_GLOBAL)
        self.calls = ctypes.CDLL(str(path))
        for name, (gives, takes) in CALLS.items():
            call = getattr(self.calls, name)
            call.restype, call.argtypes = gives, takes
        self.complaint = ""
        self.logger = LOGGER(self._log)
        self.calls.llama_log_set(self.logger, None)
        release = self.calls.llama_version().decode()
        if RELEASE not in release:
            raise SystemExit(f"{path} is llama.cpp {release}: scalepoint knows the interface of {RELEASE}")
        base.ggml_backend_load_all_from_path.argtypes = [c_char_p]
        base.ggml_backend_load_all_from_path(str(path.parent).encode())
        self.calls.llama_backend_init()

    def _log(self, level: int, text: bytes, _: Any) -> None:
        if level == 4 and text.strip() and not self.complaint:
            self.complaint = text.decode(errors="replace").strip()

    def quantize(self, source: str, path: str, kind: str) -> None:
        """llama.cpp's own: of a float file to a kind, or back."""
        settings = self.calls.llama_model_quantize_default_params()
        settings.threads, settings.kind, settings.again = 1, KINDS[kind], kind == "F32"
        if self.calls.llama_model_quantize(source.encode(), path.encode(), ctypes.byref(settings)):
            raise self.fail(f"cannot turn {source} into {kind}")

    def fail(self, what: str) -> SystemExit:
        return SystemExit(f"llama.cpp {what}{': ' + self.complaint if self.complaint else ''}")


class File:
    """options: threads (0: all cores), cache ("f16", "f32", "int8" or "int4"), exact.

    Its kernels round the inputs of layers with quantized weights to 8 bits. "exact" lets it write the weights as what
    they stand for first, in float32: then inputs stay float, and so do keys and values.
    """

    def __init__(self, path: str, options: dict[str, Any]) -> None:
        self.inputs, self.options = ["input_ids"], options
        self.llama = Llama()
        self.calls = self.llama.calls
        settings = self.calls.llama_model_default_params()
        settings.gpu_layers = 0
        with tempfile.TemporaryDirectory(prefix="scalepoint-") as folder:
            loaded = path
            if options.get("exact"):
                loaded = f"{folder}/exact.gguf"
                self.llama.quantize(path, loaded, "F32")
            self.model = self.calls.llama_model_load_from_file(loaded.encode(), settings)
        if not self.model:
            raise self.llama.fail(f"refuses {path}")
        self.words: int = self.calls.llama_vocab_n_tokens(self.calls.llama_model_get_vocab(self.model))
        self.context, self.length = None, 0

    def run(self, feeds: dict[str, np.ndarray]) -> list[tuple[str, np.ndarray]]:
        """(rows, tokens) -> logits of every token (rows, tokens, words)."""
        rows = np.atleast_2d(feeds["input_ids"])
        self._room(rows.shape[1])
        found = np.empty((*rows.shape, self.words), np.float32)
        for row, place in zip(rows, found, strict=True):
            self._forget()
            self._decode(row.tolist(), 0, place)
        return [("logits", found)]

    def generate(self, tokens: list[int], count: int) -> dict[str, Any]:
        """The most probable tokens, one after another, and the seconds for what was given and for what was made."""
        self._room(len(tokens) + count)
        self._forget()
        logits = np.empty((1, self.words), np.float32)
        start = time.perf_counter()
        self._decode(tokens, 0, logits)
        filled = time.perf_counter()
        made = [int(logits[0].argmax())]
        while len(made) < count:
            self._decode(made[-1:], len(tokens) + len(made) - 1, logits)
            made.append(int(logits[0].argmax()))
        taken = time.perf_counter() - filled
        return {"tokens": made, "prefill_seconds": filled - start, "decode_seconds": taken}

    def tokens(self, text: str) -> list[int]:
        """What llama.cpp's own tokenizer makes of a text, without tokens that are added to it."""
        vocabulary, data = self.calls.llama_model_get_vocab(self.model), text.encode()
        room = (c_int32 * (len(data) + 8))()
        count = self.calls.llama_tokenize(vocabulary, data, len(data), room, len(room), False, False)
        return list(room[:count])

    def executed(self) -> list[dict[str, Any]]:
        return []

    def _room(self, length: int) -> None:
        """A context for so many tokens."""
        if self.context and length <= self.length:
            return
        if self.context:
            self.calls.llama_free(self.context)
        settings = self.calls.llama_context_default_params()
        threads = self.options.get("threads") or os.cpu_count() or 1
        settings.context = settings.batch = length
        settings.micro_batch = min(512, settings.batch)
        settings.threads = settings.threads_batch = threads
        cache = self.options.get("cache") or ("f32" if self.options.get("exact") else "f16")
        settings.type_k = settings.type_v = CACHES[cache]
        settings.flash = int(cache.startswith("int"))  # its other kernels take no quantized values
        settings.full_window, settings.no_perf = True, True
        self.context, self.length = self.calls.llama_init_from_model(self.model, settings), length
        if not self.context:
            raise self.llama.fail(f"has no context of {length} tokens")

    def _forget(self) -> None:
        self.calls.llama_memory_clear(self.calls.llama_get_memory(self.context), True)

    def _decode(self, tokens: list[int], at: int, logits: np.ndarray) -> None:
        """The logits of the last tokens, as many as there is room for."""
        count, skipped = len(tokens), len(tokens) - len(logits)
        batch = self.calls.llama_batch_init(count, 0, 1)
        batch.count = count
        for index, token in enumerate(tokens):
            batch.tokens[index], batch.places[index] = token, at + index
            batch.sequence_counts[index], batch.sequences[index][0] = 1, 0
            batch.wanted[index] = index >= skipped
        code = self.calls.llama_decode(self.context, batch)
        self.calls.llama_batch_free(batch)
        if code:
            raise self.llama.fail(f"cannot run {count} tokens (code {code})")
        for index in range(skipped, count):
            row = self.calls.llama_get_logits_ith(self.context, index)
            logits[index - skipped] = np.ctypeslib.as_array(row, (self.words,))
