"""What trials added to each other."""

from __future__ import annotations

from ._ledger import Ledger


def unique_epochs(ledger: Ledger) -> list[int]:
    """For each trial the epochs trained for it and those before it, what they share counted once."""
    seen: set[tuple[int, int]] = set()
    counts = []
    for number in range(len(ledger.history)):
        node = ledger.node_of[number]
        for epoch in range(ledger.history[number].reached, 0, -1):
            place = ledger.plan.owner(node, epoch).id, epoch
            if place in seen:
                break  # and so is all before it
            seen.add(place)
        counts.append(len(seen))
    return counts
