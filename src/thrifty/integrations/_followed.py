"""Optimiser options that follow hyper-parameters when other code creates the optimiser.

The optimiser is created again for each epoch, with the values of that epoch, and then gets its old
state back. An option that differs between two fresh optimisers was changed by a hyper-parameter and
takes its new value. All other options keep the values of the old state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from thrifty.core import TaskError


Options = list[list[dict[str, Any]]]
"""Options by optimiser, by parameter group, by name."""

_PLAIN = (bool, int, float, str, tuple, type(None), torch.Tensor)


def options_of(optimizers: Sequence[torch.optim.Optimizer]) -> Options:
    """Return the options of fresh optimisers.

    A learning rate that a scheduler controls is given by the value at which the scheduler started.

    >>> layer = torch.nn.Linear(1, 1)
    >>> options_of([torch.optim.SGD(layer.parameters(), lr=0.1)])[0][0]["lr"]
    0.1
    """
    return [[_options(group) for group in optimizer.param_groups] for optimizer in optimizers]


def follow(
    optimizers: Sequence[torch.optim.Optimizer],
    schedulers: Sequence[Any],
    *,
    before: Options,
    now: Options,
) -> None:
    """Update options that differ between two fresh optimisers in optimisers with restored state.

    Raises:
        TaskError: The learning rate has changed, but a scheduler controls it that does not multiply
            it.
    """
    for optimizer, old_groups, new_groups in zip(optimizers, before, now, strict=True):
        for index, (old, new) in enumerate(zip(old_groups, new_groups, strict=True)):
            group = optimizer.param_groups[index]
            for name, value in new.items():
                if name not in old or old[name] == value:
                    continue
                scheduler = _scheduler_of(optimizer, schedulers) if name == "lr" else None
                if scheduler is not None:
                    _restart(scheduler, group, index, lr=value)
                else:
                    _put(group, name, value)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    out = {
        name: float(value) if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name not in ("params", "param_names", "initial_lr") and isinstance(value, _PLAIN)
    }
    if "initial_lr" in group:
        out["lr"] = float(group["initial_lr"])
    return out


def _put(group: dict[str, Any], name: str, value: Any) -> None:
    if isinstance(group[name], torch.Tensor):
        group[name].fill_(value)
    else:
        group[name] = value


def _restart(scheduler: Any, group: dict[str, Any], index: int, *, lr: float) -> None:
    if not isinstance(scheduler, LambdaLR):
        raise TaskError(
            f"the learning rate follows a hyper-parameter that changes over time (now {lr:g}), and "
            f"{type(scheduler).__name__} of the model's own code changes it, too; leave one of "
            "them out: the schedule of the space, or the scheduler"
        )
    group["initial_lr"] = scheduler.base_lrs[index] = lr
    _put(group, "lr", lr * scheduler.lr_lambdas[index](scheduler.last_epoch))


def _scheduler_of(optimizer: Any, schedulers: Sequence[Any]) -> Any:
    owned = [s for s in schedulers if _bare(s.optimizer) is _bare(optimizer)]
    return owned[0] if owned else None


def _bare(optimizer: Any) -> Any:
    """Return the inner optimiser, since some libraries wrap optimisers."""
    return getattr(optimizer, "optimizer", optimizer)
