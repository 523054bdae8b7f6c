"""Data of a task and their batches."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from copy import copy, deepcopy
from itertools import count
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from thrifty.core import TaskError, derive_seed

from ._data_contents import Samples
from ._own_generators import OwnGenerators, SeededWorker


Batch = Any


class Source(Protocol):
    """A source of batches.

    ``arrays`` are the training data if all of them are on the device, else None.
    """

    num_train: int
    arrays: tuple[torch.Tensor, ...] | None

    def train_batches(self, *, seed: int, epoch: int, batch_size: int) -> Iterator[Batch]:
        """Yield the training batches of one epoch, in an order determined by seed and epoch."""
        ...

    def valid_batches(self, *, batch_size: int) -> Iterator[tuple[Batch, int]]:
        """Yield the validation set once, in order, with the number of samples in each batch."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PassPart:
    """The batches ``start`` to ``stop`` of one pass over the training data.

    Attributes:
        number: The number of the pass, from 0. It decides the order of the samples.
        start: The first batch, from 0.
        stop: The batch after the last one.
        is_end: Whether the pass ends there.
    """

    number: int
    start: int
    stop: int
    is_end: bool


@runtime_checkable
class PassSource(Protocol):
    """A source of thrifty that begins within a pass without reading what comes before."""

    def batches_of(
        self, parts: Sequence[PassPart], *, seed: int, batch_size: int
    ) -> Iterator[Batch]:
        """Yield the training batches of some parts of passes, one part after the other."""
        ...


@runtime_checkable
class SourceData(Protocol):
    """Data that make their own batches, such as ``thrifty.graph.GraphData``.

    ``Task.data`` may return such an object instead of arrays or datasets. Batches must be a
    function of seed, epoch and batch size alone: trials with equal values of these get the same
    batches.
    """

    def source(self, device: torch.device) -> Source:
        """Return the source of batches on a device."""
        ...


class ArrayData:
    """Data that fit into memory, as tuples of arrays (NumPy or torch) of equal length.

    A batch is a tuple of slices. The arrays are put on the device once and stay there, so an epoch
    costs one permutation and one gather, and needs no data loader. Raises TaskError if lengths
    differ or a set is empty.

    >>> import numpy as np
    >>> data = ArrayData(
    ...     train=(np.zeros((8, 2)), np.arange(8)), valid=(np.ones((3, 2)), np.arange(3))
    ... )
    >>> data.train[0].shape
    torch.Size([8, 2])
    """

    def __init__(self, *, train: Sequence[Any], valid: Sequence[Any]) -> None:
        self.train = _tensors(train, name="train")
        self.valid = _tensors(valid, name="valid")


class DatasetPair:
    """Two ``torch.utils.data.Dataset``, read through a ``DataLoader`` with ``loader`` options.

    Batches are tensors or containers of tensors (named tuples and dataclasses included), which
    keep their types. Options are for example ``num_workers``. ``drop_last=True`` leaves out the
    last, smaller batch of each training epoch. Validation always sees all samples.

    A dataset has ``__len__`` and ``__getitem__``. A list of samples is one, too; samples that are
    arrays of several shapes need a ``collate_fn``. The training set cannot be an
    ``IterableDataset``: seed and epoch determine the order of its samples.

    Raises:
        TaskError: An option is unknown to ``DataLoader``, or thrifty sets it itself: seed and epoch
            determine the order of samples, and ``Task.batch_size`` the size of a batch.
    """

    def __init__(self, *, train: Dataset[Any], valid: Dataset[Any], **loader: Any) -> None:
        _check_loader(loader)
        self.train = train
        self.valid = valid
        self.loader = loader


@runtime_checkable
class WholeBatch(Protocol):
    """A batch that cannot be split into rows.

    Trials are trained on it together only if all of them see the same object.
    """

    def double(self) -> WholeBatch:
        """Return the batch in double precision, which the dry run of a pack uses."""
        ...


def open_source(data: Any, *, device: torch.device) -> Source:
    """Return the source of what ``Task.data`` returned, on its device.

    Raises:
        TaskError: It is neither ArrayData nor a pair of datasets, nor does it make its own batches,
            or it does not say which set is for training.
    """
    if isinstance(data, SourceData):
        return data.source(device)
    if isinstance(data, ArrayData):
        return _ArraySource(data, device)
    if isinstance(data, DatasetPair):
        return DatasetSource(data, device)
    return DatasetSource(_as_pair(data), device)


def _as_pair(data: Any) -> DatasetPair:
    """Return the training and the validation set of a tuple.

    Raises:
        TaskError: It is not a pair of datasets.
    """
    what = type(data).__name__
    fields = getattr(data, "_fields", ()) if isinstance(data, tuple) else ()
    if {"train", "valid"} <= set(fields):
        return DatasetPair(train=data.train, valid=data.valid)
    if fields:
        raise TaskError(
            f"Task.data returned {what}({', '.join(fields)}), a named tuple whose fields do not "
            "say which set is for training; name them train and valid, or return "
            "thrifty.DatasetPair(train=..., valid=...)"
        )
    if not isinstance(data, tuple) or len(data) != 2:
        size = f" of {len(data)}" if isinstance(data, list | tuple) else ""
        raise TaskError(
            f"Task.data returned {what}{size}; return thrifty.ArrayData(train=(x, y), "
            "valid=(x, y)) or a pair (train, valid) of torch datasets"
        )
    train, valid = data
    if any(_is_array(each) for each in data):
        raise TaskError(
            f"Task.data returned a pair of {type(train).__name__} and {type(valid).__name__}, "
            "which may be inputs and targets, or training and validation data; return "
            "thrifty.ArrayData(train=(x, y), valid=(x, y)) for arrays, or "
            "thrifty.DatasetPair(train=..., valid=...) if each row is one sample"
        )
    return DatasetPair(train=train, valid=valid)


def epoch_order(num_samples: int, *, seed: int, epoch: int) -> torch.Tensor:
    """Return the order of the training samples in an epoch (0, 1, ...).

    Returns:
        A permutation of shape ``(num_samples,)``, int64, on the CPU.

    >>> bool((epoch_order(9, seed=1, epoch=0) == epoch_order(9, seed=1, epoch=0)).all())
    True
    """
    generator = torch.Generator().manual_seed(derive_seed(seed, "data", epoch))
    return torch.randperm(num_samples, generator=generator)


def datasets_of(source: Source) -> Mapping[str, Any]:
    """Return the objects of the user that make a source's batches in this process, by name.

    There are none for arrays, for sources of thrifty, and where other processes read the data.
    """
    if not is_ours(source):
        return {"data": source}
    parts: Mapping[str, Any] = getattr(source, "parts", {})
    return {} if getattr(source, "has_workers", False) else parts


def train_batches(source: Source, *, seed: int, epoch: int, batch_size: int) -> Iterator[Batch]:
    """Return the training batches of an epoch; changing one changes nothing in the source."""
    batches = source.train_batches(seed=seed, epoch=epoch, batch_size=batch_size)
    return batches if is_ours(source) else map(own_batch, batches)


def valid_batches(source: Source, *, batch_size: int) -> Iterator[tuple[Batch, int]]:
    """Return the validation batches; changing one changes nothing in the source."""
    batches = source.valid_batches(batch_size=batch_size)
    return batches if is_ours(source) else ((own_batch(batch), num) for batch, num in batches)


def is_ours(source: Source) -> bool:
    """Return whether a source is one of thrifty, which hand out copies."""
    return type(source).__module__.partition(".")[0] == "thrifty"


def steps_of(source: Source, batch_size: int) -> int:
    """Return how many batches an epoch of training has.

    Raises:
        TaskError: It has none, because ``drop_last`` is set and no batch is full.
    """
    if not getattr(source, "drop_last", False):
        return math.ceil(source.num_train / batch_size)
    if batch_size > source.num_train:
        raise TaskError(
            f"batch_size is {batch_size}, but there are {source.num_train} training samples, and "
            "drop_last=True leaves no batch; lower batch_size or leave drop_last out"
        )
    return source.num_train // batch_size


def samples_of(source: Source) -> tuple[Samples | None, Samples | None]:
    """Return the training and validation samples of data in memory; None for any other."""
    if isinstance(source, _ArraySource):
        return source.train_samples, source.valid_samples
    return None, None


def num_valid_of(source: Source) -> int | None:
    """Return how many validation samples there are; None for a user-defined source."""
    return source.num_valid if isinstance(source, _ArraySource | DatasetSource) else None


class _ArraySource:
    def __init__(self, data: ArrayData, device: torch.device) -> None:
        self._train = tuple(t.to(device) for t in data.train)
        self.arrays: tuple[torch.Tensor, ...] | None = self._train
        self._valid = tuple(t.to(device) for t in data.valid)
        self.train_samples, self.valid_samples = Samples(self._train), Samples(self._valid)
        self._device = device
        self.num_train = len(self._train[0])
        self.num_valid = len(self._valid[0])

    def train_batches(self, *, seed: int, epoch: int, batch_size: int) -> Iterator[Batch]:
        order = epoch_order(self.num_train, seed=seed, epoch=epoch).to(self._device)
        shuffled = tuple(t[order] for t in self._train)
        return zip(*(torch.split(t, batch_size) for t in shuffled), strict=True)

    def batches_of(
        self, parts: Sequence[PassPart], *, seed: int, batch_size: int
    ) -> Iterator[Batch]:
        for part in parts:
            order = epoch_order(self.num_train, seed=seed, epoch=part.number)
            for start in range(part.start * batch_size, part.stop * batch_size, batch_size):
                rows = order[start : start + batch_size].to(self._device)
                yield tuple(t[rows] for t in self._train)

    def valid_batches(self, *, batch_size: int) -> Iterator[tuple[Batch, int]]:
        for start in range(0, len(self._valid[0]), batch_size):
            # a copy: a forward pass that changes its input must not change the data
            batch = tuple(t[start : start + batch_size].clone() for t in self._valid)
            yield batch, len(batch[0])


class DatasetSource:
    arrays: tuple[torch.Tensor, ...] | None = None

    def __init__(self, data: DatasetPair, device: torch.device) -> None:
        _check_datasets(data)
        self._data = data
        self._device = device
        self.has_workers = bool(data.loader.get("num_workers"))
        self.drop_last = bool(data.loader.get("drop_last", False))
        self.num_train = len(data.train)  # type: ignore[arg-type]
        self.num_valid = len(data.valid)  # type: ignore[arg-type]
        if not self.num_train or not self.num_valid:
            raise TaskError(
                "Task.data returned an empty dataset; both sets need at least one sample"
            )

    @property
    def parts(self) -> Mapping[str, Any]:
        """The objects of the user that make batches, by name."""
        loader = {f"data.{name}": value for name, value in self._data.loader.items()}
        made = {name: value for name, value in loader.items() if callable(value)}
        return {"data.train": self._data.train, "data.valid": self._data.valid, **made}

    def train_batches(self, *, seed: int, epoch: int, batch_size: int) -> Iterator[Batch]:
        order = epoch_order(self.num_train, seed=seed, epoch=epoch).tolist()
        return self._loaded(order, derive_seed(seed, "loader", epoch), batch_size)

    def batches_of(
        self, parts: Sequence[PassPart], *, seed: int, batch_size: int
    ) -> Iterator[Batch]:
        for part in parts:
            order = epoch_order(self.num_train, seed=seed, epoch=part.number)
            rows = order[part.start * batch_size : part.stop * batch_size].tolist()
            # Loader processes draw from here; each part of a pass has draws of its own.
            place = () if part.start == 0 else (part.start,)
            yield from self._loaded(
                rows, derive_seed(seed, "loader", part.number, *place), batch_size
            )

    def _loaded(self, order: list[int], seed: int, batch_size: int) -> Iterator[Batch]:
        """Return the batches of some rows, in this order."""
        loader: DataLoader[Any] = DataLoader(
            self._data.train,
            batch_size=batch_size,
            sampler=order,
            generator=torch.Generator().manual_seed(seed),
            **self._data.loader,
        )
        return map(self._own, self._read(loader, seed))

    def _read(self, loader: DataLoader[Any], seed: int) -> Iterator[Batch]:
        """Return the batches of a loader; generators that the user's objects keep are seeded."""
        generators = OwnGenerators(self.parts)
        if not generators:
            return iter(loader)
        if loader.num_workers:
            functions = {name: each for name, each in self._data.loader.items() if callable(each)}
            loader.worker_init_fn = SeededWorker(functions, seed, then=loader.worker_init_fn)
        return generators.iterated(loader, (derive_seed(seed, "own", i) for i in count()))

    def valid_batches(self, *, batch_size: int) -> Iterator[tuple[Batch, int]]:
        options = {**self._data.loader, "drop_last": False}
        loader: DataLoader[Any] = DataLoader(self._data.valid, batch_size=batch_size, **options)
        left = len(self._data.valid)  # type: ignore[arg-type]
        for batch in self._read(loader, 0):
            yield self._own(batch), min(batch_size, left)
            left -= batch_size

    def _own(self, batch: Batch) -> Batch:
        """Return a batch on the device that may be changed without changing the dataset."""
        if "collate_fn" in self._data.loader:  # it may return parts of the dataset itself
            batch = own_copy(batch)
        return to_device(batch, self._device)


_OURS = ("batch_size", "shuffle", "sampler", "batch_sampler", "generator", "dataset")
"""The ``DataLoader`` options that thrifty sets itself."""


def _check_loader(options: Mapping[str, Any]) -> None:
    known = inspect.signature(DataLoader.__init__).parameters.keys() - {"self"}
    for name, value in options.items():
        if name in _OURS:
            raise TaskError(
                f"DatasetPair({name}={value!r}): thrifty sets {name} itself, because the order of "
                "samples follows from seed and epoch; leave it out, and set Task.batch_size for "
                "the size"
            )
        if name not in known:
            raise TaskError(
                f"DatasetPair({name}=...): a torch DataLoader has no such option; it has: "
                f"{', '.join(sorted(known.difference(_OURS)))}"
            )
    if not isinstance(options.get("drop_last", False), bool):
        raise TaskError(
            f"DatasetPair(drop_last={options['drop_last']!r}): it must be True or False"
        )


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch on a device; containers keep their type."""

    def move(value: Any) -> Any:
        return to_device(value, device)

    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if batch is None or isinstance(batch, str | bytes | bool | int | float):
        return batch
    if callable(getattr(batch, "to", None)):  # packed sequences, token encodings, graphs
        return batch.to(device)
    if isinstance(batch, list | tuple):
        named = hasattr(batch, "_fields")
        return type(batch)(*map(move, batch)) if named else type(batch)(map(move, batch))
    moved: Any
    if isinstance(batch, MutableMapping):
        moved = copy(batch)
        moved.update({key: move(value) for key, value in batch.items()})
        return moved
    if dataclasses.is_dataclass(batch):
        moved = copy(batch)
        for name in (field.name for field in dataclasses.fields(batch)):
            object.__setattr__(moved, name, move(getattr(batch, name)))
        return moved
    return batch


_FEW_ARRAYS = 3
"""A list of so few arrays is taken for inputs and targets rather than for samples."""
_SEVERAL_ARRAYS = 8
"""So is a list of so few arrays if each of them has more rows than the list has arrays."""


def _check_datasets(data: DatasetPair) -> None:
    """Refuse what is no dataset, but has a length and items as a dataset has.

    Of a pair ``(x, y)`` of arrays, a loader would take ``x`` for the first sample.

    Raises:
        TaskError: A set cannot be read sample by sample.
    """
    _check_dataset(data.train, name="train")
    _check_dataset(data.valid, name="valid")
    if isinstance(data.train, IterableDataset):
        raise TaskError(
            f"Task.data returned {type(data.train).__name__}, an IterableDataset (train); its "
            "samples have no numbers, and the order of samples follows from seed and epoch; "
            "return thrifty.StreamData(train=..., valid=...), or thrifty.DatasetPair(train=..., "
            "valid=...) of datasets with __getitem__ and __len__"
        )
    collates = data.loader.get("collate_fn") is not None
    train, valid = _arrays_of(data.train), _arrays_of(data.valid)
    if train is not None and not _are_samples(train, collates=collates):
        raise _no_samples(data.train, name="train")
    if valid is None:
        return
    # the training samples show what a sample is, so a few of the same kind are samples, too
    alike = train is not None and _are_alike([*train, *valid], collates=collates)
    if train is not None and len(train) == len(valid) and not alike:
        raise _no_samples(data.train, name="train")  # as many columns, of different lengths
    if not alike and not _are_samples(valid, collates=collates):
        raise _no_samples(data.valid, name="valid")


def _check_dataset(data: Any, *, name: str) -> None:
    if isinstance(data, DataLoader):
        raise TaskError(
            f"Task.data returned a DataLoader ({name}); return the datasets, as "
            "thrifty.DatasetPair(train=..., valid=..., num_workers=...): thrifty makes the loaders"
        )
    what = ""
    if isinstance(data, str | bytes):
        what = "which is text"
    elif not hasattr(type(data), "__len__"):
        what = "which has no __len__"
    elif not any(hasattr(type(data), each) for each in ("__getitem__", "__getitems__")):
        what = "which has no __getitem__"
    elif isinstance(data, Mapping) and len(data) and not {0, len(data) - 1} <= data.keys():
        what = "whose keys are not the numbers of samples"
    if what:
        raise TaskError(
            f"Task.data returned {type(data).__name__} ({name}), {what}; return "
            "thrifty.DatasetPair(train=..., valid=...) of datasets with __getitem__ and __len__, "
            "or thrifty.ArrayData(train=(x, y), valid=(x, y)) for arrays"
        )


def _is_array(value: Any) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray)


def _arrays_of(data: Any) -> Sequence[Any] | None:
    """Return a list or tuple of nothing but arrays; None for anything else."""
    if isinstance(data, list | tuple) and data and all(map(_is_array, data)):
        return data
    return None


def _are_samples(arrays: Sequence[Any], *, collates: bool) -> bool:
    """Return whether each array is one sample, rather than a column of all samples.

    Args:
        arrays: The arrays.
        collates: Whether a function of the user makes batches of them.
    """
    if len(arrays) <= _FEW_ARRAYS or hasattr(arrays, "_fields"):
        return False
    if not _are_alike(arrays, collates=collates):
        return False
    are_long = all(each.ndim and len(each) > len(arrays) for each in arrays)
    return collates or len(arrays) > _SEVERAL_ARRAYS or not are_long


def _are_alike(arrays: Sequence[Any], *, collates: bool) -> bool:
    """Return whether arrays can be samples of one dataset; torch's own function stacks them."""
    return len({each.ndim if collates else tuple(each.shape) for each in arrays}) == 1


def _no_samples(data: Any, *, name: str) -> TaskError:
    shapes = ", ".join(str(tuple(each.shape)) for each in data[:3])
    return TaskError(
        f"Task.data returned a {type(data).__name__} of arrays ({name}, shapes {shapes}"
        f"{', ...' if len(data) > 3 else ''}); return thrifty.ArrayData(train=(x, y), "
        "valid=(x, y)) for arrays; if each array is one sample, return a torch Dataset, or give "
        "thrifty.DatasetPair a collate_fn for samples of several shapes"
    )


def _tensors(arrays: Sequence[Any], *, name: str) -> tuple[torch.Tensor, ...]:
    if not isinstance(arrays, list | tuple) or not arrays:
        raise TaskError(f"ArrayData({name}=...) takes a tuple of arrays, such as (x, y)")
    try:
        tensors = tuple(torch.as_tensor(array) for array in arrays)
    except (TypeError, ValueError) as error:
        raise TaskError(
            f"ArrayData({name}=...) takes arrays of numbers ({error}); make numbers of texts and "
            "rows of one length, or return a DatasetPair with a collate_fn"
        ) from None
    lengths = {len(t) if t.dim() else 0 for t in tensors}
    if len(lengths) > 1 or 0 in lengths:
        shapes = ", ".join(str(tuple(t.shape)) for t in tensors)
        raise TaskError(
            f"ArrayData({name}=...): arrays of shapes {shapes}; all need the same length, above 0"
        )
    return tensors


class LastingError(Iterator[Any]):
    """Batches for several trials; an error is raised for each of them.

    A generator would end after its first error.
    """

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self._error: Exception | None = None

    def __next__(self) -> Any:
        if self._error is not None:
            raise self._error
        try:
            return next(self._batches)
        except StopIteration:
            raise
        except Exception as error:
            self._error = error
            raise


def own_batch(batch: Batch) -> Batch:
    """Copy a batch, except for whole ones, which handle copying themselves."""
    is_whole = isinstance(batch, WholeBatch) and not isinstance(batch, torch.Tensor)
    return batch if is_whole else own_copy(batch)


def own_copy(batch: Any) -> Any:
    """Copy a batch: its containers, tensors and arrays; containers keep their type.

    A copy costs a few microseconds. Version counters would be cheaper, but they miss changes
    through ``.data``, ``.numpy()`` or a container.

    >>> x = torch.zeros(2)
    >>> copied = own_copy({"x": x})
    >>> copied["x"].add_(1), x
    (tensor([1., 1.]), tensor([0., 0.]))
    """
    if isinstance(batch, torch.Tensor):
        return batch.detach().clone().requires_grad_(batch.requires_grad)
    if batch is None or isinstance(batch, str | bytes | int | float | complex):
        return batch
    if isinstance(batch, np.ndarray):
        return batch.copy()
    if isinstance(batch, tuple):
        items = [own_copy(item) for item in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    if isinstance(batch, list):
        out = copy(batch)
        out[:] = [own_copy(item) for item in batch]
        return out
    if type(batch) is dict:
        return {key: own_copy(value) for key, value in batch.items()}
    if isinstance(batch, Mapping):
        held = copy(batch)
        try:
            for key, value in batch.items():
                held[key] = own_copy(value)  # type: ignore[index]
        except TypeError:  # it cannot be written to, so it cannot be changed
            return batch
        return held
    return deepcopy(batch)
