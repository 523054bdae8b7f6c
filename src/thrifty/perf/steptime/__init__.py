"""Step-time models of data-parallel setups: our own, and published baselines.

A setup is a placement (devices on each machine) and a batch. One model is for one network on one
type of device. scipy and scikit-learn are in the extra ``cloud``.
"""

from ._bagged import Bagged as Bagged
from ._boosting import Boosting as Boosting
from ._ernest import Ernest as Ernest
from ._hybrid import Hybrid as Hybrid
from ._intervals import Intervals as Intervals
from ._margin import smallest_margin as smallest_margin
from ._model import StepTimeModel as StepTimeModel
from ._other_device import OnBoth as OnBoth, OtherDevice as OtherDevice
from ._overlapping import Overlapping as Overlapping
from ._paleo import Paleo as Paleo
from ._perfect import PerfectScaling as PerfectScaling
from ._pollux import Pollux as Pollux
from ._setup import Setup as Setup
from ._transfer import Transfer as Transfer


__all__ = [
    "Bagged",
    "Boosting",
    "Ernest",
    "Hybrid",
    "Intervals",
    "OnBoth",
    "OtherDevice",
    "Overlapping",
    "Paleo",
    "PerfectScaling",
    "Pollux",
    "Setup",
    "StepTimeModel",
    "Transfer",
    "smallest_margin",
]
