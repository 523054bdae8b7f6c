"""A graph as the data of a study's task: trials that use the same batch share it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from thrifty.core import GraphError
from thrifty.pack import Source

from ._batch import Batch, Mode
from ._graph import Graph
from ._loader import NeighborLoader
from ._memory import tune_allocator
from ._sharing import Entry, SharedEpoch, Sharing


class GraphData:
    """Data for ``Task.data`` to return if a model trains on sampled neighbourhoods.

    A batch is a ``thrifty.graph.Batch``, so ``Task.loss(model, batch)`` is
    ``cross_entropy(model(batch), batch.y)``. Batches depend only on the trial's seed, epoch, batch
    size and fanouts. Trials that train together and agree on these get the same objects, sampled
    once, with the results that layers have cached on them. If a model changes a batch in place,
    the next trial gets a newly made one, and from then on each trial gets copies.

    Args:
        graph: graph with features and labels. If workers are processes, load it in ``Task.data``
            (``load_graph`` maps one copy for all of them) instead of keeping it on the task.
        train: nodes to train on, as numbers or a boolean mask.
        valid: nodes to compute metrics for.
        fanouts: number of neighbours to sample at each hop, the seeds' hop first; one for each
            layer of the model.
        valid_fanouts: the same for metrics; 20 at each hop by default (SALIENT, Kaler et al.,
            MLSys 2022, section 5). Validation batches are the same in every epoch.
        mode: see ``NeighborSampler``.
        replace: see ``NeighborSampler``.
        num_threads: number of threads that make batches ahead of training; 0 makes each batch
            when it is requested.
        dtype: dtype of the features of batches; float32 widens half-precision features.
        keep_bytes: validation batches are kept in memory as long as they take at most this many
            bytes.
        tuned: whether to call ``tune_allocator`` when training begins, after which freed memory
            stays with the process for good. Packed trials on sampled batches are up to twice as
            fast with it.

    Raises:
        GraphError: features or labels are missing, a node does not exist, or fanouts are invalid.

    >>> import numpy as np
    >>> ring = Graph(
    ...     np.arange(5),
    ...     np.array([1, 2, 3, 0], dtype=np.int32),
    ...     x=torch.eye(4),
    ...     y=torch.arange(4),
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
        key = (seed, batch_size)
        if key not in self._loaders:
            self._loaders[key] = self._data.loader(
                seed=seed, batch_size=batch_size, device=self._device
            )
        loader = self._loaders[key]
        return SharedEpoch(
            map(Batch.shared, loader.epoch(epoch)),
            remake=lambda index: loader.batch(epoch, index).shared(),
            sharing=self._sharing,
        )

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
    return 3 * sum(
        t.numel() * t.element_size() for t in (batch.nodes, batch.x) if t is not None
    )
