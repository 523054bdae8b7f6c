"""What a search algorithm sees and says, as values."""

from __future__ import annotations

from bisect import insort
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from thrifty.space import Config


TrialState = Literal["running", "waiting", "stopped", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One trial, as an algorithm sees it.

    Attributes:
        number: 0, 1, 2, ... in the order in which they were proposed.
        config: its hyper-parameters.
        group: the bracket or generation that the algorithm put it in.
        target: the epoch it was last asked to reach.
        reached: the last asked-for epoch it has reached (0: none yet).
        scores: one score for each epoch ``1..reached``; higher is better, whatever the study's mode.
        state: ``"running"`` towards its target, ``"waiting"`` there for a decision, ``"stopped"``, or ``"failed"``.
        parent: the trial it branched off, and at which epoch (population-based training).
    """

    number: int
    config: Config
    target: int
    group: Hashable = 0
    reached: int = 0
    scores: tuple[float, ...] = ()
    state: TrialState = "running"
    parent: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Train a trial up to ``target`` epochs: a new one (``trial`` is None, ``config`` given) or one that waits."""

    target: int
    trial: int | None = None
    config: Mapping[str, Any] | None = None
    group: Hashable = 0
    parent: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        assert (self.trial is None) != (self.config is None), "either a trial or a config"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Give up a waiting trial for good."""

    trial: int


Decision = Proposal | Stop


class History:
    """All trials so far and what they reached; algorithms only read it.

    ``History.record_*`` belong to the study, which keeps it up to date while the algorithm is not looking.

    >>> history = History()
    >>> history.record_decision(Proposal(target=1, config={"lr": 0.1}))
    0
    >>> history.record_scores(0, [0.7])
    >>> history[0].state, history.leaderboard(1)
    ('waiting', [(0.7, 0)])
    """

    def __init__(self) -> None:
        self._trials: list[Trial] = []
        self._boards: dict[tuple[Hashable, int], list[tuple[float, int]]] = {}
        self._running: set[int] = set()
        self._groups: dict[Hashable, list[int]] = {}
        self._num_decisions = 0

    def __len__(self) -> int:
        return len(self._trials)

    def __getitem__(self, number: int) -> Trial:
        return self._trials[number]

    @property
    def num_running(self) -> int:
        """How many trials are on their way to a target."""
        return len(self._running)

    @property
    def num_decisions(self) -> int:
        """How many proposals and stops there were; with a seed it names a random stream."""
        return self._num_decisions

    def in_group(self, group: Hashable) -> Sequence[int]:
        """Numbers of the trials proposed for a group, in order."""
        return self._groups.get(group, ())

    def leaderboard(self, epoch: int, *, group: Hashable = 0) -> Sequence[tuple[float, int]]:
        """``(score, trial)`` of a group's trials that were asked to reach ``epoch`` and did, best first.

        Ties go to the earlier trial. A failed trial is there with ``-inf``: it will never be the best.
        """
        return [(-score, number) for score, number in self._boards.get((group, epoch), ())]

    def record_decision(self, decision: Decision) -> int:
        """Takes note of a decision and returns the trial's number."""
        self._num_decisions += 1
        if isinstance(decision, Stop):
            self._change(decision.trial, state="stopped")
            return decision.trial
        if decision.trial is not None:
            self._change(decision.trial, state="running", target=decision.target)
            self._running.add(decision.trial)
            return decision.trial
        assert decision.config is not None
        number = len(self._trials)
        self._trials.append(
            Trial(
                number=number,
                config=decision.config,
                target=decision.target,
                group=decision.group,
                parent=decision.parent,
            )
        )
        self._groups.setdefault(decision.group, []).append(number)
        self._running.add(number)
        return number

    def record_scores(self, number: int, scores: Sequence[float]) -> None:
        """A trial reached its target; ``scores`` has one score for each epoch up to there."""
        trial = self._trials[number]
        assert len(scores) == trial.target
        self._running.discard(number)
        self._change(number, state="waiting", reached=trial.target, scores=tuple(scores))
        insort(self._boards.setdefault((trial.group, trial.target), []), (-scores[-1], number))

    def record_failure(self, number: int) -> None:
        """A trial will not reach its target."""
        trial = self._trials[number]
        self._running.discard(number)
        self._change(number, state="failed")
        insort(self._boards.setdefault((trial.group, trial.target), []), (float("inf"), number))

    def _change(self, number: int, **changes: Any) -> None:
        old = self._trials[number]
        values = {name: getattr(old, name) for name in Trial.__slots__}
        self._trials[number] = Trial(**{**values, **changes})
