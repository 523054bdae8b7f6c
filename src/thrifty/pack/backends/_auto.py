"""The back-end that chooses: fused where that works and is faster, concatenated otherwise."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch

from thrifty.core import error_text, lines_of, plain_logger
from thrifty.pack._backend import (
    Backend,
    EpochPlan,
    Member,
    Outcome,
    TimeShare,
    UnverifiedError,
    guarded,
    no_exits,
    out_of_memory,
)
from thrifty.pack._state import State
from thrifty.pack.fused._activations import ActivationStore
from thrifty.pack.fused._fusable import UnfusableError
from thrifty.pack.fused._member import FusedTrial
from thrifty.pack.task._task import Logged, Task, Trainable
from thrifty.pack.trial._probes import Trial
from thrifty.pack.trial._trial import TrainableTrial
from thrifty.pack.verify import AloneTime, CheckBudget
from thrifty.perf import PackCurve

from ._fused import FusedBackend
from ._fusion_policy import Calibration, FusionPolicy
from ._plain import ConcatenatedBackend, SoloBackend, check_parameters


logger = plain_logger(__name__)

Prefer = Literal["auto", "fused", "concatenated", "solo"]


class AutoBackend(Backend):
    """A back-end with any number of slots that trains each structure in the way measured fastest.

    Args:
        task: What the trials train.
        device: Where they are trained.
        prefer: The back-end to use; ``"auto"`` chooses by measurement. Results of
            ``"concatenated"`` and ``"solo"`` are bit-identical to those of a trial alone.
        known: Calibration curves by key, so that they are not measured again.
        on_calibrated: Called with each calibration, known or new.
        patient: Whether to measure only once enough plain training has been done to pay for it, or
            enough is known to come.
        refused: Why some structures are not fused, by a key that is the same in every process.
        on_refused: Called with the key and the reason of each structure whose check fails.
            Without it the reason is logged.
        activations: Where activations of frozen trunks are kept, as in ``FusedBackend``.

    Attributes:
        shares: The share of each slot in the time of the last ``step``.
    """

    def __init__(  # noqa: PLR0913 -- the options of a worker; all but the task are keywords
        self,
        task: Task | Trainable,
        *,
        device: torch.device | str = "cpu",
        prefer: Prefer = "auto",
        known: Mapping[str, Sequence[PackCurve]] | None = None,
        on_calibrated: Callable[[Calibration], None] = lambda _: None,
        patient: bool = False,
        refused: Mapping[str, str] | None = None,
        on_refused: Callable[[str, str], None] | None = None,
        activations: ActivationStore | None = None,
    ) -> None:
        self._task = task
        self._prefer: Prefer = prefer
        self._plain = _Plain(task, torch.device(device))
        self._fused: FusedBackend | None = None
        if isinstance(task, Task) and prefer in ("auto", "fused"):
            self._fused = FusedBackend(
                task, device=device, refused=refused, activations=activations
            )
        self._policy = FusionPolicy(
            task,
            torch.device(device),
            known=known or {},
            on_calibrated=on_calibrated,
            patient=patient and prefer == "auto",
        )
        self._where: dict[int, Backend] = {}
        self.shares: Mapping[int, TimeShare] = {}
        self._on_refused = on_refused
        self._num_refused = len(refused or {})
        # the process that found these refusals has already logged them
        self._said = set((refused or {}).values())

    def put(self, slot: int, member: Member) -> None:
        """Put a trial into a slot of the back-end that is best for it.

        Raises:
            TaskError: It trains parameters of another trial.
        """
        if self._fused is None:
            self._plain.put(slot, member)
            self._where[slot] = self._plain
            return
        trial = self._fused.prepare(member)
        check_parameters(trial, map(self.trial, self._where))
        num_epochs = 1 if member.stop is None else max(1, member.stop - member.epoch)
        if trial.why_special and not trial.stays_alone:
            trial.stays_alone = True
            self._say(trial.why_special)
        if not self._goes_fused(
            slot, trial, member.values, epoch=member.epoch, num_epochs=num_epochs
        ):
            self._plain.place(slot, trial)
            self._where[slot] = self._plain

    @property
    def epochs_to_come(self) -> float:
        """How many epochs are known to be trained by this back-end from now on."""
        return self._policy.epochs_to_come

    @epochs_to_come.setter
    def epochs_to_come(self, num: float) -> None:
        self._policy.epochs_to_come = num

    def num_steps(self, slot: int, values: Mapping[str, Any]) -> int:
        """Return how many optimizer steps the next epoch has."""
        return self._where[slot].num_steps(slot, values)

    def step(self, plans: Mapping[int, EpochPlan]) -> Mapping[int, Outcome]:
        """Train with every back-end until one of its trials has ended its epoch."""
        whole = _Stopwatch(self.checks)
        outcomes: dict[int, Outcome] = {}
        shares: dict[int, TimeShare] = {}
        for slot, plan in plans.items():
            trial = self._plain.trial(slot)
            if self._fused is not None and trial is not None:
                num_epochs = 1 if plan.stop is None else max(1, plan.stop - plan.epoch)
                self._goes_fused(slot, trial, plan.values, epoch=plan.epoch, num_epochs=num_epochs)
            elif self._where[slot] is self._fused and self._prefer == "auto":
                error = guarded(partial(self._may_go_back, slot))
                if error is not None:
                    outcomes[slot] = error
        begins = {slot: plan for slot, plan in plans.items() if slot not in outcomes}
        for backend in dict.fromkeys(self._where.values()):
            mine = {slot: plan for slot, plan in begins.items() if self._where[slot] is backend}
            watch = _Stopwatch(self.checks)
            ended = backend.step(mine)
            outcomes.update(ended)
            spent = watch.spent()
            slots = [slot for slot, where in self._where.items() if where is backend]
            shares.update(dict.fromkeys(slots, _divided(spent, len(slots))))
            if backend is self._plain:
                failed = {slot for slot, one in ended.items() if isinstance(one, Exception)}
                self._policy.spent(self._plain.trials(without=failed), spent.seconds)
        self._tell_refused()
        for slot, outcome in list(outcomes.items()):
            if isinstance(outcome, UnfusableError):
                watch = _Stopwatch(self.checks)
                leaves = partial(self._leaves_fused, slot, plans.get(slot), outcome)
                outcomes[slot] = guarded(leaves)
                shares[slot] = shares[slot].plus(watch.spent())
            elif isinstance(outcome, UnverifiedError) and not (
                outcome.mismatch and self._on_refused  # reported with its structure, once for all
            ):
                how = None if outcome.mismatch else "trained again alone, only this trial"
                self._say(str(outcome), how=how)
        # divide the rest, such as the time of measurements, equally among all slots
        left = whole.spent().seconds - sum(share.seconds for share in shares.values())
        each = TimeShare(seconds=max(0.0, left) / max(1, len(shares)))
        self.shares = {slot: share.plus(each) for slot, share in shares.items()}
        return outcomes

    def is_fused(self, slot: int) -> bool:
        """Return whether a trial is trained in a block."""
        return self._fused is not None and self._where.get(slot) is self._fused

    def alone_time(self, slot: int, values: Mapping[str, Any]) -> AloneTime | None:
        """Return how long an epoch of a fused trial takes alone; None until checks measure it."""
        assert self._fused is not None
        return self._fused.alone_time(slot, values)

    def refuse(self, key: str, reason: str) -> None:
        """Stop fusing trials of a structure, because a check has failed elsewhere."""
        self._said.add(reason)
        if self._fused is not None and key not in self._fused.refused:
            self._fused.refuse(key, reason)
            self._num_refused += 1

    def _tell_refused(self) -> None:
        """Report the structures that were refused in this step."""
        if self._fused is None:
            return
        fresh = list(self._fused.refused.items())[self._num_refused :]
        self._num_refused += len(fresh)
        if self._on_refused is not None:
            for key, reason in fresh:
                self._said.add(reason)
                self._on_refused(key, reason)

    def num_unverified(self, slot: int) -> int:
        """Return how many of a member's last epochs are not verified yet."""
        return self._where[slot].num_unverified(slot)

    def trial(self, slot: int) -> Trial:
        """Return the trial in a slot."""
        if self._fused is not None and self._where[slot] is self._fused:
            return self._fused.trial(slot)
        return self._plain.trial_of_any_kind(slot)

    def logged(self, slot: int) -> Logged:
        """Return what a trial keeps of its last epoch beside its metrics."""
        trial = self.trial(slot)
        return trial.logged if isinstance(trial, TrainableTrial) else Logged()

    def take(self, slot: int) -> Trial:
        """Take a trial out of its slot, with model and optimizer as they stand."""
        found = self.trial(slot)
        if self._fused is not None and self._where[slot] is self._fused:
            self._fused.take(slot)
        self.release(slot)
        return found

    @property
    def checks(self) -> CheckBudget:
        """The time that checks have taken so far."""
        return CheckBudget() if self._fused is None else self._fused.budget

    def state(self, slot: int) -> State:
        """Return a copy of a member's full state."""
        return self._where[slot].state(slot)

    def release(self, slot: int) -> None:
        """Free a slot."""
        where = self._where.pop(slot, None)
        if where is not None:
            where.release(slot)

    def calibration(self, slot: int) -> Calibration | None:
        """Return the measurement that led to fusing the trial in a slot; None if there is none."""
        if self._fused is None or self._where.get(slot) is not self._fused:
            return None
        return self._policy.calibration(self._fused.trial(slot))

    def _goes_fused(
        self,
        slot: int,
        trial: FusedTrial,
        values: Mapping[str, Any],
        *,
        epoch: int,
        num_epochs: int,
    ) -> bool:
        """Place a trial in the fused back-end if it belongs there, and return whether it does."""
        assert self._fused is not None
        if trial.stays_alone:
            return False
        try:
            with no_exits():
                wins = self._policy.fuses(
                    self._fused,
                    trial,
                    values,
                    num_epochs=num_epochs,
                    checked=self._prefer == "auto",
                )
                if not wins and self._prefer == "auto":
                    return False
                self._fused.place(slot, trial, values, epoch=epoch)
        except UnfusableError as error:
            self._say(str(error))
            return False
        except Exception as error:
            if out_of_memory(error):
                raise
            # If plain training meets this error too, it is the outcome of the trial. A measurement
            # trains copies of the trial for other epochs, so its errors need not be the trial's.
            trial.stays_alone = True
            self._say(f"its measurement for packing failed with {error_text(error)}")
            return False
        self._plain.forget(slot)
        self._where[slot] = self._fused
        return True

    def _may_go_back(self, slot: int) -> None:
        """Move a trial back to plain training if too few others are left to fuse it with."""
        assert self._fused is not None
        if self._fused.num_unverified(slot):
            return  # after a move, its last epochs could no longer be verified
        if not self._policy.stays(self._fused.trial(slot)):
            self._plain.place(slot, self._fused.take(slot))
            self._where[slot] = self._plain

    def _leaves_fused(
        self, slot: int, plan: EpochPlan | None, reason: UnfusableError
    ) -> Mapping[str, float]:
        """Move a trial that cannot be fused at the start of an epoch to plain training.

        Returns:
            The metrics of that epoch.
        """
        assert self._fused is not None
        self._say(str(reason))
        trial = self._fused.take(slot)
        self._plain.place(slot, trial)
        self._where[slot] = self._plain
        return self._plain.whole_epoch(slot, trial.plan if plan is None else plan)

    def _say(self, reason: str, *, how: str | None = None) -> None:
        if reason not in self._said:
            self._said.add(reason)
            how = how or "trained by plain PyTorch, not fused"
            logger.warning("%s is %s: %s", type(self._task).__name__, how, reason)


class _Stopwatch:
    """A stopwatch for time in total and for the part of it that goes into checks."""

    def __init__(self, checks: CheckBudget) -> None:
        self._checks = checks
        self._checks_before = checks.spent_s
        self._began = time.perf_counter()

    def spent(self) -> TimeShare:
        return TimeShare(
            seconds=time.perf_counter() - self._began,
            checks=self._checks.spent_s - self._checks_before,
        )


def _divided(spent: TimeShare, num: int) -> TimeShare:
    return TimeShare(seconds=spent.seconds / max(1, num), checks=spent.checks / max(1, num))


class _Plain(Backend):
    """A back-end of plain PyTorch for tasks of both kinds."""

    def __init__(self, task: Task | Trainable, device: torch.device) -> None:
        self._task = task
        self._device = device
        self._together = (
            ConcatenatedBackend(task, device=device) if isinstance(task, Task) else None
        )
        self._solos: dict[int, SoloBackend] = {}

    def put(self, slot: int, member: Member) -> None:
        if self._together is not None:
            self._together.put(slot, member)
            return
        self._solos[slot] = SoloBackend(self._task, device=self._device)
        self._solos[slot].put(0, member)

    def place(self, slot: int, trial: FusedTrial) -> None:
        """Take in a trial that has already begun.

        Raises:
            TaskError: It trains parameters of another trial.
        """
        assert self._together is not None
        self._together.place(slot, trial)

    def trial(self, slot: int) -> FusedTrial | None:
        """Return the trial in a slot if it could be fused, else None."""
        found = None if self._together is None else self._together.trials.get(slot)
        return found if isinstance(found, FusedTrial) else None

    def trial_of_any_kind(self, slot: int) -> Trial:
        """Return the trial in a slot."""
        return self._solos[slot].trial if self._together is None else self._together.trials[slot]

    def trials(self, *, without: Collection[int]) -> list[FusedTrial]:
        """Return the trials that could be fused, except those in the slots ``without``."""
        held = {} if self._together is None else self._together.trials
        return [
            trial
            for slot, trial in held.items()
            if isinstance(trial, FusedTrial) and slot not in without
        ]

    def num_steps(self, slot: int, values: Mapping[str, Any]) -> int:
        if self._together is not None:
            return self._together.num_steps(slot, values)
        return self._solos[slot].num_steps(0, values)

    def step(self, plans: Mapping[int, EpochPlan]) -> Mapping[int, Outcome]:
        if self._together is not None:
            return self._together.step(plans)
        outcomes: dict[int, Outcome] = {}
        for slot, plan in plans.items():
            with lines_of(slot):
                outcomes[slot] = self._solos[slot].step({0: plan})[0]
        return outcomes

    def whole_epoch(self, slot: int, plan: EpochPlan) -> Mapping[str, float]:
        """Train one epoch of one trial without waiting for the others. Errors propagate."""
        assert self._together is not None
        return self._together.whole_epoch(slot, plan)

    def state(self, slot: int) -> State:
        if self._together is not None:
            return self._together.state(slot)
        return self._solos[slot].state(0)

    def release(self, slot: int) -> None:
        if self._together is not None:
            self._together.release(slot)
        self._solos.pop(slot, None)

    def forget(self, slot: int) -> None:
        """Free the slot of a trial that has moved to the fused back-end."""
        self.release(slot)
