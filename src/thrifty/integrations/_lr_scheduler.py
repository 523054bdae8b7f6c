"""A thrifty schedule as a PyTorch learning-rate scheduler."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from thrifty.core import ScheduleError, plain_logger
from thrifty.space import Constant, Schedule, Timeline, last_value, schedule_from_json


logger = plain_logger(__name__)

_IDENTITY = ("schedule", "epochs", "steps_per_epoch", "name", "relative")
"""Fields in which a saved state and the scheduler that loads it must agree."""


class LRScheduler(torch.optim.lr_scheduler.LRScheduler):
    """A scheduler that makes an optimizer's option follow a thrifty schedule.

    Step it after each step of the optimizer. The values are those of a study, bit for bit: step
    ``s`` of epoch ``e`` gets what a trial of ``epochs`` epochs with ``steps_per_epoch`` steps each
    has there, sampling rates included. After the run, the last value of the schedule stays (0 for
    most), and further steps log one warning.

    Groups that are added later follow from the scheduler's next step on. ``get_last_lr`` returns
    the present values of the option ``name``, one for each group.

    Args:
        schedule: A schedule such as ``REX(0.1)``, or a constant number.
        optimizer: Any torch optimizer.
        epochs: Number of epochs in the whole run. A loop that only counts steps passes their
            number, with one step an epoch.
        steps_per_epoch: Optimizer steps in an epoch (not batches, if you accumulate gradients).
        name: Option to set: ``"lr"``, ``"momentum"``, ``"weight_decay"``, ``"betas[0]"``.
        relative: False gives all parameter groups the schedule's values. True multiplies them with
            each group's initial value (kept in the group as ``initial_<name>``, such as
            ``initial_lr``, as torch's own schedulers do).
        last_step: The last step done, to resume by hand; ``load_state_dict`` does not need it.

    Raises:
        ScheduleError: The schedule does not fit the run, the optimizer does not have the option,
            or ``relative`` starts at a later step and a group lacks its initial value.

    >>> import torch, thrifty as th
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    >>> scheduler = th.LRScheduler(th.REX(1.0), optimizer, epochs=5)
    >>> values = []
    >>> for _ in range(5):
    ...     values += scheduler.get_last_lr()
    ...     optimizer.step()
    ...     scheduler.step()
    >>> [round(value, 4) for value in values], optimizer.param_groups[0]["lr"]
    ([1.0, 0.8889, 0.75, 0.5714, 0.3333], 0.0)
    """

    def __init__(
        self,
        schedule: Schedule | float,
        optimizer: torch.optim.Optimizer,
        *,
        epochs: int,
        steps_per_epoch: int = 1,
        name: str = "lr",
        relative: bool = False,
        last_step: int = -1,
    ) -> None:
        _check_counts(epochs=epochs, steps_per_epoch=steps_per_epoch)
        self.schedule = schedule if isinstance(schedule, Schedule) else Constant(schedule)
        self.epochs = epochs
        self.steps_per_epoch = steps_per_epoch
        self.name = name
        self.relative = relative
        self._option, self._index = _parsed(name)
        self._timeline = Timeline({name: self.schedule}, epochs=epochs)
        self._end = last_value(self.schedule, epochs=epochs)
        self._at_hand: tuple[int, Any] = (-1, None)  # an epoch and its values
        self._present: list[Any] = []
        _check_options(optimizer, self._option, self._index)
        if last_step >= 0:
            self._check_resumed(optimizer)
        super().__init__(optimizer, last_epoch=last_step)

    def get_lr(self) -> list[Any]:
        """Return the learning rate of each group at the present step."""
        groups = self.optimizer.param_groups
        self._present = self._targets()
        if self.name == "lr":
            return list(self._present)
        # torch only requests learning rates, and only here. OneCycleLR also sets its momentum here.
        self._write()
        return [group["lr"] for group in groups]

    def get_last_lr(self) -> list[Any]:
        """Return the present value of the scheduled option in each group."""
        return list(self._present)

    def step(self, epoch: int | None = None) -> None:
        """Advance to the next step; call this after the optimizer's step."""
        super().step(epoch)
        num_steps = self.epochs * self.steps_per_epoch
        if self.last_epoch == num_steps + 1:
            logger.warning(
                "%s: the %d steps of %r are over and its last value stays; give epochs and "
                "steps_per_epoch of the whole run",
                *(self.name, num_steps, self.schedule),
            )

    def state_dict(self) -> dict[str, Any]:
        """Return position and schedule as plain data for ``torch.load(weights_only=True)``."""
        return {
            **{key: getattr(self, key) for key in _IDENTITY},
            "schedule": self.schedule.to_json(),
            "last_epoch": self.last_epoch,
            "step_count": self._step_count,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a saved position and set the values of that step.

        You may load the optimizer's state before or after.

        Raises:
            ScheduleError: The state is from a scheduler with another schedule, length or option.
        """
        missing = {*_IDENTITY, "last_epoch", "step_count"} - set(state_dict)
        if missing:
            raise ScheduleError(
                f"not the state of a thrifty.LRScheduler: {', '.join(sorted(missing))} "
                "missing; load what its "
                "state_dict() returned"
            )
        saved = {**state_dict, "schedule": schedule_from_json(state_dict["schedule"])}
        for key in _IDENTITY:
            if saved[key] != getattr(self, key):
                raise ScheduleError(
                    f"the saved state has {key}={saved[key]!r}, this scheduler "
                    f"{key}={getattr(self, key)!r}; make it as it was "
                    "when saved, or do not load the state to begin anew"
                )
        self.last_epoch = state_dict["last_epoch"]
        self._step_count = state_dict["step_count"]
        self._present = self._targets()
        self._write()

    def _targets(self) -> list[Any]:
        value, groups = self._value(), self.optimizer.param_groups
        if not self.relative:
            return [value] * len(groups)
        key = f"initial_{self.name}"
        for group in groups:  # includes groups that were added later
            group.setdefault(key, _plain(_read(group, self._option, self._index)))
        return [value * group[key] for group in groups]

    def _value(self) -> Any:
        epoch, step = divmod(max(self.last_epoch, 0), self.steps_per_epoch)
        if epoch >= self.epochs:
            return self._end
        if epoch != self._at_hand[0]:
            num_steps = self.steps_per_epoch
            self._at_hand = epoch, self._timeline.values(self.name, epoch, num_steps=num_steps)
        values = self._at_hand[1]
        return values[step] if isinstance(values, list) else values

    def _write(self) -> None:
        for group, value in zip(self.optimizer.param_groups, self._present, strict=True):
            old = group[self._option]
            if self._index is not None:
                group[self._option] = (*old[: self._index], value, *old[self._index + 1 :])
            elif isinstance(old, torch.Tensor):  # a captured graph reads this very tensor
                old.fill_(value)
            else:
                group[self._option] = value

    def _check_resumed(self, optimizer: torch.optim.Optimizer) -> None:
        for number, group in enumerate(optimizer.param_groups):
            if self.relative and f"initial_{self.name}" not in group:
                raise ScheduleError(
                    f"last_step with relative=True: parameter group {number} has no "
                    f"'initial_{self.name}', so its first value is "
                    "unknown; load the optimizer's state first, or leave last_step out and "
                    "use load_state_dict"
                )
            group.setdefault("initial_lr", group["lr"])  # torch requires it


def _parsed(name: str) -> tuple[str, int | None]:
    """Parse ``"betas[0]"`` into ``("betas", 0)``, and ``"lr"`` into ``("lr", None)``."""
    found = re.fullmatch(r"(\w+)(?:\[(\d+)\])?", name)
    if not found:
        raise ScheduleError(
            f'name={name!r}: it is an option such as "lr", or one of several as in "betas[0]"'
        )
    return found[1], None if found[2] is None else int(found[2])


def _read(group: Mapping[str, Any], option: str, index: int | None) -> Any:
    return group[option] if index is None else group[option][index]


def _plain(value: Any) -> float:
    return value.item() if isinstance(value, torch.Tensor) else value


def _check_options(optimizer: torch.optim.Optimizer, option: str, index: int | None) -> None:
    for number, group in enumerate(optimizer.param_groups):
        try:
            _read(group, option, index)
        except (KeyError, IndexError, TypeError):
            which = option if index is None else f"{option}[{index}]"
            known = ", ".join(sorted(key for key in group if key != "params"))
            raise ScheduleError(
                f"{type(optimizer).__name__} has no option {which!r} in parameter group "
                f"{number}; it has {known}"
            ) from None


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if not isinstance(count, int) or count < 1:
            raise ScheduleError(f"LRScheduler({name}={count!r}): a whole number, at least 1")
