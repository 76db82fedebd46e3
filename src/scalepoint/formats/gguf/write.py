"""Write a quantized checkpoint as one GGUF file: metadata, tokenizer, then one tensor after another."""

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

FILE_TYPES = {  # general.file_type by the type of most values
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K": 12, "Q4_K": 15,
    "Q5_K": 17, "Q6_K": 18, "BF16": 32,
}  # fmt: skip

PHI3 = re.compile("phi-?3", re.IGNORECASE)
PHI3_TOKENS = ("</s>", "<unk>", "<s>", "<|endoftext|>")


def check(source: Source, weight: QuantizationSpec | None, activation: QuantizationSpec | None) -> None:
    """Raise ExportError, before any work starts, if GGUF cannot store this model or precision."""
    _check_installed()
    find_architecture(source.config)
    read_vocabulary(source.folder, vocabulary_size(source.config))
    if activation is not None:
        raise ExportError(
            "GGUF cannot store quantized activations, llama.cpp rounds them to 8 bits itself: leave activations float"
        )
    if weight is None:
        return
    number_format = get_format(weight.dtype)
    is_unsigned = number_format.low == 0
    if number_format.is_float or number_format.bits > 8 or (is_unsigned and number_format.bits > 5):
        raise ExportError(f"GGUF cannot store weights of {number_format.name}: use int2 to int8, or uint2 to uint5")
    if weight.qformulation == QuantizationFormulation.MINVAL and number_format.bits > 5:
        raise ExportError(
            f"GGUF cannot store weights of {number_format.name} with a minimum: use 2 to 5 bits, or qformulation='zp'"
        )


def can_quantize(source: Source, name: str) -> bool:
    """Whether llama.cpp multiplies with this weight, and its rows are a multiple of 32 columns.

    Learned positions are added, and routers are float32 in llama.cpp.
    """
    shape = source.tensors[name].shape
    layer = name.rpartition(".")[0].rpartition(".")[2]
    is_transposed = layer in find_architecture(source.config).transposed
    must_be_float = layer in ("wpe", "gate", "shared_expert_gate")
    if len(shape) != 2 or must_be_float:
        return False
    columns = shape[0] if is_transposed else shape[1]
    return columns % 32 == 0


def tensor_bytes(path: Path) -> int:
    """Return the size in bytes of all tensors of a file, without metadata and tokenizer."""
    from gguf import GGUFReader  # noqa: PLC0415  # an extra

    return sum(int(tensor.n_bytes) for tensor in GGUFReader(path).tensors)


def write(checkpoint: QuantizedCheckpoint, path: Path) -> None:
    """Write the file; a failed write leaves nothing behind."""
    check(checkpoint.source, weight=None, activation=None)  # the precision was checked before any work
    entries = list_entries(checkpoint)
    replace_file(path, lambda temporary: _write_entries(checkpoint, entries, temporary))


def _write_entries(checkpoint: QuantizedCheckpoint, entries: list[TensorEntry], path: Path) -> None:
    from gguf import GGML_QUANT_VERSION, MODEL_ARCH, MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter  # noqa: PLC0415

    source, architecture = checkpoint.source, find_architecture(checkpoint.source.config)
    writer: Any = GGUFWriter(None, MODEL_ARCH_NAMES[MODEL_ARCH[architecture.name]])
    writer.add_type("model")
    writer.add_name(_model_name(source))
    writer.add_file_type(FILE_TYPES[_most_common_type(entries)])
    writer.add_quantization_version(GGML_QUANT_VERSION)
    add_metadata(writer, source.config, architecture)
    add_tokenizer(writer, source.folder, source.config)
    for entry in entries:
        raw_dtype = GGMLQuantizationType[entry.type]
        writer.add_tensor_info(entry.name, entry.shape, np.dtype(np.float32), _entry_bytes(entry), raw_dtype=raw_dtype)
    try:
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for entry in entries:
            writer.write_tensor_data(np.ascontiguousarray(entry.compute()))
    finally:
        writer.close()


def _model_name(source: Source) -> str:
    """Return the folder's name as the name of the model.

    If general.name contains "phi3" or "phi-3", llama.cpp (release 0.5.0) changes the attributes of four tokens, and
    does not load a file that lacks one of them. For such a file the name is written with a space.
    """
    name = source.folder.resolve().name
    if not PHI3.search(name):
        return name
    tokens = read_vocabulary(source.folder, vocabulary_size(source.config)).texts
    return name if set(PHI3_TOKENS) <= set(tokens) else PHI3.sub("phi 3", name)


def _entry_bytes(entry: TensorEntry) -> int:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType  # noqa: PLC0415

    values_per_block, bytes_per_block = GGML_QUANT_SIZES[GGMLQuantizationType[entry.type]]
    return int(np.prod(entry.shape)) // int(values_per_block) * int(bytes_per_block)


def _most_common_type(entries: list[TensorEntry]) -> str:
    """Return the type of most values."""
    counts: Counter[str] = Counter()
    for entry in entries:
        counts[entry.type] += int(np.prod(entry.shape))
    return counts.most_common(1)[0][0]


def _check_installed() -> None:
    if find_spec("gguf") is None:
        raise ExportError(f"writing GGUF files needs the package gguf: {install_hint('gguf')}")
