"""When the loss is checked again."""

from __future__ import annotations

import math

from thrifty.core import derive_seed


_SHARE = 0.01
"""Of the training time, at most."""
_LEAST_GAP = 100
"""Steps between two checks, however cheap they are."""


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
