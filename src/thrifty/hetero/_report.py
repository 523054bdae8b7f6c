"""What happens while unequal workers train, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass

from thrifty.perf import SplitChange

from ._order import Share


@dataclass(frozen=True, slots=True, kw_only=True)
class MembersChanged:
    """Another generation of workers goes on.

    Attributes:
        step: steps trained when it began.
        generation: of workers.
        names: of the workers, by rank.
        joined: of them, who are new.
        lost: who is gone.
        split: samples of each worker in a step.
        batch: of all of them.
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
    """One trained step; equal on all workers but for ``rank``, ``share`` and ``step_s``.

    Attributes:
        epoch: from 0.
        step: steps trained, this one too.
        loss: mean over the global batch.
        rank: of this worker.
        names: of the workers, by rank.
        sizes: samples that each of them trained.
        share: this worker's samples.
        busy_s: seconds that each of them worked for it.
        step_s: seconds from the end of the step before to the end of this one, without what was done between steps.
        joules: of the workers with a meter for this step; None if nobody has one.
        events: changes that came before this step or follow from it.
        check_s: mean seconds that a worker spent on checking the loss; in none of the other times.
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
