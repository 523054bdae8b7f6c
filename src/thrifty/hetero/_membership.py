"""Who trains together: the seam between the trainer and whatever carries its messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


Wait = Callable[[], None]
"""Returns once a sum that was begun is there; raises ``PeerLostError`` if a worker is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The workers of one generation, as all of them see it.

    Attributes:
        generation: grows with every change.
        rank: of this worker.
        names: of the workers, by rank.
        steps: that each of them has trained.
    """

    generation: int
    rank: int
    names: tuple[str, ...]
    steps: tuple[int, ...]

    @property
    def furthest(self) -> int:
        """The rank whose state counts: it has trained most steps; the first of them."""
        return self.steps.index(max(self.steps))


class Membership(Protocol):
    """Agrees on who trains together and carries sums between them.

    Every wait ends: with what was asked for, or with an error after the implementation's time limit.
    """

    def agree(self, *, step: int, broken: bool = False) -> View:
        """Agrees with the other workers on who they are.

        All workers call it at the same steps, and after a ``PeerLostError``.

        Args:
            step: steps that this worker has trained.
            broken: the connections of the present generation are of no use any more.

        Raises:
            TooFewWorkersError: not enough workers are left, or come in time.
        """
        ...

    def all_reduce(self, tensor: Tensor) -> None:
        """Replaces a contiguous tensor by the sum over all workers.

        Raises:
            PeerLostError: a worker is gone; the tensor's contents are undefined.
        """
        ...

    def begin_all_reduce(self, tensor: Tensor) -> Wait:
        """As ``all_reduce``, but goes on with other work meanwhile; the tensor is left alone until it has been waited for.

        All workers begin their sums in one order, and wait for them in that order.

        Raises:
            PeerLostError: a worker is gone; the tensor's contents are undefined.
        """
        ...

    def broadcast(self, tensor: Tensor, *, source: int) -> None:
        """Replaces a contiguous tensor by that of the worker with rank ``source``.

        Raises:
            PeerLostError: a worker is gone; the tensor's contents are undefined.
        """
        ...

    def close(self) -> None:
        """Leaves; may be called twice."""
        ...
