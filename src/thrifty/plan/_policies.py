"""How many trials a worker trains at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from thrifty.perf import PackCurve, choose_pack

from ._search_plan import SearchPlan
from ._stages import Chain


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurements of joint training of one structure: back-end curves and device memory."""

    curves: tuple[PackCurve, ...]
    memory_bytes: float = math.inf


MAX_SIZE = 64
"""Largest pack: bigger ones only delay results that algorithms wait for."""


def pack_size(
    plan: SearchPlan,
    measured: Sequence[Measured],
    *,
    running: Iterable[Chain] = (),
    workers: int = 1,
    memory_margin: float = 0.9,
) -> int:
    """Return the number of trials each worker trains at a time to finish pending work soonest.

    ``measured`` holds the measurements of each structure. In a pack, each trial is slower than
    alone, but all together are faster. If one long path dominates the forecast, packs are small; if
    much other work is pending, they are large. See ``thrifty.perf.choose_pack``. Without
    measurements the size is 1.
    """
    if not measured:
        return 1
    longest = max([plan.longest_pending, *(float(chain.num_epochs) for chain in running)])
    total = max(float(plan.num_epochs_needed - plan.num_epochs_done), longest)
    if not total:
        return 1
    return max(
        choose_pack(
            each.curves,
            longest=longest,
            total=total,
            ready=MAX_SIZE * workers,
            workers=workers,
            cap_bytes=each.memory_bytes,
            margin=memory_margin,
            max_size=MAX_SIZE,
        ).size
        for each in measured
    )
