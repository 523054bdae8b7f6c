"""Making trials, new and restored, and checks that one does not depend on those made before it."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any
from weakref import ReferenceType

import torch

from thrifty.core import StateError, TaskError
from thrifty.pack._backend import Member, out_of_memory
from thrifty.pack._frozen import snapshot
from thrifty.pack.task._task import HyperParameters, SelfDescribing, Task, Trainable, own_task
from thrifty.pack.verify import CheckBudget, MadeOnce, digest_or_none, own_tensors, same

from ._probes import Trial, check_kept, made_model
from ._state_messages import cannot_be_loaded, model_not_repeatable, shared_parameter, task_name
from ._trial import TaskTrial, TrainableTrial


MAX_FREE_CHECKS = 3
"""How often what is kept for later trials is checked before the budget has to allow it."""


class MadeCheck:
    """A check that a new trial keeps nothing for later ones that depends on its seed.

    It also refuses parameters that an earlier trial trains.

    Args:
        task: What the trials train. What it keeps counts as it is now.
        device: Where they are trained.
        budget: What the checks cost is added to it, and it limits how many there are.
        is_off: Whether nothing that trials keep is looked at.
    """

    def __init__(
        self,
        task: Task | Trainable,
        *,
        device: torch.device,
        budget: CheckBudget,
        is_off: bool = False,
    ) -> None:
        self._task = task
        self._device = device
        self._budget = budget
        self._kept = MadeOnce({} if is_off else {"task": task})
        self._num_made = 0
        """How many trials were made again because the first making has changed variables."""
        self._seconds = 0.0
        """What the last check took."""
        self._trained: dict[int, ReferenceType[torch.Tensor]] = {}
        """The parameters that living trials train, by their identities."""

    def note_trained(self, model: torch.nn.Module) -> None:
        """Note the parameters that a new trial trains.

        Raises:
            StateError: Another trial trains one of them.
        """
        own = {n: p for n, p in model.named_parameters() if p.requires_grad}
        for name, parameter in own.items():
            known = self._trained.get(id(parameter))
            if known is not None and known() is parameter:
                raise StateError(shared_parameter(self._task, name))
        self._trained = {key: ref for key, ref in self._trained.items() if ref() is not None}
        self._trained |= {id(p): ReferenceType(p) for p in own.values()}

    def has_changed(self) -> bool:
        """Return whether a trial has kept something since the last check."""
        return self._kept.has_changed()

    def is_affordable(self) -> bool:
        """Return whether a trial may be made again."""
        return self._num_made < MAX_FREE_CHECKS or self._budget.allows(self._seconds)

    def check(self, trial: Trial, member: Member) -> None:
        """Make a trial again if making it has changed variables, and compare what both draw.

        Args:
            trial: The trial.
            member: What it was made from.

        Raises:
            StateError: It shares parameters with the other one, or what it keeps for later trials,
                or what it makes itself, depends on which trial is made first.
        """
        if not self.is_affordable() or not self._kept.take_changed():
            return
        self._num_made += 1
        began = time.perf_counter()
        again = new_trial(self._task, self._device)
        again.begin(replace(member, state=None))
        if isinstance(trial, TaskTrial) and isinstance(again, TaskTrial):
            _check_shared(self._task, trial, again)
        if again.drawn != trial.drawn:
            self._check_kept(trial, member)
        self._kept.take_changed()
        self._seconds = time.perf_counter() - began
        self._budget.spend(self._seconds)

    def _check_kept(self, trial: Trial, member: Member) -> None:
        """Make a trial as if it were the first one, to see what depends on its seed.

        Raises:
            StateError: What it keeps for later trials does, or what it makes depends on whether
                that was kept before.
        """
        task, name = self._task, task_name(self._task)
        if isinstance(task, Task):
            own = own_task(task)

            def model() -> tuple[torch.nn.Module, Any]:
                hp = HyperParameters(member.first_values)
                return made_model(own, hp, seed=member.seed, device=self._device)

            code = f"{name}.model"
            check_kept(self._kept, model, own_tensors, drawn=trial.drawn, name=code, task=task)
            return

        def make() -> tuple[TrainableTrial, Any]:
            one = TrainableTrial(task, self._device)
            one.begin(replace(member, state=None))
            return one, one.drawn

        code = name if isinstance(task, SelfDescribing) else f"{name}.setup"
        check_kept(self._kept, make, _made_values, drawn=trial.drawn, name=code)


def _made_values(trial: TrainableTrial) -> dict[str, str | None]:
    """Return digests of what the preparation of a trial has made, by name."""
    if isinstance(trial.task, SelfDescribing):
        state = trial.state()
        return {n: digest_or_none(t) for n, t in state.tensors.items()} | {
            "state": digest_or_none(state.tree)
        }
    return {f"self.{name}": digest_or_none(value) for name, value in vars(trial.task).items()}


# -- making trials -------------------------------------------------------------------------


def new_trial(task: Task | Trainable, device: torch.device) -> Trial:
    """Return a trial of a task that has not begun."""
    return TaskTrial(task, device) if isinstance(task, Task) else TrainableTrial(task, device)


def restored_trial(
    task: Task | Trainable, device: torch.device, member: Member, *, live: Trial
) -> Trial:
    """Make a trial from its checkpoint, and check that models are the same each time.

    Args:
        task: The task.
        device: Where the trial is made.
        member: The trial as read back from its checkpoint.
        live: The live trial.

    Raises:
        StateError: The checkpoint does not fit the model, models are not the same each time, or a
            new model has a trained parameter of the live one.
    """
    restored = new_trial(task, device)
    if isinstance(restored, TrainableTrial) or isinstance(live, TrainableTrial):
        _load(task, restored, member)
        return restored
    first = new_trial(task, device)
    assert isinstance(first, TaskTrial)
    first.begin(replace(member, state=None))
    fresh = {name: snapshot(t) for name, t in own_tensors(first.model).items()}
    _check_shared(task, live, first)
    restored.begin(replace(member, state=None))
    names = [n for n, t in own_tensors(restored.model).items() if not same(t, fresh.get(n))]
    if names:
        raise StateError(model_not_repeatable(task, names[0]))
    if member.state is not None:
        _load(task, restored, member)
    return restored


def _load(task: Task | Trainable, trial: Trial, member: Member) -> None:
    """Load a checkpoint into a new trial.

    Raises:
        StateError: It cannot be loaded.
    """
    try:
        if isinstance(trial, TaskTrial):
            assert member.state is not None
            trial.load(member.state)
        else:
            trial.begin(member)
    except TaskError:
        raise
    except Exception as error:
        if out_of_memory(error):
            raise
        into = "model" if isinstance(trial, TaskTrial) else "trial"
        raise StateError(cannot_be_loaded(task, error, into=into)) from error


def _check_shared(task: Task | Trainable, live: TaskTrial, other: TaskTrial) -> None:
    """Check that two models share no parameters, unless these are frozen.

    Raises:
        StateError: They do.
    """
    own = {id(parameter) for parameter in live.model.parameters()}
    for name, parameter in other.model.named_parameters():
        if id(parameter) in own and parameter.requires_grad:
            raise StateError(shared_parameter(task, name))
