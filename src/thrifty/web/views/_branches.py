"""A branch of a trial: its hyper-parameters, and what training it costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thrifty.core import UsageError
from thrifty.space import config_from_json, config_to_json
from thrifty.space._branching import branched
from thrifty.store import StudyView, Views
from thrifty.store._records import nodes_of_replicas

from . import _models as models
from ._columns import texts
from ._study_views import max_epochs


def config_of(
    view: StudyView, row: Any, *, epoch: int, scale: Mapping[str, float]
) -> dict[str, Any]:
    """Return the hyper-parameters of a branch.

    Raises:
        UsageError: The trial cannot branch there, or has no such hyper-parameter.
        ScheduleError: A factor does not fit.
    """
    if row.horizon is not None:
        raise UsageError(
            "the trials of a ladder end at horizons of their own, so they cannot branch"
        )
    config = config_from_json(row.config)
    return branched(config, epoch=epoch, horizon=_horizon(view), scale=scale, change={})


def cost_of(
    views: Views, view: StudyView, row: Any, *, config: Mapping[str, Any], epoch: int
) -> models.Branch:
    """Return what a branch costs that has the first ``epoch`` epochs of a trial."""
    nodes = (row.node, *nodes_of_replicas(row.replicas))
    paths = views.plans.paths(view.plan, nodes)
    kept = views.plans.kept(view.plan, list(paths.origins))
    known = min(epoch, row.reached)
    owners = [paths.owners(node, known) for node in nodes]
    states = [e for e in range(1, known + 1) if all((owner[e], e) in kept for owner in owners)]
    last = max(states, default=0)
    return models.Branch(
        config=texts(config_to_json(config)),
        known_epochs=known,
        kept_epoch=last,
        epochs_again=known - last,
        epochs_to_train=len(nodes) * (_horizon(view) - last),
    )


def _horizon(view: StudyView) -> int:
    found = max_epochs(view)
    if found is None:
        raise UsageError("the study does not say how long its trials are, so they cannot branch")
    return found
