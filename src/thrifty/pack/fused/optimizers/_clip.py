"""Gradient clipping with a separate norm for each trial."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def clip_rows(gradients: torch.Tensor, max_norms: Sequence[float | None]) -> None:
    """Clip each row of ``[K, P]`` in place like ``torch.nn.utils.clip_grad_norm_``.

    A limit of None leaves the row unchanged.
    """
    if all(limit is None for limit in max_norms):
        return
    limits = torch.tensor(
        [float("inf") if limit is None else limit for limit in max_norms],
        dtype=gradients.dtype,
        device=gradients.device,
    )
    norms = torch.linalg.vector_norm(gradients, dim=1)
    factors = (limits / (norms + 1e-6)).clamp_(max=1.0)
    # without a limit, keep the factor at 1: a non-finite norm would spoil the row's finite values
    factors.masked_fill_(limits.isinf(), 1.0)
    gradients.mul_(factors.unsqueeze(1))
