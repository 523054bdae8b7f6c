"""What workers tell each other and the user, as frozen values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thrifty.perf import Power, SplitChange, StepCurve

from ._order import Share


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """A worker's report as a row of numbers; it reveals only the number of its samples.

    Attributes:
        curve: Current speed curve.
        num_private: Samples that only this worker can read.
        power: Power model; zeros if none is declared.
        new: Whether the worker has just joined.
        structure: Digest of the names, shapes and types of its model's parameters and buffers.
        trained: Digest of the parameters that it trains.
    """

    curve: StepCurve
    num_private: int
    power: Power
    new: bool
    structure: int = 0
    trained: int = 0

    NUM = 10

    def to_row(self) -> list[float]:
        """Return the report as ``NUM`` numbers."""
        most = self.curve.most
        return [
            self.curve.sample_s,
            self.curve.fixed_s,
            -1.0 if most is None else float(most),
            float(self.curve.least),
            float(self.num_private),
            self.power.idle_w,
            self.power.busy_w,
            float(self.new),
            float(self.structure),  # 48 bits are exact in double precision
            float(self.trained),
        ]

    @classmethod
    def from_row(cls, row: Sequence[float]) -> WorkerInfo:
        """Restore a report from the row that ``to_row`` returned.

        >>> info = WorkerInfo(
        ...     curve=StepCurve(sample_s=0.5),
        ...     num_private=3,
        ...     power=Power(idle_w=0, busy_w=1),
        ...     new=True,
        ... )
        >>> WorkerInfo.from_row(info.to_row()) == info
        True
        """
        sample_s, fixed_s, most, least, num_private, idle_w, busy_w, new, *digests = row
        return cls(
            curve=StepCurve(
                sample_s=sample_s,
                fixed_s=fixed_s,
                most=None if most < 0 else int(most),
                least=int(least),
            ),
            num_private=int(num_private),
            power=Power(idle_w=idle_w, busy_w=busy_w),
            new=bool(new),
            structure=int(digests[0]),
            trained=int(digests[1]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MembersChanged:
    """The set of workers has changed, and a new generation continues.

    Attributes:
        step: Steps trained when the generation began.
        generation: Number of the generation.
        names: Names of the workers, by rank.
        joined: Names of the workers that are new.
        lost: Names of the workers that are gone.
        split: Samples of each worker in a step.
        batch: Samples of all workers in a step.
    """

    step: int
    generation: int
    names: tuple[str, ...]
    joined: tuple[str, ...]
    lost: tuple[str, ...]
    split: tuple[int, ...]
    batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One trained step. It is equal on all workers except for ``rank``, ``share`` and ``step_s``.

    Attributes:
        epoch: Epoch, from 0.
        step: Steps trained, including this one.
        loss: Mean over the global batch.
        rank: Rank of this worker.
        names: Names of the workers, by rank.
        sizes: Samples that each worker trained.
        share: This worker's samples.
        busy_s: Seconds that each worker was busy with the step.
        step_s: Seconds from the end of the previous step to the end of this one, without the time
            that the caller spent between steps.
        joules: Energy of this step on the workers with a meter; None if no worker has one.
        events: Changes that preceded this step or follow from it.
        check_s: Mean seconds that a worker spent on checking the loss. No other time includes it.
    """

    epoch: int
    step: int
    loss: float
    rank: int
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    share: Share
    busy_s: tuple[float, ...]
    step_s: float
    joules: float | None
    events: tuple[SplitChange | MembersChanged, ...]
    check_s: float = 0.0
