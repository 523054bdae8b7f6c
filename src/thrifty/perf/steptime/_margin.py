"""How much of an interval a decision has to leave as a margin."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from thrifty.core import UsageError


def smallest_margin(
    missed: Callable[[float], Sequence[bool]],
    *,
    risk: float = 0.05,
    confidence: float = 0.95,
    steps: int = 20,
) -> float:
    """The smallest share of the way from forecast to upper end with which decisions miss their limit hardly ever.

    An upper end that holds nine times of ten for every setup is more than a decision needs: few of its choices are near their limit. Decisions over forecasts of what *was* measured, each by a model that has not seen
    it, show what is needed (risk-controlling prediction sets, Bates et al. 2021, with the exact binomial bound).

    Args:
        missed: of a margin from 0 (the forecast counts) to 1 (its upper end does), which decisions missed.
        risk: share of decisions that may miss.
        confidence: with which the share stays below ``risk``, if decisions are independent.
        steps: margins that are tried, evenly spaced.

    Returns:
        0 to 1; 1 if nothing less will do.

    Raises:
        UsageError: ``risk`` or ``confidence`` is not between 0 and 1.

    >>> smallest_margin(lambda margin: [margin < 0.5] + [False] * 99)
    0.0
    >>> smallest_margin(lambda margin: [margin < 0.5] * 5 + [False] * 95)
    0.5
    """
    for name, value in (("risk", risk), ("confidence", confidence)):
        if not 0 < value < 1:
            raise UsageError(f"{name} is between 0 and 1, not {value}")
    for margin in np.linspace(0, 1, steps + 1):
        seen = np.asarray(missed(float(margin)), bool)
        if _at_most(int(seen.sum()), len(seen), risk) <= 1 - confidence:
            return float(margin)
    return 1.0


def _at_most(num: int, of: int, share: float) -> float:
    """Probability of so few misses, were ``share`` their share."""
    logs = [
        math.lgamma(of + 1) - math.lgamma(k + 1) - math.lgamma(of - k + 1)
        + k * math.log(share) + (of - k) * math.log1p(-share)
        for k in range(num + 1)
    ]  # fmt: skip
    return math.fsum(map(math.exp, logs))
