"""Keys and values of earlier tokens in few bits: `cache=` of deploy_checkpoint.

    ort-genai           a scale a channel of every head, found on the calibration text and stored in the graph
    gguf                blocks of 32 channels of every token: nothing is stored, llama.cpp is told when it starts
    compressed-tensors  float8_e4m3fn, one scale for the keys and one for the values of a block, stored beside them

Quantizers stand on the keys and values that attention reads, so that the simulation sees them, and so does what is
tuned after them.
"""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, fx

from scalepoint.checkpoints import CacheScales as Cache
from scalepoint.checkpoints import Source
from scalepoint.checkpoints.source import CONFIG
from scalepoint.errors import CaptureError, UsageError
from scalepoint.formats.checkpoint_folder import attention_layers
from scalepoint.numerics import get_format
from scalepoint.patterns.fused import FusedAttention
from scalepoint.quantize import QuantConfig
from scalepoint.quantize.config import Override
from scalepoint.quantize.stubs import QuantStub
from scalepoint.spec import QuantizationSpec
from scalepoint.support.untrusted import open_tensors
from scalepoint.targets import Target, find_target, list_targets
from scalepoint.targets.language_models import with_cache
from scalepoint.tuning.checkpoint import Checkpoint

ATTENTION_KIND = "attention"


def add_cache_quantization(target: Target, config: QuantConfig, cache: str) -> tuple[Target, QuantConfig]:
    """Target and config with keys and values kept as asked for."""
    if cache not in target.caches:
        others = [name for name in list_targets(language=True) if find_target(name).caches]
        known = f"its caches are {', '.join(target.caches)}" if target.caches else f"only {', '.join(others)} do"
        raise UsageError(f"cache={cache!r}: target {target.name!r} does not keep keys and values so: {known}")
    override = Override(type=ATTENTION_KIND, input=target.caches[cache])
    return with_cache(target), config.model_copy(update={"overrides": (*config.overrides, override)})


def check_cache_fits(model: fx.GraphModule, source: Source, spec: QuantizationSpec) -> None:
    """Whether the keys and values of every block can be quantized so; asked before quantizers are put in."""
    blocks, found = _read_config_number(source, "num_hidden_layers", "n_layer"), len(_attention_nodes(model))
    if found != blocks:
        raise CaptureError(
            f"cache=: the attention of {blocks - found} of {blocks} blocks is written in a way that hides its keys and "
            "values: leave cache= out"
        )
    if get_format(spec.dtype).is_float and len(attention_layers(source)) != blocks:
        raise UsageError(
            f"cache=: loaders read scales of keys and values at layers.N.self_attn, which {source.folder} has not: "
            "leave cache= out"
        )
    heads = _read_config_number(source, "num_attention_heads", "n_head")
    channels = int(source.config.get("head_dim") or _read_config_number(source, "hidden_size", "n_embd") // heads)
    sizes = getattr(spec.granularity, "block_size", None)
    size = int(sizes[-1]) if isinstance(sizes, tuple) else 1
    if channels % size:
        raise UsageError(f"cache=: heads of {channels} channels are not cut into blocks of {size}")


def check_cache_quantizers(model: fx.GraphModule, spec: QuantizationSpec) -> None:
    """Whether quantizers stand on the keys and values of every block: a name in the config counts more than cache=."""
    blocks = len(_attention_nodes(model))
    fitting = [pair for pair in _cache_quantizers(model) if all(stub.spec.dtype == spec.dtype for _, stub in pair)]
    if len(fitting) != blocks:
        raise UsageError(
            f"cache=: the config gives the attention of {blocks - len(fitting)} of {blocks} blocks another precision "
            "by its name, a runtime has one for all: take that override away, or leave cache= out"
        )


def count_key_value_heads(source: Source) -> int:
    """Heads of keys and values."""
    return int(source.config.get("num_key_value_heads") or _read_config_number(source, "num_attention_heads", "n_head"))


def _read_config_number(source: Source, *names: str) -> int:
    found = next((source.config[name] for name in names if source.config.get(name) is not None), None)
    if found is None:
        raise CaptureError(f"cache=: {source.folder / CONFIG} does not tell {' or '.join(names)}: leave cache= out")
    return int(found)


def load_cache_scales(model: fx.GraphModule, kept: Checkpoint, groups: int) -> Cache | None:
    """The scales that were found, as a format stores them; None where every token has its own."""
    pairs = _cache_quantizers(model)
    if not pairs or pairs[0][0][1].calculator.always_called:
        return None
    files = {place: file for file, places in kept.modules_by_file().items() for place in places}
    scales = tuple(tuple(_load_scale(files, place, groups) for place, _ in pair) for pair in pairs)
    spec = pairs[0][0][1].spec
    return Cache(spec.n_bits, scales, get_format(spec.dtype).is_float)  # type: ignore[arg-type]  # pairs


def _load_scale(files: Mapping[str, Path], place: str, groups: int) -> Tensor:
    """(groups, channels): heads that share keys have the same scales; (1, 1) where there is one for all."""
    with open_tensors(files[place]) as file:
        scale: Tensor = file.get_tensor(f"{place}|scale").clone()
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    heads, channels = scale.shape[1], scale.shape[-1]
    return scale.reshape(groups, heads // groups, channels)[:, 0].contiguous()


def _cache_quantizers(model: fx.GraphModule) -> list[tuple[tuple[str, QuantStub], tuple[str, QuantStub]]]:
    """The quantizers of keys and of values, block after block."""
    found = []
    for node in _attention_nodes(model):
        pair = [(str(each.target), _get_stub(model, each)) for each in node.all_input_nodes[1:3]]
        if len(pair) == 2 and all(stub is not None for _, stub in pair):
            found.append((pair[0], pair[1]))
    return found  # type: ignore[return-value]  # none is None


def _attention_nodes(model: fx.GraphModule) -> list[fx.Node]:
    nodes = [node for node in model.graph.nodes if node.op == "call_module"]
    return [node for node in nodes if isinstance(model.get_submodule(str(node.target)), FusedAttention)]


def _get_stub(model: fx.GraphModule, node: fx.Node) -> QuantStub | None:
    module = model.get_submodule(str(node.target)) if node.op == "call_module" else None
    return module if isinstance(module, QuantStub) else None
