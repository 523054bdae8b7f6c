"""Effect of evictions on the time of a training."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ._offer import Offer
from ._spot import spot_seconds
from ._workload import Workload


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
            _WORK_S,
            evictions_per_h=rate,
            save_s=save_s,
            restart_s=workload.setup_s + save_s,
        )
        found[:, index] = seconds / _WORK_S, every_s
    slow, every = found[:, places.reshape(evictions_per_h.shape)]
    return slow, every
