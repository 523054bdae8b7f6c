"""One bracket of synchronous halving, as a pure function of history."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

from ._history import Decision, History, Proposal, Stop


def advance(
    history: History, epochs: Sequence[int], *, eta: int, group: Hashable
) -> list[Decision]:
    """What follows in a bracket whose rungs are at ``epochs``: nothing while its trials run; then the best go on.

    Of ``n`` trials that reached a rung the best ``n // eta`` (at least one) go on, the others are stopped. Trials
    that failed count in ``n`` but never go on.
    """
    members = history.in_group(group)
    states = [history[number].state for number in members]
    if "running" in states or "waiting" not in states:
        return []
    at = max(
        history[number].reached for number in members if history[number].state == "waiting"
    )
    if at >= epochs[-1]:
        return []
    board = history.leaderboard(at, group=group)
    target = epochs[epochs.index(at) + 1]
    num_on = max(len(board) // eta, 1)
    fit = [number for score, number in board if score > -math.inf]
    on: list[Decision] = [Proposal(target=target, trial=number) for number in fit[:num_on]]
    return [*on, *(Stop(trial=number) for number in fit[num_on:])]
