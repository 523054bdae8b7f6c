"""Schedule of the checks of a worker's loss, and the samples they use."""

from __future__ import annotations

import math

import torch

from thrifty.core import Clock, derive_seed
from thrifty.hetero.training._learner import Learner
from thrifty.hetero.training._samples import Taken
from thrifty.pack import borrowed_streams

from ._loss_check import LossCheck


_SHARE = 0.01
"""Maximum share of the training time that checks may take."""
_LEAST_GAP = 100
"""Minimum number of steps between two checks, however cheap they are."""
_ENOUGH = 8
"""Minimum number of samples to check the loss with, if there are enough."""


class CheckSchedule:
    """Picks seeded random steps, so that all checks after the first take at most 1 % of the time.

    It depends only on numbers that all workers know, so all check at the same steps and none waits
    for another.

    Args:
        seed: Seed of the steps.
    """

    def __init__(self, *, seed: int) -> None:
        self._seed = seed
        self._next = 0

    def restart(self) -> None:
        """Check at the next step."""
        self._next = 0

    def is_due(self, step: int) -> bool:
        """Return whether to check before this step."""
        return step >= self._next

    def checked(self, step: int, *, check_s: float, step_s: float) -> None:
        """Record a check, and pick the step of the next one.

        Args:
            step: Step at which the check was made.
            check_s: Seconds that the check took.
            step_s: Seconds that the step took without the check.
        """
        gap = math.ceil(check_s / (_SHARE * max(step_s, 1e-9)))
        gap = max(gap, _LEAST_GAP)
        self._next = step + gap + derive_seed(self._seed, "check", step) % gap


class Inspector:
    """Checks the loss of a worker's share, at the steps of a ``CheckSchedule``.

    Args:
        check: Compares a batch with its parts.
        learner: The learner whose samples are checked.
        seed: Seed of the steps and of the draws in a check.
        clock: Clock to measure with.
        enabled: Whether to check at all.

    Attributes:
        finding: Description of the problem; empty if there is none.
        seconds: Seconds that the check of this step took.
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
        """Check at the next step, because workers or parameters have changed."""
        self._schedule.restart()

    def begin(self, step: int, *, largest: int) -> bool:
        """Begin a step; return whether to inspect its samples.

        Args:
            step: Steps trained before it.
            largest: Samples of the worker with the largest share.
        """
        self.finding, self.seconds = "", 0.0
        self._step, self._largest = step, largest
        return self._enabled and self._schedule.is_due(step)

    def inspect(self, taken: Taken) -> None:
        """Check the samples of this worker's share."""
        began = self._clock.monotonic()
        seed = derive_seed(self._seed, "check", self._step)
        # The step must draw the same numbers, whether its samples are checked or not.
        with borrowed_streams():
            self.finding = self._check.find(self._enough(taken, seed), seed=seed)
        self._learner.synchronise()
        self.seconds = self._clock.monotonic() - began

    def end(self, *, check_s: float, step_s: float) -> None:
        """Record the cost of all workers' checks; see ``CheckSchedule.checked``."""
        self._schedule.checked(self._step + 1, check_s=check_s, step_s=step_s)

    def _enough(self, taken: Taken, seed: int) -> Taken:
        """Return the share, or some public samples if all shares are too small to be split."""
        samples = self._learner.samples
        if max(len(taken), self._largest) >= _ENOUGH or samples.num_public <= len(taken):
            return taken
        generator = torch.Generator().manual_seed(seed)
        some = torch.randperm(samples.num_public, generator=generator)[:_ENOUGH]
        return samples.take(some.tolist(), (), watched=True)
