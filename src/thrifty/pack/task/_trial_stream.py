"""The stream of one trial: a copy of its own, read batch by batch, pass after pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from itertools import islice
from typing import Any

from thrifty.core import StateError, TaskError

from ._data import Batch
from ._stream_kinds import name_of


END = object()
"""What reading returns after the last batch."""


class Reader:
    """A reader of one copy of a stream, pass after pass.

    Attributes:
        number: The number of the pass that it is in.
    """

    def __init__(
        self, stream: Any, *, collate: Callable[[list[Any]], Any] | None, number: int, state: Any
    ) -> None:
        self._stream = stream
        self._collate = collate
        self.number = number
        self._items: Iterator[Any] | None = None
        self._tell_pass()
        if state is not None:
            stream.load_state_dict(deepcopy(state))

    def read(self, batch_size: int) -> Batch:
        """Return the next batch; a new pass begins after the last one of a pass.

        Raises:
            TaskError: A pass has no batches.
        """
        for _ in range(3):  # the rest of a pass may be empty, and then a whole one must not
            if self._items is None:
                self._items = iter(self._stream)
            batch = self._next(batch_size)
            if batch is not END:
                return batch
            self.number += 1
            self._items = None
            self._tell_pass()
        raise TaskError(
            f"StreamData(train={name_of(self._stream)}): a pass over the stream has no batches"
        )

    def state(self) -> Any:
        """Return the state of the stream after the last batch."""
        return deepcopy(self._stream.state_dict())

    def _next(self, batch_size: int) -> Any:
        assert self._items is not None
        if self._collate is None:
            return next(self._items, END)
        samples = list(islice(self._items, batch_size))
        return self._collate(samples) if samples else END

    def _tell_pass(self) -> None:
        if callable(getattr(self._stream, "set_epoch", None)):
            self._stream.set_epoch(self.number)


class TrialStream:
    """The stream of one trial: a copy of its own, and where it is.

    Args:
        new_reader: Returns a reader of a copy of the stream, given its pass and its state.
        own: Brings a batch to the device, as a copy.
    """

    def __init__(self, new_reader: Callable[..., Reader], *, own: Callable[[Batch], Batch]) -> None:
        self._new_reader = new_reader
        self._own = own
        self._begin: dict[str, Any] = {"epoch": 0, "pass": 0, "state": None}
        self._end: dict[str, Any] | None = None
        self.is_probed = False
        """Whether a probe reads on from here, whatever the number of its epoch."""
        self._reader: Reader | None = None

    def state(self) -> dict[str, Any]:
        """Return where the stream is after the last epoch."""
        return dict(self._begin if self._end is None else self._end)

    def load(self, state: Mapping[str, Any]) -> None:
        """Go to where ``state`` was."""
        self._begin, self._end, self._reader = dict(state), None, None

    def epoch(self, epoch: int, *, batch_size: int, num: int) -> Iterator[Batch]:
        """Return the batches of the next epoch, or once more those of the last one.

        Raises:
            StateError: The stream is at another epoch.
        """
        if self._end is not None and (self.is_probed or self._end["epoch"] == epoch):
            self._begin, self._end = self._end, None
        else:
            self._reader = None  # an epoch that was begun before is read again from its start
            self._end = None
        if self.is_probed:
            epoch = self._begin["epoch"]
        if self._begin["epoch"] != epoch:
            raise StateError(
                f"the stream of a trial is at epoch {self._begin['epoch']}, but the trial trains "
                f"epoch {epoch}; restore it from the checkpoint before this epoch"
            )
        return self._batches(epoch, batch_size=batch_size, num=num)

    def _batches(self, epoch: int, *, batch_size: int, num: int) -> Iterator[Batch]:
        if self._reader is None:
            begin = self._begin
            self._reader = self._new_reader(number=begin["pass"], state=begin["state"])
        reader = self._reader
        for left in range(num - 1, -1, -1):
            batch = reader.read(batch_size)
            if not left:
                self._end = {"epoch": epoch + 1, "pass": reader.number, "state": reader.state()}
            yield self._own(batch)


class CountedBatches:
    """The batches of a function's iterable, by number, each asked for once and in order."""

    def __init__(self, call: Callable[[], Iterable[Batch]], *, epoch: int, num: int) -> None:
        self._call = call
        self._epoch = epoch
        self._num = num
        self._batches: Iterator[Batch] | None = None

    def __call__(self, index: int) -> Batch:
        if self._batches is None:  # called only now, when the random streams are seeded
            self._batches = iter(self._call())
        batch = next(self._batches, END)
        if batch is END:
            raise ended(self._epoch, index, wanted=self._num)
        return batch


def ended(epoch: int, num: int, *, wanted: int | None) -> TaskError:
    short = "" if wanted is None else f", and an epoch has {wanted} steps"
    return TaskError(
        f"the training stream ended after {num} batches of epoch {epoch + 1}{short}; let it go on "
        "(itertools.cycle, or while True), or lower steps_per_epoch"
    )
