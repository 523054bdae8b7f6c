"""Which workers train, where the exchange of gradients costs more than some workers contribute."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from thrifty.core import UsageError

from .balancing import split_batch, step_seconds
from .profiles import StepCurve


_GAIN = 0.1
"""Share of a step that another set of workers must save. Changing it costs a copy of the state."""

_WARM_UP = 2
"""Steps after a change that do not count: they allocate memory for other sizes."""

_PATIENCE = 5
"""Steps whose median is the time of a step."""

_WINDOW = 11
"""Most steps of that median."""

_REVIEW_EVERY = 50
"""Steps between two reviews while all workers train at an unchanged speed."""

_LEAST_GAP = 100
"""Fewest steps until workers that stand by are tried again."""

_TRIAL_SHARE = 0.01
"""Share of the time that such trials may take."""

_STATE_SUMS = 20
"""Time of a call to everyone (with a copy of the state), in exchanges of gradients."""

_MAX_BACKOFF = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SubsetChange:
    """A new set of workers that train, and its reason.

    Attributes:
        reason: "exchange" (without the others a step is shorter, because the exchange of gradients
            takes longer than they save), "slower" (those that train are too slow now) or "trial"
            (whether the others would help now is measured anew).
        training: Workers that train from now on.
        step_s: Estimated seconds of a step before and after the change.
    """

    reason: Literal["exchange", "slower", "trial"]
    training: tuple[int, ...]
    step_s: tuple[float, float]


class StandbyPolicy:
    """Chooses the workers that train so that a step, including its exchange, is short.

    With everyone training, a step takes its longest worker and the exchange, which is measured. The
    candidates are the one fastest worker, the two fastest, and so on. One worker exchanges nothing;
    for others the cost is scaled by their number. If a candidate's step is at least 10 % shorter,
    only its workers go on training and the others stand by.

    Its step is then measured, too, which corrects later forecasts for the same workers. Everyone is
    called back if the step should be 10 % shorter with them (because the forecast was wrong, or
    those that train have become slower), and from time to time as a trial, because a worker that
    stands by may have become faster. Trials take about 1 % of the time and become rarer.

    At least one worker must never have stood by, because what a caller does after each step, such
    as a learning-rate schedule, is only up to date there.

    The policy depends only on its arguments, so workers that observe the same numbers agree.

    Args:
        num_workers: Number of workers.
        batch: Samples of one step, over all workers.
        required: Workers that must train, such as those with private samples.

    Attributes:
        training: Workers that train, by rank.
        constant: Workers that have never stood by.

    Raises:
        UsageError: There are no workers, or ``required`` names others.

    >>> policy = StandbyPolicy(2, batch=10)
    >>> curves = [StepCurve(sample_s=1.0), StepCurve(sample_s=99.0)]
    >>> changes = [policy.observe(curves, whole_s=15.0, busy_s=10.0) for _ in range(7)]
    >>> changes[-1].reason, policy.training
    ('exchange', (0,))
    """

    def __init__(self, num_workers: int, *, batch: int, required: Collection[int] = ()) -> None:
        if num_workers < 1:
            raise UsageError(f"`num_workers` must be at least 1, got {num_workers}")
        if not set(required) <= set(range(num_workers)):
            raise UsageError(
                f"`required` must name workers from 0 to {num_workers - 1}, got {sorted(required)}"
            )
        self._everyone = tuple(range(num_workers))
        self._batch = batch
        self._required = frozenset(required)
        self.training = self._everyone
        self.constant = frozenset(self._everyone)
        self._bias: dict[tuple[int, ...], float] = {}
        self._full_exchange_s = 0.0
        self._full_s = 0.0
        self._backoff = 1
        self._gap = 0
        self._steps = 0
        self._skip = _WARM_UP
        self._whole: deque[float] = deque(maxlen=_WINDOW)
        self._exchange: deque[float] = deque(maxlen=_WINDOW)
        self._known: tuple[StepCurve, ...] = ()
        self._busy: dict[tuple[int, ...], float] = {}

    def observe(
        self, curves: Sequence[StepCurve], *, whole_s: float, busy_s: float
    ) -> SubsetChange | None:
        """Record a step of the workers that train.

        Args:
            curves: Present curve of each worker, also of those that stand by.
            whole_s: Seconds of the step, including the exchange.
            busy_s: Working time of the worker that took longest.

        Returns:
            The change that takes effect with the next step; None: no change.
        """
        self._steps += 1
        if tuple(curves) != self._known:
            # A worker has another speed now, so earlier steps say nothing.
            self._known = tuple(curves)
            self._busy.clear()
            self._forget()
        if self._skip or not 0 < whole_s < math.inf:
            self._skip = max(0, self._skip - 1)
            return None
        self._whole.append(max(whole_s, busy_s))
        self._exchange.append(max(0.0, whole_s - busy_s))
        if len(self._whole) < _PATIENCE:
            return None
        if self.training != self._everyone:
            return self._reconsider(curves)
        if len(self._whole) > _PATIENCE and self._steps % _REVIEW_EVERY:
            return None
        return self._reduce(curves)

    def settle(self) -> None:
        """Measure anew from the next steps on, because the split has changed."""
        self._forget()
        self._skip = _WARM_UP

    def state(self) -> dict[str, Any]:
        """Return as plain values what a worker that stood by has to know."""
        return {
            "training": list(self.training),
            "constant": sorted(self.constant),
            "bias": [[list(workers), factor] for workers, factor in self._bias.items()],
            "full": [self._full_exchange_s, self._full_s],
            "backoff": self._backoff,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state`` returned; steps are counted anew."""
        self.training = tuple(state["training"])
        self.constant = frozenset(state["constant"])
        self._bias = {tuple(workers): factor for workers, factor in state["bias"]}
        self._full_exchange_s, self._full_s = state["full"]
        self._backoff = state["backoff"]
        self.restart()

    def restart(self) -> None:
        """Count and measure steps anew, because other workers train."""
        self._steps = 0
        self.settle()

    def _forget(self) -> None:
        self._whole.clear()
        self._exchange.clear()

    def _reduce(self, curves: Sequence[StepCurve]) -> SubsetChange | None:
        """Let some workers stand by if a step without them is shorter."""
        now_s, exchange_s = median(self._whole), median(self._exchange)
        self._full_s, self._full_exchange_s = now_s, exchange_s
        self._note_bias(curves, now_s)
        forecasts = {
            workers: self._forecast(workers, curves, biased=True) for workers in self._tries(curves)
        }
        if not forecasts:
            return None
        best = min(forecasts, key=lambda workers: (forecasts[workers], len(workers)))
        if forecasts[best] > now_s * (1 - _GAIN):
            return None
        self._gap = 0
        return self._move(best, "exchange", step_s=(now_s, forecasts[best]))

    def _reconsider(self, curves: Sequence[StepCurve]) -> SubsetChange | None:
        """Call everyone back if that makes a step shorter, or as a trial."""
        now_s = median(self._whole)
        self._note_bias(curves, now_s)
        all_s = self._forecast(self._everyone, curves, biased=True)
        if all_s < now_s * (1 - _GAIN):
            return self._move(self._everyone, "slower", step_s=(now_s, all_s))
        if not self._gap:
            lost_s = (_WARM_UP + _PATIENCE) * max(0.0, self._full_s - now_s)
            cost_s = lost_s + _STATE_SUMS * self._full_exchange_s
            gap = math.ceil(cost_s / (_TRIAL_SHARE * now_s))
            self._gap = max(gap, _LEAST_GAP) * self._backoff
        if self._steps < self._gap:
            return None
        self._backoff = min(2 * self._backoff, _MAX_BACKOFF)
        return self._move(self._everyone, "trial", step_s=(now_s, all_s))

    def _move(
        self,
        workers: tuple[int, ...],
        reason: Literal["exchange", "slower", "trial"],
        *,
        step_s: tuple[float, float],
    ) -> SubsetChange:
        self.training = workers
        self.constant &= frozenset(workers)
        self.restart()
        return SubsetChange(reason=reason, training=workers, step_s=step_s)

    def _note_bias(self, curves: Sequence[StepCurve], now_s: float) -> None:
        """Remember how far the forecast for the workers that train is off."""
        self._bias[self.training] = now_s / self._forecast(self.training, curves, biased=False)

    def _forecast(
        self, workers: tuple[int, ...], curves: Sequence[StepCurve], *, biased: bool
    ) -> float:
        """Return the seconds of a step of these workers, with its exchange."""
        if workers not in self._busy:  # the same at most steps
            own = [curves[worker] for worker in workers]
            self._busy[workers] = step_seconds(own, split_batch(own, self._batch))
        others = max(1, len(self._everyone) - 1)
        raw = self._busy[workers] + self._full_exchange_s * (len(workers) - 1) / others
        return raw * (self._bias.get(workers, 1.0) if biased else 1.0)

    def _tries(self, curves: Sequence[StepCurve]) -> list[tuple[int, ...]]:
        """Return the smaller sets of workers that may train the batch."""
        order = sorted(self._everyone, key=lambda worker: curves[worker].seconds(self._batch))
        tries: set[tuple[int, ...]] = set()
        for num in range(1, len(order)):
            chosen = self._required | set(order[:num])
            if not chosen & self.constant:
                chosen |= {next(worker for worker in order if worker in self.constant)}
            own = [curves[worker] for worker in chosen]
            least = sum(curve.min_samples for curve in own)
            most = sum(curve.capacity(math.inf, self._batch) for curve in own)
            if len(chosen) < len(order) and least <= self._batch <= most:
                tries.add(tuple(sorted(chosen)))
        return sorted(tries)
