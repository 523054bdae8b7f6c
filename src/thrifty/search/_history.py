"""What a search algorithm sees and decides, as values."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Generic, Literal, TypeVar, overload

from thrifty.core import AlgorithmError
from thrifty.space import Config


Item = TypeVar("Item", bound=Any)

BLOCK = 512
"""Items of a block after a split; blocks are short, as an insertion moves all items after it."""


class SortedList(Generic[Item]):
    """Sorted list of items, in blocks of at most ``2 * BLOCK``.

    Adding, removing and ranking take time proportional to the number of blocks, not of items.

    >>> board = SortedList([3, 1])
    >>> board.add(2)
    >>> list(board), board.rank(3), board[1:]
    ([1, 2, 3], 2, [2, 3])
    """

    __slots__ = ("_blocks", "_lasts", "_len")

    def __init__(self, items: Iterable[Item] = ()) -> None:
        ordered = sorted(items)
        self._len = len(ordered)
        self._blocks = [ordered[at : at + BLOCK] for at in range(0, len(ordered), BLOCK)]
        self._lasts = [block[-1] for block in self._blocks]

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[Item]:
        return chain.from_iterable(self._blocks)

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...
    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._len)
            if step < 0:
                return list(self)[index]
            return list(islice(self.iterate(start), 0, max(stop - start, 0), step))
        at = index + self._len if index < 0 else index
        if at >= 0:
            for block in self._blocks:
                if at < len(block):
                    return block[at]
                at -= len(block)
        raise IndexError(f"index {index} of a list of {self._len}")

    def iterate(self, start: int) -> Iterator[Item]:
        """Return an iterator over the items from index ``start`` on."""
        for number, block in enumerate(self._blocks):
            if start < len(block):
                rest = islice(self._blocks, number + 1, None)
                return chain(islice(block, start, None), chain.from_iterable(rest))
            start -= len(block)
        return iter(())

    def add(self, item: Item) -> None:
        """Insert an item in its place."""
        self._len += 1
        lasts = self._lasts
        number = bisect_left(lasts, item)
        if number < len(lasts):
            block = self._blocks[number]
            insort(block, item)
        elif lasts:
            number -= 1
            block = self._blocks[number]
            block.append(item)
            lasts[number] = item
        else:
            block = [item]
            self._blocks.append(block)
            lasts.append(item)
        if len(block) > 2 * BLOCK:
            self._blocks[number : number + 1] = [block[:BLOCK], block[BLOCK:]]
            lasts[number : number + 1] = [block[BLOCK - 1], block[-1]]

    def remove(self, item: Item) -> None:
        """Remove an item that is in the list."""
        number = bisect_left(self._lasts, item)
        block = self._blocks[number]
        place = bisect_left(block, item)
        assert block[place] == item
        del block[place]
        self._len -= 1
        if block:
            self._lasts[number] = block[-1]
        else:
            del self._blocks[number], self._lasts[number]

    def rank(self, item: Item) -> int:
        """Return how many items are less than ``item``."""
        number = bisect_left(self._lasts, item)
        before = sum(map(len, self._blocks[:number]))
        if number == len(self._blocks):
            return before
        return before + bisect_left(self._blocks[number], item)


# -- what an algorithm sees ------------------------------------------------------------------------


TrialState = Literal["running", "waiting", "stopped", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One trial, as an algorithm sees it.

    Attributes:
        number: 0, 1, 2, ... in the order of proposal.
        config: Its hyper-parameters.
        group: Bracket or generation in which the algorithm put it.
        target: Epoch that it was last asked to reach.
        reached: Last requested epoch that it has reached (0: none yet).
        scores: One score for each epoch ``1..reached``; higher is better, whatever the study's
            mode.
        state: ``"running"`` towards its target, ``"waiting"`` there for a decision, ``"stopped"``,
            or ``"failed"``.
        parent: Trial from which it branched off, and at which epoch (population-based training).
        objectives: Values of all objectives of the study at ``reached``; higher is better (empty
            before the first report).
        violation: By how much it violated the study's constraints there; 0: not at all.
        standard_errors: Standard error of each score (empty: the study has one seed).
        horizon: Epoch at which its training ends, by its space or by the algorithm (None: unknown).
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
    standard_errors: tuple[float, ...] = ()
    horizon: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Decision to train a trial up to ``target`` epochs.

    The trial is a new one (``trial`` is None, ``config`` is given) or one that waits. A new trial
    may have a ``horizon``, at which its training ends (None: the algorithm's ``max_epochs``).
    """

    target: int
    trial: int | None = None
    config: Mapping[str, Any] | None = None
    group: Hashable = 0
    parent: tuple[int, int] | None = None
    horizon: int | None = None

    def __post_init__(self) -> None:
        assert (self.trial is None) != (self.config is None), "either a trial or a config"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Decision to stop a waiting trial for good."""

    trial: int


Decision = Proposal | Stop


class Leaderboard(Sequence[tuple[float, int]]):
    """Pairs ``(score, trial)``, best first: a view, which costs nothing however long it is.

    Ties go to the earlier trial. A failed trial is at the end with ``-inf``.
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
        """Number of trials that have not failed."""
        return self._entries.rank((math.inf, -1))

    def rank(self, entry: tuple[float, int]) -> int:
        """Return how many entries are better than this ``(score, trial)``."""
        score, number = entry
        return self._entries.rank((-score, number))


_EMPTY = Leaderboard(SortedList())
_Boards = defaultdict[tuple[Hashable, int], SortedList[tuple[float, int]]]


class _Row:
    """Mutable state of a trial; ``Trial`` is the immutable view of it, built on demand.

    Most algorithms look at leaderboards alone, and each trial of a study changes several times.
    """

    __slots__ = (
        "config",
        "group",
        "horizon",
        "number",
        "objectives",
        "parent",
        "reached",
        "scores",
        "standard_errors",
        "state",
        "target",
        "view",
        "violation",
    )

    def __init__(self, number: int, decision: Proposal, *, max_epochs: int | None) -> None:
        assert decision.config is not None
        self.horizon = max_epochs if decision.horizon is None else decision.horizon
        self.number = number
        self.config = decision.config
        self.target = decision.target
        self.group = decision.group
        self.parent = decision.parent
        self.reached = 0
        self.scores: tuple[float, ...] = ()
        self.state: TrialState = "running"
        self.objectives: tuple[float, ...] = ()
        self.violation = 0.0
        self.standard_errors: tuple[float, ...] = ()
        self.view: Trial | None = None

    def trial(self) -> Trial:
        """Return the trial as it is now."""
        if self.view is None:
            self.view = Trial(
                number=self.number,
                config=self.config,
                target=self.target,
                group=self.group,
                reached=self.reached,
                scores=self.scores,
                state=self.state,
                parent=self.parent,
                objectives=self.objectives,
                violation=self.violation,
                standard_errors=self.standard_errors,
                horizon=self.horizon,
            )
        return self.view


class History:
    """All trials so far and what they reached; algorithms only read it.

    The ``record_*`` methods are for the study, which keeps the history up to date between calls of
    the algorithm.

    >>> history = History()
    >>> history.record_decision(Proposal(target=1, config={"lr": 0.1}))
    0
    >>> history.record_scores(0, [0.7])
    >>> history[0].state, history.leaderboard(1)
    ('waiting', Leaderboard([(0.7, 0)]))
    """

    def __init__(self, *, prior: Sequence[Trial] = (), max_epochs: int | None = None) -> None:
        self.prior = tuple(prior)
        """Trials of earlier studies, for samplers to learn from; their numbers do not count."""
        self._max_epochs = max_epochs
        self._enqueued: list[Config] = []
        self._num_taken = 0
        """Number of enqueued configurations that have been proposed."""
        self._num_drawn = 0
        self._rows: list[_Row] = []
        self._boards: _Boards = defaultdict(SortedList)
        self._num_running = 0
        self._waiting: _Boards = defaultdict(SortedList)
        self._groups: defaultdict[Hashable, list[int]] = defaultdict(list)
        self._under_way: Counter[Hashable] = Counter()
        """Number of running trials, by group."""
        self._undecided: Counter[Hashable] = Counter()
        """Number of trials, by group, that wait before their horizon."""
        self._settled: set[Hashable] = set()
        self._moves: list[int] = []
        self._num_decisions = 0

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Trial:
        return self._rows[number].trial()

    def __iter__(self) -> Iterator[Trial]:
        return (row.trial() for row in self._rows)

    @property
    def num_running(self) -> int:
        """Number of trials on their way to a target."""
        return self._num_running

    @property
    def num_unfinished(self) -> int:
        """Number of trials that wait before their horizon."""
        return self._undecided.total()

    @property
    def num_decisions(self) -> int:
        """Number of proposals and stops so far; together with a seed it names a random stream."""
        return self._num_decisions

    @property
    def enqueued(self) -> Sequence[Config]:
        """Configurations that the user wants to try first and that have not been proposed yet."""
        return tuple(self._enqueued[self._num_taken :])

    @property
    def num_ever_enqueued(self) -> int:
        """Number of configurations that were ever enqueued."""
        return len(self._enqueued)

    @property
    def num_enqueued(self) -> int:
        """Number of enqueued configurations that have not been proposed yet."""
        return len(self._enqueued) - self._num_taken

    def next_enqueued(self, num: int) -> Sequence[Config]:
        """Return the first ``num`` enqueued configurations, or all if there are fewer."""
        return self._enqueued[self._num_taken : self._num_taken + num]

    @property
    def num_drawn(self) -> int:
        """Number of trials from a sampler: neither enqueued nor branched off another trial."""
        return self._num_drawn

    @property
    def moves(self) -> Sequence[int]:
        """Trial number of each record, in order: a trial appears once for each of its changes.

        State that an algorithm derives from a history can be kept up to date by reading only the
        new entries.
        """
        return self._moves

    @property
    def settled(self) -> Set[Hashable]:
        """Groups in which no trial is running and some wait before their horizon."""
        return self._settled

    def in_group(self, group: Hashable) -> Sequence[int]:
        """Return the numbers of the trials proposed for a group, in order."""
        return self._groups.get(group, ())

    def is_running(self, group: Hashable) -> bool:
        """Return whether a trial of a group is on its way to a target."""
        return self._under_way[group] > 0

    def leaderboard(self, epoch: int, *, group: Hashable = 0) -> Leaderboard:
        """Return a group's trials asked to reach ``epoch`` that did, or failed on the way."""
        board = self._boards.get((group, epoch))
        return _EMPTY if board is None else Leaderboard(board)

    def waiting(self, epoch: int, *, group: Hashable = 0) -> Leaderboard:
        """Return the trials of the leaderboard that wait at ``epoch`` for a decision."""
        board = self._waiting.get((group, epoch))
        return _EMPTY if board is None else Leaderboard(board)

    def record_enqueued(self, config: Config) -> None:
        """Record that the user wants a configuration to be tried next."""
        self._enqueued.append(config)

    def record_decision(self, decision: Decision) -> int:
        """Record a decision and return the trial's number.

        Raises:
            AlgorithmError: The trial does not wait, has already reached the target, or would be
                trained beyond its horizon.
        """
        if decision.trial is not None:
            row = self._waiting_row(decision)
            self._num_decisions += 1
            self._waiting[row.group, row.reached].remove((-row.scores[-1], row.number))
            if isinstance(decision, Stop):
                self._change(row, "stopped")
            else:
                row.target = decision.target
                self._change(row, "running")
            return row.number
        assert decision.config is not None
        number = len(self._rows)
        row = _Row(number, decision, max_epochs=self._max_epochs)
        _check_target(row, decision)
        self._num_decisions += 1
        if self.num_enqueued and dict(decision.config) == dict(self._enqueued[self._num_taken]):
            self._num_taken += 1
        elif decision.parent is None:
            self._num_drawn += 1
        self._rows.append(row)
        self._groups[decision.group].append(number)
        self._moves.append(number)
        self._under_way[decision.group] += 1
        self._num_running += 1
        self._settled.discard(decision.group)
        return number

    def record_scores(
        self,
        number: int,
        scores: Sequence[float],
        *,
        objectives: Sequence[float] = (),
        violation: float = 0.0,
        standard_errors: Sequence[float] = (),
    ) -> None:
        """Record that a trial has reached its target.

        Args:
            number: Number of the trial.
            scores: One score for each epoch up to its target. NaN counts as ``-inf``; a trial whose
                last score is ``-inf`` has failed.
            objectives: All objectives at the target (default: the last score).
            violation: By how much the trial violates the study's constraints there.
            standard_errors: Standard error of each score, if scores are means over several seeds.
        """
        row = self._rows[number]
        assert len(scores) == row.target
        scores = tuple(scores)
        if any(map(math.isnan, scores)):
            scores = tuple(-math.inf if math.isnan(score) else score for score in scores)
        if scores[-1] == -math.inf:
            self.record_failure(number)
            return
        row.reached = row.target
        row.scores = scores
        row.objectives = tuple(objectives) or scores[-1:]
        row.violation = violation
        row.standard_errors = tuple(standard_errors)
        self._change(row, "waiting")
        place, entry = (row.group, row.target), (-scores[-1], number)
        self._boards[place].add(entry)
        self._waiting[place].add(entry)

    def record_failure(self, number: int) -> None:
        """Record that a trial will not reach its target."""
        row = self._rows[number]
        self._change(row, "failed")
        self._boards[row.group, row.target].add((math.inf, number))

    def record_stop(self, number: int) -> None:
        """Record that a running trial was stopped by a person and will not reach its target.

        For the trials that it competes with, it counts as one that has failed.
        """
        row = self._rows[number]
        self._change(row, "stopped")
        self._boards[row.group, row.target].add((math.inf, number))

    def _waiting_row(self, decision: Decision) -> _Row:
        number = decision.trial
        assert number is not None
        row = self._rows[number] if 0 <= number < len(self._rows) else None
        if row is None or row.state != "waiting":
            state = "unknown" if row is None else row.state
            raise AlgorithmError(
                f"a decision about trial {number}, which is {state}; decide only about trials "
                "that wait"
            )
        if isinstance(decision, Proposal) and decision.target <= row.reached:
            raise AlgorithmError(
                f"{decision} asks for no more than the {row.reached} epochs that the trial has; "
                "raise its target, or stop it"
            )
        if isinstance(decision, Proposal):
            _check_target(row, decision)
        return row

    def _change(self, row: _Row, state: TrialState) -> None:
        """Set a trial's state and update the counts and ``settled``."""
        group = row.group
        if row.state == "running":
            self._under_way[group] -= 1
            self._num_running -= 1
        elif row.state == "waiting" and row.reached != row.horizon:
            self._undecided[group] -= 1
        row.state, row.view = state, None
        self._moves.append(row.number)
        if state == "running":
            self._under_way[group] += 1
            self._num_running += 1
        elif state == "waiting" and row.reached != row.horizon:
            self._undecided[group] += 1
        if self._undecided[group] and not self._under_way[group]:
            self._settled.add(group)
        else:
            self._settled.discard(group)


def _check_target(row: _Row, decision: Proposal) -> None:
    if row.horizon is not None and decision.target > row.horizon:
        raise AlgorithmError(
            f"the algorithm asks for {decision.target} epochs of trial {row.number}, whose "
            f"training ends at {row.horizon}; lower the target"
        )
