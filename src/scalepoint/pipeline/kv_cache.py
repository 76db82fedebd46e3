"""Quantized KV cache (keys and values of earlier tokens): the option `cache` of deploy_checkpoint.

    ort-genai           one scale per channel of every head, calibrated and stored in the graph
    gguf                blocks of 32 channels of every token; nothing is stored, it is an option of llama.cpp
    compressed-tensors  float8_e4m3fn, one scale for the keys and one for the values of each layer, stored with them

The quantizers are on the keys and values that attention reads. So the simulation includes their error, and layers that
are tuned later compensate for it.
"""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, fx

from scalepoint.checkpoints import CacheScales, Source
from scalepoint.checkpoints.source import CONFIG
from scalepoint.errors import CaptureError, UsageError
from scalepoint.formats.checkpoint_folder import attention_layers
from scalepoint.numerics import get_format
from scalepoint.patterns.fused import FusedAttention
from scalepoint.quantize import QuantConfig
from scalepoint.quantize.config import Override
from scalepoint.quantize.quantizers import QuantStub
from scalepoint.spec import QuantizationSpec
from scalepoint.support.untrusted import open_tensors
from scalepoint.targets import Target, find_target, list_targets
from scalepoint.targets.language_models import with_cache
from scalepoint.tuning.checkpoint import Checkpoint

ATTENTION_KIND = "attention"  # the type by which the override matches attention layers


def add_cache_quantization(target: Target, config: QuantConfig, cache: str) -> tuple[Target, QuantConfig]:
    """Return target and config with the KV cache quantized to `cache`."""
    if cache not in target.caches:
        supporting = [name for name in list_targets(language=True) if find_target(name).caches]
        hint = f"choose from {', '.join(target.caches)}" if target.caches else f"choose from {', '.join(supporting)}"
        what = "this type of" if target.caches else "a quantized"
        raise UsageError(f"cache={cache!r}: target {target.name!r} does not support {what} KV cache: {hint}")
    override = Override(type=ATTENTION_KIND, input=target.caches[cache])
    return with_cache(target), config.model_copy(update={"overrides": (*config.overrides, override)})


def check_cache_fits(model: fx.GraphModule, source: Source, spec: QuantizationSpec) -> None:
    """Raise an error if the keys and values of some block cannot be quantized. Called before insert_qdq."""
    blocks, recognized = _read_config_number(source, "num_hidden_layers", "n_layer"), len(_attention_nodes(model))
    if recognized != blocks:
        raise CaptureError(
            f"cache=: the attention of {blocks - recognized} of {blocks} blocks is not recognized, so its keys and "
            "values are not known: omit cache="
        )
    if get_format(spec.dtype).is_float and len(attention_layers(source)) != blocks:
        raise UsageError(
            f"cache=: loaders read the scales of keys and values at layers.N.self_attn, and {source.folder} has no "
            "such layers: omit cache="
        )
    heads = _read_config_number(source, "num_attention_heads", "n_head")
    channels = int(source.config.get("head_dim") or _read_config_number(source, "hidden_size", "n_embd") // heads)
    block_shape = getattr(spec.granularity, "block_size", None)
    block_size = int(block_shape[-1]) if isinstance(block_shape, tuple) else 1
    if channels % block_size:
        raise UsageError(f"cache=: heads have {channels} channels, not a multiple of the block size {block_size}")


def check_cache_quantizers(model: fx.GraphModule, spec: QuantizationSpec) -> None:
    """Raise UsageError if the config overrides the precision of some block by name, which has priority over cache=."""
    blocks = len(_attention_nodes(model))
    matching = [pair for pair in _cache_quantizers(model) if all(stub.spec.dtype == spec.dtype for _, stub in pair)]
    if len(matching) != blocks:
        raise UsageError(
            f"cache=: an override by name gives the attention of {blocks - len(matching)} of {blocks} blocks another "
            "precision, and a runtime has one precision for all blocks: remove the override, or omit cache="
        )


def count_key_value_heads(source: Source) -> int:
    """Return the number of heads of keys and values; with grouped queries it is less than that of queries."""
    return int(source.config.get("num_key_value_heads") or _read_config_number(source, "num_attention_heads", "n_head"))


def _read_config_number(source: Source, *names: str) -> int:
    """Return the first of these entries of config.json that is set."""
    value = next((source.config[name] for name in names if source.config.get(name) is not None), None)
    if value is None:
        raise CaptureError(f"cache=: {source.folder / CONFIG} has no {' or '.join(names)}: omit cache=")
    return int(value)


def load_cache_scales(model: fx.GraphModule, tuned: Checkpoint, groups: int) -> CacheScales | None:
    """Return the calibrated scales of keys and values; None if every token gets its own scales at run time."""
    pairs = _cache_quantizers(model)
    if not pairs:
        return None
    _, first_stub = pairs[0][0]
    if first_stub.calculator.always_called:
        return None
    files = {path: file for file, paths in tuned.modules_by_file().items() for path in paths}
    scales = tuple(tuple(_load_scale(files, path, groups) for path, _ in pair) for pair in pairs)
    is_float = get_format(first_stub.spec.dtype).is_float
    return CacheScales(first_stub.spec.n_bits, scales, is_float)  # type: ignore[arg-type]  # scales are pairs


def _load_scale(files: Mapping[str, Path], path: str, groups: int) -> Tensor:
    """Return scales (groups, channels), as heads that share keys share scales; (1, 1) for a single scale."""
    with open_tensors(files[path]) as file:
        scale: Tensor = file.get_tensor(f"{path}|scale").clone()
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    heads, channels = scale.shape[1], scale.shape[-1]
    return scale.reshape(groups, heads // groups, channels)[:, 0].contiguous()


def _cache_quantizers(model: fx.GraphModule) -> list[tuple[tuple[str, QuantStub], tuple[str, QuantStub]]]:
    """Return path and quantizer of the keys, and of the values, of every block."""
    pairs = []
    for node in _attention_nodes(model):
        pair = [(str(source.target), _get_stub(model, source)) for source in node.all_input_nodes[1:3]]
        if len(pair) == 2 and all(stub is not None for _, stub in pair):
            pairs.append((pair[0], pair[1]))
    return pairs  # type: ignore[return-value]  # no stub is None here


def _attention_nodes(model: fx.GraphModule) -> list[fx.Node]:
    nodes = [node for node in model.graph.nodes if node.op == "call_module"]
    return [node for node in nodes if isinstance(model.get_submodule(str(node.target)), FusedAttention)]


def _get_stub(model: fx.GraphModule, node: fx.Node) -> QuantStub | None:
    module = model.get_submodule(str(node.target)) if node.op == "call_module" else None
    return module if isinstance(module, QuantStub) else None
