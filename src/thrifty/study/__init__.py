"""Studies: the loop that brings space, plan, search, executors and store together."""

from ._forecast import Forecast as Forecast
from ._goals import Bound as Bound, at_least as at_least, at_most as at_most
from ._loop import Observer as Observer
from ._results import Savings as Savings, TrialResult as TrialResult
from ._stop import StopWhen as StopWhen
from ._storage import Storage as Storage
from ._study import Study as Study


__all__ = [
    "Bound",
    "Forecast",
    "Observer",
    "Savings",
    "StopWhen",
    "Storage",
    "Study",
    "TrialResult",
    "at_least",
    "at_most",
]
