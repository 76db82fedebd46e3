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
            is_causal = lambda mask, is_causal=None, size=None: is_causal is True  # noqa: E731
            stack.enter_context(attribute_replaced(transformer, "_detect_is_causal_mask", is_causal))
        else:
            for module in model.modules() if isinstance(model, nn.Module) else ():
                hints = [hint for kind, hint in HINTS.items() if isinstance(module, kind)]
                if hints and hints[0] in inspect.signature(module.forward).parameters:
                    hook = module.register_forward_pre_hook(_make_hook(hints[0]), with_kwargs=True)
                    stack.callback(hook.remove)
        yield


def _make_hook(hint: str) -> Callable[..., Any]:
    def set_hint(module: nn.Module, args: Any, kwargs: Any) -> Any:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
        bound.arguments[hint] = bound.arguments.get(hint) is True
        return bound.args, bound.kwargs

    return set_hint
