"""The schedules of ``bench_rex``, as functions of the learning rate and the budget in epochs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import thrifty as th


Make = Callable[[float, int], th.Schedule]

SCHEDULES: Mapping[str, Make] = {
    "REX": lambda lr, _: th.REX(lr),
    "linear": lambda lr, _: th.Linear(lr),
    "cosine": lambda lr, _: th.Cosine(lr),
    "step": lambda lr, epochs: th.Step(lr, [epochs / 2, 3 * epochs / 4]),
    "exponential": lambda lr, epochs: th.Exponential(lr, gamma=math.exp(-3 / epochs)),
    "OneCycle": lambda lr, _: th.OneCycle(
        lr, warmup=0.5, div=10.0, final_div=10.0, shape="linear"
    ),
    "WSD": lambda lr, epochs: th.WSD(lr, cooldown=0.2 * epochs),
    "constant": lambda lr, _: th.Constant(lr),
}
"""The schedules of Chen et al., section 4, with their settings; WSD is our addition.

Decay on plateau follows no clock and is in ``_rex_plateau.py``.
"""

PLATEAU = "plateau"
NAMES = (*SCHEDULES, PLATEAU)

PAPER: Mapping[str, str] = {
    "REX": "70 / 92",
    "linear": "11 / 70",
    "cosine": "6 / 64",
    "OneCycle": "13 / 45",
    "step": "5 / 25",
}
"""Results of Chen et al., Table 1.

The percentages of all settings and budgets where a schedule was the best / among the three best.
"""


def space_of(named_rates: Sequence[tuple[str, float]], epochs: int) -> th.Space:
    """Return a space of one configuration for each schedule and learning rate.

    OneCycle moves the momentum, too (0.95, 0.85, 0.95).
    """
    schedules = [SCHEDULES[name](lr, epochs) for name, lr in named_rates]
    cycles = [s for s in schedules if isinstance(s, th.OneCycle)]
    if not cycles:
        return th.Space(lr=th.Choice(schedules))
    # The momentum is a cycle upside down.
    share = 0.85 / 0.95
    swing = th.OneCycle(0.85, warmup=0.5, div=share, final_div=share, shape="linear")
    return th.Space(lr=th.Choice(schedules), momentum=th.Choice([swing]).when(lr=cycles))
