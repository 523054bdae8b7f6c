"""Studies: the loop that brings space, plan, search, executors and store together."""

from ._forecast import Forecast as Forecast
from ._loop import Observer as Observer
from ._results import Savings as Savings, TrialResult as TrialResult
from ._storage import Storage as Storage
from ._study import Study as Study


__all__ = ["Forecast", "Observer", "Savings", "Storage", "Study", "TrialResult"]
