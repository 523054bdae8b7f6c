"""What evictions make of a training's time."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ._offer import Offer
from ._spot import spot_seconds
from ._workload import Workload


_SAVE_S = 1.0
"""What the smallest checkpoint takes."""

_SAVED_BYTES_PER_S = 200e6
"""What writes and reads checkpoints: a network's file system."""

_WORK_S = 1e6
"""Work that the slowdown is computed for: long beside every interval between checkpoints."""

ASSUMED_PER_H = 0.1
"""Evictions of one machine in an hour where nobody has recorded them."""


class SpotHistory(Protocol):
    """What is known of spot machines before they are rented."""

    def evictions_per_h(self, offer: Offer) -> float:
        """Of one machine."""
        ...

    def spot_usd_h(self, offer: Offer) -> float:
        """Price of an hour of one machine."""
        ...


def spot_terms(offer: Offer, history: SpotHistory | None) -> tuple[float, float] | None:
    """Price and evictions of an hour of one machine; None: it is not offered as spot.

    Raises:
        CloudError: the history knows nothing of it.
    """
    if history is not None:
        return history.spot_usd_h(offer), history.evictions_per_h(offer)
    return None if offer.spot_usd_h is None else (offer.spot_usd_h, ASSUMED_PER_H)


def slowdowns(workload: Workload, evictions_per_h: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How many times the work's seconds it takes, and seconds between checkpoints; infinite where nothing is ever done.

    Short work with few evictions takes a little less, since nothing is saved after its end. Any eviction stops the whole fleet, so ``evictions_per_h`` are those of all of its machines.
    """
    save_s = _SAVE_S + workload.state_bytes / _SAVED_BYTES_PER_S
    rates, places = np.unique(evictions_per_h, return_inverse=True)
    found = np.empty((2, rates.size))
    for index, rate in enumerate(rates.tolist()):
        seconds, every_s = spot_seconds(
            _WORK_S,
            evictions_per_h=rate,
            save_s=save_s,
            restart_s=workload.setup_s + save_s,
        )
        found[:, index] = seconds / _WORK_S, every_s
    slow, every = found[:, places.reshape(evictions_per_h.shape)]
    return slow, every
