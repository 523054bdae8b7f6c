"""Which hyper-parameters a task reads, and whether it follows them while they change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from thrifty.core import TaskError

from ._backend import EpochPlan
from ._hyperparameters import HyperParameters


_MENDS = {
    "data": "data are loaded once for the whole run, so give {name!r} a fixed value",
    "model": "override Task.adapt(model, hp) and read hp.{name} there to follow it, or give "
    "{name!r} a fixed value",
    "optimizer": "pass it to the optimizer as an option, such as thrifty.SGD(lr={name!r}), or give "
    "{name!r} a fixed value",
    "setup": "read it in train(epoch, hp), too, or give {name!r} a fixed value",
}


class Readings:
    """Which hyper-parameters one trial reads once, before training, and which ones it follows.

    A value that is read once is always the value at epoch 0, whatever epoch a trial resumes from.

    Args:
        task: The name of its class.
        first: The hyper-parameters at epoch 0.
        moving: The hyper-parameters known to change during training.

    Attributes:
        moving: As given.
        followed: The hyper-parameters that the optimizer, the batch size, ``adapt`` or ``train``
            follows.
    """

    def __init__(
        self, task: str, first: Mapping[str, Any], *, moving: Iterable[str] = ()
    ) -> None:
        self.first = first
        self.followed: set[str] = set()
        self._task = task
        self.moving = frozenset(moving)
        self._given: dict[str, HyperParameters] = {}
        self._once: dict[str, frozenset[str]] = {}

    def once(self, method: str) -> HyperParameters:
        """Return hyper-parameters for a method called once; every read from them is recorded."""
        return self._given.setdefault(method, HyperParameters(self.first))

    def note_once(self, method: str, names: Iterable[str]) -> None:
        """Record that a method has read some names once."""
        self._once[method] = frozenset(names)

    @property
    def read_once(self) -> dict[str, str]:
        """The method that reads a hyper-parameter once, by the hyper-parameter's name."""
        by_method = {**{m: hp.names_read for m, hp in self._given.items()}, **self._once}
        return {name: method for method, names in by_method.items() for name in names}

    def check(self, moving: Iterable[str] = ()) -> None:
        """Refuse hyper-parameters that change, are read once and are not followed.

        Args:
            moving: Names in addition to those known at first.

        Raises:
            TaskError: There is one; the message names the method that reads it.
        """
        read_once = self.read_once
        names = (self.moving | set(moving)) & read_once.keys() - self.followed
        if names:
            name = min(names)
            method = read_once[name]
            raise TaskError(
                f"{name!r} has a schedule, but {self._task}.{method} reads it only once, "
                f"before training: "
                + _MENDS.get(method, "give {name!r} a fixed value").format(name=name)
            )

    def check_epoch(self, plan: EpochPlan) -> None:
        """Check what changes within an epoch or has changed by then. Raises as ``check`` does."""
        moved = {n for n, value in plan.values.items() if value != self.first.get(n, value)}
        self.check(moved | set(plan.moving))
