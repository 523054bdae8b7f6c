"""Schedules for a budget: one that ends with it, or one that can be extended."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from thrifty.core import ScheduleError
from thrifty.space._domain import Choice
from thrifty.space.schedules._base import Schedule
from thrifty.space.schedules._linear import Linear
from thrifty.space.schedules._rex import REX
from thrifty.space.schedules._warmup import Warmup
from thrifty.space.schedules._wsd import WSD


_SHAPES: dict[str, type[REX | Linear]] = {"rex": REX, "linear": Linear}


def schedule_for(
    peak: Any,
    *,
    epochs: float | None = None,
    extendable: bool = False,
    warmup: float = 0.0,
    shape: str = "rex",
    cooldown: float = 0.2,
) -> Schedule:
    """Return a learning-rate schedule for a known or an extendable budget.

    For a known budget, it is ``REX`` down to 0, or linear with ``shape="linear"``. Both fit
    themselves to the run. With ``extendable``, the budget may grow: it is ``WSD``, a stable phase
    and a cooldown to 0 over the last share ``cooldown`` of ``epochs``. A longer run goes on from
    where the cooldown began. ``warmup`` counts epochs and is part of the budget. ``peak`` may be a
    ``Float``.

    As a first guess, REX wants about 0.8 times the peak of linear (from the convex bound of Schaipp
    et al., ICML 2025). Its ``d`` is the paper's 0.5. The REX of other programs often has
    ``d=0.9``, which holds the rate far longer (0.91 instead of 0.67 of it half way) and is not the
    paper's: write ``REX(peak, d=0.9)`` to get it.

    Raises:
        ScheduleError: The shape is unknown, ``epochs`` is missing for an extendable run, or shares
            and epochs do not fit.

    >>> schedule_for(0.1)
    REX(0.1)
    >>> schedule_for(0.1, warmup=2)
    Warmup(2, REX(0.1))
    >>> schedule_for(0.1, extendable=True, epochs=50)
    WSD(0.1, cooldown=10.0, epochs=50)

    References:
        Chen et al., "REX", MLSys 2022.
        Hägele et al., "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations",
        NeurIPS 2024.
    """
    if shape not in _SHAPES:
        raise ScheduleError(f'schedule_for(shape={shape!r}): it is "rex" or "linear"')
    if warmup < 0 or (epochs is not None and warmup >= epochs):
        raise ScheduleError(
            f"schedule_for(warmup={warmup!r}, epochs={epochs!r}): the warm-up counts epochs, "
            "at least 0 and fewer than the run has"
        )
    if extendable:
        if epochs is None:
            raise ScheduleError(
                "schedule_for(extendable=True) needs epochs: where the run ends for now, so that "
                "its cooldown can begin before"
            )
        return _with_cooldown(peak, epochs, share=cooldown, warmup=warmup)
    kind = _SHAPES[shape]
    if not warmup:
        return kind(peak, epochs=epochs)
    return Warmup(warmup, kind(peak, epochs=None if epochs is None else epochs - warmup))


def cooldowns(
    peak: Any, *, ends: Sequence[float], cooldown: float = 0.2, warmup: float = 0.0
) -> Choice:
    """Return one ``WSD`` schedule for each of ``ends`` (epochs) that share one stable phase.

    Together they are one long run with a cooldown to each end. Each cools down over the last share
    ``cooldown`` of its own length, starting at a whole epoch. In one study, the shorter schedules
    stay at 0 until ``max_epochs``: their trials idle there. Instead, run one study for each end,
    with ``max_epochs`` at that end. Studies of one task, one seed and one database share what they
    train, so only the cooldowns are trained separately.

    Raises:
        ScheduleError: ``ends`` is empty or not ascending, the share is not in (0, 1], or the
            warm-up leaves no room.

    >>> cooldowns(0.1, ends=[50, 100]).options
    (WSD(0.1, cooldown=10.0, epochs=50), WSD(0.1, cooldown=20.0, epochs=100))
    """
    if not ends or list(ends) != sorted(set(ends)):
        raise ScheduleError(
            f"cooldowns(ends={list(ends)!r}): give at least one, each later than the one before"
        )
    return Choice([_with_cooldown(peak, end, share=cooldown, warmup=warmup) for end in ends])


def _with_cooldown(peak: Any, epochs: float, *, share: float, warmup: float) -> WSD:
    if not 0.0 < share <= 1.0:
        raise ScheduleError(
            f"cooldown={share!r}: it is a share of the run, above 0 and at most 1"
        )
    # Start at a whole epoch, because whole epochs are shared. The 1e-9 corrects the rounding of
    # shares such as 0.2, which have no exact float.
    turn = math.floor(epochs * (1.0 - share) + 1e-9)
    return WSD(peak, cooldown=float(epochs - turn), warmup=warmup, epochs=epochs)
