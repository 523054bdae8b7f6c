"""Why the trials of a study share no epoch."""

from __future__ import annotations

from collections.abc import Sequence

from thrifty.space import Schedule, Timeline
from thrifty.store._reports import listed


WHAT_SHARES = "docs/how-to/schedules.md#see-which-trials-share"
"""The page that says which trials share epochs."""
_MOST_TRIALS = 500
"""Trials that are looked at; the names that differ hardly depend on the others."""


def why_nothing_is_shared(timelines: Sequence[Timeline]) -> str:
    """Return why no two trials share an epoch, in one line; empty for fewer than two trials.

    Args:
        timelines: The timelines of the trials, in the same seed.

    >>> from thrifty.space import Cosine, Step
    >>> rates = [0.1, Step(0.2, [3]), Cosine(0.1)]
    >>> why = why_nothing_is_shared([Timeline({"lr": lr}, epochs=9) for lr in rates])
    >>> print(why.partition(" (")[0])
    nothing shared: trials differ from epoch 1 on in lr
    """
    looked_at = timelines[:_MOST_TRIALS]
    names = dict.fromkeys(name for each in looked_at for name in each.config)
    differ = [name for name in names if len({each.piece(name, 0) for each in looked_at}) > 1]
    if not differ:
        return ""
    constant = [
        name
        for name in differ
        if not any(isinstance(each.config.get(name), Schedule) for each in looked_at)
    ]
    advice = ""
    if constant == differ:
        verb = "is a constant" if len(differ) == 1 else "are constants"
        advice = f", which {verb}; schedules that begin alike share"
    where = f"trials differ from epoch 1 on in {listed(differ)}{advice}"
    return f"nothing shared: {where} ({WHAT_SHARES})"
