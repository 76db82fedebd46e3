"""Child program that runs a GGUF file in llama.cpp on the CPU, through its C interface.

    SCALEPOINT_LLAMACPP=folder    folder that contains the library at any depth; default ~/.cache/scalepoint/llamacpp

`child_loop.py` starts it. It imports nothing of scalepoint. The structures of the C interface change from release to
release. The structures here are those of RELEASE, and other releases are refused.
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

RELEASE = "0.5.0"  # of llama.cpp, in node-llama-cpp 3.22
LIBRARY_NAME = f"libllama.v{RELEASE}.so"
FOLDER_VARIABLE = "SCALEPOINT_LLAMACPP"
# Not Path.home(), which fails without a home folder.
DEFAULT_FOLDER = Path(os.path.expanduser("~")) / ".cache" / "scalepoint" / "llamacpp"
NPM_PACKAGES = {"x86_64": "linux-x64", "aarch64": "linux-arm64"}  # machine -> @node-llama-cpp/...
CACHE_TYPES = {"f32": 0, "f16": 1, "int4": 2, "int8": 8}  # codes of ggml: int4 is Q4_0, int8 is Q8_0
FILE_TYPES = {
    "F32": 0,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q8_0": 7,
    "Q2_K": 10,
    "Q3_K_M": 12,
    "Q4_K_M": 15,
    "Q5_K_M": 17,
    "Q6_K": 18,
}


def find_library() -> Path | None:
    """Return the path of the library; None if it is not installed."""
    folder = Path(os.environ.get(FOLDER_VARIABLE) or DEFAULT_FOLDER)
    package = NPM_PACKAGES.get(platform.machine(), "")
    return next((path for path in sorted(folder.rglob(LIBRARY_NAME)) if path.parent.name == package), None)


class ModelSettings(ctypes.Structure):
    """llama_model_params."""

    _fields_ = [
        ("devices", c_void_p), ("overrides", c_void_p), ("gpu_layers", c_int32), ("split", c_int32), ("load", c_int32),
        ("lazy", c_int32), ("main_gpu", c_int32), ("tensor_split", c_void_p), ("progress", c_void_p),
        ("progress_data", c_void_p), ("pairs", c_void_p), ("vocabulary_only", c_bool), ("check_tensors", c_bool),
        ("repack", c_bool), ("no_host", c_bool), ("no_alloc", c_bool), ("load_mtp", c_bool),
    ]  # fmt: skip


class ContextSettings(ctypes.Structure):
    """llama_context_params."""

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
    """llama_model_quantize_params."""

    _fields_ = [
        ("threads", c_int32), ("file_type", c_int32), ("output_type", c_int32), ("embedding_type", c_int32),
        ("allow_requantize", c_bool), ("output", c_bool), ("only_copy", c_bool), ("pure", c_bool),
        ("keep_split", c_bool), ("dry_run", c_bool), ("importance", c_void_p), ("pairs", c_void_p),
        ("overrides", c_void_p), ("prune", c_void_p), ("buffer", c_size_t),
    ]  # fmt: skip


class Batch(ctypes.Structure):
    """llama_batch."""

    _fields_ = [
        ("count", c_int32), ("tokens", POINTER(c_int32)), ("embeddings", c_void_p), ("positions", POINTER(c_int32)),
        ("sequence_counts", POINTER(c_int32)), ("sequences", POINTER(POINTER(c_int32))),
        ("has_logits", POINTER(c_int8)),
    ]  # fmt: skip


LOG_LEVEL_ERROR = 4
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
    """The loaded library, and the first error that it logged."""

    def __init__(self) -> None:
        path = find_library()
        if path is None:
            raise SystemExit(
                f"llama.cpp is not installed: no {LIBRARY_NAME} in {os.environ.get(FOLDER_VARIABLE) or DEFAULT_FOLDER}"
            )
        base = ctypes.CDLL(str(path.parent / f"libggml.v{RELEASE}.so"), mode=ctypes.RTLD_GLOBAL)
        self.calls = ctypes.CDLL(str(path))
        for name, (result_type, argument_types) in CALLS.items():
            call = getattr(self.calls, name)
            call.restype, call.argtypes = result_type, argument_types
        self.first_error = ""
        self.logger = LOGGER(self._log)  # an attribute, so that it is not garbage collected while the library uses it
        self.calls.llama_log_set(self.logger, None)
        release = self.calls.llama_version().decode()
        if RELEASE not in release:
            raise SystemExit(f"{path} is llama.cpp {release}: scalepoint needs llama.cpp {RELEASE}")
        base.ggml_backend_load_all_from_path.argtypes = [c_char_p]
        base.ggml_backend_load_all_from_path(str(path.parent).encode())
        self.calls.llama_backend_init()

    def _log(self, level: int, text: bytes, _: Any) -> None:
        if level == LOG_LEVEL_ERROR and text.strip() and not self.first_error:
            self.first_error = text.decode(errors="replace").strip()

    def quantize(self, source: str, path: str, file_type: str) -> None:
        """Convert a file to another type with llama.cpp's own quantizer. "F32" dequantizes all weights."""
        settings = self.calls.llama_model_quantize_default_params()
        settings.threads, settings.file_type, settings.allow_requantize = 1, FILE_TYPES[file_type], file_type == "F32"
        if self.calls.llama_model_quantize(source.encode(), path.encode(), ctypes.byref(settings)):
            raise self.build_error(f"cannot convert {source} to {file_type}")

    def build_error(self, problem: str) -> SystemExit:
        """Return an exception that ends this program with the problem and the first error of the library."""
        return SystemExit(f"llama.cpp {problem}{': ' + self.first_error if self.first_error else ''}")


class File:
    """A loaded file. Options: threads (0: all cores), cache ("f16", "f32", "int8" or "int4"), exact.

    The kernels of llama.cpp round the inputs of layers with quantized weights to 8 bits. With "exact" the weights are
    first converted to float32. Then inputs, keys and values stay float.
    """

    def __init__(self, path: str, options: dict[str, Any]) -> None:
        self.inputs, self.options = ["input_ids"], options
        self.llama = Llama()
        self.calls = self.llama.calls
        settings = self.calls.llama_model_default_params()
        settings.gpu_layers = 0
        with tempfile.TemporaryDirectory(prefix="scalepoint-") as folder:
            model_path = path
            if options.get("exact"):
                model_path = f"{folder}/exact.gguf"
                self.llama.quantize(path, model_path, "F32")
            self.model = self.calls.llama_model_load_from_file(model_path.encode(), settings)
        if not self.model:
            raise self.llama.build_error(f"cannot load {path}")
        self.vocabulary_size: int = self.calls.llama_vocab_n_tokens(self.calls.llama_model_get_vocab(self.model))
        self.context, self.context_length = None, 0

    def run(self, feeds: dict[str, np.ndarray]) -> list[tuple[str, np.ndarray]]:
        """Compute the logits of every token: (sequences, tokens) -> (sequences, tokens, vocabulary)."""
        sequences = np.atleast_2d(feeds["input_ids"])
        self._ensure_context(sequences.shape[1])
        logits = np.empty((*sequences.shape, self.vocabulary_size), np.float32)
        for tokens, output in zip(sequences, logits, strict=True):
            self._clear_cache()
            self._decode(tokens.tolist(), 0, output)
        return [("logits", logits)]

    def generate(self, tokens: list[int], count: int) -> dict[str, Any]:
        """Generate `count` tokens greedily. Return them with the seconds for the prompt and for the generation."""
        self._ensure_context(len(tokens) + count)
        self._clear_cache()
        logits = np.empty((1, self.vocabulary_size), np.float32)
        start = time.perf_counter()
        self._decode(tokens, 0, logits)
        prefill_end = time.perf_counter()
        generated = [int(logits[0].argmax())]
        while len(generated) < count:
            self._decode(generated[-1:], len(tokens) + len(generated) - 1, logits)
            generated.append(int(logits[0].argmax()))
        end = time.perf_counter()
        return {"tokens": generated, "prefill_seconds": prefill_end - start, "decode_seconds": end - prefill_end}

    def tokens(self, text: str) -> list[int]:
        """Tokenize a text with the tokenizer of llama.cpp, without special tokens at the beginning or end."""
        vocabulary, data = self.calls.llama_model_get_vocab(self.model), text.encode()
        buffer = (c_int32 * (len(data) + 8))()
        count = self.calls.llama_tokenize(vocabulary, data, len(data), buffer, len(buffer), False, False)
        return list(buffer[:count])

    def executed(self) -> list[dict[str, Any]]:
        """Return [] because the C interface does not list operations."""
        return []

    def _ensure_context(self, length: int) -> None:
        """Create a context for at least `length` tokens, if the current one is shorter."""
        if self.context and length <= self.context_length:
            return
        if self.context:
            self.calls.llama_free(self.context)
        settings = self.calls.llama_context_default_params()
        threads = self.options.get("threads") or os.cpu_count() or 1
        settings.context = settings.batch = length
        settings.micro_batch = min(512, settings.batch)
        settings.threads = settings.threads_batch = threads
        cache = self.options.get("cache") or ("f32" if self.options.get("exact") else "f16")
        settings.type_k = settings.type_v = CACHE_TYPES[cache]
        settings.flash = int(cache.startswith("int"))  # only flash attention supports quantized values in the cache
        settings.full_window, settings.no_perf = True, True
        self.context, self.context_length = self.calls.llama_init_from_model(self.model, settings), length
        if not self.context:
            raise self.llama.build_error(f"cannot create a context of {length} tokens")

    def _clear_cache(self) -> None:
        self.calls.llama_memory_clear(self.calls.llama_get_memory(self.context), True)

    def _decode(self, tokens: list[int], position: int, logits: np.ndarray) -> None:
        """Run tokens that begin at `position`, and write the logits of the last len(logits) tokens into `logits`."""
        count, skipped = len(tokens), len(tokens) - len(logits)
        batch = self.calls.llama_batch_init(count, 0, 1)
        batch.count = count
        for index, token in enumerate(tokens):
            batch.tokens[index], batch.positions[index] = token, position + index
            batch.sequence_counts[index], batch.sequences[index][0] = 1, 0
            batch.has_logits[index] = index >= skipped
        code = self.calls.llama_decode(self.context, batch)
        self.calls.llama_batch_free(batch)
        if code:
            raise self.llama.build_error(f"cannot run {count} tokens (code {code})")
        for index in range(skipped, count):
            row = self.calls.llama_get_logits_ith(self.context, index)
            logits[index - skipped] = np.ctypeslib.as_array(row, (self.vocabulary_size,))
