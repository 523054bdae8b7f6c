"""The trials as more channels: ``[B, K * C, ...]``, for what treats each channel, or group of channels, by itself."""

from __future__ import annotations

from typing import Any

import torch

from thrifty.pack.fused._packed import Group, Packed


def fold(group: Group, images: Any) -> torch.Tensor:
    """``[B, K * C, ...]``: images of K x C channels."""
    x = group.second(images)
    return laid_out(group, x.reshape(x.shape[0], -1, *x.shape[3:]))


def laid_out(group: Group, images: torch.Tensor) -> torch.Tensor:
    """Images of one channel lie the same in both orders; their strides say which is meant, and what follows keeps to it."""
    if group.channels_last and images.dim() == 4 and images.shape[1] == 1:
        return images.squeeze(1).unsqueeze(-1).permute(0, 3, 1, 2)
    return images


def unfold(group: Group, out: torch.Tensor) -> Packed:
    """Back from ``[B, K * C, ...]``."""
    return group.pack(out.view(out.shape[0], group.size, -1, *out.shape[2:]), 1)


def flat(group: Group, x: Any) -> torch.Tensor | None:
    """``[K * C]``: a parameter of K x C channels, where there is one."""
    return None if x is None else group.first(x).reshape(-1)
