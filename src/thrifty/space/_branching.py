"""Configurations that are those of a trial until some epoch, and differ from there on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thrifty.core import UsageError

from ._domain import freeze
from .schedules import Branched, Schedule


def branched(
    config: Mapping[str, Any],
    *,
    epoch: int,
    horizon: int,
    scale: Mapping[str, float],
    change: Mapping[str, Any],
) -> dict[str, Any]:
    """Return a configuration that is the given one until ``epoch``, and differs from there on.

    Args:
        config: The configuration.
        epoch: The number of epochs that both have in common.
        horizon: The length of its training.
        scale: Factors by which hyper-parameters are multiplied.
        change: New values or schedules; the time of a schedule begins at ``epoch``.

    Raises:
        UsageError: A name is unknown or given twice, nothing changes, or the epoch is none of the
            trial's.
        ScheduleError: A factor or a schedule does not fit.
    """
    whole = isinstance(epoch, int) and not isinstance(epoch, bool)
    if not whole or not 0 < epoch < horizon:
        raise UsageError(
            f"epoch={epoch!r}: a trial of {horizon} epochs can branch after 1 to {horizon - 1}"
        )
    for name in (*scale, *change):
        if name not in config:
            raise UsageError(f"the trial has no {name!r}; it has: {', '.join(config)}")
    if both := sorted(scale.keys() & change.keys()):
        raise UsageError(f"{both[0]!r} is in scale and in change; give one of them")
    parts: dict[str, Any] = {name: {"factor": factor} for name, factor in scale.items()}
    parts |= {name: {"after": freeze(value)} for name, value in change.items()}
    changes = {name: Branched(config[name], at=epoch, **part) for name, part in parts.items()}
    for schedule in changes.values():
        schedule.segments(horizon)  # does it fit?
    if all(_is_same(changes[name], config[name], horizon) for name in changes):
        raise UsageError(
            "nothing changes; give scale={...} or change={...} with values that the trial does not "
            f"have after epoch {epoch}"
        )
    return {**config, **changes}


def _is_same(schedule: Branched, before: Any, horizon: int) -> bool:
    if not isinstance(before, Schedule):
        return len(schedule.segments(horizon)) == 1
    return schedule.segments(horizon) == before.segments(horizon)
