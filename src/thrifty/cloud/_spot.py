"""Cost of evictions, and the best checkpoint interval."""

from __future__ import annotations

import math

from thrifty.core import CloudError


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

    >>> seconds, interval = spot_seconds(
    ...     8 * 3600, evictions_per_h=0.1, save_s=30, restart_s=300
    ... )
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
