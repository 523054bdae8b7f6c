"""RMSprop over rows (``torch.optim.RMSprop``), with momentum, not centred."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ._base import Options, RowOptimizer, Rows, advance, columns


class RMSprop(RowOptimizer):
    """RMSprop over rows; epsilon is added outside the square root, as in torch.

    References:
        Hinton, lecture 6e.
    """

    moments = ("square_avg", "momentum_buffer")

    def kept(self, options: Options) -> tuple[str, ...]:
        """Return the names of the buffers; without momentum there is no momentum buffer."""
        return self.moments if options.get("momentum", 0.0) else self.moments[:1]

    def step(self, rows: Rows, options: Sequence[Options]) -> None:
        """Update each row once."""
        self.update(rows, self.table(rows, options))
        advance(rows, len(options))

    def values(self, options: Options, *, step: int) -> tuple[float, ...]:
        """Return lr, alpha, 1 - alpha, eps, weight decay and momentum."""
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
        """Update the rows by tensor operations alone."""
        num = table.shape[1]
        lr, alpha, share, eps, decay, momentum = columns(table)
        p, g = rows.parameters[:num], rows.gradients[:num]
        square, buffer = (rows.moments[name][:num] for name in self.moments)
        g.addcmul_(p, decay)
        square.mul_(alpha).addcmul_(g * g, share)
        buffer.mul_(momentum).addcdiv_(g, square.sqrt().add_(eps))
        p.addcmul_(buffer, lr, value=-1)
