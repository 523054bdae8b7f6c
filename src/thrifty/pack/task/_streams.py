"""Data that come as a stream: functions of (seed, epoch), streams with a state, token files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.utils.data import default_collate

from thrifty.core import (
    OrderedPrefetcher,
    StateError,
    TaskError,
    derive_seed,
    plain_logger,
    step_seed,
)
from thrifty.pack._state import (
    borrowed_streams,
    loose_streams,
    pack_state,
    seed_everything,
    unpack_state,
)
from thrifty.pack.verify import same, stand_in

from ._data import Batch, DatasetPair, DatasetSource, Source, own_copy, to_device
from ._data_contents import TokenFile
from ._step_options import epoch_batches, epoch_length
from ._trial_stream import (
    CountedBatches,
    Reader,
    TrialStream,
    check_train,
    check_valid,
    copy_of,
    digest_of,
    ended,
    is_function,
    is_map,
    is_stateful,
    len_of,
    name_of,
    num_required,
    num_rows,
    parameters_of,
    pinned,
    yields_samples,
)


logger = plain_logger(__name__)

NOMINAL_NUM = 2**16
"""How many samples a stream without a length is taken to have, where rounding is estimated."""
NUM_COMPARED = 2
"""How many batches are read twice before training, to see whether they are the same."""


class StreamData:
    """Data that have no fixed order or no end: functions, iterable data sets, token files.

    ``train`` is one of these:

    - a function of ``(seed, epoch)`` that returns an iterable of batches, the same ones each time;
      it may also take ``batch_size``, by name;
    - a ``TokenFile``;
    - a stream with ``state_dict`` and ``load_state_dict``: an ``IterableDataset`` or a streaming
      data set of Hugging Face, which yield samples, or a loader of batches such as torchdata's
      ``StatefulDataLoader``. Each trial reads a copy of its own, whose state is in its checkpoint;
    - a data set with ``__len__`` and ``__getitem__``, shuffled by seed and pass as in
      ``DatasetPair``.

    A stream needs ``Task.steps_per_epoch``, unless it says its length. A function is asked for
    each epoch anew; all others go on across epochs.

    ``valid`` is one of these, too, or any iterable of batches that can be read again. It is read to
    its end after each epoch, and has to give the same batches each time. A function is called with
    seed 0 and epoch 0, or with nothing if it takes no arguments.

    Args:
        train: The training stream.
        valid: The validation stream, which has an end.
        collate_fn: Makes a batch of a list of samples (default: torch's ``default_collate``).
        prefetch: How many training batches a thread prepares in advance; 0 for none. The function
            must then draw from generators of its own only (default: 2 for a ``TokenFile``, else 0).

    Raises:
        TaskError: A stream cannot be resumed or read again; the message says what to do.

    >>> def batches(seed, epoch):
    ...     generator = torch.Generator().manual_seed(1000 * seed + epoch)
    ...     while True:
    ...         yield torch.rand(8, generator=generator)
    >>> data = StreamData(train=batches, valid=[torch.tensor(0.5)] * 4)
    """

    def __init__(
        self,
        *,
        train: Any,
        valid: Any,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        prefetch: int | None = None,
    ) -> None:
        if prefetch is None:
            prefetch = 2 if isinstance(train, TokenFile) else 0
        if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
            raise TaskError(
                f"StreamData(prefetch={prefetch!r}): it must be a whole number, 0 or more"
            )
        if prefetch and not (isinstance(train, TokenFile) or is_function(train)):
            raise TaskError(
                f"StreamData(prefetch={prefetch}): a {type(train).__name__} reads its batches "
                "itself; leave prefetch out, and give a loader num_workers"
            )
        check_train(train)
        check_valid(valid)
        self.train = train
        self.valid = valid
        self.collate_fn = collate_fn or default_collate
        self.prefetch = prefetch

    @property
    def tokens_per_sample(self) -> int | None:
        """The number of tokens of a training sample, if the stream says it."""
        found: int | None = getattr(self.train, "tokens_per_sample", None)
        return found

    def source(self, device: torch.device) -> StreamSource:
        """Return a source of the batches on a device."""
        return StreamSource(self, device)


class StreamSource:
    """The batches of ``StreamData`` on a device.

    Attributes:
        files: The token files that are read.
        is_verified: Whether a second reading of the stream has given the same batches.
    """

    arrays: tuple[torch.Tensor, ...] | None = None
    has_workers = False

    def __init__(self, data: StreamData, device: torch.device) -> None:
        self._data = data
        self._device = device
        self._seen: dict[int, list[int]] = {}
        self._lengths: dict[tuple[int, int], int | None] = {}
        self._mapped_train, self._mapped_valid = _mapped(data, device)
        mapped = self._mapped_train
        self.num_train = NOMINAL_NUM if mapped is None else mapped.num_train
        self.files = [each for each in (data.train, data.valid) if isinstance(each, TokenFile)]
        self.is_verified = False

    @property
    def tokens_per_sample(self) -> int | None:
        """The number of tokens of a training sample, if the stream says it."""
        return self._data.tokens_per_sample

    @property
    def parts(self) -> Mapping[str, Any]:
        """The objects of the user that make batches, by name."""
        data = self._data
        found = {"data.train": data.train, "data.valid": data.valid, "collate_fn": data.collate_fn}
        return {k: v for k, v in found.items() if v is not default_collate}

    @property
    def is_stateful(self) -> bool:
        """Whether each trial reads a copy of the stream, whose state it keeps."""
        return self._mapped_train is None and is_stateful(self._data.train)

    def epoch_length(self, *, seed: int, batch_size: int, num_steps: int | None) -> int:
        """Return how many steps an epoch has.

        Raises:
            TaskError: The stream says no length, and the task does not either.
        """
        if self._mapped_train is not None:
            return epoch_length(
                self._mapped_train, seed=seed, batch_size=batch_size, num_steps=num_steps
            )
        if num_steps is not None:
            return num_steps
        key = (seed, batch_size)
        if key not in self._lengths:
            self._lengths[key] = self._length(seed=seed, batch_size=batch_size)
        length = self._lengths[key]
        if length:
            return length
        raise TaskError(
            f"the training stream ({name_of(self._data.train)}) says no length, so an epoch has no "
            "end; set steps_per_epoch on the task"
        )

    def epoch_batches(
        self, *, seed: int, epoch: int, batch_size: int, num_steps: int | None
    ) -> Iterator[Batch]:
        """Return the batches of an epoch of a stream without a state.

        Raises:
            TaskError: The stream has fewer batches, or draws from a global stream in a thread.
        """
        if self._mapped_train is not None:
            return epoch_batches(
                self._mapped_train,
                seed=seed,
                epoch=epoch,
                batch_size=batch_size,
                num_steps=num_steps,
            )
        num = self.epoch_length(seed=seed, batch_size=batch_size, num_steps=num_steps)
        train = self._data.train
        if isinstance(train, TokenFile):
            first = epoch * num
            return self._moved(
                lambda index: train.batch(seed=seed, step=first + index, batch_size=batch_size), num
            )
        called = partial(self._called, seed, epoch, batch_size)
        return self._moved(CountedBatches(called, epoch=epoch, num=num), num)

    def train_batches(self, *, seed: int, epoch: int, batch_size: int) -> Iterator[Batch]:
        """Yield the batches of a new reading; for probes. It may have no end."""
        train = self._data.train
        if self._mapped_train is not None:
            yield from self._mapped_train.train_batches(
                seed=seed, epoch=epoch, batch_size=batch_size
            )
        elif isinstance(train, TokenFile):
            yield self._own(train.batch(seed=seed, step=epoch, batch_size=batch_size))
        elif self.is_stateful:
            reader = self.reader(number=0, state=None)
            while True:
                yield self._own(reader.read(batch_size))
        else:
            for batch in self._called(seed, epoch, batch_size):
                yield self._own(batch)

    def valid_batches(self, *, batch_size: int) -> Iterator[tuple[Batch, int]]:
        """Yield the validation batches with their numbers of rows.

        Raises:
            StateError: They are not those of the first time.
            TaskError: There are none.
        """
        known = self._seen.get(batch_size)
        digests: list[int] = []
        for batch in self._valid(batch_size):
            found = digest_of(batch)
            if known is not None and known[len(digests) : len(digests) + 1] != [found]:
                raise self._other_validation(f"batch {len(digests) + 1} differs")
            digests.append(found)
            yield self._own(batch), num_rows(batch)
        if not digests:
            raise TaskError(
                f"the validation stream ({name_of(self._data.valid)}) has no batches; it must have "
                "an end and at least one batch, each time that it is read"
            )
        if known is not None and len(digests) != len(known):
            raise self._other_validation(f"{len(known)} batches were {len(digests)}")
        self._seen[batch_size] = digests

    def reader(self, *, number: int, state: Any) -> Reader:
        """Return a reader of a copy of the stream.

        Args:
            number: The number of the pass that the copy is in.
            state: The state of the copy; None for the beginning of the stream.
        """
        return Reader(
            copy_of(self._data.train),
            collate=self._data.collate_fn if yields_samples(self._data.train) else None,
            number=number,
            state=state,
        )

    def trial_stream(self) -> TrialStream:
        """Return the stream of a new trial."""
        return TrialStream(self.reader, own=self._own)

    def check(self, *, seed: int, batch_size: int, num_steps: int | None) -> None:
        """Read the beginning of the stream twice, and compare.

        Raises:
            StateError: The second reading differs, so trials would not see the same batches.
            TaskError: The stream says no length, its state cannot be stored, or it draws from a
                global stream in a thread.
        """
        self.epoch_length(seed=seed, batch_size=batch_size, num_steps=num_steps)
        if self.is_verified or self._mapped_train is not None:
            return
        with borrowed_streams():
            if self.is_stateful:
                self._check_state(seed, batch_size)
            elif not isinstance(self._data.train, TokenFile):
                self._check_function(seed, batch_size)
        self.is_verified = True

    # -- details -------------------------------------------------------------------------

    def _length(self, *, seed: int, batch_size: int) -> int | None:
        train = self._data.train
        if is_function(train):
            return len_of(self._called(seed, 0, batch_size))
        length = None if isinstance(train, TokenFile) else len_of(train)
        if length is not None and yields_samples(train):
            return -(-length // batch_size)
        return length

    def _called(self, seed: int, epoch: int, batch_size: int) -> Iterable[Batch]:
        """Call the user's function.

        Raises:
            TaskError: It returns nothing that can be iterated over.
        """
        function = self._data.train
        options = {"batch_size": batch_size} if "batch_size" in parameters_of(function) else {}
        found = function(seed, epoch, **options)
        if not isinstance(found, Iterable) or isinstance(found, torch.Tensor | Mapping | str):
            raise TaskError(
                f"StreamData(train={name_of(function)}): it returned {type(found).__name__}; "
                "return an iterable of batches, or make the function a generator"
            )
        return found

    def _moved(self, make: Callable[[int], Batch], num: int) -> Iterator[Batch]:
        """Yield batches on the device, prepared in advance if the user wants that."""
        if not self._data.prefetch:
            for index in range(num):
                yield self._own(make(index))
            return
        before = _global_streams()
        first = self._own(make(0))
        if before != _global_streams():
            raise self._draws_globally()
        yield first
        pins = self._device.type == "cuda"

        def prepared(index: int) -> Batch:
            batch = own_copy(make(index + 1))
            return pinned(batch) if pins else batch

        ahead = OrderedPrefetcher(prepared, num - 1, num_threads=1, depth=self._data.prefetch)
        try:
            for batch in ahead:
                yield to_device(batch, self._device)
        finally:
            ahead.close()

    def _own(self, batch: Batch) -> Batch:
        return to_device(own_copy(batch), self._device)

    def _valid(self, batch_size: int) -> Iterator[Batch]:
        valid, collate = self._data.valid, self._data.collate_fn
        if isinstance(valid, TokenFile):
            yield from valid.valid_batches(batch_size)
        elif is_function(valid):
            yield from valid(0, 0) if num_required(valid) else valid()
        elif self._mapped_valid is not None:
            yield from (b for b, _ in self._mapped_valid.valid_batches(batch_size=batch_size))
        else:
            stream = copy_of(valid) if is_stateful(valid) else valid
            items = iter(stream)
            if not yields_samples(valid):
                yield from items
                return
            while samples := list(islice(items, batch_size)):
                yield collate(samples)

    def _other_validation(self, what: str) -> StateError:
        return StateError(
            f"the validation stream ({name_of(self._data.valid)}) gave other batches than before "
            f"({what}), so metrics could not be compared; give a stream that is the same each time "
            "that it is read, with generators of fixed seeds"
        )

    def _check_function(self, seed: int, batch_size: int) -> None:
        def beginning(epoch: int) -> list[Any]:
            seed_everything(derive_seed(seed, "fetch", epoch))
            found = []
            batches = iter(self._called(seed, epoch, batch_size))
            for step in range(NUM_COMPARED):
                seed_everything(step_seed(derive_seed(seed, "fetch", epoch), step))
                found += [stand_in(batch) for batch in islice(batches, 1)]
            return found

        first = beginning(0)
        if not first:
            raise ended(0, 0, wanted=None)
        if not same(first, beginning(0)):
            raise StateError(
                f"StreamData(train={name_of(self._data.train)}): it gives other batches when it is "
                "called again with the same seed and epoch, so a trial could not be resumed; let "
                "the batches depend on seed and epoch only, with a generator made in the function"
            )
        if same(first, beginning(1)):
            logger.warning(
                "StreamData(train=%s): epochs 1 and 2 begin with the same batches; if the stream "
                "should go on, let the function use its argument epoch",
                name_of(self._data.train),
            )

    def _draws_globally(self) -> TaskError:
        return TaskError(
            f"StreamData(train={name_of(self._data.train)}, prefetch={self._data.prefetch}): it "
            "draws from a global random stream, which training uses at the same time; draw from a "
            "generator made in the function, or set prefetch=0"
        )

    def _check_state(self, seed: int, batch_size: int) -> None:
        def taken(stream: TrialStream, epoch: int) -> list[Any]:
            seed_everything(derive_seed(seed, "fetch", epoch))
            batches = stream.epoch(epoch, batch_size=batch_size, num=NUM_COMPARED)
            return [stand_in(batch) for batch in batches]

        live, again, restored = (self.trial_stream() for _ in range(3))
        firsts = [taken(live, 0)]
        state = pack_state(live.state())  # it must be storable
        firsts += [taken(live, 1), taken(live, 2)]
        seconds = [taken(again, 0)]
        restored.load(unpack_state(state))
        seconds += [taken(restored, 1), taken(restored, 2)]
        for number, (one, other) in enumerate(zip(firsts, seconds, strict=True)):
            if same(one, other):
                continue
            what = (
                "goes on differently when it is restored from its state_dict"
                if number
                else "begins differently each time"
            )
            raise StateError(
                f"StreamData(train={name_of(self._data.train)}): the stream {what}, so a trial "
                "could not be resumed; keep all that decides its next samples in state_dict (a "
                "shuffle buffer may not), or give a function of (seed, epoch)"
            )


def _mapped(
    data: StreamData, device: torch.device
) -> tuple[DatasetSource | None, DatasetSource | None]:
    """Return the sources of those streams that are data sets, for training and validation."""
    has = is_map(data.train), is_map(data.valid)
    if not any(has):
        return None, None
    pair = DatasetPair(
        train=data.train if has[0] else data.valid,
        valid=data.valid if has[1] else data.train,
        collate_fn=data.collate_fn,
    )
    source = DatasetSource(pair, device)
    return source if has[0] else None, source if has[1] else None


def check_stream(source: Source, *, seed: int, batch_size: int, num_steps: int | None) -> None:
    """Read the beginning of a stream twice and compare, once; other data are left alone.

    Raises:
        StateError: The second reading differs.
        TaskError: The stream has no length or too few batches, or its state cannot be stored.
    """
    if isinstance(source, StreamSource):
        source.check(seed=seed, batch_size=batch_size, num_steps=num_steps)


def trial_stream(source: Source) -> TrialStream | None:
    """Return the stream of a new trial; None for data that have no state."""
    if isinstance(source, StreamSource) and source.is_stateful:
        return source.trial_stream()
    return None


def token_files(source: Source) -> list[TokenFile]:
    """Return the token files that a source reads."""
    return list(source.files) if isinstance(source, StreamSource) else []


def _global_streams() -> tuple[Any, ...]:
    """Return where the global random streams are."""
    return (*loose_streams(), torch.get_rng_state().numpy().tobytes())
