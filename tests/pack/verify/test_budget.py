"""The time budget of checks."""

from __future__ import annotations

from thrifty.pack.verify import CheckBudget


def test_checks_are_paid_by_training():
    budget = CheckBudget(share=0.1)
    assert not budget.allows(0.1)
    budget.trained_s += 2.0
    assert budget.allows(0.2)
    budget.spend(0.15)
    assert not budget.allows(0.1)
    assert budget.allows(0.05)
    assert (budget.num_checks, budget.spent_s) == (1, 0.15)
