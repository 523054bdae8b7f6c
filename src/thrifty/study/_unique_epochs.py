"""How many epochs each trial added to those before it."""

from __future__ import annotations

from ._ledger import Ledger


def unique_epochs(ledger: Ledger) -> list[int]:
    """Return, for each trial, the unique epochs of this trial and those before it together."""
    seen: set[tuple[int, int]] = set()
    counts = []
    for number in range(len(ledger.history)):
        node = ledger.node_of[number]
        for epoch in range(ledger.history[number].reached, 0, -1):
            place = ledger.plan.owner(node, epoch).id, epoch
            if place in seen:
                break  # all earlier epochs are counted as well
            seen.add(place)
        counts.append(len(seen))
    return counts
