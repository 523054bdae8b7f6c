"""Studies: the loop that combines space, plan, search, executors and store."""

from ._forecast import Forecast as Forecast
from ._goals import Bound as Bound, at_least as at_least, at_most as at_most
from ._importance import Importance as Importance
from ._loop import Observer as Observer
from ._repository import Storage as Storage
from ._results import Savings as Savings, TrialResult as TrialResult
from ._stop import StopWhen as StopWhen
from ._study import Study as Study
from ._trial_events import (
    StudyBegan as StudyBegan,
    StudyEnded as StudyEnded,
    TrialAdvanced as TrialAdvanced,
    TrialBegan as TrialBegan,
    TrialEnded as TrialEnded,
    TrialEvent as TrialEvent,
)
from .simulation._report import DecisionTimes as DecisionTimes, Simulation as Simulation
from .simulation._simulate import simulate as simulate


__all__ = [
    "Bound",
    "DecisionTimes",
    "Forecast",
    "Importance",
    "Observer",
    "Savings",
    "Simulation",
    "StopWhen",
    "Storage",
    "Study",
    "StudyBegan",
    "StudyEnded",
    "TrialAdvanced",
    "TrialBegan",
    "TrialEnded",
    "TrialEvent",
    "TrialResult",
    "at_least",
    "at_most",
    "simulate",
]
