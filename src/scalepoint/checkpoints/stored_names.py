"""Maps the parameter names of a model to the names in its checkpoint.

    model.layers.0.mlp.experts.3.gate_proj.weight   ->   model.layers.0.block_sparse_moe.experts.3.w1.weight   (Mixtral)

transformers has renamed modules over the years, and loads old checkpoints by a list of conversions. Renamings are
applied as they are. Conversions that stack the layers of all experts are not applied, because `split_experts` makes one
module of each expert; only their names of the layers are used.
"""

from collections.abc import Iterable
from typing import Any

from torch import nn

from scalepoint.checkpoints.source import Source

# Parameter of a stack of experts in transformers -> names of the layers that `split_experts` makes of it
STACKED_PARTS = {".experts.gate_up_proj": ("gate_proj", "up_proj"), ".experts.down_proj": ("down_proj",)}


def map_stored_names(model: nn.Module, source: Source) -> dict[str, str]:
    """Return the name in the checkpoint of each parameter and buffer of a model."""
    same_names = {name: name for name in source.tensors}
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping  # noqa: PLC0415
        from transformers.core_model_loading import WeightRenaming, rename_source_key  # noqa: PLC0415
    except ImportError:
        return same_names
    conversions = get_model_conversion_mapping(model)  # type: ignore[arg-type]
    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    expert_layers = _map_expert_layers(conversions)
    state, prefix = model.state_dict(), str(getattr(model, "base_model_prefix", ""))
    names = {}
    for stored_name in source.tensors:
        name = rename_source_key(stored_name, renamings, [], prefix, state)[0]
        path, _, layer = name.removesuffix(".weight").rpartition(".")
        if ".experts." in name and layer in expert_layers:
            name = f"{path}.{expert_layers[layer]}.weight"
        names[name] = stored_name
    return names | {name: name for name in same_names if name in state}


def _map_expert_layers(conversions: Iterable[Any]) -> dict[str, str]:
    """Map an expert's layer names in the checkpoint to those of `split_experts`, such as Mixtral's w1 to gate_proj."""
    layers: dict[str, str] = {}
    for conversion in conversions:
        stored_layers = [  # w1 for the pattern .experts.*.w1.weight
            pattern.removesuffix(".weight").rpartition(".")[2] for pattern in conversion.source_patterns
        ]
        for suffix, split_layers in STACKED_PARTS.items():
            if any(str(target).endswith(suffix) for target in conversion.target_patterns):
                layers.update(zip(stored_layers, split_layers, strict=False))
    return layers
