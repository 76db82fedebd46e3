"""A quantized checkpoint as one GGUF file: what it is, its tokenizer, its tensors one after another."""

import re
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from scalepoint.checkpoints import QuantizedCheckpoint, Source
from scalepoint.errors import ExportError, install_hint
from scalepoint.formats.gguf.architectures import find_architecture
from scalepoint.formats.gguf.metadata import add_metadata
from scalepoint.formats.gguf.tensors import TensorEntry, list_entries
from scalepoint.formats.gguf.tokenizer import add_tokenizer, read_vocabulary, vocabulary_size
from scalepoint.numerics import get_format
from scalepoint.spec import QuantizationFormulation, QuantizationSpec
from scalepoint.support.files import replace_file

FILE_TYPES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K": 12, "Q4_K": 15,
    "Q5_K": 17, "Q6_K": 18, "BF16": 32,
}  # fmt: skip

PHI3 = re.compile("phi-?3", re.IGNORECASE)
PHI3_TOKENS = ("</s>", "<unk>", "<s>", "<|endoftext|>")


def check(source: Source, weight: QuantizationSpec | None, activation: QuantizationSpec | None) -> None:
    """Refuse before any work what a GGUF file cannot hold."""
    _check_installed()
    find_architecture(source.config)
    read_vocabulary(source.folder, vocabulary_size(source.config))
    if activation is not None:
        raise ExportError(
            "GGUF holds weights alone: llama.cpp rounds activations to 8 bits by itself; leave activations float"
        )
    if weight is None:
        return
    row = get_format(weight.dtype)
    if row.is_float or row.bits > 8 or (row.low == 0 and row.bits > 5):
        raise ExportError(f"GGUF cannot hold weights of {row.name}: take int2 to int8, or uint2 to uint5")
    if weight.qformulation == QuantizationFormulation.MINVAL and row.bits > 5:
        raise ExportError(
            f"GGUF cannot hold weights of {row.name} with a minimum: take 2 to 5 bits, or qformulation='zp'"
        )


def can_quantize(source: Source, name: str) -> bool:
    """Rows of whole blocks; not what llama.cpp adds, or routes by."""
    shape = source.tensors[name].shape
    layer = name.rpartition(".")[0].rpartition(".")[2]
    is_turned = layer in find_architecture(source.config).transposed
    is_kept = layer in ("wpe", "gate", "shared_expert_gate")
    return len(shape) == 2 and not is_kept and shape[0 if is_turned else 1] % 32 == 0


def tensor_bytes(path: Path) -> int:
    """Bytes of all tensors in a file, without metadata and tokenizer."""
    from gguf import GGUFReader  # noqa: PLC0415  # an extra

    return sum(int(tensor.n_bytes) for tensor in GGUFReader(path).tensors)


def write(checkpoint: QuantizedCheckpoint, path: Path) -> None:
    """The file, whole or not at all."""
    check(checkpoint.source, None, None)
    found = list_entries(checkpoint)
    replace_file(path, lambda temporary: _write_entries(checkpoint, found, temporary))


def _write_entries(checkpoint: QuantizedCheckpoint, found: list[TensorEntry], path: Path) -> None:
    from gguf import GGML_QUANT_VERSION, MODEL_ARCH, MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter  # noqa: PLC0415

    source, architecture = checkpoint.source, find_architecture(checkpoint.source.config)
    writer: Any = GGUFWriter(None, MODEL_ARCH_NAMES[MODEL_ARCH[architecture.name]])
    writer.add_type("model")
    writer.add_name(_model_name(source))
    writer.add_file_type(FILE_TYPES[_most_common_type(found)])
    writer.add_quantization_version(GGML_QUANT_VERSION)
    add_metadata(writer, source.config, architecture)
    add_tokenizer(writer, source.folder, source.config)
    for each in found:
        kind = GGMLQuantizationType[each.type]
        writer.add_tensor_info(each.name, each.shape, np.dtype(np.float32), _entry_bytes(each), raw_dtype=kind)
    try:
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for each in found:
            writer.write_tensor_data(np.ascontiguousarray(each.make()))
    finally:
        writer.close()


def _model_name(source: Source) -> str:
    """The folder's name, without a word that llama.cpp takes for more than a name.

    Where general.name holds "phi3" or "phi-3", llama.cpp (release 0.5.0) changes the attributes of four tokens, and
    does not load a file that lacks one of them.
    """
    name = source.folder.resolve().name
    if PHI3.search(name) and not set(PHI3_TOKENS) <= set(
        read_vocabulary(source.folder, vocabulary_size(source.config)).texts
    ):
        return PHI3.sub("phi 3", name)
    return name


def _entry_bytes(entry: TensorEntry) -> int:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType  # noqa: PLC0415

    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[entry.type]]
    return int(np.prod(entry.shape)) // int(block) * int(size)


def _most_common_type(found: list[TensorEntry]) -> str:
    """The type of most values."""
    counts: Counter[str] = Counter()
    for each in found:
        counts[each.type] += int(np.prod(each.shape))
    return counts.most_common(1)[0][0]


def _check_installed() -> None:
    if find_spec("gguf") is None:
        raise ExportError(f"writing GGUF files needs the package gguf: {install_hint('gguf')}")
