"""Which rule says what a torch function does to packed tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


Rule = Callable[..., Any]
"""``rule(group, *args, **kwargs)``: the arguments of the torch function, packed where they are; a packed result."""

RULES: dict[Any, Rule] = {}


class UnfusableError(Exception):
    """A model cannot be fused; the message says what stands in the way. It is trained by another back-end."""


def register_rule(*functions: Callable[..., Any]) -> Callable[[Rule], Rule]:
    """Registers how torch functions (or your own, see below) act on packed tensors.

    The rule is called as ``rule(group, *args, **kwargs)`` with the function's own arguments; those that differ from trial
    to trial are packed: ``group.first(x)`` gives the plain tensor with the trials as its first dimension, ``group.pack(y)``
    makes a packed result of such a tensor. A function without a rule goes through ``torch.vmap``.
    It serves torch functions and anything that calls ``torch.overrides.handle_torch_function``. A rule that raises
    ``UnfusableError`` sends the model to the concatenated back-end.

    >>> import torch
    >>> @register_rule(torch.special.xlog1py)
    ... def xlog1py(group, x, y):
    ...     return group.pack(torch.special.xlog1py(group.first(x), group.first(y)))
    """

    def register(rule: Rule) -> Rule:
        for function in functions:
            RULES[function] = rule
        return rule

    return register
