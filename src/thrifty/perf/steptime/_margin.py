"""Safety margin of decisions, as a share of the prediction interval."""

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
    """Return the smallest margin with which decisions rarely miss their limit.

    A margin is the share of the way from the forecast to the upper end of its interval. The upper
    end itself, which holds in nine cases of ten for every setup, is too conservative for decisions:
    few of the chosen setups are near their limit. The margin is calibrated on decisions over
    measured setups, with forecasts by models that did not see them (risk-controlling prediction
    sets, Bates et al. 2021, with the exact binomial bound).

    Args:
        missed: function from a margin, from 0 (use the forecast) to 1 (use its upper end), to
            whether each decision missed its limit.
        risk: share of decisions that may miss.
        confidence: probability that the share stays below ``risk``, if decisions are independent.
        steps: number of evenly spaced margins to try.

    Returns:
        Margin from 0 to 1; 1 if no smaller one suffices.

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
    """Return the probability of at most ``num`` misses if their true share were ``share``."""
    logs = [
        math.lgamma(of + 1) - math.lgamma(k + 1) - math.lgamma(of - k + 1)
        + k * math.log(share) + (of - k) * math.log1p(-share)
        for k in range(num + 1)
    ]  # fmt: skip
    return math.fsum(map(math.exp, logs))
