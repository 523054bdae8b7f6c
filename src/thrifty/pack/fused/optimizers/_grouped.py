"""Optimizers over rows for the param groups of trials that share a block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ._base import Options, RowOptimizer, Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedOptimizer:
    """One optimizer over rows for each param group.

    Attributes:
        names: Names of the parameters of each group.
        optimizers: The optimizer of each group.
    """

    names: tuple[tuple[str, ...], ...]
    optimizers: tuple[RowOptimizer, ...]

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of the buffers that the optimizers keep."""
        return self.optimizers[0].moments

    def stepper(
        self, rows: Sequence[Rows | None], options: Sequence[Sequence[Options]]
    ) -> Callable[[], None]:
        """Return a function that does one update, for use at several steps with the same options.

        Args:
            rows: The part of the rows that belongs to each group; None where no parameter of the
                group is trained.
            options: The options of each group, for each trial.
        """
        steps = [
            optimizer.stepper(own, [each[number] for each in options])
            for number, (optimizer, own) in enumerate(zip(self.optimizers, rows, strict=True))
            if own is not None
        ]
        return steps[0] if len(steps) == 1 else partial(_each, steps)


def _each(steps: Sequence[Callable[[], None]]) -> None:
    for step in steps:
        step()
