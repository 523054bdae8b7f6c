"""Schedules, one file each: frozen data that reduces to the same few pieces."""

from ._base import (
    Constant as Constant,
    Schedule as Schedule,
    Then as Then,
    last_value as last_value,
    schedule_from_json as schedule_from_json,
)
from ._budgeted import (
    REX as REX,
    WSD as WSD,
    Warmup as Warmup,
    cooldowns as cooldowns,
    schedule_for as schedule_for,
)
from ._cyclic import CosineRestarts as CosineRestarts, Cyclic as Cyclic, OneCycle as OneCycle
from ._decay import (
    Cosine as Cosine,
    Exponential as Exponential,
    Linear as Linear,
    MultiStep as MultiStep,
    Polynomial as Polynomial,
    Step as Step,
)


__all__ = [
    "REX",
    "WSD",
    "Constant",
    "Cosine",
    "CosineRestarts",
    "Cyclic",
    "Exponential",
    "Linear",
    "MultiStep",
    "OneCycle",
    "Polynomial",
    "Schedule",
    "Step",
    "Then",
    "Warmup",
    "cooldowns",
    "last_value",
    "schedule_for",
    "schedule_from_json",
]
