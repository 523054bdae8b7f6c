"""What is known of a configuration before anything is trained: metrics, and who trained them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from thrifty.space import Config, Timeline

from ._replicas import mean_curve
from ._repository import StudyRepository


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownEpoch:
    """An epoch of a configuration that is trained already.

    Attributes:
        epoch: The epoch, from 1.
        metrics: The metrics after it.
        studies: The studies that trained it, several only with several seeds; None for a study that
            was deleted.
        kept: Whether the state after it is kept, so that training can go on from there.

    With several seeds, an epoch is known if it is for all of them; its metrics are their means.
    """

    epoch: int
    metrics: Mapping[str, float]
    studies: tuple[str | None, ...]
    kept: bool


def known_epochs(
    repository: StudyRepository, config: Config, *, epochs: int, horizon: int, num_seeds: int
) -> list[KnownEpoch]:
    """Return which of a configuration's first epochs are known, in order.

    Args:
        repository: The study whose plan is looked at.
        config: The configuration.
        epochs: The number of epochs.
        horizon: The length of its training; schedules without an end of their own depend on it.
        num_seeds: The number of seeds that a configuration is trained with.
    """
    plan, origins, names = repository.known_with_origins()
    places = [
        plan.insert(Timeline(config, epochs=horizon, replica=replica))
        for replica in range(num_seeds)
    ]
    found = []
    for epoch in range(1, epochs + 1):
        owners = [plan.owner(place, epoch) for place in places]
        if any(epoch not in owner.metrics for owner in owners):
            break
        ids = dict.fromkeys(origins.get((owner.id, epoch)) for owner in owners)
        (metrics,) = mean_curve([[owner.metrics[epoch]] for owner in owners])
        found.append(
            KnownEpoch(
                epoch=epoch,
                metrics=dict(metrics),
                studies=tuple(None if each is None else names.get(each) for each in ids),
                kept=all(epoch in owner.checkpoints for owner in owners),
            )
        )
    return found
