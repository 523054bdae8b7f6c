"""What a search algorithm sees and says, as values."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal, overload

from thrifty.core import AlgorithmError
from thrifty.space import Config

from ._sorted_list import SortedList


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
        objectives: what all objectives of the study were at ``reached``, higher is better (empty before the first report).
        violation: by how much it broke the study's constraints there; 0: not at all.
    """

    number: int
    config: Config
    target: int
    group: Hashable = 0
    reached: int = 0
    scores: tuple[float, ...] = ()
    state: TrialState = "running"
    parent: tuple[int, int] | None = None
    objectives: tuple[float, ...] = ()
    violation: float = 0.0


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


class Leaderboard(Sequence[tuple[float, int]]):
    """``(score, trial)``, best first; a view, which costs nothing however long it is.

    Ties go to the earlier trial. A failed trial stands at the end with ``-inf``.
    """

    __slots__ = ("_entries",)

    def __init__(self, entries: SortedList[tuple[float, int]]) -> None:
        self._entries = entries
        """``(-score, trial)``, ascending."""

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def __getitem__(self, index: int) -> tuple[float, int]: ...
    @overload
    def __getitem__(self, index: slice) -> list[tuple[float, int]]: ...
    def __getitem__(self, index: int | slice) -> tuple[float, int] | list[tuple[float, int]]:
        if isinstance(index, slice):
            return [(-key, number) for key, number in self._entries[index]]
        key, number = self._entries[index]
        return -key, number

    def __iter__(self) -> Iterator[tuple[float, int]]:
        return ((-key, number) for key, number in self._entries)

    def __repr__(self) -> str:
        return f"Leaderboard({list(self)!r})"

    @property
    def num_alive(self) -> int:
        """How many of them have not failed."""
        return self._entries.rank((math.inf, -1))

    def rank(self, entry: tuple[float, int]) -> int:
        """How many are better than this ``(score, trial)``."""
        score, number = entry
        return self._entries.rank((-score, number))


_EMPTY = Leaderboard(SortedList())


class History:
    """All trials so far and what they reached; algorithms only read it.

    ``History.record_*`` belong to the study, which keeps it up to date while the algorithm is not looking.

    >>> history = History()
    >>> history.record_decision(Proposal(target=1, config={"lr": 0.1}))
    0
    >>> history.record_scores(0, [0.7])
    >>> history[0].state, history.leaderboard(1)
    ('waiting', Leaderboard([(0.7, 0)]))
    """

    def __init__(self, *, prior: Sequence[Trial] = (), max_epochs: int | None = None) -> None:
        self.prior = tuple(prior)
        """Trials of earlier studies, which samplers may learn from; their numbers mean nothing here."""
        self._max_epochs = max_epochs
        self._enqueued: list[Config] = []
        self._num_taken = 0
        """How many of the enqueued configurations have been proposed."""
        self._num_drawn = 0
        self._trials: list[Trial] = []
        self._boards: dict[tuple[Hashable, int], SortedList[tuple[float, int]]] = {}
        self._running: set[int] = set()
        self._waiting: dict[tuple[Hashable, int], SortedList[tuple[float, int]]] = {}
        self._groups: dict[Hashable, list[int]] = {}
        self._under_way: dict[Hashable, int] = {}
        """By group how many trials are running."""
        self._undecided: dict[Hashable, int] = {}
        """By group how many trials wait and have not gone all the way."""
        self._settled: set[Hashable] = set()
        self._moves: list[int] = []
        self._num_decisions = 0

    def __len__(self) -> int:
        return len(self._trials)

    def __getitem__(self, number: int) -> Trial:
        return self._trials[number]

    def __iter__(self) -> Iterator[Trial]:
        return iter(self._trials)

    @property
    def num_running(self) -> int:
        """How many trials are on their way to a target."""
        return len(self._running)

    @property
    def num_decisions(self) -> int:
        """How many proposals and stops there were; with a seed it names a random stream."""
        return self._num_decisions

    @property
    def enqueued(self) -> Sequence[Config]:
        """What the user wants tried first and has not been proposed yet."""
        return tuple(self._enqueued[self._num_taken :])

    @property
    def num_enqueued(self) -> int:
        """How many configurations are enqueued."""
        return len(self._enqueued) - self._num_taken

    def next_enqueued(self, num: int) -> Sequence[Config]:
        """The first ``num`` of the enqueued configurations, or all if there are fewer."""
        return self._enqueued[self._num_taken : self._num_taken + num]

    @property
    def num_drawn(self) -> int:
        """How many of the trials came from a sampler: neither enqueued nor branched off another trial."""
        return self._num_drawn

    @property
    def moves(self) -> Sequence[int]:
        """The trial of each record, in order: a trial is here once for each time that it has changed.

        What an algorithm derives from a history can be kept up to date by reading the new end only.
        """
        return self._moves

    @property
    def settled(self) -> Set[Hashable]:
        """The groups in which no trial is running, and some wait that have not gone all the way."""
        return self._settled

    def in_group(self, group: Hashable) -> Sequence[int]:
        """Numbers of the trials proposed for a group, in order."""
        return self._groups.get(group, ())

    def is_running(self, group: Hashable) -> bool:
        """Whether a trial of a group is on its way to a target."""
        return bool(self._under_way.get(group))

    def leaderboard(self, epoch: int, *, group: Hashable = 0) -> Leaderboard:
        """A group's trials that were asked to reach ``epoch`` and did, or failed on the way there."""
        board = self._boards.get((group, epoch))
        return _EMPTY if board is None else Leaderboard(board)

    def waiting(self, epoch: int, *, group: Hashable = 0) -> Leaderboard:
        """Those of the leaderboard that wait at ``epoch`` for a decision."""
        board = self._waiting.get((group, epoch))
        return _EMPTY if board is None else Leaderboard(board)

    def record_enqueued(self, config: Config) -> None:
        """The user wants a configuration to be tried next."""
        self._enqueued.append(config)

    def record_decision(self, decision: Decision) -> int:
        """Takes note of a decision and returns the trial's number.

        Raises:
            AlgorithmError: it concerns a trial that does not wait, or has been further already.
        """
        if isinstance(decision, Stop):
            self._check_waits(decision.trial)
            self._num_decisions += 1
            self._forget_waiting(decision.trial)
            self._change(decision.trial, state="stopped")
            return decision.trial
        if decision.trial is not None:
            self._check_waits(decision.trial)
            if decision.target <= self._trials[decision.trial].reached:
                raise AlgorithmError(
                    f"{decision} asks for no more than the {self._trials[decision.trial].reached} epochs "
                    "that the trial has; raise its target, or stop it"
                )
            self._num_decisions += 1
            self._forget_waiting(decision.trial)
            self._change(decision.trial, state="running", target=decision.target)
            self._running.add(decision.trial)
            return decision.trial
        self._num_decisions += 1
        assert decision.config is not None
        number = len(self._trials)
        if self.num_enqueued and dict(decision.config) == dict(self._enqueued[self._num_taken]):
            self._num_taken += 1
        elif decision.parent is None:
            self._num_drawn += 1
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
        self._moves.append(number)
        self._count(decision.group, running=1)
        return number

    def record_scores(
        self,
        number: int,
        scores: Sequence[float],
        *,
        objectives: Sequence[float] = (),
        violation: float = 0.0,
    ) -> None:
        """Record that a trial has reached its target.

        Args:
            number: the trial.
            scores: one for each epoch up to its target. NaN counts as ``-inf``; a trial whose last score
                is that bad has failed.
            objectives: all objectives at the target (default: the last score).
            violation: by how much it breaks the study's constraints there.
        """
        trial = self._trials[number]
        assert len(scores) == trial.target
        scores = tuple(scores)
        if any(map(math.isnan, scores)):
            scores = tuple(-math.inf if math.isnan(score) else score for score in scores)
        if scores[-1] == -math.inf:
            self.record_failure(number)
            return
        self._running.discard(number)
        self._change(
            number,
            state="waiting",
            reached=trial.target,
            scores=scores,
            objectives=tuple(objectives) or scores[-1:],
            violation=violation,
        )
        place, entry = (trial.group, trial.target), (-scores[-1], number)
        _board(self._boards, place).add(entry)
        _board(self._waiting, place).add(entry)

    def record_failure(self, number: int) -> None:
        """Record that a trial will not reach its target."""
        trial = self._trials[number]
        self._running.discard(number)
        self._change(number, state="failed")
        _board(self._boards, (trial.group, trial.target)).add((math.inf, number))

    def _check_waits(self, number: int) -> None:
        state = self._trials[number].state if 0 <= number < len(self._trials) else "unknown"
        if state != "waiting":
            raise AlgorithmError(
                f"a decision about trial {number}, which is {state}; decide only about trials that wait"
            )

    def _forget_waiting(self, number: int) -> None:
        trial = self._trials[number]
        self._waiting[trial.group, trial.reached].remove((-trial.scores[-1], number))

    def _change(self, number: int, **changes: Any) -> None:
        old, change = self._trials[number], changes.get
        # ``dataclasses.replace`` takes three times as long, and this is done for each event of a study
        new = self._trials[number] = Trial(
            number=number,
            config=old.config,
            group=old.group,
            parent=old.parent,
            state=change("state", old.state),
            target=change("target", old.target),
            reached=change("reached", old.reached),
            scores=change("scores", old.scores),
            objectives=change("objectives", old.objectives),
            violation=change("violation", old.violation),
        )
        self._moves.append(number)
        self._count(
            old.group,
            running=(new.state == "running") - (old.state == "running"),
            undecided=self._is_undecided(new) - self._is_undecided(old),
        )

    def _is_undecided(self, trial: Trial) -> bool:
        return trial.state == "waiting" and trial.reached != self._max_epochs

    def _count(self, group: Hashable, *, running: int, undecided: int = 0) -> None:
        """Keep ``settled`` up to date when a trial has changed its state."""
        under_way = self._under_way[group] = self._under_way.get(group, 0) + running
        open_ = self._undecided[group] = self._undecided.get(group, 0) + undecided
        if open_ and not under_way:
            self._settled.add(group)
        else:
            self._settled.discard(group)


def _board(
    boards: dict[tuple[Hashable, int], SortedList[tuple[float, int]]],
    place: tuple[Hashable, int],
) -> SortedList[tuple[float, int]]:
    found = boards.get(place)
    if found is None:
        found = boards[place] = SortedList()
    return found
