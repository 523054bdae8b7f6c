"""Control numbers that workers send each other at each step, beside the gradients."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


REFUSED = 1
"""Value of ``news``: this worker's loss or data cannot be split over workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What one worker sends.

    Attributes:
        busy_s: Seconds that it worked on this step.
        news: 0 for no news; ``REFUSED``; or a digest of the trained parameters if they have
            changed.
        joules: Energy that it used; None if it has no meter.
        loss: Its part of the loss.
        weight: Weight of its share in the mean.
        check_s: Seconds that it spent on checking the loss.
        buffers: Whether its forward pass changed buffers.
    """

    busy_s: float
    news: int
    joules: float | None
    loss: float
    weight: float
    check_s: float
    buffers: bool

    def write(self, control: Tensor, *, rank: int) -> None:
        """Write the note into the control numbers, whose sum over all workers is read as ``Told``.

        Args:
            control: ``Told.num(workers)`` zeros.
            rank: Rank of this worker.
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
    """The notes of all workers, summed.

    Attributes:
        busy_s: Seconds of each worker.
        news: News of each worker; see ``Note``.
        joules: Energy of the workers with a meter; None if no worker has one.
        loss: Loss of the global batch.
        weight: Weight of the global batch.
        check_s: Mean seconds that a worker spent on checking the loss.
        buffers: Whether a forward pass changed buffers.
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
        """Return how many control numbers ``workers`` workers need."""
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
