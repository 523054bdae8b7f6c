"""The registry of rules, which say what torch functions do to packed tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


Rule = Callable[..., Any]
"""``rule(group, *args, **kwargs)`` with the torch function's arguments, returning a packed result.

Arguments that differ from trial to trial are packed.
"""

RULES: dict[Any, Rule] = {}


class UnfusableError(Exception):
    """Error raised when a model cannot be fused; the message says why.

    Another back-end then trains the model.
    """


def register_rule(*functions: Callable[..., Any]) -> Callable[[Rule], Rule]:
    """Register how torch functions (or your own, see below) act on packed tensors.

    The rule is called as ``rule(group, *args, **kwargs)`` with the function's own arguments.
    Arguments that differ from trial to trial are packed: ``group.first(x)`` gives the plain tensor
    with the trials as its first dimension, and ``group.pack(y)`` turns such a tensor into a packed
    result. A function without a rule goes through ``torch.vmap``.

    You can register torch functions and any function that calls
    ``torch.overrides.handle_torch_function``. A rule that raises ``UnfusableError`` sends the model
    to the concatenated back-end.

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
