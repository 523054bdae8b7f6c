"""Detection of interference between trials that take turns in one process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch.utils.data import Dataset

from thrifty.core import TaskError
from thrifty.pack._random import loose_streams
from thrifty.pack.trial._trainable_trial import TrainableTrial
from thrifty.pack.trial._trial import TaskTrial
from thrifty.pack.verify import Change, Watch


STREAMS_MOVED = (
    "it draws from Python's or NumPy's random stream, which is seeded for each epoch, "
    "not for each step"
)


class InterferenceError(Exception):
    """Trials that took turns have affected each other: their epochs do not count."""


class Company:
    """The trials that are in the middle of an epoch at the same time.

    Python's and NumPy's streams are seeded when an epoch starts (before each batch of a dataset),
    so the steps in between must not draw from them. A value that a step reads must not change
    until the epoch ends if another trial can write to it.
    """

    def __init__(self) -> None:
        self._watches: dict[int, Watch] = {}
        self._others: dict[int, list[Watch]] = {}
        self.seeded()

    def join(self, slot: int, trial: TaskTrial, others: Mapping[int, TaskTrial]) -> None:
        """Start watching a trial that begins an epoch; its values count as they are now.

        Args:
            slot: The slot of the trial.
            trial: The trial.
            others: The trials in the middle of an epoch, by slot.
        """
        watch = self._watches.get(slot)
        if watch is None:
            watch = self._watches[slot] = trial.new_watch()
        else:
            watch.look()
        self._others[slot] = []
        for number, other in others.items():
            if number not in self._watches:
                self._watches[number] = other.new_watch()
            theirs = self._watches[number]
            self._others[slot].append(theirs)
            self._others.setdefault(number, []).append(watch)

    def end(self, slot: int) -> None:
        """Stop watching a trial that has ended its epoch."""
        self._others.pop(slot, None)

    def forget(self, slot: int) -> None:
        """Discard what is known of a trial that has left its slot."""
        self.end(slot)
        self._watches.pop(slot, None)

    def step(self, slot: int, trial: TaskTrial) -> bool:
        """Let a trial take a step, and return False if its epoch has no steps left.

        Raises:
            InterferenceError: A trial has drawn from streams that were seeded for another one.
        """
        if not (trial.seeds_each_batch and slot in self._others):
            return trial.step()
        self.check_streams()
        try:
            batch = trial.next_batch()
        finally:
            self.seeded()
        if batch is None:
            return False
        trial.update(batch)
        return True

    def seeded(self) -> None:
        """Record where Python's and NumPy's streams are; nothing may move them from here on."""
        self._streams = loose_streams()

    def is_moved(self) -> bool:
        """Return whether Python's or NumPy's stream has moved since it was recorded."""
        return self._streams != loose_streams()

    def check_streams(self) -> None:
        """Check that no trial has drawn from Python's and NumPy's streams.

        Raises:
            InterferenceError: One has.
        """
        if self.is_moved():
            raise InterferenceError(STREAMS_MOVED)

    def check(self, slot: int) -> None:
        """Check that no other trial interfered with a trial that is at the end of its epoch.

        Raises:
            InterferenceError: Streams have moved, or a value that another trial also reads has
                changed.
        """
        others = self._others.get(slot)
        if not others:
            return
        self.check_streams()
        for change in self._watches[slot].changes():
            if _is_shared(change, others):
                raise InterferenceError(
                    f"{change.name}, which several trials read, has changed while they took turns"
                )


def _is_shared(change: Change, others: Iterable[Watch]) -> bool:
    if isinstance(change.holder, Dataset):
        # a cache, or a count of reads: the rows do not depend on it, see ``StateCheck``
        return False
    return any(not change.objects.isdisjoint(other.objects()) for other in others)


def check_parameters(trial: TaskTrial, others: Iterable[TaskTrial | TrainableTrial]) -> None:
    """Check that no other trial trains a parameter of this one; frozen ones may be shared.

    Raises:
        TaskError: Another trial trains one.
    """
    own = {id(p): name for name, p in trial.model.named_parameters() if p.requires_grad}
    for other in others:
        for parameter in other.model.parameters():
            if parameter.requires_grad and id(parameter) in own:
                raise TaskError(
                    f"{type(trial.task).__name__}.model gives the parameter {own[id(parameter)]!r} "
                    "to several trials, so one trial trains those of another; make it anew, or "
                    "copy it (copy.deepcopy), in each call"
                )
