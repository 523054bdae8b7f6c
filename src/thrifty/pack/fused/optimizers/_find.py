"""Choice of the optimizer over rows for a torch optimizer."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch

from thrifty.pack.fused._registry import UnfusableError
from thrifty.pack.task._followed_optimizer import FollowedOptimizer
from thrifty.pack.task._optimizer import Optimizer

from ._fused_optimizer import GroupedOptimizer, RowOptimizer
from ._rules import SGD, Adagrad, Adam, AdamW, RMSprop


KINDS: dict[Any, type[RowOptimizer]] = {
    torch.optim.SGD: SGD,
    torch.optim.Adam: Adam,
    torch.optim.AdamW: AdamW,
    torch.optim.RMSprop: RMSprop,
    torch.optim.Adagrad: Adagrad,
}

NUMBERS = frozenset({
    "lr", "momentum", "dampening", "weight_decay", "betas", "eps", "alpha", "lr_decay",
    "initial_accumulator_value", "nesterov",
})  # fmt: skip
"""Options that may differ from row to row; others must have torch's defaults.

Options in ``INDIFFERENT`` may have any value.
"""
INDIFFERENT = frozenset({"foreach", "fused", "capturable", "differentiable"})


def optimizer_for(spec: Optimizer, options: Mapping[str, Any]) -> tuple[RowOptimizer, Hashable]:
    """Return the optimizer over rows for one param group.

    Returns:
        The optimizer, and a key that must be equal for trials to share it.

    Raises:
        UnfusableError: There is no optimizer over rows for this optimizer or these options.
    """
    kind = KINDS.get(spec.factory)
    name = getattr(spec.factory, "__name__", str(spec.factory))
    if kind is None:
        raise UnfusableError(f"there is no optimiser over rows for {name}")
    for option, value in options.items():
        if option in NUMBERS:
            if isinstance(value, torch.Tensor):
                raise UnfusableError(f"{name}({option}=...) is a tensor")
        elif option not in INDIFFERENT and value:
            raise UnfusableError(f"{name}({option}={value!r}) is not offered over rows")
    # With momentum 0, torch keeps no buffer; keeping one and using momentum 0 is not the same.
    return kind(), (name, bool(options.get("momentum", 0.0)))


def grouped_optimizer(
    followed: FollowedOptimizer, values: Mapping[str, Any]
) -> tuple[GroupedOptimizer, Hashable]:
    """Return the optimizers over rows for all param groups.

    Trials share them only if the same parameters belong to each group.

    Returns:
        The optimizers, and a key that must be equal for trials to share them.

    Raises:
        UnfusableError: There is no optimizer over rows for this optimizer or these options.
    """
    try:
        options, _ = followed.options(values)
    except (
        Exception
    ) as error:  # from the user's own method: plain training reports it as the trial's error
        raise UnfusableError(
            f"its optimizer failed with {type(error).__name__}: {error}"
        ) from error
    found = [optimizer_for(followed.spec, own) for own in options]
    if len({own.get("initial_accumulator_value", 0.0) for own in options}) > 1:
        raise UnfusableError("torch takes initial_accumulator_value for all parameters only")
    grouped = GroupedOptimizer(
        names=followed.partition, optimizers=tuple(optimizer for optimizer, _ in found)
    )
    kinds = tuple(kind for _, kind in found)
    return grouped, kinds[0] if len(kinds) == 1 else (kinds, followed.partition)
