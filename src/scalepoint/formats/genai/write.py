"""Write the folder that ONNX Runtime GenAI loads: model.onnx with its data, genai_config.json, tokenizer files."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scalepoint.checkpoints import CacheScales, QuantizedCheckpoint, Source
from scalepoint.errors import DocumentError, ExportError
from scalepoint.formats.genai.decoder import Decoder
from scalepoint.formats.genai.families import describe_decoder
from scalepoint.formats.genai.graph import MICROSOFT_DOMAIN, GraphBuilder
from scalepoint.formats.genai.initializers import InitializerFile
from scalepoint.formats.genai.network import PAST, PRESENT, NetworkWriter
from scalepoint.support.files import replace_folder
from scalepoint.support.untrusted import LARGEST_PROTOBUF, read_bytes, read_json
from scalepoint.version import __version__

MODEL_FILE, DATA_FILE, CONFIG_FILE = "model.onnx", "model.onnx.data", "genai_config.json"
OPSET, MICROSOFT_OPSET, IR_VERSION = 23, 1, 11
DEFAULT_MAX_LENGTH = 4096  # tokens that the runtime allocates its cache for, unless a program sets max_length
RUNTIME_MODEL_TYPES = (  # ONNX Runtime GenAI runs other types as "decoder"
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
)


def write(checkpoint: QuantizedCheckpoint, path: Path) -> None:
    """Write the folder, with one tensor of the checkpoint in memory at a time."""
    decoder = describe_decoder(checkpoint.source.config)
    replace_folder(path, lambda folder: _write_folder(checkpoint, decoder, folder))


def tensor_bytes(path: Path) -> int:
    """Return the size in bytes of all initializers, including those in the data file."""
    import onnx  # noqa: PLC0415

    total = 0
    for tensor in onnx.load_from_string(read_bytes(path / MODEL_FILE, LARGEST_PROTOBUF)).graph.initializer:
        external = {entry.key: entry.value for entry in tensor.external_data}
        total += int(external["length"]) if "length" in external else len(tensor.raw_data)
    return total


def _write_folder(checkpoint: QuantizedCheckpoint, decoder: Decoder, folder: Path) -> None:
    with InitializerFile(folder / DATA_FILE) as initializers:
        graph = GraphBuilder(checkpoint, initializers)
        NetworkWriter(graph, decoder).write()
    _save_graph(graph, decoder, folder / MODEL_FILE, checkpoint.cache)
    config = build_genai_config(decoder, _read_generation_config(checkpoint.source))
    (folder / CONFIG_FILE).write_bytes(json.dumps(config, indent=2).encode() + b"\n")
    for file in checkpoint.source.tokenizer_files:
        shutil.copyfile(file, folder / file.name)


def _save_graph(builder: GraphBuilder, decoder: Decoder, path: Path, cache: CacheScales | None) -> None:
    import onnx  # noqa: PLC0415  # only an export needs it
    from onnx import helper  # noqa: PLC0415

    inputs, outputs = _declare_interface(decoder, cache)
    initializers = list(builder.initializers.tensors.values())
    graph = helper.make_graph(builder.nodes, decoder.model_type, inputs, outputs, initializers)
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT_DOMAIN, MICROSOFT_OPSET)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="scalepoint")
    model.producer_version = __version__
    path.write_bytes(model.SerializeToString(deterministic=True))
    try:
        onnx.checker.check_model(str(path))
    except onnx.checker.ValidationError as error:
        raise ExportError(f"onnx.checker rejects the graph: {error}") from error


def _declare_interface(decoder: Decoder, cache: CacheScales | None) -> tuple[list[Any], list[Any]]:
    from onnx import TensorProto, helper  # noqa: PLC0415

    cache_bits = 32 if cache is None else cache.bits
    cache_dtype = {32: TensorProto.FLOAT, 8: TensorProto.INT8, 4: TensorProto.UINT8}[cache_bits]
    channels = decoder.head_size // 2 if cache_bits == 4 else decoder.head_size  # a byte holds two 4-bit codes

    token_shape = ["batch_size", "sequence_length"]
    mask_shape = ["batch_size", "total_sequence_length"]
    logits_shape: list[str | int] = ["batch_size", "logits_length", decoder.vocabulary_size]
    past_shape: list[str | int] = ["batch_size", decoder.kv_head_count, "past_sequence_length", channels]
    present_shape: list[str | int] = ["batch_size", decoder.kv_head_count, "total_sequence_length", channels]

    inputs = [
        helper.make_tensor_value_info("input_ids", TensorProto.INT64, token_shape),
        helper.make_tensor_value_info("attention_mask", TensorProto.INT64, mask_shape),
    ]
    if decoder.names.positions:
        inputs.append(helper.make_tensor_value_info("position_ids", TensorProto.INT64, token_shape))
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, logits_shape)]
    for block in range(len(decoder.blocks)):
        for part in ("key", "value"):
            past, present = PAST.format(block=block, part=part), PRESENT.format(block=block, part=part)
            inputs.append(helper.make_tensor_value_info(past, cache_dtype, past_shape))
            outputs.append(helper.make_tensor_value_info(present, cache_dtype, present_shape))
    return inputs, outputs


def build_genai_config(decoder: Decoder, generation: Mapping[str, Any]) -> dict[str, Any]:
    """Build genai_config.json: names and sizes of the graph, special tokens, and greedy search as the default."""
    inputs = {"input_ids": "input_ids", "attention_mask": "attention_mask"}
    if decoder.names.positions:
        inputs["position_ids"] = "position_ids"
    past = {f"past_{part}_names": PAST.format(block="%d", part=part) for part in ("key", "value")}
    present = {f"present_{part}_names": PRESENT.format(block="%d", part=part) for part in ("key", "value")}
    end_tokens = generation.get("eos_token_id")
    first_end_token = end_tokens[0] if isinstance(end_tokens, list) else end_tokens
    tokens = {
        "bos_token_id": generation.get("bos_token_id"),
        "eos_token_id": end_tokens,
        "pad_token_id": generation.get("pad_token_id", first_end_token),
    }
    return {
        "model": {
            "type": decoder.model_type if decoder.model_type in RUNTIME_MODEL_TYPES else "decoder",
            **{key: value for key, value in tokens.items() if value is not None},
            "vocab_size": decoder.vocabulary_size,
            "context_length": decoder.context_length,
            "decoder": {
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
                "filename": MODEL_FILE,
                "head_size": decoder.head_size,
                "hidden_size": decoder.hidden_size,
                "num_attention_heads": decoder.head_count,
                "num_key_value_heads": decoder.kv_head_count,
                "num_hidden_layers": len(decoder.blocks),
                "inputs": inputs | past,
                "outputs": {"logits": "logits"} | present,
            },
        },
        "search": {
            "do_sample": False,
            "max_length": min(decoder.context_length, DEFAULT_MAX_LENGTH),
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
    """Read the special tokens from generation_config.json, or else from config.json."""
    path = source.folder / "generation_config.json"
    try:
        document = read_json(path, folder=source.folder) if path.is_file() else {}
    except (OSError, DocumentError):  # the file is optional
        document = {}
    if not isinstance(document, dict):
        document = {}
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    tokens = {key: document.get(key, source.config.get(key)) for key in keys}
    return {key: token for key, token in tokens.items() if token is not None}
