"""Adam and AdamW over rows (``torch.optim.Adam``, ``torch.optim.AdamW``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from ._base import Options, RowOptimizer, Rows, advance, columns


class Adam(RowOptimizer):
    """Adam over rows; weight decay is added to the gradient.

    References:
        Kingma and Ba, 2015.
    """

    moments = ("exp_avg", "exp_avg_sq")
    decoupled: ClassVar[bool] = False

    def step(self, rows: Rows, options: Sequence[Options]) -> None:
        """Update each row once."""
        num = len(options)
        if rows.parameters.is_cuda:
            self.update(rows, self.table(rows, options))
        else:
            fused = torch._fused_adamw_ if self.decoupled else torch._fused_adam_
            singles = rows.singles
            for p, g, m, v, step, option in zip(
                singles["parameters"],
                singles["gradients"],
                *(singles[name] for name in self.moments),
                torch.tensor(rows.steps[:num], dtype=torch.float32).add_(1).unbind(),
                options,
                strict=False,
            ):
                beta1, beta2 = option.get("betas", (0.9, 0.999))
                fused(
                    p,
                    g,
                    m,
                    v,
                    [],
                    [step],
                    lr=option.get("lr", 1e-3),
                    beta1=beta1,
                    beta2=beta2,
                    weight_decay=self.decay(option),
                    eps=option.get("eps", 1e-8),
                    amsgrad=False,
                    maximize=False,
                )
        advance(rows, num)

    def decay(self, options: Options) -> float:
        """Return the weight decay; torch's defaults differ between Adam and AdamW."""
        return float(options.get("weight_decay", 1e-2 if self.decoupled else 0.0))

    def values(self, options: Options, *, step: int) -> tuple[float, ...]:
        """Return the numbers of one row's update.

        Small numbers are computed here, in double precision.

        Returns:
            1 - beta1, beta2, 1 - beta2, eps, weight decay (times -lr if decoupled), step size, and
            the square root of the bias correction of the second moment.
        """
        beta1, beta2 = options.get("betas", (0.9, 0.999))
        lr, decay = options.get("lr", 1e-3), self.decay(options)
        size = lr / (1.0 - beta1 ** (step + 1))
        root = (1.0 - beta2 ** (step + 1)) ** 0.5
        eps = options.get("eps", 1e-8)
        return (
            1.0 - beta1,
            beta2,
            1.0 - beta2,
            eps,
            -lr * decay if self.decoupled else decay,
            size,
            root,
        )

    def update(self, rows: Rows, table: torch.Tensor) -> None:
        """Update the rows by tensor operations alone."""
        num = table.shape[1]
        share1, beta2, share2, eps, decay, size, root = columns(table)
        p, g = rows.parameters[:num], rows.gradients[:num]
        first, second = (rows.moments[name][:num] for name in self.moments)
        if self.decoupled:
            p.addcmul_(p, decay)
        else:
            g.addcmul_(p, decay)
        first.lerp_(g, share1)
        second.mul_(beta2).addcmul_(g * g, share2)
        p.addcdiv_(first * size, (second.sqrt() / root).add_(eps), value=-1)


class AdamW(Adam):
    """AdamW over rows; weight decay shrinks the parameters themselves.

    References:
        Loshchilov and Hutter, 2019.
    """

    decoupled = True
