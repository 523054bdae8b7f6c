"""The numbers that workers tell each other at each step, beside the gradients."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


REFUSED = 1
"""News: what this worker was given to train cannot be split over workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What one worker tells.

    Attributes:
        busy_s: seconds that it worked for this step.
        news: 0; ``REFUSED``; or a digest of the parameters, which are other ones than before.
        joules: that it used; None if it has no meter.
        loss: its part of the loss.
        weight: of its share in the mean.
        check_s: seconds that it spent on checking the loss.
        buffers: whether its forward pass changed buffers.
    """

    busy_s: float
    news: int
    joules: float | None
    loss: float
    weight: float
    check_s: float
    buffers: bool

    def write(self, control: Tensor, *, rank: int) -> None:
        """Write it where the sum over all workers becomes ``Told``.

        Args:
            control: zeros, ``Told.num(workers)`` of them.
            rank: of this worker.
        """
        workers = (len(control) - Told.COMMON) // 2
        control[rank] = self.busy_s
        control[workers + rank] = self.news
        common = (
            0.0 if self.joules is None else self.joules,
            self.joules is not None,
            self.loss,
            self.weight,
            self.check_s,
            self.buffers,
        )
        for at, value in enumerate(common, 2 * workers):
            control[at] = float(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What all workers have told together.

    Attributes:
        busy_s: seconds of each worker.
        news: of each worker; see ``Note``.
        joules: of the workers with a meter; None if nobody has one.
        loss: of the global batch.
        weight: of the global batch.
        check_s: mean seconds that a worker spent on checking the loss.
        buffers: whether a forward pass changed buffers.
    """

    busy_s: tuple[float, ...]
    news: tuple[int, ...]
    joules: float | None
    loss: float
    weight: float
    check_s: float
    buffers: bool

    COMMON = 6

    @classmethod
    def num(cls, workers: int) -> int:
        """Return how many numbers ``workers`` workers need."""
        return 2 * workers + cls.COMMON

    @classmethod
    def read(cls, control: Tensor) -> Told:
        """Read the sum of all workers' notes."""
        numbers = control.tolist()
        workers = (len(numbers) - cls.COMMON) // 2
        joules, meters, loss, weight, check_s, buffers = numbers[2 * workers :]
        return cls(
            busy_s=tuple(numbers[:workers]),
            news=tuple(round(each) for each in numbers[workers : 2 * workers]),
            joules=joules if meters else None,
            loss=loss,
            weight=weight,
            check_s=check_s / workers,
            buffers=bool(buffers),
        )
