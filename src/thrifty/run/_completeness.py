"""Checks at the start and the end of stages that checkpoints contain the whole training state."""

from __future__ import annotations

import json

import torch

from thrifty.pack import AutoBackend, Member, State, StateCheck, Task, Trainable, Trial

from ._alone import plan_of
from ._running_chain import RunningChain
from ._states import state_from_arrays, state_to_arrays


class Completeness:
    """A check that compares live trials with restored ones, when ``StateCheck`` says it is due."""

    def __init__(self, task: Task | Trainable, *, device: torch.device) -> None:
        self._check = StateCheck(task, device=device)

    def trained(self, seconds: float) -> None:
        """Add training time, which the budget for comparisons is relative to."""
        self._check.budget.trained_s += seconds

    @property
    def spent_s(self) -> float:
        """Seconds spent on comparisons so far."""
        return self._check.budget.spent_s

    def note(self, trial: Trial) -> None:
        """Register a new trial before it is trained."""
        self._check.note(trial)

    def at_end(
        self, course: RunningChain, backend: AutoBackend, state: State
    ) -> Exception | None:
        """Compare a trial that has ended a stage with a trial restored from its state.

        The comparison removes the trial from the back-end; its course continues from ``state``.

        Args:
            course: The course of the trial.
            backend: The back-end that holds the trial.
            state: The current state of the trial.

        Returns:
            The error that the comparison found, or None.
        """
        if not self._check.is_due(
            backend.trial(course.number), is_first=not course.is_compared
        ):
            return None
        course.is_compared = True
        live = backend.take(course.number)
        course.passed = state
        arrays, meta = state_to_arrays(state)
        meta = json.loads(json.dumps(meta))  # what writing and reading a checkpoint does
        state = state_from_arrays(arrays, meta)
        # Compare at the values of epochs already trained: if the values of the next epoch make a
        # step hang or fail, this stage is not to blame. A change that ``adapt`` made only once, for
        # certain values, shows at other values, so compare at those of epoch 0, too.
        last, timeline = course.epoch - 1, course.chain.timeline
        try:
            self._compare(course, live, state, epoch=last)
            if live.adapts and timeline.at(0) != timeline.at(last):
                self._compare(course, live, live.state(), epoch=0)
        except Exception as error:  # noqa: BLE001 (user code may raise anything)
            return error
        return None

    def at_begin(self, course: RunningChain, member: Member) -> None:
        """Compare a trial that begins in this process with one that begins in a new process.

        Values that other trials have left in shared variables must not influence this trial.

        Raises:
            StateError: They do.
        """
        if self._check.is_changed():
            live = self._check.begin(member)
            if self._check.is_due(live):
                self._compare(course, live, member.state, epoch=course.epoch)

    def _compare(
        self, course: RunningChain, live: Trial, state: State | None, *, epoch: int
    ) -> None:
        plan = plan_of(live.num_steps, course.chain.timeline, epoch=epoch)
        member = course.member(state, epoch=epoch)
        self._check.check(live, member, plan, seconds=course.epoch_s)
