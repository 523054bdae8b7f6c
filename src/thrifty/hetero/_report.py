"""Events of training on unequal workers, as frozen dataclasses."""

from __future__ import annotations

from dataclasses import dataclass

from thrifty.perf import SplitChange

from ._order import Share


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
