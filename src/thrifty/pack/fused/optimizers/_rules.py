"""Optimizers over the rows of a pack, and the choice of one for a torch optimizer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch

from thrifty.pack.fused._fusable import UnfusableError
from thrifty.pack.task._followed_optimizer import FollowedOptimizer
from thrifty.pack.task._optimizer import Optimizer

from ._fused_optimizer import GroupedOptimizer, Options, RowOptimizer, Rows, advance, columns


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

    def takes(self, found: Collection[str], options: Options) -> bool:
        """Return whether it goes on from a state as torch does; a buffer may come later."""
        return set(found) <= set(self.moments)

    def step(self, rows: Rows, options: Sequence[Options]) -> None:
        """Update each row once."""
        if rows.parameters.is_cuda:
            self.update_on_gpu(rows, options)
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
        if rows.parameters.is_cuda or not all(rows.steps[:num]) or self._is_small(rows, options):
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
        moved = (buffer * momentum).addcmul_(g, share)
        ahead = torch.where(nesterov > 0, g + momentum * moved, moved)
        # Without momentum, torch leaves the buffer as it is, and later goes on from there.
        buffer.copy_(torch.where(momentum > 0, moved, buffer))
        p.addcmul_(ahead, lr, value=-1)


def _special(options: Options) -> bool:
    """Return whether options other than learning rate and momentum are set."""
    return any(options.get(name) for name in ("weight_decay", "dampening", "nesterov"))


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
            self.update_on_gpu(rows, options)
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
                    [step] * len(p),
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
            self.update_on_gpu(rows, options)
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
        if rows.parameters.is_cuda:
            self.update_on_gpu(rows, options)
        else:
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


KINDS: dict[Any, type[RowOptimizer]] = {
    torch.optim.SGD: SGD,
    torch.optim.Adam: Adam,
    torch.optim.AdamW: AdamW,
    torch.optim.RMSprop: RMSprop,
    torch.optim.Adagrad: Adagrad,
}

NUMBERS = frozenset({
    "lr", "momentum", "dampening", "weight_decay", "betas", "eps", "alpha", "lr_decay",
    "initial_accumulator_value", "nesterov",
})  # fmt: skip
"""Options that may differ from row to row; others must have torch's defaults.

Options in ``INDIFFERENT`` may have any value.
"""
INDIFFERENT = frozenset({"foreach", "fused", "capturable", "differentiable"})


def optimizer_for(spec: Optimizer, options: Mapping[str, Any]) -> tuple[RowOptimizer, Hashable]:
    """Return the optimizer over rows for one param group.

    Returns:
        The optimizer, and a key that must be equal for trials to share it.

    Raises:
        UnfusableError: There is no optimizer over rows for this optimizer or these options.
    """
    kind = KINDS.get(spec.factory)
    name = getattr(spec.factory, "__name__", str(spec.factory))
    if kind is None:
        raise UnfusableError(f"there is no optimizer over rows for {name}")
    for option, value in options.items():
        if option in NUMBERS:
            if isinstance(value, torch.Tensor):
                raise UnfusableError(f"{name}({option}=...) is a tensor")
        elif option not in INDIFFERENT and value:
            raise UnfusableError(f"{name}({option}={value!r}) is not offered over rows")
    # With momentum 0, torch keeps no buffer; keeping one and using momentum 0 is not the same.
    return kind(), (name, bool(options.get("momentum", 0.0)))


_TORCH = sys.modules["torch.optim.optimizer"]  # not an attribute of its package
_HOOKS_OF_ALL = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
"""Where PyTorch keeps hooks of the steps of all optimizers."""


def grouped_optimizer(
    followed: FollowedOptimizer, values: Mapping[str, Any]
) -> tuple[GroupedOptimizer, Hashable]:
    """Return the optimizers over rows for all param groups.

    Trials share them only if the same parameters belong to each group.

    Returns:
        The optimizers, and a key that must be equal for trials to share them.

    Raises:
        UnfusableError: There is no optimizer over rows for this optimizer or these options.
    """
    if any(getattr(_TORCH, name, None) for name in _HOOKS_OF_ALL):
        raise UnfusableError("hooks are registered for all optimizers")
    try:
        options, _ = followed.options(values)
    except (
        Exception
    ) as error:  # from the user's own method: plain training reports it as the trial's error
        raise UnfusableError(
            f"its optimizer failed with {type(error).__name__}: {error}"
        ) from error
    found = [optimizer_for(followed.spec, own) for own in options]
    if len({own.get("initial_accumulator_value", 0.0) for own in options}) > 1:
        raise UnfusableError("torch takes initial_accumulator_value for all parameters only")
    grouped = GroupedOptimizer(
        names=followed.partition, optimizers=tuple(optimizer for optimizer, _ in found)
    )
    kinds = tuple(kind for _, kind in found)
    return grouped, kinds[0] if len(kinds) == 1 else (kinds, followed.partition)
