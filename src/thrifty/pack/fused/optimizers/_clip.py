"""Clipping of gradients, each trial by its own norm."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def clip_rows(gradients: torch.Tensor, max_norms: Sequence[float | None]) -> None:
    """As ``torch.nn.utils.clip_grad_norm_`` for each row of ``[K, P]``; None leaves a row as it is."""
    if all(limit is None for limit in max_norms):
        return
    limits = torch.tensor(
        [float("inf") if limit is None else limit for limit in max_norms],
        dtype=gradients.dtype,
        device=gradients.device,
    )
    norms = torch.linalg.vector_norm(gradients, dim=1)
    factors = (limits / (norms + 1e-6)).clamp_(max=1.0)
    # where there is no limit, what is not finite stays the only thing that is not
    factors.masked_fill_(limits.isinf(), 1.0)
    gradients.mul_(factors.unsqueeze(1))
