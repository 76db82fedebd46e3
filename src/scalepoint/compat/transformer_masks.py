"""Keeps nn.TransformerEncoder and nn.TransformerDecoder from reading the values of a mask while they are traced.

With is_causal=None they (torch 2.13) compare the mask with the causal one. A trace has no values. The result is only a
hint for kernels, so the mask is treated as not causal unless the caller passes is_causal=True.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.nn.modules import transformer

from scalepoint.compat import attribute_replaced, patches_enabled

HINTS = {nn.TransformerEncoder: "is_causal", nn.TransformerDecoder: "tgt_is_causal"}  # parameters of `forward`


@contextmanager
def mask_values_unread(model: Any) -> Iterator[None]:
    """Inside this context, these modules read no mask. The fallback finds them among the submodules of `model`."""
    with ExitStack() as stack:
        if patches_enabled():
            stack.enter_context(attribute_replaced(transformer, "_detect_is_causal_mask", _is_causal_if_passed))
        elif isinstance(model, nn.Module):
            for module in model.modules():
                hint = next((name for kind, name in HINTS.items() if isinstance(module, kind)), None)
                if hint is not None and hint in inspect.signature(module.forward).parameters:
                    hook = module.register_forward_pre_hook(_make_hook(hint), with_kwargs=True)
                    stack.callback(hook.remove)
        yield


def _is_causal_if_passed(mask: Any, is_causal: bool | None = None, size: Any = None) -> bool:
    """Replace torch's function of the same parameters, which reads the mask if is_causal is None."""
    return is_causal is True


def _make_hook(hint: str) -> Callable[..., Any]:
    def set_hint(module: nn.Module, args: Any, kwargs: Any) -> Any:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
        bound.arguments[hint] = bound.arguments.get(hint) is True
        return bound.args, bound.kwargs

    return set_hint
