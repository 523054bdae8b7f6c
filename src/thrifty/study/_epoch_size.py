"""How many steps and tokens an epoch of a task has, so that amounts become epochs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from thrifty.core import UsageError, error_text
from thrifty.pack import HyperParameters, Task, Trainable, measure_data
from thrifty.pack._backend import no_exits
from thrifty.search import Algorithm
from thrifty.space import Amount, Domain, EpochSize, Schedule, Space, TimeUnit
from thrifty.space._domain import amounts_in, in_epochs


def unit_of(algorithm: Algorithm, space: Space, size: EpochSize) -> TimeUnit:
    """Return the unit in which a study shows what it trains: that of its horizon or its schedules.

    Raises:
        UsageError: The task does not say how much of it an epoch has.
    """
    amounts = (*algorithm.amounts(), *space.amounts())
    return size.unit(amounts[0].unit) if amounts else TimeUnit()


@dataclass(kw_only=True)
class EpochSizes:
    """The epochs of one study, measured when an amount is first turned into epochs.

    Nothing is loaded if the task says everything that the units need. A trainable has no data to
    load, so it needs no space here.
    """

    task: Task | Trainable
    space: Space | None
    seed: int
    _known: EpochSize | None = field(default=None, repr=False)

    def loads_data(self, amounts: Iterable[Amount]) -> bool:
        """Return whether data have to be loaded to know the epochs of some amounts."""
        units = {amount.unit for amount in amounts} - {"epochs"}
        if not units or not isinstance(self.task, Task):
            return False
        says = getattr(self.task, "tokens_per_sample", None) is not None
        return self.task.steps_per_epoch is None or ("tokens" in units and not says)

    def of(self, amounts: Iterable[Amount]) -> EpochSize:
        """Return the size of an epoch in the units of some amounts.

        Raises:
            UsageError: The task does not say it; the message says what to set.
        """
        units = {amount.unit for amount in amounts} - {"epochs"}
        if not units:
            return EpochSize()
        if self._known is None:
            self._known = self._measured()
        for unit in units:
            self._known.unit(unit)
        return self._known

    def in_epochs(self, value: Any) -> Any:
        """Return a value, a mapping of values or ``None`` with all amounts in epochs.

        Raises:
            UsageError: The task does not say how large an epoch is.
        """
        if isinstance(value, Mapping):
            return {name: self.in_epochs(item) for name, item in value.items()}
        return in_epochs(value, self.of(amounts_in(value)))

    def _measured(self) -> EpochSize:
        name = type(self.task).__name__
        steps = getattr(self.task, "steps_per_epoch", None)
        set_steps = f"set {name}.steps_per_epoch, the optimizer steps of an epoch"
        if not isinstance(self.task, Task):
            if steps is None:
                set_steps = f"give {name} steps_per_epoch, the optimizer steps of an epoch"
            return EpochSize(
                steps=steps,
                why_no_steps=set_steps,
                why_no_tokens=f"{name} does not count tokens; write steps",
            )
        batch_size = self._fixed(self.task.batch_size)
        per_sample = getattr(self.task, "tokens_per_sample", None)
        if batch_size is None:
            why = f"the batch size follows hyper-parameter {self.task.batch_size!r}"
            return EpochSize(
                steps=steps,
                why_no_steps=f"{why}; {set_steps}",
                why_no_tokens=f"{why}, so the tokens of a step vary; write steps",
            )
        if steps is None or per_sample is None:
            try:
                found_steps, found_tokens = self._data(batch_size)
            except UsageError as error:
                if steps is None:
                    return EpochSize(why_no_steps=str(error), why_no_tokens=str(error))
                found_steps, found_tokens = steps, None
            steps = found_steps if steps is None else steps
            per_sample = found_tokens if per_sample is None else per_sample
        return EpochSize(
            steps=steps,
            tokens=None if per_sample is None else steps * batch_size * per_sample,
            why_no_tokens=f"set {name}.tokens_per_sample; if samples vary in length, write steps",
        )

    def _data(self, batch_size: int) -> tuple[int, int | None]:
        """Return the steps of a pass over the data, and the tokens of a sample if the data say it.

        Raises:
            UsageError: The data cannot be loaded, or depend on hyper-parameters that vary.
        """
        name = type(self.task).__name__
        set_steps = f"set {name}.steps_per_epoch, the optimizer steps of an epoch"
        assert self.space is not None
        names = self.space.names
        fixed = {each: self.space[each] for each in names if self._is_fixed(each)}
        hp = HyperParameters(fixed)
        why = ""
        assert isinstance(self.task, Task)
        try:
            with no_exits():
                size = measure_data(self.task, hp, batch_size=batch_size, seed=self.seed)
        except Exception as error:  # noqa: BLE001 (whatever the task's code raises)
            why = f"{name}.data(hp) cannot be loaded before training ({error_text(error)})"
        varying = sorted((hp.names_read & {*names}) - fixed.keys())
        if varying:
            why = (
                f"the data depend on hyper-parameter {varying[0]!r}, and may have more or fewer "
                "batches"
            )
        if why:
            raise UsageError(f"{why}; {set_steps}")
        return size.steps, size.tokens_per_sample

    def _is_fixed(self, name: str) -> bool:
        assert self.space is not None
        return not isinstance(self.space[name], Domain | Schedule)

    def _fixed(self, batch_size: int | str) -> int | None:
        """Return the batch size if it is one number, else None."""
        if isinstance(batch_size, str):
            assert self.space is not None
            known = batch_size in self.space.names and self._is_fixed(batch_size)
            found = self.space[batch_size] if known else None
            return found if isinstance(found, int) else None
        return batch_size
