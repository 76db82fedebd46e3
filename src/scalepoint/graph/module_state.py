"""Modes and attributes of modules, borrowed and given back."""

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
    """In eval mode; every module has its own mode back afterwards. What is no module has none."""
    modes = [(each, each.training) for each in model.modules()] if isinstance(model, nn.Module) else []
    for module, _ in modes:
        module.training = False  # by hand: train(False) of a quantized layer also derives its scales anew
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def restore_attributes(model: nn.Module) -> Iterator[None]:
    """A forward that is traced may store tensors and sizes of the trace, which have no values, in attributes and new
    buffers: a module where it did is as before afterwards, also its flags ("is_built") that belong to them."""
    before = {module: (_attributes(module), dict(module._buffers)) for module in model.modules()}
    try:
        yield
    finally:
        for module, (known, buffers) in before.items():
            is_new = module._buffers.keys() != buffers.keys()
            if is_new or any(
                _is_traced(value) for value in (*_extra_attributes(module).values(), *module._buffers.values())
            ):
                for name in _extra_attributes(module).keys() - known.keys():
                    delattr(module, name)
                vars(module).update(known)
                module._buffers.clear()
                module._buffers.update(buffers)


def _extra_attributes(module: nn.Module) -> dict[str, Any]:
    """Its attributes that nn.Module does not know."""
    return {name: value for name, value in vars(module).items() if name not in _MODULE}


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {
        name: copy(value) if type(value) in (dict, list) else value for name, value in _extra_attributes(module).items()
    }


def _is_traced(value: Any) -> bool:
    is_nested = isinstance(value, dict | list | tuple)
    leaves = pytree.tree_leaves(value) if is_nested else (value,)
    sizes = (torch.SymInt, torch.SymFloat, torch.SymBool)
    return any(isinstance(leaf, sizes) or (isinstance(leaf, Tensor) and is_fake(leaf)) for leaf in leaves)


@contextmanager
def cache_disabled(model: Any) -> Iterator[None]:
    """Set `use_cache` to False in all configs of a transformers model: it returns keys and values of earlier tokens
    otherwise."""
    configs = {id(config): config for module in _modules(model) for config in _configs(vars(module).get("config"))}
    on = [config for config in configs.values() if config.use_cache is True]
    for config in on:
        config.use_cache = False
    try:
        yield
    finally:
        for config in on:
            config.use_cache = True


def _modules(model: Any) -> Iterator[nn.Module]:
    return model.modules() if isinstance(model, nn.Module) else iter(())


def _configs(config: Any, depth: int = 3) -> Iterator[Any]:
    """A config, and those inside (of a decoder, of the text part), that say whether there is a cache."""
    if isinstance(getattr(config, "use_cache", None), bool):
        yield config
    if depth and hasattr(config, "__dict__"):
        for name, value in vars(config).items():
            if name.endswith("config") or name in ("encoder", "decoder"):
                yield from _configs(value, depth - 1)


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


_MODULE = frozenset(vars(nn.Module()))
