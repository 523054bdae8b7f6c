"""Search spaces, schedules as data, and timelines that compute their common prefix."""

from ._conditions import Branches as Branches, BranchInterval as BranchInterval
from ._coordinates import Coordinate as Coordinate, Coordinates as Coordinates
from ._domain import (
    Choice as Choice,
    Condition as Condition,
    Domain as Domain,
    Float as Float,
    Int as Int,
)
from ._space import (
    Config as Config,
    Space as Space,
    config_from_json as config_from_json,
    config_to_json as config_to_json,
)
from ._timeline import (
    Run as Run,
    Timeline as Timeline,
    common_prefix as common_prefix,
)
from .schedules import (
    REX as REX,
    WSD as WSD,
    Constant as Constant,
    Cosine as Cosine,
    CosineRestarts as CosineRestarts,
    Cyclic as Cyclic,
    Exponential as Exponential,
    Linear as Linear,
    MultiStep as MultiStep,
    OneCycle as OneCycle,
    Polynomial as Polynomial,
    Schedule as Schedule,
    Step as Step,
    Then as Then,
    Warmup as Warmup,
    cooldowns as cooldowns,
    last_value as last_value,
    schedule_for as schedule_for,
    schedule_from_json as schedule_from_json,
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
