"""Ending a run before the algorithm is done: stop conditions, Ctrl-C."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Self

from thrifty.core import Clock, StopNow, UsageError, plain_logger

from ._ledger import Ledger


logger = plain_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StopWhen:
    """Conditions that stop a run as Ctrl-C does, as soon as one of them holds.

    Running epochs are finished and kept.

    Attributes:
        epochs: Stop after this many unique epochs were trained for this study, over all its runs.
            Trials begin only while epochs are left for them, so a pack exceeds this by less than
            one trial's training and one epoch of each trial in it.
        seconds: Stop when this run has lasted this many seconds.
        target: Stop when the metric of the best trial (``Study.best_trial``; with several
            objectives, the first one) is at least as good.

    Raises:
        UsageError: No condition is given, or a condition is invalid.

    >>> StopWhen(epochs=500, target=0.98)
    StopWhen(epochs=500, seconds=None, target=0.98)
    """

    epochs: int | None = None
    seconds: float | None = None
    target: float | None = None

    def __post_init__(self) -> None:
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        if not any(value is not None for value in given.values()):
            raise UsageError("StopWhen(): say when, with epochs=, seconds= or target=")
        for name, value in given.items():
            kind = int if name == "epochs" else int | float
            number = isinstance(value, kind) and not isinstance(value, bool)
            low = -math.inf if name == "target" else 0
            if value is not None and not (number and low < value < math.inf):
                wanted = {"epochs": "a whole number, 1 or more", "seconds": "a number above 0"}
                raise UsageError(
                    f"StopWhen({name}={value!r}): {name} must be "
                    f"{wanted.get(name, 'a finite number')}"
                )

    def epochs_left(self, ledger: Ledger) -> float:
        """Return how many epochs may still be trained; infinite if they are not limited."""
        return math.inf if self.epochs is None else self.epochs - ledger.epochs_trained

    def watch(self, ledger: Ledger, clock: Clock) -> Callable[[], str]:
        """Return a function that gives the reason to stop, or an empty string.

        Time counts from this call on.
        """
        began = clock.monotonic()

        def reason() -> str:
            best, sign = ledger.best_value, ledger.goals.sign
            if self.epochs is not None and ledger.epochs_trained >= self.epochs:
                one = ledger.epochs_trained == 1
                return f"{ledger.epochs_trained:,} epoch{' was' if one else 's were'} trained"
            if self.seconds is not None and clock.monotonic() - began >= self.seconds:
                return f"{self.seconds:g} s have passed"
            if (
                self.target is not None
                and best is not None
                and sign * (best - self.target) >= 0
            ):
                return f"{ledger.goals.metrics[0]} is {best:g}"
            return ""

        return reason


class StopOnSignal:
    """A handler of Ctrl-C and SIGTERM: the first stops cleanly, the second stops at once."""

    def __init__(self) -> None:
        self._asked = False
        self._before: dict[signal.Signals, Any] = {}

    def requested(self) -> bool:
        """Return whether a signal has requested a stop."""
        return self._asked

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: object) -> None:
        if self._asked:
            raise StopNow
        self._asked = True
        logger.warning("stopping at the end of the epoch; once more to stop at once")

    _on_signal.raises_stop_now = True  # type: ignore[attr-defined]
