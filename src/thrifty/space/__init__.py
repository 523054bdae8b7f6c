"""Search spaces, schedules as data, and timelines that compute their common prefix."""

from ._conditions import Branches, BranchInterval
from ._coordinates import Coordinate, Coordinates
from ._domain import Choice, Condition, Domain, Float, Int
from ._ladder import Ladder
from ._space import Config, Space, config_from_json, config_to_json
from ._timeline import Run, Timeline, common_prefix
from ._units import Amount, EpochSize, TimeUnit, Unit, epochs, steps, tokens
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
    Trunk,
    Warmup,
    cooldowns,
    last_value,
    schedule_for,
    schedule_from_json,
)


__all__ = [
    "REX",
    "WSD",
    "Amount",
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
    "EpochSize",
    "Exponential",
    "Float",
    "Int",
    "Ladder",
    "Linear",
    "MultiStep",
    "OneCycle",
    "Polynomial",
    "Run",
    "Schedule",
    "Space",
    "Step",
    "Then",
    "TimeUnit",
    "Timeline",
    "Trunk",
    "Unit",
    "Warmup",
    "common_prefix",
    "config_from_json",
    "config_to_json",
    "cooldowns",
    "epochs",
    "last_value",
    "schedule_for",
    "schedule_from_json",
    "steps",
    "tokens",
]
