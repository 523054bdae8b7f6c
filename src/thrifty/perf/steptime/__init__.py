"""Step-time models of data-parallel setups.

A setup is a placement (devices on each machine) and a batch. One model is for one network on one
type of device. scipy and scikit-learn are in the extra ``cloud``.
"""

from ._hybrid import Bagged, Hybrid, Overlapping
from ._model import Intervals, PerfectScaling, Setup, StepTimeModel, smallest_margin
from ._transfer import OtherDevice, PairedSteps, Transfer


__all__ = [
    "Bagged",
    "Hybrid",
    "Intervals",
    "OtherDevice",
    "Overlapping",
    "PairedSteps",
    "PerfectScaling",
    "Setup",
    "StepTimeModel",
    "Transfer",
    "smallest_margin",
]
