"""The stream of one trial: a copy of its own, read batch by batch, pass after pass."""

from __future__ import annotations

import inspect
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset

from thrifty.core import StateError, TaskError
from thrifty.pack._frozen import bytes_of

from ._data import Batch
from ._data_contents import TokenFile


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
        self._readers: list[Reader] = []
        """The reader in use, if there is one.

        A trial may be in a reference cycle, such as that of an error and its traceback. If the
        iterator of a loader were garbage with it, Python would close the queues of the loader's
        workers before ``__del__`` of the iterator tells the workers to end, and ``__del__`` would
        wait 5 s for each of them. ``weakref`` keeps the list, so the reader is not garbage until
        the stream is gone.
        """
        weakref.finalize(self, self._readers.clear).atexit = False

    def state(self) -> dict[str, Any]:
        """Return where the stream is after the last epoch."""
        return dict(self._begin if self._end is None else self._end)

    def load(self, state: Mapping[str, Any]) -> None:
        """Go to where ``state`` was."""
        self._begin, self._end = dict(state), None
        self._readers.clear()

    def epoch(self, epoch: int, *, batch_size: int, num: int) -> Iterator[Batch]:
        """Return the batches of the next epoch, or once more those of the last one.

        Raises:
            StateError: The stream is at another epoch.
        """
        if self._end is not None and (self.is_probed or self._end["epoch"] == epoch):
            self._begin, self._end = self._end, None
        else:
            self._readers.clear()  # an epoch that was begun before is read again from its start
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
        if not self._readers:
            begin = self._begin
            self._readers.append(self._new_reader(number=begin["pass"], state=begin["state"]))
        reader = self._readers[0]
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


MAX_ELEMENTS = 256
"""How many elements of each tensor are compared when validation data are read again."""


def is_function(stream: Any) -> bool:
    return callable(stream) and not isinstance(stream, Iterable | TokenFile)


def is_map(stream: Any) -> bool:
    """Return whether a stream is a data set or a list, whose samples have numbers."""
    kind = type(stream)
    if isinstance(stream, IterableDataset):  # it inherits an item access that only raises
        return False
    return hasattr(kind, "__len__") and hasattr(kind, "__getitem__")


def is_stateful(stream: Any) -> bool:
    return all(callable(getattr(stream, n, None)) for n in ("state_dict", "load_state_dict"))


def yields_samples(stream: Any) -> bool:
    """Return whether a stream yields samples; others yield batches."""
    is_hugging_face = type(stream).__module__.partition(".")[0] == "datasets"
    return isinstance(stream, IterableDataset) or is_hugging_face


def check_train(train: Any) -> None:
    if isinstance(train, TokenFile) or is_map(train):
        return
    if is_function(train):
        if num_required(train) != 2:
            raise TaskError(
                f"StreamData(train={name_of(train)}): it takes {num_required(train)} arguments; it "
                "is called with seed and epoch: def train(seed, epoch)"
            )
        return
    if isinstance(train, Iterator):
        raise TaskError(
            f"StreamData(train=...): {type(train).__name__} objects can be read only once, so a "
            "trial could not be resumed; give the function that makes it, with the arguments "
            "(seed, epoch)"
        )
    if not isinstance(train, Iterable) or not is_stateful(train):
        hint = (
            " Return thrifty.DatasetPair(train=..., valid=...) for a data set with items, or give "
            "torchdata's StatefulDataLoader."
            if isinstance(train, DataLoader)
            else ""
        )
        raise TaskError(
            f"StreamData(train=...): {type(train).__name__} objects cannot be resumed, because "
            "they have no state_dict and load_state_dict; add them, or give a function of "
            f"(seed, epoch) that returns an iterable of batches.{hint}"
        )


def check_valid(valid: Any) -> None:
    if is_function(valid):
        if num_required(valid) not in (0, 2):
            raise TaskError(
                f"StreamData(valid={name_of(valid)}): it takes {num_required(valid)} arguments; it "
                "takes none, or seed and epoch"
            )
        return
    if isinstance(valid, Iterator) or not isinstance(valid, Iterable | TokenFile):
        if is_map(valid):
            return
        raise TaskError(
            f"StreamData(valid=...): {type(valid).__name__} objects cannot be read after each "
            "epoch; give a function that returns an iterable of batches, a list of samples, or a "
            "data set"
        )


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def num_required(function: Callable[..., Any]) -> int:
    """Return how many arguments a function needs, besides ``batch_size``."""
    return sum(
        each.default is inspect.Parameter.empty
        and each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
        and name != "batch_size"
        for name, each in parameters_of(function).items()
    )


def copy_of(stream: Any) -> Any:
    """Return a copy of a stream that has a state; data sets without a state are shared.

    Raises:
        TaskError: It cannot be copied.
    """
    inside = getattr(stream, "dataset", None)
    shared = inside is not None and is_map(inside) and not is_stateful(inside)
    try:
        return deepcopy(stream, {id(inside): inside} if shared else {})
    except Exception as error:
        raise TaskError(
            f"StreamData: the {type(stream).__name__} cannot be copied ({type(error).__name__}: "
            f"{error}), and each trial reads a copy of its own; make it anew in data(hp), unread "
            "and without open files, or give a function of (seed, epoch)"
        ) from error


def len_of(stream: Any) -> int | None:
    try:
        return len(stream)
    except TypeError:
        return None


def name_of(stream: Any) -> str:
    return str(getattr(stream, "__qualname__", type(stream).__name__))


def num_rows(batch: Batch) -> int:
    """Return the number of samples of a batch.

    Raises:
        TaskError: It holds nothing that has a length.
    """
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, torch.Tensor | np.ndarray) and leaf.ndim:
            return len(leaf)
    num = len_of(batch)
    if num is None:
        raise TaskError(
            f"the validation stream gives batches of type {type(batch).__name__}, which have no "
            "rows; metrics are weighted by the rows of a batch, so give tensors whose first "
            "dimension is the samples"
        )
    return num


def digest_of(batch: Batch) -> int:
    """Return a digest of a part of a batch, cheap enough to compute each time."""
    found = 0
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, torch.Tensor):
            flat = leaf.detach().reshape(-1)
            text = b"".join(bytes_of(flat[:: max(1, len(flat) // MAX_ELEMENTS)]))
            found = zlib.crc32(repr(tuple(leaf.shape)).encode() + text, found)
        elif isinstance(leaf, np.ndarray | str | bytes | int | float):
            found = zlib.crc32(repr(leaf).encode(), found)
    return found


def pinned(batch: Batch) -> Batch:
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.pin_memory(), batch)
