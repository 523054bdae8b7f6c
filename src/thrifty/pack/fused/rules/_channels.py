"""Conversions that treat the trials as more channels, ``[B, K * C, ...]``.

They serve functions that treat each channel, or each group of channels, by itself.
"""

from __future__ import annotations

from typing import Any

import torch

from thrifty.pack.fused._packed import Group, Packed


def fold(group: Group, images: Any) -> torch.Tensor:
    """Return images of K x C channels, ``[B, K * C, ...]``."""
    x = group.second(images)
    return laid_out(group, x.reshape(x.shape[0], -1, *x.shape[3:]))


def laid_out(group: Group, images: torch.Tensor) -> torch.Tensor:
    """Give one-channel images channels-last strides where the group uses channels last.

    One channel looks the same in memory in both layouts. Only the strides say which layout is
    meant, and the functions that follow keep to it.
    """
    if group.channels_last and images.dim() == 4 and images.shape[1] == 1:
        return images.squeeze(1).unsqueeze(-1).permute(0, 3, 1, 2)
    return images


def unfold(group: Group, out: torch.Tensor) -> Packed:
    """Return a packed tensor from one of shape ``[B, K * C, ...]``."""
    return group.pack(out.view(out.shape[0], group.size, -1, *out.shape[2:]), 1)


def flat(group: Group, x: Any) -> torch.Tensor | None:
    """Return a parameter of K x C channels as ``[K * C]``; None stays None."""
    return None if x is None else group.first(x).reshape(-1)
