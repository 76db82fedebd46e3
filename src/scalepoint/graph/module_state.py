"""Context managers that change modes, attributes and configs of modules and restore them."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from scalepoint.compat.torch_names import is_fake, pytree
from scalepoint.compat.transformer_masks import mask_values_unread


@contextmanager
def eval_mode(model: Any) -> Iterator[None]:
    """Put all modules in eval mode, and restore the mode of each. A value that is not a module is left alone."""
    modes = [(module, module.training) for module in model.modules()] if isinstance(model, nn.Module) else []
    for module, _ in modes:
        module.training = False  # not module.eval(): that recomputes the scales of quantized layers
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def restore_attributes(model: nn.Module) -> Iterator[None]:
    """Undo what a traced forward stores in attributes and buffers of modules.

    A trace leaves fake tensors and symbolic sizes, which have no values. In a module that has some, or new buffers, all
    attributes are restored, so that flags such as "is_built" are consistent with them.
    """
    before = {module: (_copy_extra_attributes(module), dict(module._buffers)) for module in model.modules()}
    try:
        yield
    finally:
        for module, (attributes, buffers) in before.items():
            has_new_buffers = module._buffers.keys() != buffers.keys()
            values = (*_extra_attributes(module).values(), *module._buffers.values())
            if has_new_buffers or any(map(_is_traced, values)):
                for name in _extra_attributes(module).keys() - attributes.keys():
                    delattr(module, name)
                vars(module).update(attributes)
                module._buffers.clear()
                module._buffers.update(buffers)


def _extra_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that a plain nn.Module does not have."""
    return {name: value for name, value in vars(module).items() if name not in _MODULE_ATTRIBUTES}


def _copy_extra_attributes(module: nn.Module) -> dict[str, Any]:
    attributes = _extra_attributes(module)
    for name, value in attributes.items():
        if type(value) in (dict, list):
            attributes[name] = copy(value)
    return attributes


def _is_traced(value: Any) -> bool:
    is_nested = isinstance(value, dict | list | tuple)
    leaves = pytree.tree_leaves(value) if is_nested else (value,)
    symbolic_types = (torch.SymInt, torch.SymFloat, torch.SymBool)
    return any(isinstance(leaf, symbolic_types) or (isinstance(leaf, Tensor) and is_fake(leaf)) for leaf in leaves)


@contextmanager
def cache_disabled(model: Any) -> Iterator[None]:
    """Set `use_cache` to False in all configs of a transformers model, so that it returns no keys and values."""
    configs = {
        id(config): config for module in _modules(model) for config in _configs_with_cache(vars(module).get("config"))
    }
    changed_configs = [config for config in configs.values() if config.use_cache is True]
    for config in changed_configs:
        config.use_cache = False
    try:
        yield
    finally:
        for config in changed_configs:
            config.use_cache = True


def _modules(model: Any) -> Iterator[nn.Module]:
    return model.modules() if isinstance(model, nn.Module) else iter(())


def _configs_with_cache(config: Any, depth: int = 3) -> Iterator[Any]:
    """Yield a config and its nested configs (decoder, text part) that have the setting `use_cache`."""
    if isinstance(getattr(config, "use_cache", None), bool):
        yield config
    if depth and hasattr(config, "__dict__"):
        for name, value in vars(config).items():
            if name.endswith("config") or name in ("encoder", "decoder"):
                yield from _configs_with_cache(value, depth - 1)


@contextmanager
def fused_attention_disabled(model: Any) -> Iterator[None]:
    """Inside this context, encoder layers do not run as one operation (aten._transformer_encoder_layer_fwd)."""
    was_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with mask_values_unread(model):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_enabled)


_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
