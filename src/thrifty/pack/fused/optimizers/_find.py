"""From a torch optimiser to the one over rows."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch

from thrifty.pack._optimizer import Optimizer
from thrifty.pack.fused._registry import UnfusableError

from ._adagrad import Adagrad
from ._adam import Adam, AdamW
from ._base import RowOptimizer
from ._rmsprop import RMSprop
from ._sgd import SGD


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
"""Options that may differ from row to row; others must have torch's defaults."""
INDIFFERENT = frozenset({"foreach", "fused", "capturable", "differentiable"})


def optimizer_for(spec: Optimizer, options: Mapping[str, Any]) -> tuple[RowOptimizer, Hashable]:
    """The optimiser over rows, and what trials must have in common to share it.

    Raises:
        UnfusableError: there is none for this optimiser or these options.
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
    # a momentum of zero keeps no buffer at all, which is not the same as a buffer with momentum zero
    return kind(), (name, bool(options.get("momentum", 0.0)))
