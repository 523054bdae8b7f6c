"""Adagrad over rows (``torch.optim.Adagrad``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ._base import Options, RowOptimizer, Rows, advance, columns


class Adagrad(RowOptimizer):
    """Adagrad over rows.

    References:
        Duchi, Hazan and Singer, 2011.
    """

    moments = ("sum",)

    def step(self, rows: Rows, options: Sequence[Options]) -> None:
        """Update each row once."""
        num = len(options)
        self.prepare(rows, options)
        if rows.parameters.is_cuda:
            self.update(rows, self.table(rows, options))
        else:
            for p, g, total, step, option in zip(
                rows.parameters.unbind(),
                rows.gradients.unbind(),
                rows.moments["sum"].unbind(),
                torch.tensor(rows.steps[:num], dtype=torch.float32).add_(1).unbind(),
                options,
                strict=False,
            ):
                torch._fused_adagrad_(
                    [p],
                    [g],
                    [total],
                    [step],
                    lr=option.get("lr", 1e-2),
                    lr_decay=option.get("lr_decay", 0.0),
                    weight_decay=option.get("weight_decay", 0.0),
                    eps=option.get("eps", 1e-10),
                    maximize=False,
                )
        advance(rows, num)

    def prepare(self, rows: Rows, options: Sequence[Options]) -> None:
        """Set the sum of each fresh row to ``initial_accumulator_value``."""
        for k, option in enumerate(options):
            if not rows.steps[k]:
                rows.moments["sum"][k].fill_(option.get("initial_accumulator_value", 0.0))

    def values(self, options: Options, *, step: int) -> tuple[float, ...]:
        """Return step size, weight decay and eps."""
        lr = options.get("lr", 1e-2) / (1.0 + step * options.get("lr_decay", 0.0))
        return (lr, options.get("weight_decay", 0.0), options.get("eps", 1e-10))

    def update(self, rows: Rows, table: torch.Tensor) -> None:
        """Update the rows by tensor operations alone."""
        num = table.shape[1]
        lr, decay, eps = columns(table)
        p, g = rows.parameters[:num], rows.gradients[:num]
        total = rows.moments["sum"][:num]
        g.addcmul_(p, decay)
        total.addcmul_(g, g)
        p.addcdiv_(g * lr, total.sqrt().add_(eps), value=-1)
