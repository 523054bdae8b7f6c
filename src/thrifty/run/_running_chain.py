"""The progress of an assignment within a worker."""

from __future__ import annotations

from concurrent.futures import Future

from thrifty.core import CheckpointRef, EpochDone, Event
from thrifty.pack import Member, State, TimeShare
from thrifty.plan import Stage

from ._alone import member_at
from ._executor import Assignment, ChainProgress, Report


class RunningChain(ChainProgress):
    """An assignment in progress: its current epoch, and its checkpoints still being written."""

    def __init__(self, assignment: Assignment) -> None:
        super().__init__(assignment)
        self.under_way = False
        self.spent = TimeShare()
        """Time spent on the current epoch so far."""
        self.dropped = TimeShare()
        """Time spent on discarded epochs; it is reported with the next epoch."""
        self.writes: list[tuple[Stage, Future[CheckpointRef | None]]] = []
        self.passed: State | None = None
        """State after the last epoch if that was not trained; it is in no back-end slot yet."""
        self.lost: set[CheckpointRef] = set()
        self.parked: Member | None = None
        """State after the last epoch, held while all trials together may not fit into memory."""
        self.finale: Event | None = None
        self.held: list[EpochDone] = []
        """Epochs that have ended but are not verified yet."""
        self.is_again = False
        """Whether it has started its current stage before."""
        self.is_alone = False
        """Whether it must no longer be fused with other trials."""
        self.is_compared = False
        """Whether it was compared with a restored trial at the end of a stage."""
        self.epoch_s = 0.0
        """Seconds that the last epoch took."""
        self._num_reported = self.epoch
        self._start: tuple[int, CheckpointRef | Future[CheckpointRef] | None]
        self._start = (self.epoch, self.chain.resume)

    @property
    def resume(self) -> CheckpointRef | None:
        """The last checkpoint from which it can be trained again; None: a fresh model.

        Raises:
            StoreWriteError: The checkpoint could not be written.
        """
        return self._start[1].result() if isinstance(self._start[1], Future) else self._start[1]

    @property
    def next_kept(self) -> CheckpointRef | None:
        """The state after the next epoch, if another plan has trained that epoch."""
        ref = self.stage.kept_at(self.epoch + 1)
        return None if self.under_way or self.held or ref in self.lost else ref

    def move_to(self, kept: CheckpointRef, state: State) -> None:
        """Skip an epoch whose state is stored already."""
        self.epoch, self.passed = self.epoch + 1, state
        self._start = (self.epoch, kept)

    def verified(self, done: EpochDone, num_unverified: int) -> list[Report]:
        """Add an epoch that has ended; return reports of the newly verified epochs, each once."""
        self.held.append(done)
        num_ready = len(self.held) - num_unverified
        ready, self.held = self.held[:num_ready], self.held[num_ready:]
        fresh = [event for event in ready if event.epoch > self._num_reported]
        for event in ready[: len(ready) - len(fresh)]:
            self._drop(event)
        self._num_reported = max([self._num_reported, *(event.epoch for event in ready)])
        return [self.report(event) for event in fresh]

    def start_again(self) -> None:
        """Go back to the last state from which it can be trained again."""
        self.epoch = self._start[0]
        self.under_way = False
        self.is_again = self.is_alone = True
        self.parked = self.passed = None
        self.drop_spent()
        for event in self.held:
            self._drop(event)
        self.held.clear()

    def drop_spent(self) -> None:
        """Count the time spent on the current epoch as time of discarded epochs."""
        self.dropped, self.spent = self.dropped.plus(self.spent), TimeShare()

    def _drop(self, event: EpochDone) -> None:
        lost = TimeShare(seconds=event.seconds, checks=event.seconds_checks)
        self.dropped = self.dropped.plus(lost)

    def keep(self, stage: Stage, writing: Future[CheckpointRef]) -> None:
        """Note that the state at the end of a stage is being written."""
        self.writes.append((stage, writing))  # type: ignore[arg-type] # futures are only read
        self._start = (self.epoch, writing)

    def member(self, state: State | None, *, epoch: int | None = None) -> Member:
        """Return the trial with ``state``, about to train ``epoch`` (None: the current one)."""
        return member_at(
            self.chain.timeline,
            seed=self.assignment.seed,
            epoch=self.epoch if epoch is None else epoch,
            stop=self.stage.stop,
            state=state,
            alone=self.is_alone,
        )
