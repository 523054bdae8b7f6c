"""The data of a task, and the batches of one epoch: a function of seed and epoch alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.data import DataLoader, Dataset

from thrifty.core import TaskError, derive_seed


Batch = Any


class Source(Protocol):
    """Where batches come from; ``arrays`` are the training data where they all lie on the device, else None."""

    num_train: int
    arrays: tuple[torch.Tensor, ...] | None

    def train_batches(self, *, seed: int, epoch: int, batch_size: int) -> Iterator[Batch]:
        """The batches of one epoch of training, in an order given by seed and epoch."""
        ...

    def valid_batches(self, *, batch_size: int) -> Iterator[tuple[Batch, int]]:
        """The validation set once, in order, with the number of samples in each batch."""
        ...


@runtime_checkable
class SourceData(Protocol):
    """Data that make their own batches, such as ``thrifty.graph.GraphData``; what ``Task.data`` may return besides arrays and datasets.

    Batches must be a function of seed, epoch and batch size alone: trials that agree on these are given the same ones.
    """

    def source(self, device: torch.device) -> Source:
        """The batches, on a device."""
        ...


class ArrayData:
    """Data that fit into memory: tuples of arrays (NumPy or torch) of equal length; batches are tuples of slices.

    They are put on the device once and stay there: an epoch costs one permutation and one gather, no data
    loader. Raises TaskError if lengths differ or a set is empty.

    >>> import numpy as np
    >>> data = ArrayData(train=(np.zeros((8, 2)), np.arange(8)), valid=(np.ones((3, 2)), np.arange(3)))
    >>> data.train[0].shape
    torch.Size([8, 2])
    """

    def __init__(self, *, train: Sequence[Any], valid: Sequence[Any]) -> None:
        self.train = _tensors(train, name="train")
        self.valid = _tensors(valid, name="valid")


class DatasetPair:
    """Two ``torch.utils.data.Dataset``, read through a ``DataLoader`` with ``loader`` options (``num_workers`` etc.)."""

    def __init__(self, *, train: Dataset[Any], valid: Dataset[Any], **loader: Any) -> None:
        self.train = train
        self.valid = valid
        self.loader = loader


@runtime_checkable
class WholeBatch(Protocol):
    """A batch that is no bundle of rows: trials are trained on it together only if all of them see the same object."""

    def double(self) -> WholeBatch:
        """The same in double precision, which the dry run of a pack is made in."""
        ...


def open_source(data: Any, *, device: torch.device) -> Source:
    """What ``Task.data`` returned, on its device.

    Raises:
        TaskError: it is neither ArrayData nor a pair of datasets, nor does it make batches itself.
    """
    if isinstance(data, SourceData):
        return data.source(device)
    if isinstance(data, ArrayData):
        return _ArraySource(data, device)
    if isinstance(data, DatasetPair):
        return _DatasetSource(data, device)
    if (
        isinstance(data, tuple)
        and len(data) == 2
        and all(hasattr(d, "__getitem__") for d in data)
    ):
        return _DatasetSource(DatasetPair(train=data[0], valid=data[1]), device)
    raise TaskError(
        f"Task.data returned {type(data).__name__}; return thrifty.ArrayData(train=(x, y), valid=(x, y)) "
        "or a pair (train, valid) of torch datasets"
    )


def epoch_order(num_samples: int, *, seed: int, epoch: int) -> torch.Tensor:
    """The order of the training samples in one epoch (0, 1, ...). Shape ``(num_samples,)``, int64, on the CPU.

    >>> bool((epoch_order(9, seed=1, epoch=0) == epoch_order(9, seed=1, epoch=0)).all())
    True
    """
    generator = torch.Generator().manual_seed(derive_seed(seed, "data", epoch))
    return torch.randperm(num_samples, generator=generator)


class _ArraySource:
    def __init__(self, data: ArrayData, device: torch.device) -> None:
        self.arrays = self._train = tuple(t.to(device) for t in data.train)
        self._valid = tuple(t.to(device) for t in data.valid)
        self._device = device
        self.num_train = len(self._train[0])

    def train_batches(self, *, seed: int, epoch: int, batch_size: int) -> Iterator[Batch]:
        order = epoch_order(self.num_train, seed=seed, epoch=epoch).to(self._device)
        shuffled = tuple(t[order] for t in self._train)
        return zip(*(t.split(batch_size) for t in shuffled), strict=True)

    def valid_batches(self, *, batch_size: int) -> Iterator[tuple[Batch, int]]:
        for start in range(0, len(self._valid[0]), batch_size):
            batch = tuple(t[start : start + batch_size] for t in self._valid)
            yield batch, len(batch[0])


class _DatasetSource:
    arrays = None

    def __init__(self, data: DatasetPair, device: torch.device) -> None:
        self._data = data
        self._device = device
        self.has_workers = bool(data.loader.get("num_workers"))
        self.num_train = len(data.train)  # type: ignore[arg-type]
        if not self.num_train or not len(data.valid):  # type: ignore[arg-type]
            raise TaskError(
                "Task.data returned an empty dataset; both sets need at least one sample"
            )

    def train_batches(self, *, seed: int, epoch: int, batch_size: int) -> Iterator[Batch]:
        order = epoch_order(self.num_train, seed=seed, epoch=epoch).tolist()
        generator = torch.Generator().manual_seed(derive_seed(seed, "loader", epoch))
        loader: DataLoader[Any] = DataLoader(
            self._data.train,
            batch_size=batch_size,
            sampler=order,
            generator=generator,
            **self._data.loader,
        )
        return (_to_device(batch, self._device) for batch in loader)

    def valid_batches(self, *, batch_size: int) -> Iterator[tuple[Batch, int]]:
        loader: DataLoader[Any] = DataLoader(
            self._data.valid, batch_size=batch_size, **self._data.loader
        )
        left = len(self._data.valid)  # type: ignore[arg-type]
        for batch in loader:
            yield _to_device(batch, self._device), min(batch_size, left)
            left -= batch_size


def _to_device(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: _to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return tuple(_to_device(value, device) for value in batch)
    return batch


def _tensors(arrays: Sequence[Any], *, name: str) -> tuple[torch.Tensor, ...]:
    if not isinstance(arrays, list | tuple) or not arrays:
        raise TaskError(f"ArrayData({name}=...) takes a tuple of arrays, such as (x, y)")
    tensors = tuple(torch.as_tensor(array) for array in arrays)
    lengths = {len(t) if t.dim() else 0 for t in tensors}
    if len(lengths) > 1 or 0 in lengths:
        shapes = ", ".join(str(tuple(t.shape)) for t in tensors)
        raise TaskError(
            f"ArrayData({name}=...): arrays of shapes {shapes}; all need the same length, above 0"
        )
    return tensors
