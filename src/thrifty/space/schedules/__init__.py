"""Schedules, one file each: frozen data that reduces to the same few pieces."""

from ._base import Schedule as Schedule, Then as Then, schedule_from_json as schedule_from_json
from ._budget import cooldowns as cooldowns, schedule_for as schedule_for
from ._constant import Constant as Constant
from ._cosine import Cosine as Cosine
from ._cosine_restarts import CosineRestarts as CosineRestarts
from ._cyclic import Cyclic as Cyclic
from ._exponential import Exponential as Exponential
from ._last_value import last_value as last_value
from ._linear import Linear as Linear
from ._multi_step import MultiStep as MultiStep
from ._one_cycle import OneCycle as OneCycle
from ._polynomial import Polynomial as Polynomial
from ._rex import REX as REX
from ._step import Step as Step
from ._warmup import Warmup as Warmup
from ._wsd import WSD as WSD


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
