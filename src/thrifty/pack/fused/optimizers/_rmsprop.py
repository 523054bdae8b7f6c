"""RMSprop (``torch.optim.RMSprop``), with momentum, not centred."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ._base import Options, RowOptimizer, Rows, advance, columns


class RMSprop(RowOptimizer):
    """Hinton's lecture 6e; the epsilon is outside of the root, as in torch."""

    moments = ("square_avg", "momentum_buffer")

    def kept(self, options: Options) -> tuple[str, ...]:
        """There is no momentum buffer without momentum."""
        return self.moments if options.get("momentum", 0.0) else self.moments[:1]

    def step(self, rows: Rows, options: Sequence[Options]) -> None:
        """One update of each row."""
        self.update(rows, self.table(rows, options))
        advance(rows, len(options))

    def values(self, options: Options, *, step: int) -> tuple[float, ...]:
        """lr, alpha, 1 - alpha, eps, weight decay, momentum."""
        alpha = options.get("alpha", 0.99)
        return (
            options.get("lr", 1e-2),
            alpha,
            1.0 - alpha,
            options.get("eps", 1e-8),
            options.get("weight_decay", 0.0),
            options.get("momentum", 0.0),
        )

    def update(self, rows: Rows, table: torch.Tensor) -> None:
        """By tensor operations."""
        num = table.shape[1]
        lr, alpha, share, eps, decay, momentum = columns(table)
        p, g = rows.parameters[:num], rows.gradients[:num]
        square, buffer = (rows.moments[name][:num] for name in self.moments)
        g.addcmul_(p, decay)
        square.mul_(alpha).addcmul_(g * g, share)
        buffer.mul_(momentum).addcdiv_(g, square.sqrt().add_(eps))
        p.addcmul_(buffer, lr, value=-1)
