"""How many stages to train at a time: breadth (packs) against depth (the critical path)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from thrifty.perf import PackCurve, choose_pack

from ._search_plan import SearchPlan
from ._stage import Chain


MAX_SIZE = 64
"""Packs beyond this only delay results that algorithms wait for."""


def pack_size(
    plan: SearchPlan,
    curves: Sequence[Sequence[PackCurve]],
    *,
    running: Iterable[Chain] = (),
    workers: int = 1,
) -> int:
    """Trials at a time for each worker, so that the pending work ends first by forecast.

    ``curves`` has those of each structure that was measured. In a pack each trial is slower than by itself, all together
    are faster: where one long path decides, packs are small; where there is much beside it, they are large. See
    ``thrifty.perf.choose_pack``. Without curves it is 1.
    """
    if not curves:
        return 1
    longest = max([plan.longest_pending, *(float(chain.num_epochs) for chain in running)])
    total = max(float(plan.num_epochs_needed - plan.num_epochs_done), longest)
    if not total:
        return 1
    return max(
        choose_pack(
            each,
            longest=longest,
            total=total,
            ready=MAX_SIZE * workers,
            workers=workers,
            max_size=MAX_SIZE,
        ).size
        for each in curves
    )
