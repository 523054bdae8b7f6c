"""Stochastic gradient descent with momentum and Nesterov's (``torch.optim.SGD``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ._base import Options, RowOptimizer, Rows, advance, columns


class SGD(RowOptimizer):
    """``buf = momentum * buf + (1 - dampening) * g`` (``buf = g`` at first), ``p -= lr * buf``."""

    moments = ("momentum_buffer",)
    counts = False

    def kept(self, options: Options) -> tuple[str, ...]:
        """There is no buffer without momentum."""
        return self.moments if options.get("momentum", 0.0) else ()

    def step(self, rows: Rows, options: Sequence[Options]) -> None:
        """One update of each row."""
        num = len(options)
        if rows.parameters.is_cuda:
            self.update(rows, self.table(rows, options))
        else:
            # one pass over each row; torch's own kernel, made for whole models
            for k, (p, g, buffer, option) in enumerate(
                zip(
                    rows.parameters.unbind(),
                    rows.gradients.unbind(),
                    rows.moments["momentum_buffer"].unbind(),
                    options,
                    strict=False,
                )
            ):
                momentum = option.get("momentum", 0.0)
                torch._fused_sgd_(
                    [p],
                    [g],
                    [buffer] if momentum else [],
                    weight_decay=option.get("weight_decay", 0.0),
                    momentum=momentum,
                    lr=option.get("lr", 1e-3),
                    dampening=option.get("dampening", 0.0),
                    nesterov=option.get("nesterov", False),
                    maximize=False,
                    is_first_step=not rows.steps[k],
                )
        advance(rows, num)

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
