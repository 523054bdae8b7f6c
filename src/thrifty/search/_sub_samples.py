"""Rule of sub-sampling: which trial deserves another observation, from scores alone."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Literal

import numpy as np

from thrifty.core import AlgorithmError


Threshold = Literal["sqrt-log", "log"] | float
"""Number of observations that every trial gets in any case.

It is a function of the number of all observations, or a constant.
"""

HUGE = 1e300
"""Bound below which sums of numbers do not overflow."""


def check_threshold(owner: object, threshold: object) -> None:
    """Raise AlgorithmError unless ``threshold`` names a function or is a positive finite number."""
    if isinstance(threshold, str):
        right = threshold in ("sqrt-log", "log")
    else:
        is_number = isinstance(threshold, int | float) and not isinstance(threshold, bool)
        right = is_number and 0 < threshold < math.inf  # type: ignore[operator]
    if not right:
        raise AlgorithmError(
            f"{type(owner).__name__}(threshold={threshold!r}): give 'sqrt-log', 'log' or a "
            "positive number of epochs"
        )


def threshold(num: int, kind: Threshold) -> float:
    """Return the fewest observations per trial when all trials together have ``num``.

    The theory allows anything that grows faster than ``log(log(n))`` and slower than ``log(n)``;
    ``"log"`` is at the edge (Chan, "The multi-armed bandit problem: an efficient nonparametric
    solution", Annals of Statistics 2020). The value is never rounded: on learning curves all
    exploration comes from it, and 1.8 rounded down to 1 would be none at all.

    >>> round(threshold(27, "sqrt-log"), 3), round(threshold(27, "log"), 3), threshold(27, 4)
    (1.815, 3.296, 4.0)
    """
    if not isinstance(kind, str):
        return float(kind)
    log = math.log(max(num, 1))
    return math.sqrt(log) if kind == "sqrt-log" else log


def leader(scores: Mapping[int, Sequence[float]], *, previous: int | None = None) -> int:
    """Return the trial with the most observations.

    Ties go to the best mean, then to the previous leader, then to the lowest number. The rule is
    that of the code of Baudry et al., "Sub-sampling for Efficient Non-Parametric Bandit
    Exploration", NeurIPS 2020, which draws lots where this takes the lowest number.

    >>> leader({0: [0.9], 1: [0.1, 0.2], 2: [0.3, 0.1]})
    2
    """
    # For equally many observations, totals compare as means do.
    return max(
        scores, key=lambda k: (len(scores[k]), total(tuple(scores[k])), k == previous, -k)
    )


def is_good(challenger: Sequence[float], leader: Sequence[float], *, c: float) -> bool:
    """Return whether a challenger, rather than the leader, deserves another observation.

    It must have fewer observations than the leader. In addition, it must have fewer than ``c``
    (forced exploration), or a mean no worse than that of the leader's worst block of as many
    consecutive observations (Huang et al., "Bandit evaluation by sub-samples", MLSys 2022, after
    the authors' manual: vega, algorithms/hpo.md, 6.4). A challenger with a score of ``-inf`` or NaN
    is never good.

    >>> is_good([0.3], [0.2, 0.5, 0.6], c=1.0), is_good([0.1], [0.2, 0.5, 0.6], c=1.0)
    (True, False)
    >>> is_good([0.1], [0.2, 0.5, 0.6], c=1.2)
    True
    """
    num = len(challenger)
    if num >= len(leader):
        return False
    if not num:
        return True  # it has no observations yet
    mine = total(tuple(challenger))
    if mine == -math.inf:
        return False
    return num < c or mine >= _worst_total(tuple(leader), num)


def bar(leader: Sequence[float], num: int) -> float:
    """Return the least ``total`` with which a challenger is good without forced exploration.

    The challenger has ``num`` observations, fewer than the leader.

    >>> bar([0.2, 0.5, 0.6], 2)
    0.7
    """
    # If the leader's block contains -inf, every challenger without -inf is good.
    return max(_worst_total(tuple(leader), num), -sys.float_info.max)


def difference(challenger: Sequence[float], leader: Sequence[float]) -> float:
    """Return the challenger's score minus the leader's at the last epoch that both have reached.

    The result is never NaN: the worst score differs by ``-inf`` from any score, including itself.

    >>> difference([0.1, 0.5], [0.2, 0.4, 0.9]), difference([float("nan")], [0.2])
    (0.09999999999999998, -inf)
    """
    last = min(len(challenger), len(leader)) - 1
    if last < 0:
        return 0.0
    return gap(_worst_if_nan(challenger[last]), _worst_if_nan(leader[last]))


def gap(one: float, other: float) -> float:
    """Return the ``difference`` of two scores that are not NaN."""
    return -math.inf if one == -math.inf else 0.0 if one == other else one - other


@lru_cache(maxsize=1024)  # one leader is compared with many challengers of few lengths
def _worst_total(scores: tuple[float, ...], length: int) -> float:
    """Return the least sum of ``length`` consecutive scores, as exactly as ``total``.

    Trials that share all of their training so far have the same scores and must tie exactly. So
    prefix sums only narrow down which blocks to sum exactly.
    """
    starts: Sequence[int] = range(len(scores) - length + 1)
    values = np.array(scores)
    if np.abs(values).max() < HUGE:
        sums = np.concatenate([[0.0], np.cumsum(values)])
        totals = sums[length:] - sums[:-length]
        slack = 4 * np.finfo(float).eps * len(scores) * np.abs(values).sum()
        starts = np.flatnonzero(totals <= totals.min() + slack).tolist()
    return min(total(scores[start : start + length]) for start in starts)


@lru_cache(maxsize=1 << 14)  # most challengers are the same whenever a worker is free
def total(scores: tuple[float, ...]) -> float:
    """Return the sum, rounded once; ``-inf`` if any score is ``-inf`` or NaN."""
    if not all(score > -math.inf for score in scores):
        return -math.inf
    try:
        return math.fsum(scores)
    except OverflowError:
        return math.fsum(score / len(scores) for score in scores) * len(scores)


def _worst_if_nan(score: float) -> float:
    return -math.inf if math.isnan(score) else score
