"""Stochastic gradient descent over rows, with (Nesterov) momentum (``torch.optim.SGD``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from ._base import Options, RowOptimizer, Rows, columns


SMALL = 2**16
"""Count of numbers in all rows up to which the cost of calls exceeds that of arithmetic."""


class SGD(RowOptimizer):
    """SGD over rows.

    The update is ``buf = momentum * buf + (1 - dampening) * g`` (``buf = g`` at the first step),
    then ``p -= lr * buf``.
    """

    moments = ("momentum_buffer",)
    counts = False

    def __init__(self) -> None:
        self._key: list[tuple[float, float]] = []
        self._columns: Sequence[torch.Tensor] = ()

    def step(self, rows: Rows, options: Sequence[Options]) -> None:
        """Update each row once."""
        if rows.parameters.is_cuda:
            self.update(rows, self.table(rows, options))
        elif self._is_small(rows, options):
            self._plain(rows, options)
        else:
            for call in self._calls(rows, options):
                call()
        self._count(rows, options)

    def _count(self, rows: Rows, options: Sequence[Options]) -> None:
        """Count updates of the momentum buffer; without momentum, torch leaves it unchanged."""
        for row, option in enumerate(options):
            rows.steps[row] += bool(option.get("momentum", 0.0))

    def stepper(self, rows: Rows, options: Sequence[Options]) -> Callable[[], None]:
        """Return a function that updates each row, with everything but kernel calls done once."""
        num = len(options)
        if (
            rows.parameters.is_cuda
            or not all(rows.steps[:num])
            or self._is_small(rows, options)
        ):
            return partial(self.step, rows, options)
        calls = self._calls(rows, options)

        def step() -> None:
            for call in calls:
                call()

        return step

    def _is_small(self, rows: Rows, options: Sequence[Options]) -> bool:
        alike = len({bool(option.get("momentum", 0.0)) for option in options}) == 1
        small = len(options) * rows.parameters.shape[1] <= SMALL
        return alike and small and not any(map(_special, options))

    def _calls(self, rows: Rows, options: Sequence[Options]) -> list[Callable[[], None]]:
        """Return one call per row of torch's own fused kernel, which makes one pass over a row."""
        singles = rows.singles
        return [
            partial(
                torch._fused_sgd_,
                p,
                g,
                buffer if option.get("momentum", 0.0) else [],
                weight_decay=option.get("weight_decay", 0.0),
                momentum=option.get("momentum", 0.0),
                lr=option.get("lr", 1e-3),
                dampening=option.get("dampening", 0.0),
                nesterov=option.get("nesterov", False),
                maximize=False,
                is_first_step=not step,
            )
            for option, p, g, buffer, step in zip(
                options,
                singles["parameters"],
                singles["gradients"],
                singles["momentum_buffer"],
                rows.steps,
                strict=False,
            )
        ]

    def _plain(self, rows: Rows, options: Sequence[Options]) -> None:
        """Update small rows together: three calls for all rows cost less than one call per row."""
        num = len(options)
        key = [(o.get("lr", 1e-3), o.get("momentum", 0.0)) for o in options]
        if key != self._key:
            table = torch.tensor(key, dtype=rows.parameters.dtype).t().unsqueeze(-1)
            self._key, self._columns = key, table.unbind(0)
        lr, momentum = self._columns
        ahead = rows.gradients[:num]
        if key[0][1]:  # then all rows have momentum
            ahead = rows.moments["momentum_buffer"][:num].mul_(momentum).add_(ahead)
        rows.parameters[:num].addcmul_(ahead, lr, value=-1)

    def values(self, options: Options, *, step: int) -> tuple[float, ...]:
        """Return lr, momentum, share of the gradient, weight decay and Nesterov flag."""
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
        """Update the rows by tensor operations alone."""
        num = table.shape[1]
        lr, momentum, share, decay, nesterov = columns(table)
        p, g = rows.parameters[:num], rows.gradients[:num]
        buffer = rows.moments["momentum_buffer"][:num]
        g.addcmul_(p, decay)
        buffer.mul_(momentum).addcmul_(g, share)
        ahead = torch.where(nesterov > 0, g + momentum * buffer, buffer)
        p.addcmul_(ahead, lr, value=-1)


def _special(options: Options) -> bool:
    """Return whether options other than learning rate and momentum are set."""
    return any(options.get(name) for name in ("weight_decay", "dampening", "nesterov"))
