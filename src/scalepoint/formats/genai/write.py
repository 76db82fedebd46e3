"""The folder that ONNX Runtime GenAI loads: model.onnx with its data, genai_config.json, the tokenizer's files."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scalepoint.checkpoints import CacheScales, QuantizedCheckpoint, Source
from scalepoint.errors import DocumentError, ExportError
from scalepoint.formats.genai.decoder import Decoder
from scalepoint.formats.genai.families import describe_decoder
from scalepoint.formats.genai.graph import MICROSOFT, GraphBuilder
from scalepoint.formats.genai.initializers import InitializerFile
from scalepoint.formats.genai.network import PAST, PRESENT, NetworkWriter
from scalepoint.support.files import replace_folder
from scalepoint.support.untrusted import LARGEST_PROTOBUF, read_bytes, read_json
from scalepoint.version import __version__

MODEL, DATA, CONFIG = "model.onnx", "model.onnx.data", "genai_config.json"
OPSET, MICROSOFT_OPSET, IR = 23, 1, 11
DEFAULT_CONTEXT = 4096  # tokens that memory is taken for by default: a program asks for more with max_length
KNOWN_MODEL_TYPES = (
    "gemma",
    "gemma2",
    "gemma3_text",
    "llama",
    "mistral",
    "olmo",
    "phi",
    "phi3",
    "qwen2",
    "qwen3",
)  # to the runtime


def write(checkpoint: QuantizedCheckpoint, path: Path) -> None:
    """The whole folder or nothing; a tensor of the checkpoint in memory at a time."""
    decoder = describe_decoder(checkpoint.source.config)
    replace_folder(path, lambda folder: _write_folder(checkpoint, decoder, folder))


def tensor_bytes(path: Path) -> int:
    """Bytes of all tensors of a folder's graph, those in its data file included."""
    import onnx  # noqa: PLC0415

    total = 0
    for tensor in onnx.load_from_string(read_bytes(path / MODEL, LARGEST_PROTOBUF)).graph.initializer:
        stored = {entry.key: entry.value for entry in tensor.external_data}
        total += int(stored["length"]) if "length" in stored else len(tensor.raw_data)
    return total


def _write_folder(checkpoint: QuantizedCheckpoint, decoder: Decoder, folder: Path) -> None:
    with InitializerFile(folder / DATA) as store:
        graph = GraphBuilder(checkpoint, store)
        NetworkWriter(graph, decoder).write()
    _save_graph(graph, decoder, folder / MODEL, checkpoint.cache)
    config = build_genai_config(decoder, _read_generation_config(checkpoint.source))
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    for each in checkpoint.source.tokenizer_files:
        shutil.copyfile(each, folder / each.name)


def _save_graph(graph: GraphBuilder, decoder: Decoder, path: Path, cache: CacheScales | None) -> None:
    import onnx  # noqa: PLC0415  # only an export needs it
    from onnx import helper  # noqa: PLC0415

    inputs, outputs = _declare_interface(decoder, cache)
    made = helper.make_graph(graph.nodes, decoder.kind, inputs, outputs, list(graph.store.tensors.values()))
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, MICROSOFT_OPSET)]
    model = helper.make_model(made, opset_imports=opsets, ir_version=IR, producer_name="scalepoint")
    model.producer_version = __version__
    path.write_bytes(model.SerializeToString(deterministic=True))
    try:
        onnx.checker.check_model(str(path))
    except onnx.checker.ValidationError as error:
        raise ExportError(f"the graph is not sound: {error}") from error


def _declare_interface(decoder: Decoder, cache: CacheScales | None) -> tuple[list[Any], list[Any]]:
    from onnx import TensorProto, helper  # noqa: PLC0415

    bits = 32 if cache is None else cache.bits
    kind = {32: TensorProto.FLOAT, 8: TensorProto.INT8, 4: TensorProto.UINT8}[bits]
    channels = decoder.head // 2 if bits == 4 else decoder.head  # two codes a byte

    words = ["batch_size", "sequence_length"]
    inputs = [helper.make_tensor_value_info("input_ids", TensorProto.INT64, words)]
    total = ["batch_size", "total_sequence_length"]
    inputs.append(helper.make_tensor_value_info("attention_mask", TensorProto.INT64, total))
    if decoder.names.positions:
        inputs.append(helper.make_tensor_value_info("position_ids", TensorProto.INT64, words))
    logits: list[str | int] = ["batch_size", "logits_length", decoder.vocabulary]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, logits)]
    for block in range(len(decoder.blocks)):
        for part in ("key", "value"):
            for pattern, listed, length in ((PAST, inputs, "past"), (PRESENT, outputs, "total")):
                shape: list[str | int] = ["batch_size", decoder.groups, f"{length}_sequence_length", channels]
                name = pattern.format(block=block, part=part)
                listed.append(helper.make_tensor_value_info(name, kind, shape))
    return inputs, outputs


def build_genai_config(decoder: Decoder, generation: Mapping[str, Any]) -> dict[str, Any]:
    """What the runtime must know of the graph, and how it searches unless it is told otherwise: greedily."""
    given = {"input_ids": "input_ids", "attention_mask": "attention_mask"}
    if decoder.names.positions:
        given["position_ids"] = "position_ids"
    past = {f"past_{part}_names": PAST.format(block="%d", part=part) for part in ("key", "value")}
    present = {f"present_{part}_names": PRESENT.format(block="%d", part=part) for part in ("key", "value")}
    ends = generation.get("eos_token_id")
    first = ends[0] if isinstance(ends, list) else ends
    tokens = {
        "bos_token_id": generation.get("bos_token_id"),
        "eos_token_id": ends,
        "pad_token_id": generation.get("pad_token_id", first),
    }
    return {
        "model": {
            "type": decoder.kind if decoder.kind in KNOWN_MODEL_TYPES else "decoder",
            **{key: value for key, value in tokens.items() if value is not None},
            "vocab_size": decoder.vocabulary,
            "context_length": decoder.context,
            "decoder": {
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
                "filename": MODEL,
                "head_size": decoder.head,
                "hidden_size": decoder.hidden,
                "num_attention_heads": decoder.heads,
                "num_key_value_heads": decoder.groups,
                "num_hidden_layers": len(decoder.blocks),
                "inputs": given | past,
                "outputs": {"logits": "logits"} | present,
            },
        },
        "search": {
            "do_sample": False,
            "max_length": min(decoder.context, DEFAULT_CONTEXT),
            "min_length": 0,
            "num_beams": 1,
            "past_present_share_buffer": True,
            "repetition_penalty": 1.0,
            "temperature": 1.0,
            "top_k": 1,
            "top_p": 1.0,
        },
    }


def _read_generation_config(source: Source) -> dict[str, Any]:
    """Tokens that begin, end and fill: generation_config.json knows best, then config.json."""
    found = {key: source.config.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    path = source.folder / "generation_config.json"
    try:
        told = read_json(path, folder=source.folder) if path.is_file() else {}
    except (OSError, DocumentError):
        told = {}
    told = told if isinstance(told, dict) else {}
    return {key: told.get(key, value) for key, value in found.items() if told.get(key, value) is not None}
