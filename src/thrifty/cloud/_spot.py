"""Spot machines: prices, evictions, and the time that they cost."""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np

from thrifty.core import CloudError

from ._offer import Offer
from ._workload import Workload


_HOUR_S = 3600.0
_LARGEST_EXPONENT = 700.0


def young_s(save_s: float, mtbf_s: float) -> float:
    """Return the seconds of work between checkpoints by Young's first-order rule (CACM 1974).

    Args:
        save_s: seconds to write a checkpoint.
        mtbf_s: mean seconds between evictions.

    Raises:
        CloudError: a time is out of range.

    >>> young_s(8.0, 3600.0), young_s(8.0, math.inf)
    (240.0, inf)
    """
    _check_times(save_s, mtbf_s)
    return math.inf if math.isinf(mtbf_s) else math.sqrt(2 * save_s * mtbf_s)


def daly_s(save_s: float, mtbf_s: float) -> float:
    """Return the seconds of work between checkpoints by Daly's higher-order rule (FGCS 2006).

    The rule is good for frequent evictions, too.

    Args:
        save_s: seconds to write a checkpoint.
        mtbf_s: mean seconds between evictions.

    Raises:
        CloudError: a time is out of range.

    >>> round(daly_s(8.0, 3600.0), 1), daly_s(60.0, 20.0)
    (234.7, 20.0)
    """
    _check_times(save_s, mtbf_s)
    if math.isinf(mtbf_s):
        return math.inf
    ratio = save_s / (2 * mtbf_s)
    if ratio >= 1:
        return mtbf_s
    return young_s(save_s, mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def spot_seconds(
    work_s: float, *, evictions_per_h: float, save_s: float, restart_s: float
) -> tuple[float, float]:
    """Return the expected seconds of a job with evictions, and its checkpoint interval.

    Evictions come at a constant rate, during checkpoints and restarts, too. Each one loses the work
    since the last checkpoint. This is Daly's complete formula (FGCS 2006), but without a checkpoint
    after the end.

    Args:
        work_s: seconds without evictions and checkpoints.
        evictions_per_h: expected evictions per hour.
        save_s: seconds to write a checkpoint.
        restart_s: seconds from an eviction until work resumes.

    Returns:
        Expected seconds, and seconds of work between checkpoints. The interval is all of ``work_s``
        if no checkpoint is worth its time, and ``inf`` without evictions.

    Raises:
        CloudError: a number is out of range.

    >>> seconds, interval = spot_seconds(8 * 3600, evictions_per_h=0.1, save_s=30, restart_s=300)
    >>> round(seconds / 3600, 2), round(interval)
    (8.4, 1440)
    """
    numbers = (work_s, evictions_per_h, save_s, restart_s)
    if not all(0 <= number < math.inf for number in numbers):
        raise CloudError(
            f"work, evictions and seconds are finite and not negative, not work_s={work_s}, "
            f"evictions_per_h={evictions_per_h}, save_s={save_s}, restart_s={restart_s}"
        )
    if work_s == 0 or evictions_per_h == 0:
        return work_s, math.inf
    mtbf_s = _HOUR_S / evictions_per_h
    restarts = 1 + _expm1(restart_s / mtbf_s)
    if save_s == 0:
        return work_s * restarts, 0.0
    # Daly's job also saves at its end. Ours writes one checkpoint fewer, so longer pieces may be
    # better.
    about = math.ceil(work_s / daly_s(save_s, mtbf_s))
    seconds, pieces = min(
        (_seconds_of(work_s, count, save_s=save_s, mtbf_s=mtbf_s), count)
        for count in range(max(1, about - 2), about + 1)
    )
    return restarts * seconds, work_s / pieces


def _seconds_of(work_s: float, pieces: int, *, save_s: float, mtbf_s: float) -> float:
    """Return the expected seconds of ``pieces`` equal pieces with checkpoints between them.

    Restarts take no time here.
    """
    piece_s = work_s / pieces
    saved = (pieces - 1) * _expm1((piece_s + save_s) / mtbf_s) if pieces > 1 else 0.0
    return mtbf_s * (saved + _expm1(piece_s / mtbf_s))


def _expm1(exponent: float) -> float:
    return math.expm1(exponent) if exponent < _LARGEST_EXPONENT else math.inf


def _check_times(save_s: float, mtbf_s: float) -> None:
    if not (0 <= save_s < math.inf and mtbf_s > 0):
        raise CloudError(
            "saving takes 0 s or more, and evictions are some time apart, not "
            f"save_s={save_s}, mtbf_s={mtbf_s}"
        )


_SAVE_S = 1.0
"""Seconds to write the smallest checkpoint."""

_SAVED_BYTES_PER_S = 200e6
"""Bandwidth at which checkpoints are written and read: that of a network file system."""

_WORK_S = 1e6
"""Seconds of work for which the slowdown is computed: long compared with checkpoint intervals."""

ASSUMED_PER_H = 0.1
"""Assumed evictions per machine hour if no history is given."""


class SpotHistory(Protocol):
    """Interface to prices and evictions of spot machines, known before renting them."""

    def evictions_per_h(self, offer: Offer) -> float:
        """Return the evictions per hour of one machine."""
        ...

    def spot_usd_h(self, offer: Offer) -> float:
        """Return the price of one machine in dollars per hour."""
        ...


def spot_terms(offer: Offer, history: SpotHistory | None) -> tuple[float, float] | None:
    """Return one machine's price and evictions per hour; None if it is not offered as spot.

    Raises:
        CloudError: the history has no data on this machine.
    """
    if history is not None:
        return history.spot_usd_h(offer), history.evictions_per_h(offer)
    return None if offer.spot_usd_h is None else (offer.spot_usd_h, ASSUMED_PER_H)


def slowdowns(workload: Workload, evictions_per_h: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the slowdown by evictions, and the seconds between checkpoints.

    The slowdown is a factor on the seconds of work; it is infinite where the work never completes.
    Short work with few evictions takes slightly less, since nothing is saved after its end.

    Args:
        workload: training whose checkpoints are saved.
        evictions_per_h: evictions per hour of all machines of a fleet together, because any
            eviction stops the whole fleet.
    """
    save_s = _SAVE_S + workload.state_bytes / _SAVED_BYTES_PER_S
    rates, places = np.unique(evictions_per_h, return_inverse=True)
    found = np.empty((2, rates.size))
    for index, rate in enumerate(rates.tolist()):
        seconds, every_s = spot_seconds(
            _WORK_S, evictions_per_h=rate, save_s=save_s, restart_s=workload.setup_s + save_s
        )
        found[:, index] = seconds / _WORK_S, every_s
    slow, every = found[:, places.reshape(evictions_per_h.shape)]
    return slow, every
