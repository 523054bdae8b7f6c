"""The back-end that chooses: fused where that works and pays, concatenated otherwise."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from thrifty.core import TaskError, plain_logger
from thrifty.perf import PackCurve

from ._backend import Backend, EpochPlan, Member, Outcome, UnverifiedError
from ._company import check_parameters
from ._concatenated import ConcatenatedBackend
from ._fused import FusedBackend
from ._judge import Calibration, Judge
from ._solo import SoloBackend
from ._state import State
from ._state_probe import Trial
from ._task import Task, Trainable
from .fused._member import FusedTrial
from .fused._registry import UnfusableError
from .verify import CheckBudget


logger = plain_logger(__name__)

Prefer = Literal["auto", "fused", "concatenated", "solo"]


class AutoBackend(Backend):
    """Any number of slots. Each structure goes to the back-end that a short measurement finds best.

    Options: ``device``; ``prefer`` one back-end (``"concatenated"`` and ``"solo"`` are bit-identical to a trial alone); ``known``
    calibrations by key; ``on_calibrated`` is told each one, known or new; ``patient``: measure only once there has
    been enough plain training to pay for it.
    """

    def __init__(
        self,
        task: Task | Trainable,
        *,
        device: torch.device | str = "cpu",
        prefer: Prefer = "auto",
        known: Mapping[str, Sequence[PackCurve]] | None = None,
        on_calibrated: Callable[[Calibration], None] = lambda _: None,
        patient: bool = False,
    ) -> None:
        self._task = task
        self._prefer: Prefer = prefer
        self._plain = _Plain(task, torch.device(device))
        self._fused: FusedBackend | None = None
        if isinstance(task, Task) and prefer in ("auto", "fused"):
            self._fused = FusedBackend(task, device=device)
        self._judge = Judge(
            task,
            torch.device(device),
            known=known or {},
            on_calibrated=on_calibrated,
            patient=patient and prefer == "auto",
        )
        self._where: dict[int, Backend] = {}
        self._said: set[str] = set()

    def stack(self, slot: int, member: Member) -> None:
        """Puts a trial into a slot of the back-end that is best for it.

        Raises:
            TaskError: It trains parameters of another trial.
        """
        if self._fused is None:
            self._plain.stack(slot, member)
            self._where[slot] = self._plain
            return
        trial = self._fused.prepare(member)
        check_parameters(trial, map(self.trial, self._where))
        if not self._goes_fused(slot, trial, member.values):
            self._plain.place(slot, trial)
            self._where[slot] = self._plain

    def num_steps(self, slot: int, values: Mapping[str, Any]) -> int:
        """How many optimiser steps the next epoch has."""
        return self._where[slot].num_steps(slot, values)

    def step(self, plans: Mapping[int, EpochPlan]) -> Mapping[int, Outcome]:
        """Every back-end goes on until one of its trials has ended its epoch."""
        outcomes: dict[int, Outcome] = {}
        for slot, plan in plans.items():
            trial = self._plain.trial(slot)
            if self._fused is not None and trial is not None:
                self._goes_fused(slot, trial, plan.values)
            elif self._where[slot] is self._fused and self._prefer == "auto":
                try:
                    self._may_go_back(slot)
                except TaskError as error:
                    outcomes[slot] = error
        begins = {slot: plan for slot, plan in plans.items() if slot not in outcomes}
        for backend in dict.fromkeys(self._where.values()):
            mine = {slot: plan for slot, plan in begins.items() if self._where[slot] is backend}
            began = time.perf_counter()
            outcomes.update(backend.step(mine))
            if backend is self._plain:
                self._judge.spent(self._plain.trials(), time.perf_counter() - began)
        for slot, outcome in list(outcomes.items()):
            if isinstance(outcome, UnfusableError):
                outcomes[slot] = self._leaves_fused(slot, plans.get(slot), outcome)
            elif isinstance(outcome, UnverifiedError):
                self._say(str(outcome))
        return outcomes

    def num_unverified(self, slot: int) -> int:
        """How many of the last epochs of a member are not verified yet."""
        return self._where[slot].num_unverified(slot)

    def trial(self, slot: int) -> Trial:
        """The trial in a slot."""
        if self._fused is not None and self._where[slot] is self._fused:
            return self._fused.trial(slot)
        return self._plain.trial_of_any_kind(slot)

    def take(self, slot: int) -> Trial:
        """Take a trial out of its slot, model and optimizer as they stand."""
        found = self.trial(slot)
        if self._fused is not None and self._where[slot] is self._fused:
            self._fused.take(slot)
        self.release(slot)
        return found

    @property
    def checks(self) -> CheckBudget:
        """What checks have cost so far."""
        return CheckBudget() if self._fused is None else self._fused.budget

    def unstack(self, slot: int) -> State:
        """A copy of the full state."""
        return self._where[slot].unstack(slot)

    def release(self, slot: int) -> None:
        """Frees a slot."""
        where = self._where.pop(slot, None)
        if where is not None:
            where.release(slot)

    def calibration(self, slot: int) -> Calibration | None:
        """What was measured for the trial in a slot, if it is fused for that reason."""
        if self._fused is None or self._where.get(slot) is not self._fused:
            return None
        return self._judge.calibration(self._fused.trial(slot))

    def _goes_fused(self, slot: int, trial: FusedTrial, values: Mapping[str, Any]) -> bool:
        """Gives a trial a place in the fused back-end, if that is where it belongs."""
        assert self._fused is not None
        if trial.stays_alone:
            return False
        try:
            wins = self._judge.fuses(self._fused, trial, values)
            if not wins and self._prefer == "auto":
                return False
            self._fused.place(slot, trial, values)
        except UnfusableError as error:
            self._say(str(error))
            return False
        self._plain.forget(slot)
        self._where[slot] = self._fused
        return True

    def _may_go_back(self, slot: int) -> None:
        """A trial that is left with too little company is trained plainly again."""
        assert self._fused is not None
        if self._fused.num_unverified(slot):
            return  # nobody could say any more whether its last epochs are right
        if not self._judge.stays(self._fused.trial(slot)):
            self._plain.place(slot, self._fused.take(slot))
            self._where[slot] = self._plain

    def _leaves_fused(
        self, slot: int, plan: EpochPlan | None, reason: UnfusableError
    ) -> Outcome:
        """A trial that turns out not to be fusable at the beginning of an epoch goes on elsewhere."""
        assert self._fused is not None
        self._say(str(reason))
        trial = self._fused.take(slot)
        try:
            self._plain.place(slot, trial)
        except TaskError as error:
            return error
        self._where[slot] = self._plain
        return self._plain.whole_epoch(slot, trial.plan if plan is None else plan)

    def _say(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            logger.warning(
                "%s is trained by plain PyTorch, not fused: %s",
                type(self._task).__name__,
                reason,
            )


class _Plain(Backend):
    """Plain PyTorch for tasks of both kinds."""

    def __init__(self, task: Task | Trainable, device: torch.device) -> None:
        self._task = task
        self._device = device
        self._together = (
            ConcatenatedBackend(task, device=device) if isinstance(task, Task) else None
        )
        self._solos: dict[int, SoloBackend] = {}

    def stack(self, slot: int, member: Member) -> None:
        if self._together is not None:
            self._together.stack(slot, member)
            return
        self._solos[slot] = SoloBackend(self._task, device=self._device)
        self._solos[slot].stack(0, member)

    def place(self, slot: int, trial: FusedTrial) -> None:
        """Take in a trial that has begun.

        Raises:
            TaskError: It trains parameters of another trial.
        """
        assert self._together is not None
        self._together.place(slot, trial)

    def trial(self, slot: int) -> FusedTrial | None:
        """The trial in a slot, if it could be fused."""
        found = None if self._together is None else self._together.trials.get(slot)
        return found if isinstance(found, FusedTrial) else None

    def trial_of_any_kind(self, slot: int) -> Trial:
        """The trial in a slot."""
        return (
            self._solos[slot].trial if self._together is None else self._together.trials[slot]
        )

    def trials(self) -> list[FusedTrial]:
        held = {} if self._together is None else self._together.trials
        return [trial for trial in held.values() if isinstance(trial, FusedTrial)]

    def num_steps(self, slot: int, values: Mapping[str, Any]) -> int:
        if self._together is not None:
            return self._together.num_steps(slot, values)
        return self._solos[slot].num_steps(0, values)

    def step(self, plans: Mapping[int, EpochPlan]) -> Mapping[int, Outcome]:
        if self._together is not None:
            return self._together.step(plans)
        return {slot: self._solos[slot].step({0: plan})[0] for slot, plan in plans.items()}

    def whole_epoch(self, slot: int, plan: EpochPlan) -> Outcome:
        """An epoch of one trial, whatever the others are doing."""
        assert self._together is not None
        return self._together.whole_epoch(slot, plan)

    def unstack(self, slot: int) -> State:
        if self._together is not None:
            return self._together.unstack(slot)
        return self._solos[slot].unstack(0)

    def release(self, slot: int) -> None:
        if self._together is not None:
            self._together.release(slot)
        self._solos.pop(slot, None)

    def forget(self, slot: int) -> None:
        """The trial that was in a slot lives on elsewhere."""
        self.release(slot)
