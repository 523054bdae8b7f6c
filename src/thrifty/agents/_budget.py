"""What an agent may train: a limit on epochs and seconds, and what its studies have used."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from thrifty.core import UsageError
from thrifty.store import Store

from ._documents import BudgetDocument


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What some studies have trained.

    Attributes:
        epochs: Epochs, each counted as often as it was trained.
        seconds: Seconds of training and evaluation.
    """

    epochs: int = 0
    seconds: float = 0.0


def usage_of(store: Store, names: Iterable[str]) -> Usage:
    """Return what studies have trained, by the records of their epochs.

    Args:
        store: The database.
        names: Names of the studies; those that do not exist have trained nothing.
    """
    epochs, seconds = 0, 0.0
    for name in names:
        info = store.studies.find(name)
        if info is None:
            continue
        for each in store.plans.load(info.plan).epochs:
            if each.study == info.id:
                epochs += (not each.evaluated) + each.again
                seconds += each.seconds + each.again_s
    return Usage(epochs=epochs, seconds=seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """A limit on what an agent trains.

    What is used is counted in the database, so it holds across calls, servers and crashes.

    Attributes:
        is_allowed: Whether it may train at all.
        max_epochs: Epochs that all of its runs together may train; None for any number.
        max_seconds: Seconds that they may train; None for any number.
    """

    is_allowed: bool = False
    max_epochs: int | None = None
    max_seconds: float | None = None

    def check(self, used: Usage, *, epochs: float) -> None:
        """Check that some epochs may be trained.

        Raises:
            UsageError: Nothing may be trained, or not that much.
        """
        if not self.is_allowed:
            raise UsageError(
                "this server is read-only; its user starts it with --allow-run to let you train"
            )
        if self.max_seconds is not None and used.seconds >= self.max_seconds:
            raise UsageError(
                f"the budget of {self.max_seconds:,.0f} seconds is used up; ask the user for more"
            )
        if self.max_epochs is not None and used.epochs + epochs > self.max_epochs:
            left = max(0, self.max_epochs - used.epochs)
            raise UsageError(
                f"these configurations need {epochs:,.0f} epochs, and {left:,} are left of the "
                f"budget of {self.max_epochs:,}; give fewer or shorter ones, or ask the user for "
                "more"
            )

    def document(self, used: Usage) -> BudgetDocument:
        """Return the budget as a document."""
        return {
            "allowed": self.is_allowed,
            "max_epochs": self.max_epochs,
            "used_epochs": used.epochs,
            "max_seconds": self.max_seconds,
            "used_seconds": used.seconds,
        }
