"""Asks for checks that checkpoints are complete, at the ends and the beginnings of stages."""

from __future__ import annotations

import json

import torch

from thrifty.pack import AutoBackend, Member, State, StateCheck, Task, Trainable, Trial

from ._alone import plan_of
from ._course import Course
from ._tensors import state_from_arrays, state_to_arrays


class Completeness:
    """Compares trials with trials that are restored, where ``StateCheck`` finds that due."""

    def __init__(self, task: Task | Trainable, *, device: torch.device) -> None:
        self._check = StateCheck(task, device=device)

    def trained(self, seconds: float) -> None:
        """Take note of time that went into training."""
        self._check.budget.trained_s += seconds

    @property
    def spent_s(self) -> float:
        """Seconds of all comparisons so far."""
        return self._check.budget.spent_s

    def note(self, trial: Trial) -> None:
        """Take note of a new trial before it is trained."""
        self._check.note(trial)

    def at_end(self, course: Course, backend: AutoBackend, state: State) -> Exception | None:
        """Compare a trial that has ended a stage with one that is restored.

        The trial leaves the back-end for that; its course goes on from ``state``.

        Args:
            course: That of the trial.
            backend: Where the trial is.
            state: That of the trial now.

        Returns:
            What is wrong, if something is.
        """
        if not self._check.is_due(
            backend.trial(course.number), is_first=not course.is_compared
        ):
            return None
        course.is_compared = True
        live = backend.take(course.number)
        course.passed = state
        arrays, meta = state_to_arrays(state)
        meta = json.loads(json.dumps(meta))  # as a checkpoint is written and read
        state = state_from_arrays(arrays, meta)
        # The values of epochs that were trained already: what hangs or fails at those of the next
        # one is not this stage's affair. What ``adapt`` has done once, at some values, is seen at
        # others.
        last, timeline = course.epoch - 1, course.chain.timeline
        try:
            self._compare(course, live, state, epoch=last)
            if live.adapts and timeline.at(0) != timeline.at(last):
                self._compare(course, live, live.state(), epoch=0)
        except Exception as error:  # noqa: BLE001 (user code may raise anything)
            return error
        return None

    def at_begin(self, course: Course, member: Member) -> None:
        """Compare a trial that begins here with one that begins in a new process.

        What other trials have left in variables that all of them read must not reach it.

        Raises:
            StateError: It does.
        """
        if self._check.is_changed():
            live = self._check.begin(member)
            if self._check.is_due(live):
                self._compare(course, live, member.state, epoch=course.epoch)

    def _compare(self, course: Course, live: Trial, state: State | None, *, epoch: int) -> None:
        plan = plan_of(live.num_steps, course.chain.timeline, epoch=epoch)
        member = course.member(state, epoch=epoch)
        self._check.check(live, member, plan, seconds=course.epoch_s)
