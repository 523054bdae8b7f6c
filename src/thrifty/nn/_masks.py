"""Masks of dropout, and groups of them that are kept."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from thrifty.core import LayerError


def draw_masks(
    subnetworks: int, num_features: int, p: float, *, generator: torch.Generator | None = None
) -> Tensor:
    """Draw which units each subnetwork keeps; bool, shape ``(subnetworks, num_features)``."""
    return torch.rand(subnetworks, num_features, generator=generator) >= p


def draw_groups(
    subnetworks: int, num_groups: int, p: float, *, generator: torch.Generator | None = None
) -> Tensor:
    """Draw which ``round((1 - p) * num_groups)`` groups each subnetwork keeps, in ascending order.

    Returns:
        int64, shape ``(subnetworks, kept)``.

    Raises:
        LayerError: no group would be kept.

    >>> draw_groups(3, 4, 0.5, generator=torch.Generator().manual_seed(0)).shape
    torch.Size([3, 2])
    """
    num_kept = round((1 - p) * num_groups)
    if not num_kept:
        raise LayerError(
            f"p={p} keeps none of {num_groups} groups; give a smaller p or smaller groups"
        )
    noise = torch.rand(subnetworks, num_groups, generator=generator)
    return noise.argsort(dim=1)[:, :num_kept].sort(dim=1).values


def unit_dim(x: Tensor) -> int:
    """Return the dimension of the units.

    It is the last one for rows and sequences, and that of the channels for images and volumes.
    """
    return 1 if x.dim() > 3 else x.dim() - 1


def multiply_parts(x: Tensor, rows: Tensor, *, dim: int) -> Tensor:
    """Multiply the samples of each part of a batch by the row of that part.

    Args:
        x: shape ``(batch, ..., units, ...)``, with units at ``dim``.
        rows: shape ``(parts, units)``. Sample ``i`` belongs to part ``i * parts // batch``.

    >>> multiply_parts(torch.ones(3, 2), torch.tensor([[0.0, 1.0], [2.0, 3.0]]), dim=1)
    tensor([[0., 1.],
            [0., 1.],
            [2., 3.]])
    """
    num_parts, num_units = rows.shape
    others = [1] * (x.dim() - 2)
    others.insert(dim - 1, num_units)
    batch = x.shape[0]
    if batch % num_parts:
        part = torch.arange(batch, device=x.device) * num_parts // batch
        return x * rows[part].reshape(batch, *others)
    parts = x.reshape(num_parts, batch // num_parts, *x.shape[1:])
    return (parts * rows.reshape(num_parts, 1, *others)).reshape(x.shape)


class KeptGroups(NamedTuple):
    """The groups of units that each part of a batch keeps.

    Attributes:
        groups: kept groups in ascending order; int64, shape ``(parts, kept)``.
        group_size: number of units in a group.
        num_groups: number of all groups.
    """

    groups: Tensor
    group_size: int
    num_groups: int

    @property
    def num_units(self) -> int:
        """Number of units that each part keeps."""
        return self.groups.shape[1] * self.group_size

    def units(self) -> Tensor:
        """Return the numbers of the kept units; int64, shape ``(parts, num_units)``."""
        within = torch.arange(self.group_size, device=self.groups.device)
        return (self.groups.unsqueeze(-1) * self.group_size + within).flatten(1)

    def spread(self, factor: int) -> KeptGroups:
        """Return the same groups after each unit became ``factor`` units side by side.

        Flattened channels are an example.
        """
        return self._replace(group_size=self.group_size * factor)


class Parts(NamedTuple):
    """The split of a batch into parts that differ by at most one sample.

    Sample ``i`` belongs to part ``i * num // batch``.

    >>> parts = Parts.of(5, num=2)
    >>> split = parts.split(torch.arange(5.0))
    >>> split.shape, parts.join(split)
    (torch.Size([2, 3]), tensor([0., 1., 2., 3., 4.]))
    """

    num: int
    batch: int
    places: Tensor | None
    """The sample at each place of the parts, shape ``(num * longest,)``.

    None if all parts have the same length.
    """
    samples: Tensor | None
    """The place of each sample."""

    @staticmethod
    def of(batch: int, *, num: int, device: torch.device | None = None) -> Parts:
        """Return the parts of a batch."""
        if batch % num == 0:
            return Parts(num, batch, None, None)
        every = torch.arange(batch, device=device)
        part = every * num // batch
        starts = -(
            -torch.arange(num, device=device) * batch // num
        )  # the first i with i * num // batch >= part
        longest = -(-batch // num)
        samples = part * longest + every - starts[part]
        # Places that are left over hold an arbitrary sample, which is never taken out again.
        places = torch.zeros(num * longest, dtype=torch.int64, device=device)
        places[samples] = every
        return Parts(num, batch, places, samples)

    def split(self, x: Tensor) -> Tensor:
        """Split ``(batch, ...)`` into ``(num, longest, ...)``."""
        if self.places is not None:
            x = x.index_select(0, self.places)
        return x.reshape(self.num, x.shape[0] // self.num, *x.shape[1:])

    def join(self, x: Tensor) -> Tensor:
        """Join ``(num, longest, ...)`` into ``(batch, ...)``."""
        x = x.flatten(0, 1)
        return x if self.samples is None else x.index_select(0, self.samples)


def take(x: Tensor, kept: KeptGroups, *, dim: int) -> Tensor:
    """Return the kept units of each part.

    Args:
        x: shape ``(parts, samples, ..., units, ...)``, with units at ``dim``.
        kept: the units that each part keeps.
    """
    units = kept.units()
    return torch.stack([
        part.index_select(dim - 1, unit) for part, unit in zip(x, units, strict=True)
    ])


def put(x: Tensor, kept: KeptGroups, *, dim: int) -> Tensor:
    """Return all units, with zeros for those that were not kept."""
    shape = list(x.shape)
    shape[dim] = kept.num_groups * kept.group_size
    units = kept.units()
    return torch.stack([
        part.new_zeros(shape[1:]).index_copy(dim - 1, unit, part)
        for part, unit in zip(x, units, strict=True)
    ])
