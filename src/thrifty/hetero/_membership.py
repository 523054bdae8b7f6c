"""Membership: the interface between the trainer and the transport between workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


Wait = Callable[[], None]
"""Waits for a sum that was begun; raises ``PeerLostError`` if a worker is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The workers of one generation, as all of them see it.

    Attributes:
        generation: Number that grows with every change.
        rank: Rank of this worker.
        names: Names of the workers, by rank.
        steps: Steps that each of them has trained.
    """

    generation: int
    rank: int
    names: tuple[str, ...]
    steps: tuple[int, ...]

    @property
    def furthest(self) -> int:
        """Rank of the worker with most steps trained (the lowest such rank). Its state counts."""
        return self.steps.index(max(self.steps))


class Membership(Protocol):
    """Agrees on the workers that train together, and carries sums between them.

    Every wait ends, either with its result or with an error after the implementation's time limit.
    """

    def agree(self, *, step: int, broken: bool = False) -> View:
        """Agree with the other workers on the members.

        All workers call it at the same steps, and after a ``PeerLostError``.

        Args:
            step: Steps that this worker has trained.
            broken: Whether the connections of the present generation have failed.

        Raises:
            TooFewWorkersError: Not enough workers are left, or enough do not come in time.
        """
        ...

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace a contiguous tensor by the sum over all workers.

        Raises:
            PeerLostError: A worker is gone; the tensor's contents are undefined.
        """
        ...

    def begin_all_reduce(self, tensor: Tensor) -> Wait:
        """Begin an ``all_reduce`` and return, so that the caller can do other work meanwhile.

        The caller must not touch the tensor until it has waited for the sum. All workers begin
        their sums in one order, and wait for them in that order.

        Raises:
            PeerLostError: A worker is gone; the tensor's contents are undefined.
        """
        ...

    def broadcast(self, tensor: Tensor, *, source: int) -> None:
        """Replace a contiguous tensor by that of the worker with rank ``source``.

        Raises:
            PeerLostError: A worker is gone; the tensor's contents are undefined.
        """
        ...

    def close(self) -> None:
        """Leave the group; may be called twice."""
        ...
