"""The report of a simulated study."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionTimes:
    """Real seconds per decision of the loop, from polling free workers to the next assignment.

    >>> DecisionTimes.of([0.001, 0.003, 0.002]).median
    0.002
    """

    num: int
    median: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> DecisionTimes:
        """Summarise the times of the given decisions."""
        if not len(seconds):
            return cls(num=0, median=0.0, p99=0.0, max=0.0)
        median, p99 = np.percentile(seconds, [50, 99])
        return cls(num=len(seconds), median=float(median), p99=float(p99), max=max(seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """The result of simulating one or several studies; print it for a summary.

    Attributes:
        workers: The number of workers.
        shared: Whether equal prefixes were trained once.
        end_to_end_s: Seconds from the first decision to the last result.
        busy_s: Busy seconds of all workers together, including loading states and lost work.
        bound_s: The least seconds in which any scheduler could have done this training, had it
            known all decisions in advance.
        num_trials: The number of trials of all studies together.
        num_failed: Trials that failed because their workers were lost too often.
        trial_epochs: Epochs that the trials have reached, each trial counted separately.
        unique_epochs: Epochs that were needed for that.
        epochs_redone: Epochs that were trained again because a worker was lost.
        failures: Failures of workers, busy or not.
        preemptions: Preemptions of workers, busy or not.
        kept_bytes: Bytes of all checkpoints at the end.
        best_value: The value of the best trial at the epoch that it has reached.
        decision_s: Real time of the decisions.
        driver_s: Real seconds of the whole loop: decisions, ledger and records.
    """

    workers: int
    shared: bool
    end_to_end_s: float
    busy_s: float
    bound_s: float
    num_trials: int
    num_failed: int
    trial_epochs: int
    unique_epochs: int
    epochs_redone: int
    failures: int
    preemptions: int
    kept_bytes: int
    best_value: float | None
    decision_s: DecisionTimes = field(compare=False)
    driver_s: float = field(compare=False)

    @property
    def utilisation(self) -> float:
        """Share of the workers' time in which they were busy."""
        return self.busy_s / (self.workers * self.end_to_end_s) if self.end_to_end_s else 0.0

    @property
    def efficiency(self) -> float:
        """Share of the speed that any scheduler could have reached; 1: none could be faster."""
        return self.bound_s / self.end_to_end_s if self.end_to_end_s else 1.0

    @property
    def merge_rate(self) -> float:
        """Trial-epochs per epoch that was needed; at least 1."""
        return self.trial_epochs / max(self.unique_epochs, 1)

    def __str__(self) -> str:
        kind = "equal prefixes trained once" if self.shared else "each trial by itself"
        lost = f", {self.num_failed:,} given up" if self.num_failed else ""
        again = f", {self.epochs_redone:,} trained again" if self.epochs_redone else ""
        best = "" if self.best_value is None else f"; the best: {self.best_value:.4g}"
        times = self.decision_s
        faults = ""
        if self.failures or self.preemptions:
            faults = f"\nfaults: {self.failures:,} failures, {self.preemptions:,} preemptions"
        return (
            f"{self.workers:,} workers, {kind}\n"
            f"end to end: {_duration(self.end_to_end_s)}, "
            f"and no scheduler could do it in less than {_duration(self.bound_s)} "
            f"({self.efficiency:.0%})\n"
            f"busy: {self.busy_s / 3600:,.2f} worker-hours (utilisation {self.utilisation:.0%})\n"
            f"trials: {self.num_trials:,}{lost}{best}\n"
            f"epochs: {self.unique_epochs:,} for {self.trial_epochs:,} trial-epochs "
            f"(merge rate {self.merge_rate:.2f}){again}{faults}\n"
            f"the driver: {self.driver_s:.1f} s; a decision {times.median * 1e3:.2f} ms "
            f"(99 of 100 at most {times.p99 * 1e3:.2f} ms, the longest {times.max * 1e3:.1f} ms)"
        )


def _duration(seconds: float) -> str:
    """Format a duration in two units at most.

    >>> _duration(42.0), _duration(200.0), _duration(5000.0), _duration(200_000.0)
    ('42.0 s', '3 min 20 s', '1 h 23 min', '2 d 8 h')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    large, small, unit_s, in_large, _ = next(
        unit for unit in _UNITS if round(seconds / unit[2]) < unit[4]
    )
    whole = round(seconds / unit_s)
    return f"{whole // in_large:,} {large} {whole % in_large} {small}"


_UNITS = (
    ("min", "s", 1, 60, 3600),
    ("h", "min", 60, 60, 24 * 60),
    ("d", "h", 3600, 24, math.inf),
)
"""Large and small unit, seconds in the small one, small ones per large one, upper limit."""
