"""Search spaces, schedules as data, and timelines that compute their common prefix."""

from ._conditions import Branches, BranchInterval
from ._coordinates import Coordinate, Coordinates
from ._domain import Choice, Condition, Domain, Float, Int
from ._space import Config, Space, config_from_json, config_to_json
from ._timeline import Run, Timeline, common_prefix
from .schedules import (
    REX,
    WSD,
    Constant,
    Cosine,
    CosineRestarts,
    Cyclic,
    Exponential,
    Linear,
    MultiStep,
    OneCycle,
    Polynomial,
    Schedule,
    Step,
    Then,
    Warmup,
    cooldowns,
    last_value,
    schedule_for,
    schedule_from_json,
)


__all__ = [
    "REX",
    "WSD",
    "BranchInterval",
    "Branches",
    "Choice",
    "Condition",
    "Config",
    "Constant",
    "Coordinate",
    "Coordinates",
    "Cosine",
    "CosineRestarts",
    "Cyclic",
    "Domain",
    "Exponential",
    "Float",
    "Int",
    "Linear",
    "MultiStep",
    "OneCycle",
    "Polynomial",
    "Run",
    "Schedule",
    "Space",
    "Step",
    "Then",
    "Timeline",
    "Warmup",
    "common_prefix",
    "config_from_json",
    "config_to_json",
    "cooldowns",
    "last_value",
    "schedule_for",
    "schedule_from_json",
]
