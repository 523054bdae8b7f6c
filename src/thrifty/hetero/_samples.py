"""Batches from data sets, by index."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, TensorDataset, default_collate


Collate = Callable[[list[Any]], Any]
"""From samples to a batch."""


class Samples:
    """A map-style data set as batches.

    Tensors are indexed at once; other data sets sample by sample (``__getitems__`` where they have it), then collated.
    """

    def __init__(self, dataset: Dataset[Any], collate: Collate | None) -> None:
        self._dataset = dataset
        self._collate = collate or default_collate
        self._whole = collate is None and type(dataset) is TensorDataset

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]

    def batch(self, indices: Sequence[int]) -> Any:
        """The samples of these indices, together."""
        if self._whole:
            at = torch.tensor(indices, dtype=torch.long)
            return tuple(tensor[at] for tensor in self._dataset.tensors)  # type: ignore[attr-defined]
        return self._collate(self.samples(indices))

    def samples(self, indices: Sequence[int]) -> list[Any]:
        """The samples of these indices, one by one."""
        many = getattr(self._dataset, "__getitems__", None)
        return many(list(indices)) if many else [self._dataset[i] for i in indices]


class PublicAndPrivate:
    """What this worker can read: the public data, and its own.

    A share's public and private samples make one batch. Private samples are read here and nowhere else: other workers know their number alone.
    """

    def __init__(
        self, public: Dataset[Any], private: Dataset[Any] | None, collate: Collate | None
    ) -> None:
        self._public = Samples(public, collate)
        self._private = Samples(private, collate) if private is not None else None
        self._collate = collate or default_collate

    @property
    def num_public(self) -> int:
        """Samples that everybody can read."""
        return len(self._public)

    @property
    def num_private(self) -> int:
        """Samples that only this worker can read."""
        return len(self._private) if self._private is not None else 0

    def batch(self, public: Sequence[int], private: Sequence[int]) -> Any:
        """The batch of a share."""
        if not private or self._private is None:
            return self._public.batch(public)
        if not public:
            return self._private.batch(private)
        return self._collate(self._private.samples(private) + self._public.samples(public))
