"""What fused optimizers have in common: their base class, groups and clipping."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch

from thrifty.pack.fused._tape import Tape, captured
from thrifty.pack.task._optimizer import Clipping


Options = Mapping[str, Any]


@dataclass(slots=True, kw_only=True)
class _Update:
    """An update of the first rows: where its table lies, and what does it once it is captured."""

    table: torch.Tensor
    run: Tape | None = None


@dataclass(slots=True, kw_only=True)
class Rows:
    """The state of K trials, with tensors of shape ``[K, P]``.

    Attributes:
        parameters: The parameters.
        gradients: Their gradients.
        moments: The optimizer's own buffers, by the names that torch gives them.
        steps: Number of updates of each trial.
    """

    parameters: torch.Tensor
    gradients: torch.Tensor
    moments: dict[str, torch.Tensor]
    steps: list[int]
    updates: dict[int, _Update] = field(init=False, default_factory=dict)
    """On a GPU, the updates captured so far, by the number of rows (``update_on_gpu``)."""
    ranges: list[Sequence[tuple[int, int]]] = field(init=False)
    """The columns of each row that are in use (``use``): at first all."""
    singles: dict[str, list[list[torch.Tensor]]] = field(init=False)
    """These parts of each row, in a list of its own, as torch's fused kernels take lists."""

    def __post_init__(self) -> None:
        num, width = self.parameters.shape
        self.ranges = [()] * num
        self.singles = {name: [[]] * num for name in self._all()}
        for row in range(num):
            self.use(row, [(0, width)])

    def _all(self) -> dict[str, torch.Tensor]:
        return {"parameters": self.parameters, "gradients": self.gradients, **self.moments}

    def use(self, row: int, ranges: Sequence[tuple[int, int]]) -> None:
        """Set which columns of a row are in use.

        The parameters of other columns are zero, and stay so. Optimizers need not update them, and
        those that don't leave memory untouched that the system has not given yet.
        """
        self.ranges[row] = ranges
        for name, whole in self._all().items():
            self.singles[name][row] = [whole[row, start:stop] for start, stop in ranges]

    def move(self, source: int, target: int) -> None:
        """Copy one trial's row over another row."""
        if source == target:
            return
        self.empty(target)
        self.use(target, self.ranges[source])
        for name in ("parameters", *self.moments):
            torch._foreach_copy_(self.singles[name][target], self.singles[name][source])
        self.steps[target] = self.steps[source]

    def empty(self, row: int) -> None:
        """Reset the parameters of a row to zero, and its optimizer state."""
        torch._foreach_zero_(self.singles["parameters"][row])
        self.clear(row)

    def clear(self, row: int) -> None:
        """Reset the optimizer state of a row."""
        for name in self.moments:
            torch._foreach_zero_(self.singles[name][row])
        self.steps[row] = 0


class RowOptimizer(ABC):
    """An optimizer that updates the first ``len(options)`` rows, each with its own options.

    The arithmetic is that of the torch optimizer of the same name. A row without any update yet
    acts like a fresh optimizer.
    """

    moments: ClassVar[tuple[str, ...]] = ()
    """Names of the buffers that it keeps."""
    counts: ClassVar[bool] = True
    """Whether torch's optimizer keeps the number of its steps."""
    _last_values: Sequence[tuple[float, ...]] = ()
    _last_table: torch.Tensor

    def kept(self, options: Options) -> tuple[str, ...]:
        """Return the names of the buffers that torch's optimizer makes under some options."""
        return self.moments

    def takes(self, found: Collection[str], options: Options) -> bool:
        """Return whether it goes on from a state as torch does.

        torch makes its buffers at the first step and keeps them for good, whatever the options
        become. Rows have those that the present options need.

        Args:
            found: Names of the buffers that a parameter's state holds.
            options: The options of the next step.
        """
        return set(found) == set(self.kept(options))

    @abstractmethod
    def step(self, rows: Rows, options: Sequence[Options]) -> None:
        """Update each row once."""

    def stepper(self, rows: Rows, options: Sequence[Options]) -> Callable[[], None]:
        """Return a function that calls ``step`` with constant options, for use at several steps."""
        return partial(self.step, rows, options)

    @abstractmethod
    def update(self, rows: Rows, table: torch.Tensor) -> None:
        """Update the rows by tensor operations alone.

        Args:
            rows: The rows.
            table: The values of all rows (see ``values``), ``[num_values, K]``.
        """

    def update_on_gpu(self, rows: Rows, options: Sequence[Options]) -> None:
        """Update the rows as ``update`` does, from the second time on by a single launch."""
        table = self.table(rows, options)
        key = len(options)
        known = rows.updates.get(key)
        if known is None:
            self.update(rows, table)
            rows.updates[key] = _Update(table=table.clone())
            return
        known.table.copy_(table)
        if known.run is None:
            plain = Tape(partial(self.update, rows, known.table), ())
            known.run = captured(plain, table.device) or plain
        known.run()

    @abstractmethod
    def values(self, options: Options, *, step: int) -> tuple[float, ...]:
        """Return the numbers that one row's update depends on.

        Args:
            options: The options of the row.
            step: Number of updates of the row before this one.
        """

    def prepare(self, rows: Rows, options: Sequence[Options]) -> None:  # noqa: B027
        """Set the initial state of fresh rows where it is not zero."""

    def table(self, rows: Rows, options: Sequence[Options]) -> torch.Tensor:
        """Return the values of all rows, ``[num_values, K]``, on the rows' device."""
        values = [self.values(o, step=s) for o, s in zip(options, rows.steps, strict=False)]
        if values != self._last_values:
            device = rows.parameters.device
            table = torch.tensor(
                list(zip(*values, strict=True)),
                dtype=rows.parameters.dtype,
                pin_memory=device.type == "cuda",  # a copy that does not make this thread wait
            )
            self._last_values, self._last_table = values, table.to(device, non_blocking=True)
        return self._last_table


def columns(table: torch.Tensor) -> list[torch.Tensor]:
    """Return each value of a table as a column, ``[K, 1]``."""
    return list(table.unsqueeze(-1).unbind(0))


def advance(rows: Rows, num: int) -> None:
    """Count one update of each of the first ``num`` rows."""
    for row in range(num):
        rows.steps[row] += 1


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


def clip_rows(gradients: torch.Tensor, limits: Sequence[Clipping]) -> None:
    """Clip each row of ``[K, P]`` in place by value, then by norm, like the functions of torch.

    A limit of None leaves the row unchanged.
    """
    if any(limit.value is not None for limit in limits):
        values = _limits([limit.value for limit in limits], gradients).unsqueeze(1)
        gradients.clamp_(-values, values)
    if any(limit.norm is not None for limit in limits):
        _clip_norms(gradients, _limits([limit.norm for limit in limits], gradients))


def _limits(limits: Sequence[float | None], gradients: torch.Tensor) -> torch.Tensor:
    return torch.tensor(
        [float("inf") if limit is None else limit for limit in limits],
        dtype=gradients.dtype,
        device=gradients.device,
    )


def _clip_norms(gradients: torch.Tensor, limits: torch.Tensor) -> None:
    norms = torch.linalg.vector_norm(gradients, dim=1)
    factors = (limits / (norms + 1e-6)).clamp_(max=1.0)
    # without a limit, keep the factor at 1: a non-finite norm would spoil the row's finite values
    factors.masked_fill_(limits.isinf(), 1.0)
    gradients.mul_(factors.unsqueeze(1))
