"""The order in which subnetworks are trained."""

from __future__ import annotations

import math
import warnings
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from thrifty.core import LayerError

from ._arguments import check_integers


Order = Literal["partition", "legacy"]

_PATIENCE = 1_000
"""Training forward passes without a schedule step before a warning that the schedule is unused."""
# Not an attribute, so that schedules that differ in it alone are equal.
_num_forward: WeakKeyDictionary[GyroSchedule, int] = WeakKeyDictionary()


class GyroSchedule(nn.Module):
    """The order in which subnetworks have their turn, and the position in it.

    All layers of a model share one. Source: Gyro Dropout (Lee et al., MLSys 2022).
    ``"partition"`` trains every subnetwork equally often. ``"legacy"`` draws with replacement for
    each period, as the paper's code does, and thereby leaves some out.

    Args:
        subnetworks: number of subnetworks (the paper's sigma).
        concurrent: number of subnetworks to train at a time (tau).
        total_steps: optimiser steps of the whole training; after them, the order starts again.
        order: ``"partition"`` or ``"legacy"``, see above.
        cycles: how often each subnetwork has its turn; ``"partition"`` only.
        generator: source of the order; None is torch's global stream, as for the weights of a
            layer.

    Raises:
        LayerError: an argument is invalid.

    >>> schedule = GyroSchedule(subnetworks=4, concurrent=2, total_steps=10)
    >>> seen = schedule.active().tolist()
    >>> for _ in range(5):
    ...     schedule.step()
    >>> sorted(seen + schedule.active().tolist())
    [0, 1, 2, 3]
    """

    step_counters = ("position",)
    """Buffers that thrifty's training loops increase by one after each optimiser step."""

    order: Tensor
    position: Tensor

    def __init__(
        self,
        *,
        subnetworks: int,
        concurrent: int,
        total_steps: int,
        order: Order = "partition",
        cycles: int = 1,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        check_integers(
            1,
            subnetworks=subnetworks,
            concurrent=concurrent,
            total_steps=total_steps,
            cycles=cycles,
        )
        if concurrent > subnetworks:
            raise LayerError(
                f"concurrent={concurrent} of subnetworks={subnetworks}: no more than there are "
                "can be trained at a time"
            )
        if order not in get_args(Order):
            raise LayerError(
                f"order={order!r}; give one of {', '.join(map(repr, get_args(Order)))}"
            )
        if order == "legacy" and cycles != 1:
            raise LayerError(
                f"cycles={cycles} with order='legacy', which has none; leave it out"
            )
        self.subnetworks, self.concurrent = int(subnetworks), int(concurrent)
        self.total_steps = int(total_steps)
        drawn = (
            _partition(self, cycles=int(cycles), generator=generator)
            if order == "partition"
            else _with_replacement(self, generator)
        )
        self.register_buffer("order", drawn)
        self.register_buffer("position", torch.zeros((), dtype=torch.int64))

    def active(self) -> Tensor:
        """Return the subnetworks that are trained now; int64, shape ``(concurrent,)``."""
        num_phases = self.order.shape[0]
        phase = self.position.remainder(self.total_steps) * num_phases // self.total_steps
        # Take one row by an index of shape (1,): a 0-dimensional index would be read on the CPU.
        return self.order[phase.reshape(1)].squeeze(0)

    def step(self) -> None:
        """Note an optimiser step; thrifty's own training loops do this for you."""
        self.position.add_(1)

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Note each step of an optimiser from now on."""

        def note(*_: Any) -> None:
            self.step()

        optimizer.register_step_post_hook(note)

    def watch(self) -> None:
        """Warn once if the schedule never advances; layers call this in training."""
        # A packed position belongs to thrifty's own training.
        if torch.compiler.is_compiling() or type(self.position) is not Tensor:
            return
        num = _num_forward[self] = _num_forward.get(self, 0) + 1
        if num == _PATIENCE and not int(self.position):
            warnings.warn(
                f"{_PATIENCE} forward passes in training and no optimiser step noted: the same "
                f"{self.concurrent} subnetworks "
                "are trained all the time; call schedule.follow(optimizer)",
                stacklevel=2,
            )

    def extra_repr(self) -> str:
        return (
            f"subnetworks={self.subnetworks}, concurrent={self.concurrent}, "
            f"total_steps={self.total_steps}"
        )


def _partition(
    schedule: GyroSchedule, *, cycles: int, generator: torch.Generator | None
) -> Tensor:
    """Return permutations one after the other, cut into phases.

    The last phase is filled up from another permutation.
    """
    num_phases = math.ceil(cycles * schedule.subnetworks / schedule.concurrent)
    num_phases = min(num_phases, schedule.total_steps)
    num = num_phases * schedule.concurrent
    drawn = [
        torch.randperm(schedule.subnetworks, generator=generator)
        for _ in range(math.ceil(num / schedule.subnetworks))
    ]
    return torch.cat(drawn)[:num].reshape(num_phases, schedule.concurrent)


def _with_replacement(schedule: GyroSchedule, generator: torch.Generator | None) -> Tensor:
    num_phases = min(max(schedule.subnetworks // schedule.concurrent, 1), schedule.total_steps)
    shape = (num_phases, schedule.concurrent)
    return torch.randint(schedule.subnetworks, shape, generator=generator)
