"""When the loss of a worker's share is checked, and with which samples."""

from __future__ import annotations

import math

import torch

from thrifty.core import Clock, derive_seed
from thrifty.pack import borrowed_streams

from ._learner import Learner
from ._loss_check import LossCheck
from ._samples import Taken


_SHARE = 0.01
"""Of the training time, at most."""
_LEAST_GAP = 100
"""Steps between two checks, however cheap they are."""
_ENOUGH = 8
"""Samples that the loss is checked with, if there are as many."""


class CheckSchedule:
    """Picks seeded random steps, so that all checks after the first take 1 % of the time at most.

    It depends on numbers that all workers know, so they check at the same steps and none waits for
    another.

    Args:
        seed: of the steps.
    """

    def __init__(self, *, seed: int) -> None:
        self._seed = seed
        self._next = 0

    def restart(self) -> None:
        """Check at the next step."""
        self._next = 0

    def is_due(self, step: int) -> bool:
        """Whether to check before this step."""
        return step >= self._next

    def checked(self, step: int, *, check_s: float, step_s: float) -> None:
        """Note a check, and pick the step of the next one.

        Args:
            step: at which it was made.
            check_s: seconds that it took.
            step_s: seconds that the step took without it.
        """
        gap = math.ceil(check_s / (_SHARE * max(step_s, 1e-9)))
        gap = max(gap, _LEAST_GAP)
        self._next = step + gap + derive_seed(self._seed, "check", step) % gap


class Inspector:
    """Checks the loss of a worker's share, at the steps of a ``CheckSchedule``.

    Args:
        check: compares a batch with its parts.
        learner: whose samples are checked.
        seed: of the steps, and of what a check draws.
        clock: to read.
        enabled: whether to check at all.

    Attributes:
        finding: what is wrong; an empty text if nothing is.
        seconds: that the check of this step took.
    """

    def __init__(
        self, check: LossCheck, learner: Learner, *, seed: int, clock: Clock, enabled: bool
    ) -> None:
        self.finding = ""
        self.seconds = 0.0
        self._check = check
        self._learner = learner
        self._seed = seed
        self._clock = clock
        self._enabled = enabled
        self._schedule = CheckSchedule(seed=seed)
        self._step = 0
        self._largest = 0

    def restart(self) -> None:
        """Check at the next step: workers or parameters are others."""
        self._schedule.restart()

    def begin(self, step: int, *, largest: int) -> bool:
        """Begin a step; return whether its samples are to be inspected.

        Args:
            step: steps trained before it.
            largest: samples of the worker that has most of them.
        """
        self.finding, self.seconds = "", 0.0
        self._step, self._largest = step, largest
        return self._enabled and self._schedule.is_due(step)

    def inspect(self, taken: Taken) -> None:
        """Check the samples of this worker's share."""
        began = self._clock.monotonic()
        seed = derive_seed(self._seed, "check", self._step)
        # The step draws the same numbers, whether its samples are checked or not.
        with borrowed_streams():
            self.finding = self._check.find(self._enough(taken, seed), seed=seed)
        self._learner.synchronise()
        self.seconds = self._clock.monotonic() - began

    def end(self, *, check_s: float, step_s: float) -> None:
        """Note what all workers' checks cost; see ``CheckSchedule.checked``."""
        self._schedule.checked(self._step + 1, check_s=check_s, step_s=step_s)

    def _enough(self, taken: Taken, seed: int) -> Taken:
        """A share, or some public samples where all shares are too small to be split."""
        samples = self._learner.samples
        if max(len(taken), self._largest) >= _ENOUGH or samples.num_public <= len(taken):
            return taken
        generator = torch.Generator().manual_seed(seed)
        some = torch.randperm(samples.num_public, generator=generator)[:_ENOUGH]
        return samples.take(some.tolist(), (), watched=True)
