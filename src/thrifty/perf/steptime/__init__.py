"""Step-time models of data-parallel setups: our own, and published baselines.

A setup is a placement (devices on each machine) and a batch. One model is for one network on one
type of device. scipy and scikit-learn are in the extra ``cloud``.
"""

from ._boosting import Bagged as Bagged, Boosting as Boosting, Hybrid as Hybrid
from ._intervals import Intervals as Intervals, smallest_margin as smallest_margin
from ._model import Setup as Setup, StepTimeModel as StepTimeModel
from ._other_device import OnBoth as OnBoth, OtherDevice as OtherDevice
from ._overlapping import Overlapping as Overlapping
from ._published import (
    Ernest as Ernest,
    Paleo as Paleo,
    PerfectScaling as PerfectScaling,
    Pollux as Pollux,
)
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
