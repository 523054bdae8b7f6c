"""The interface of an optimiser over rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch


Options = Mapping[str, Any]


@dataclass(slots=True, kw_only=True)
class Rows:
    """The state of K trials: ``[K, P]`` each; ``steps`` counts each trial's updates.

    ``moments`` are the optimiser's own buffers, by the names that torch gives them.
    """

    parameters: torch.Tensor
    gradients: torch.Tensor
    moments: dict[str, torch.Tensor]
    steps: list[int]
    singles: dict[str, list[list[torch.Tensor]]] = field(init=False)
    """Each row by itself, in the list of one that torch's fused kernels take."""

    def __post_init__(self) -> None:
        whole = {"parameters": self.parameters, "gradients": self.gradients, **self.moments}
        self.singles = {name: [[row] for row in t.unbind()] for name, t in whole.items()}

    def move(self, source: int, target: int) -> None:
        """Puts one trial's row where another one's was."""
        for tensor in (self.parameters, *self.moments.values()):
            tensor[target].copy_(tensor[source])
        self.steps[target] = self.steps[source]

    def clear(self, row: int) -> None:
        """A fresh optimiser for a row."""
        for moment in self.moments.values():
            moment[row].zero_()
        self.steps[row] = 0


class RowOptimizer(ABC):
    """Updates the first ``len(options)`` rows, each with its own options.

    The arithmetic is that of the torch optimiser of the same name; a row without any update yet is as fresh.
    """

    moments: ClassVar[tuple[str, ...]] = ()
    """The buffers it keeps."""
    counts: ClassVar[bool] = True
    """Whether torch's optimiser keeps the number of its steps."""

    def kept(self, options: Options) -> tuple[str, ...]:
        """The buffers that torch's optimiser has under some options."""
        return self.moments

    @abstractmethod
    def step(self, rows: Rows, options: Sequence[Options]) -> None:
        """One update of each row."""

    def stepper(self, rows: Rows, options: Sequence[Options]) -> Callable[[], None]:
        """``step`` with options that stay as they are, to be called for each of several steps."""
        return partial(self.step, rows, options)

    @abstractmethod
    def update(self, rows: Rows, table: torch.Tensor) -> None:
        """The same by tensor operations alone: ``table`` is ``[num_values, K]``, made by ``values``."""

    @abstractmethod
    def values(self, options: Options, *, step: int) -> tuple[float, ...]:
        """The numbers that one row's update depends on; ``step`` counts its updates before this one."""

    def prepare(self, rows: Rows, options: Sequence[Options]) -> None:  # noqa: B027
        """Gives fresh rows what they begin with, where that is not zero."""

    def table(self, rows: Rows, options: Sequence[Options]) -> torch.Tensor:
        """The values of all rows. Shape ``[num_values, K]``, on the rows' device."""
        values = [self.values(o, step=s) for o, s in zip(options, rows.steps, strict=False)]
        return (
            torch
            .tensor(values, dtype=rows.parameters.dtype)
            .t()
            .contiguous()
            .to(rows.parameters.device)
        )


def columns(table: torch.Tensor) -> list[torch.Tensor]:
    """Each value as ``[K, 1]``."""
    return list(table.unsqueeze(-1).unbind(0))


def advance(rows: Rows, num: int) -> None:
    """Counts an update of the first ``num`` rows."""
    for row in range(num):
        rows.steps[row] += 1
