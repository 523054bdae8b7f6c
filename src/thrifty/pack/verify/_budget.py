"""The cost of checks, and when another one is affordable."""

from __future__ import annotations

from dataclasses import dataclass


SHARE = 0.01
"""The share of training time that checks may take, besides those that are never skipped."""


@dataclass(slots=True, kw_only=True)
class CheckBudget:
    """Seconds of checks and of training.

    Attributes:
        share: The share of training time up to which optional checks may bring the total.
        trained_s: Seconds of training in blocks.
        spent_s: Seconds of all checks.
        num_checks: Checks so far.
        num_ties: Checks that differed in single precision and agreed in double precision.
    """

    share: float = SHARE
    trained_s: float = 0.0
    spent_s: float = 0.0
    num_checks: int = 0
    num_ties: int = 0

    def spend(self, seconds: float) -> None:
        """Add the cost of a check."""
        self.spent_s += seconds
        self.num_checks += 1

    def allows(self, seconds: float) -> bool:
        """Return whether a check of this cost fits into the share of training time.

        >>> budget = CheckBudget(trained_s=10.0)
        >>> budget.spend(0.02)
        >>> budget.allows(0.02), budget.allows(0.1)
        (True, False)
        """
        return self.spent_s + seconds <= self.share * self.trained_s
