"""A graph as the data of a study's task, in batches that several trials share."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from thrifty.core import GraphError, plain_logger
from thrifty.pack import Source
from thrifty.pack.task._data import LastingError, PassPart

from ._batch import Batch, Mode, tune_allocator
from ._graph import Graph
from ._loader import NeighborLoader


logger = plain_logger(__name__)

_EVERY = 100
"""Reused batches between two comparisons with a newly made batch, on average."""


@dataclass(slots=True)
class Entry:
    """A batch that may be handed out several times.

    Attributes:
        batch: The batch as it was made, unless a trial has changed it.
        remake: Makes the batch again.
        versions: Version counters of its arrays when it was handed out; None if it was not.
    """

    batch: Batch
    remake: Callable[[], Batch]
    versions: tuple[int, ...] | None = None


class Sharing:
    """A distributor of batches, and of copies of them once a trial has changed one.

    A change in place shows in the version counters of PyTorch. Some changes are not counted there
    (``x.data``, ``x.numpy()``), so values are compared with those of a newly made batch, the first
    time and at random times.

    Attributes:
        copies: Whether each trial gets its own copy.
    """

    def __init__(self) -> None:
        self.copies = False
        self._rng = random.Random(0)
        self._left = 0

    def hand(self, entry: Entry) -> Batch:
        """Return the batch as it was made, either itself or a copy."""
        if entry.versions is None and not self.copies:
            entry.versions = _versions(entry.batch)
            return entry.batch
        if not self.copies and self._is_intact(entry):
            return entry.batch
        if entry.versions is not None:
            entry.batch, entry.versions = entry.remake(), None
        return entry.batch.clone()

    def _is_intact(self, entry: Entry) -> bool:
        intact = entry.versions == _versions(entry.batch)
        if intact and self._left:
            self._left -= 1
            return True
        self._left = self._rng.randrange(1, 2 * _EVERY)
        intact = intact and _equal(entry.batch, entry.remake())
        if not intact:
            self.copies = True
            logger.warning(
                "a trial has changed a batch in place, which others see, too: from now on each "
                "trial gets a copy of each batch, which takes time; change a copy in the model "
                "(`batch.x.clone()`)"
            )
        return intact


class SharedEpoch(Iterator[Batch]):
    """An iterator over the batches of an epoch, whose copies advance on their own.

    ``itertools.tee`` makes such copies. A batch is kept until all copies have had it.

    Args:
        batches: Batches of the epoch, each made once.
        remake: Makes the batch at an index again.
        sharing: Hands out the batches.
    """

    def __init__(
        self, batches: Iterator[Batch], *, remake: Callable[[int], Batch], sharing: Sharing
    ) -> None:
        self._batches = batches if isinstance(batches, LastingError) else LastingError(batches)
        self._remake = remake
        self._sharing = sharing
        self._index = 0
        self._next = _Link()

    def __copy__(self) -> SharedEpoch:
        other = SharedEpoch(self._batches, remake=self._remake, sharing=self._sharing)
        other._index, other._next = self._index, self._next
        return other

    def __next__(self) -> Batch:
        link, index = self._next, self._index
        if link.entry is None:
            link.entry = Entry(next(self._batches), lambda: self._remake(index))
            link.after = _Link()
        assert link.after is not None
        self._next, self._index = link.after, index + 1
        return self._sharing.hand(link.entry)


@dataclass(slots=True, eq=False)
class _Link:
    """A batch, once an iterator has requested it, and the link to the next one."""

    entry: Entry | None = None
    after: _Link | None = None


def _arrays(batch: Batch) -> list[torch.Tensor]:
    own = [batch.nodes, batch.seed_rows, *(a for a in (batch.x, batch.y) if a is not None)]
    return own + [a for block in batch.blocks for a in (block.indptr, block.indices)]


def _versions(batch: Batch) -> tuple[int, ...]:
    # Inference tensors have no version counter, but are still compared at random times.
    return tuple(0 if each.is_inference() else each._version for each in _arrays(batch))


def _equal(one: Batch, other: Batch) -> bool:
    pairs = zip(_arrays(one), _arrays(other), strict=True)
    return all(
        a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
        for a, b in pairs
    )


class GraphData:
    """Data for ``Task.data`` to return if a model trains on sampled neighbourhoods.

    A batch is a ``thrifty.graph.Batch``, so ``Task.loss(model, batch)`` is
    ``cross_entropy(model(batch), batch.y)``. Batches depend only on the trial's seed, epoch, batch
    size and fanouts. Trials that train together and agree on these get the same objects, sampled
    once, with the results that layers have cached on them. If a model changes a batch in place,
    the next trial gets a newly made one, and from then on each trial gets copies.

    Args:
        graph: Graph with features and labels. If workers are processes, load it in ``Task.data``
            (``load_graph`` maps one copy for all of them) instead of keeping it on the task.
        train: Nodes to train on, as numbers or a boolean mask.
        valid: Nodes to compute metrics for.
        fanouts: Number of neighbours to sample at each hop, the seeds' hop first; one for each
            layer of the model.
        valid_fanouts: The same for metrics; 20 at each hop by default (SALIENT, Kaler et al.,
            MLSys 2022, section 5). Validation batches are the same in every epoch.
        mode: See ``NeighborSampler``.
        replace: See ``NeighborSampler``.
        num_threads: Number of threads that make batches ahead of training; 0 makes each batch
            when it is requested.
        dtype: Dtype of the features of batches; float32 widens half-precision features.
        keep_bytes: Validation batches are kept in memory as long as they take at most this many
            bytes.
        tuned: Whether to call ``tune_allocator`` when training begins, after which freed memory
            stays with the process for good. Packed trials on sampled batches are up to twice as
            fast with it.

    Raises:
        GraphError: Features or labels are missing, a node does not exist, or fanouts are invalid.

    >>> import numpy as np
    >>> ring = Graph(
    ...     np.arange(5), np.array([1, 2, 3, 0], dtype=np.int32), x=torch.eye(4), y=torch.arange(4)
    ... )
    >>> source = GraphData(ring, train=[0, 1], valid=[2, 3], fanouts=[1]).source(
    ...     torch.device("cpu")
    ... )
    >>> [batch.y.tolist() for batch, _ in source.valid_batches(batch_size=1)]
    [[2], [3]]
    """

    def __init__(  # noqa: PLR0913 -- the options of a loader; all are keywords
        self,
        graph: Graph,
        *,
        train: Any,
        valid: Any,
        fanouts: Sequence[int],
        valid_fanouts: Sequence[int] | None = None,
        mode: Mode = "frontier",
        replace: bool = False,
        num_threads: int = 1,
        dtype: torch.dtype | None = None,
        keep_bytes: int = 2**28,
        tuned: bool = True,
    ) -> None:
        for name in ("x", "y"):
            if getattr(graph, name) is None:
                raise GraphError(
                    f"GraphData(graph=...) has no {name}; give it one: graph.replace({name}=...)"
                )
        valid_fanouts = [20] * len(fanouts) if valid_fanouts is None else valid_fanouts
        if len(valid_fanouts) != len(fanouts):
            raise GraphError(
                f"fanouts={list(fanouts)} has {len(fanouts)} hops and "
                f"valid_fanouts={list(valid_fanouts)} has "
                f"{len(valid_fanouts)}; a model has as many layers in both"
            )
        self.graph, self.train, self.valid = graph, train, valid
        self.fanouts, self.valid_fanouts = tuple(fanouts), tuple(valid_fanouts)
        self.keep_bytes = keep_bytes
        self.tuned = tuned
        self._options: dict[str, Any] = {
            "mode": mode,
            "replace": replace,
            "num_threads": num_threads,
            # A study has many loaders: each would keep processes and page-locked memory.
            "processes": False,
            "dtype": dtype,
        }
        # Report what cannot be sampled now, not in the first epoch.
        checked = self.loader(seed=0, batch_size=1, device=torch.device("cpu"))
        self.num_train = checked.num_seeds
        self.valid_loader(batch_size=1, device=torch.device("cpu"))

    def loader(self, *, seed: int, batch_size: int, device: torch.device) -> NeighborLoader:
        """Return the loader of the training batches for a seed and a batch size."""
        return NeighborLoader(
            self.graph,
            self.fanouts,
            seeds=self.train,
            batch_size=batch_size,
            seed=seed,
            device=device,
            **self._options,
        )

    def valid_loader(self, *, batch_size: int, device: torch.device) -> NeighborLoader:
        """Return the loader of the validation batches, which keeps their order."""
        return NeighborLoader(
            self.graph,
            self.valid_fanouts,
            seeds=self.valid,
            batch_size=batch_size,
            shuffle=False,
            device=device,
            **self._options,
        )

    def source(self, device: torch.device) -> Source:
        """Return a source of the batches on a device."""
        if self.tuned:
            tune_allocator()
        return _GraphSource(self, device)


class _GraphSource:
    arrays: tuple[torch.Tensor, ...] | None = None

    def __init__(self, data: GraphData, device: torch.device) -> None:
        self._data = data
        self._device = device
        self._loaders: dict[tuple[int, int], NeighborLoader] = {}
        self._kept: dict[int, list[Entry]] = {}
        self._sharing = Sharing()
        self.num_train = data.num_train

    def train_batches(self, *, seed: int, epoch: int, batch_size: int) -> Iterator[Batch]:
        loader = self._loader(seed=seed, batch_size=batch_size)
        return SharedEpoch(
            map(Batch.shared, loader.epoch(epoch)),
            remake=lambda index: loader.batch(epoch, index).shared(),
            sharing=self._sharing,
        )

    def batches_of(
        self, parts: Sequence[PassPart], *, seed: int, batch_size: int
    ) -> Iterator[Batch]:
        loader = self._loader(seed=seed, batch_size=batch_size)
        batches = chain.from_iterable(
            loader.epoch(part.number, start=part.start, stop=part.stop) for part in parts
        )
        places = [(part.number, index) for part in parts for index in range(part.start, part.stop)]
        return SharedEpoch(
            map(Batch.shared, batches),
            remake=lambda index: loader.batch(*places[index]).shared(),
            sharing=self._sharing,
        )

    def _loader(self, *, seed: int, batch_size: int) -> NeighborLoader:
        key = (seed, batch_size)
        if key not in self._loaders:
            self._loaders[key] = self._data.loader(
                seed=seed, batch_size=batch_size, device=self._device
            )
        return self._loaders[key]

    def valid_batches(self, *, batch_size: int) -> Iterator[tuple[Batch, int]]:
        for entry in self._kept.get(batch_size) or self._new(batch_size):
            batch = self._sharing.hand(entry)
            yield batch, batch.num_seeds

    def _new(self, batch_size: int) -> Iterator[Entry]:
        """Yield the validation batches, and keep them once all of them have been seen."""
        seen: list[Entry] | None = []
        num_bytes = 0
        loader = self._data.valid_loader(batch_size=batch_size, device=self._device)
        for index, batch in enumerate(map(Batch.shared, loader.epoch(0))):
            num_bytes += _num_bytes(batch)
            if num_bytes > self._data.keep_bytes:
                seen = None
            entry = Entry(
                batch,
                lambda index=index: loader.batch(0, index).shared(),  # type: ignore[misc]
            )
            if seen is not None:
                seen.append(entry)
            yield entry
        if seen is not None:
            self._kept[batch_size] = seen


def _num_bytes(batch: Batch) -> int:
    # Layers will cache about twice as much again from the features.
    return 3 * sum(t.numel() * t.element_size() for t in (batch.nodes, batch.x) if t is not None)
