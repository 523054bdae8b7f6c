"""Stochastic gradient descent with momentum and Nesterov's (``torch.optim.SGD``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ._base import Options, RowOptimizer, Rows, advance, columns


SMALL = 2**16
"""Numbers of all rows together, up to which calls cost more than arithmetic."""


class SGD(RowOptimizer):
    """``buf = momentum * buf + (1 - dampening) * g`` (``buf = g`` at first), ``p -= lr * buf``."""

    moments = ("momentum_buffer",)
    counts = False

    def __init__(self) -> None:
        self._key: list[tuple[float, float]] = []
        self._columns: Sequence[torch.Tensor] = ()

    def kept(self, options: Options) -> tuple[str, ...]:
        """There is no buffer without momentum."""
        return self.moments if options.get("momentum", 0.0) else ()

    def step(self, rows: Rows, options: Sequence[Options]) -> None:
        """One update of each row."""
        num = len(options)
        if rows.parameters.is_cuda:
            self.update(rows, self.table(rows, options))
        elif num * rows.parameters.shape[1] <= SMALL and not any(map(_special, options)):
            self._plain(rows, options)
        else:
            self._by_row(rows, options)
        advance(rows, num)

    def _by_row(self, rows: Rows, options: Sequence[Options]) -> None:
        """One pass over each row; torch's own kernel, made for whole models."""
        singles = rows.singles
        for option, p, g, buffer, step in zip(
            options,
            singles["parameters"],
            singles["gradients"],
            singles["momentum_buffer"],
            rows.steps,
            strict=False,
        ):
            momentum = option.get("momentum", 0.0)
            torch._fused_sgd_(
                p,
                g,
                buffer if momentum else [],
                weight_decay=option.get("weight_decay", 0.0),
                momentum=momentum,
                lr=option.get("lr", 1e-3),
                dampening=option.get("dampening", 0.0),
                nesterov=option.get("nesterov", False),
                maximize=False,
                is_first_step=not step,
            )

    def _plain(self, rows: Rows, options: Sequence[Options]) -> None:
        """Few numbers: three calls for all rows cost less than one for each."""
        num = len(options)
        key = [(o.get("lr", 1e-3), o.get("momentum", 0.0)) for o in options]
        if key != self._key:
            table = torch.tensor(key, dtype=rows.parameters.dtype).t().unsqueeze(-1)
            self._key, self._columns = key, table.unbind(0)
        lr, momentum = self._columns
        buffer = rows.moments["momentum_buffer"][:num]
        buffer.mul_(momentum).add_(rows.gradients[:num])
        rows.parameters[:num].addcmul_(buffer, lr, value=-1)

    def values(self, options: Options, *, step: int) -> tuple[float, ...]:
        """lr, momentum, share of the gradient, weight decay, Nesterov."""
        momentum = options.get("momentum", 0.0)
        share = 1.0 - options.get("dampening", 0.0) if step and momentum else 1.0
        nesterov = float(options.get("nesterov", False))
        return (
            options.get("lr", 1e-3),
            momentum,
            share,
            options.get("weight_decay", 0.0),
            nesterov,
        )

    def update(self, rows: Rows, table: torch.Tensor) -> None:
        """By tensor operations."""
        num = table.shape[1]
        lr, momentum, share, decay, nesterov = columns(table)
        p, g = rows.parameters[:num], rows.gradients[:num]
        buffer = rows.moments["momentum_buffer"][:num]
        g.addcmul_(p, decay)
        buffer.mul_(momentum).addcmul_(g, share)
        ahead = torch.where(nesterov > 0, g + momentum * buffer, buffer)
        p.addcmul_(ahead, lr, value=-1)


def _special(options: Options) -> bool:
    """Whether there is more to it than learning rate and momentum."""
    return any(options.get(name) for name in ("weight_decay", "dampening", "nesterov"))
