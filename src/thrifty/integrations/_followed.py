"""Options of an optimiser that follow hyper-parameters, where somebody else's code makes the optimiser.

The optimiser is made anew for each epoch, from the values of that epoch, and then gets its old state back. An
option that differs between two fresh ones is one that a hyper-parameter has changed: it takes the new value, all
others go on as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from thrifty.core import TaskError


Options = list[list[dict[str, Any]]]
"""By optimiser, by parameter group, by name."""

_PLAIN = (bool, int, float, str, tuple, type(None), torch.Tensor)


def options_of(optimizers: Sequence[torch.optim.Optimizer]) -> Options:
    """The options of fresh optimisers; of a learning rate that a scheduler has got hold of, what it started from.

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
    """Gives optimisers with their old state the options that have changed from one fresh one to the next.

    Raises:
        TaskError: the learning rate has changed, and a scheduler that does not multiply it has got hold of it.
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
            f"{type(scheduler).__name__} of the model's own code changes it, too; leave one of them out: the schedule of the space, or the scheduler"
        )
    group["initial_lr"] = scheduler.base_lrs[index] = lr
    _put(group, "lr", lr * scheduler.lr_lambdas[index](scheduler.last_epoch))


def _scheduler_of(optimizer: Any, schedulers: Sequence[Any]) -> Any:
    owned = [s for s in schedulers if _bare(s.optimizer) is _bare(optimizer)]
    return owned[0] if owned else None


def _bare(optimizer: Any) -> Any:
    """Some libraries wrap optimisers."""
    return getattr(optimizer, "optimizer", optimizer)
