"""Studies: the loop that combines space, plan, search, executors and store."""

from ._extension import Extension
from ._forecast import Forecast
from ._goals import Bound, at_least, at_most
from ._importance import Importance
from ._loop import Observer, StopWhen
from ._reader import KnownEpoch
from ._repository import Storage
from ._results import Savings, TrialResult
from ._scaling_law import Prediction, ScalingLaw
from ._steering_mixin import Branch
from ._study import Study
from ._trial_events import StudyBegan, StudyEnded, TrialAdvanced, TrialBegan, TrialEnded, TrialEvent
from .simulation._simulate import simulate
from .simulation._simulation_report import DecisionTimes, Simulation


__all__ = [
    "Bound",
    "Branch",
    "DecisionTimes",
    "Extension",
    "Forecast",
    "Importance",
    "KnownEpoch",
    "Observer",
    "Prediction",
    "Savings",
    "ScalingLaw",
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
