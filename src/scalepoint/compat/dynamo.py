"""Marks functions for torch.compile without importing it."""

from collections.abc import Callable
from typing import TypeVar

import torch

from scalepoint.compat import patches_enabled

Function = TypeVar("Function", bound=Callable[..., object])


def assume_constant_result(function: Function) -> Function:
    """Let torch.compile run `function` once and treat its result as a constant.

    torch.compiler.assume_constant_result (torch 2.13) sets the same attribute, but imports torch._dynamo, which takes
    as long as importing torch.
    """
    if not patches_enabled():
        return torch.compiler.assume_constant_result(function)  # type: ignore[no-any-return,no-untyped-call]
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
