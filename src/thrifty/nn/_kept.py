"""Parts of a batch of which each has units of its own left."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Kept(NamedTuple):
    """The groups of units that each part of a batch keeps.

    Attributes:
        groups: int64, shape ``(parts, kept)``, ascending.
        group_size: units of a group.
        num_groups: all groups.
    """

    groups: Tensor
    group_size: int
    num_groups: int

    @property
    def num_units(self) -> int:
        """Units that are left in each part."""
        return self.groups.shape[1] * self.group_size

    def units(self) -> Tensor:
        """Their numbers; int64, shape ``(parts, num_units)``."""
        within = torch.arange(self.group_size, device=self.groups.device)
        return (self.groups.unsqueeze(-1) * self.group_size + within).flatten(1)

    def spread(self, factor: int) -> Kept:
        """The same where each unit has become ``factor`` units side by side, as flattened channels do."""
        return self._replace(group_size=self.group_size * factor)


class Parts(NamedTuple):
    """How a batch is split: sample ``i`` belongs to part ``i * num // batch``, so parts differ by one sample at most.

    >>> parts = Parts.of(5, num=2)
    >>> split = parts.split(torch.arange(5.0))
    >>> split.shape, parts.join(split)
    (torch.Size([2, 3]), tensor([0., 1., 2., 3., 4.]))
    """

    num: int
    batch: int
    places: Tensor | None
    """For each place in the parts a sample, shape ``(num * longest,)``; None where all parts are of one length."""
    samples: Tensor | None
    """For each sample its place."""

    @staticmethod
    def of(batch: int, *, num: int, device: torch.device | None = None) -> Parts:
        """The parts of a batch."""
        if batch % num == 0:
            return Parts(num, batch, None, None)
        every = torch.arange(batch, device=device)
        part = every * num // batch
        starts = -(
            -torch.arange(num, device=device) * batch // num
        )  # the first i with i * num // batch >= part
        longest = -(-batch // num)
        samples = part * longest + every - starts[part]
        # whatever stands in a place that is left over: nobody takes it out again
        places = torch.zeros(num * longest, dtype=torch.int64, device=device)
        places[samples] = every
        return Parts(num, batch, places, samples)

    def split(self, x: Tensor) -> Tensor:
        """From ``(batch, ...)`` to ``(num, longest, ...)``."""
        if self.places is not None:
            x = x.index_select(0, self.places)
        return x.reshape(self.num, x.shape[0] // self.num, *x.shape[1:])

    def join(self, x: Tensor) -> Tensor:
        """And back."""
        x = x.flatten(0, 1)
        return x if self.samples is None else x.index_select(0, self.samples)


def take(x: Tensor, kept: Kept, *, dim: int) -> Tensor:
    """What is left of all units.

    Args:
        x: shape ``(parts, samples, ..., units, ...)``, with units at ``dim``.
        kept: of each part.
    """
    units = kept.units()
    return torch.stack([
        part.index_select(dim - 1, unit) for part, unit in zip(x, units, strict=True)
    ])


def put(x: Tensor, kept: Kept, *, dim: int) -> Tensor:
    """All units again; zeros for those that are not there."""
    shape = list(x.shape)
    shape[dim] = kept.num_groups * kept.group_size
    units = kept.units()
    return torch.stack([
        part.new_zeros(shape[1:]).index_copy(dim - 1, unit, part)
        for part, unit in zip(x, units, strict=True)
    ])
