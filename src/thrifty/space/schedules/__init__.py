"""Schedules by family: frozen data that reduces to the same few pieces."""

from ._base_schedule import Constant, Schedule, Then, last_value, schedule_from_json
from ._budgeted import REX, WSD, Trunk, Warmup, cooldowns, schedule_for
from ._shapes import (
    Branched,
    Cosine,
    CosineRestarts,
    Cyclic,
    Exponential,
    Linear,
    MultiStep,
    OneCycle,
    Polynomial,
    Step,
)


__all__ = [
    "REX",
    "WSD",
    "Branched",
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
    "Trunk",
    "Warmup",
    "cooldowns",
    "last_value",
    "schedule_for",
    "schedule_from_json",
]
