"""Masks of subnetworks, drawn beforehand, and the parts of a batch that they apply to."""

from __future__ import annotations

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
