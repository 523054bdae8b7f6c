"""Made-up learning curves for timelines that were never trained."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache

from thrifty.core import derive_seed
from thrifty.space import Timeline

from ._goals import Mode


_HALF_WAY = 5.0
"""Progress (at most 1 per epoch) at which the metric is half way to its limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeUpCurve:
    """A metric that improves with each epoch.

    The values of the hyper-parameters in an epoch determine how fast it improves: the speed is
    random, but always the same for the same values. The metric depends only on the epochs so far,
    so timelines with a common prefix agree there.

    >>> from thrifty.space import Constant, Step
    >>> curve = MadeUpCurve(metric="accuracy", mode="max")
    >>> one, other = (Timeline({"lr": lr}, epochs=9) for lr in (Constant(0.1), Step(0.1, [3])))
    >>> curve(one, 3, 0) == curve(other, 3, 0), curve(one, 4, 0) == curve(other, 4, 0)
    (True, False)
    """

    metric: str
    mode: Mode

    def __call__(self, timeline: Timeline, epoch: int, seed: int) -> dict[str, float]:
        """Return the metric after ``epoch`` epochs."""
        progress = 0.0
        for run in timeline.runs:
            if run.start >= epoch:
                break
            progress += (min(run.stop, epoch) - run.start) * _speed(run.key, seed)
        reached = progress / (progress + _HALF_WAY)
        return {self.metric: reached if self.mode == "max" else 1.0 - reached}


@lru_cache(maxsize=65536)
def _speed(values: Hashable, seed: int) -> float:
    return derive_seed(seed, "speed", repr(values)) / 2**63
