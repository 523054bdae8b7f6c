"""Performance models: time, memory and energy of training steps.

They cover:

- The step time and memory of packed trials, and the pack size with which a study finishes first.
- Whether slicing a product by its dropout mask pays.
- How to split a batch among unequal workers, and which of them should train.
- How long an iteration takes on many machines.

All curves are plain numbers, measured elsewhere and kept by the store. Nothing here touches a
tensor or a device.
"""

from .balancing import (
    Balancer,
    BalancerOptions,
    SplitChange,
    SplitForecast,
    forecast_split,
    split_batch,
    split_for_energy,
    step_seconds,
)
from .network import CollectiveModel, CollectiveTiming, Link, ring_s
from .packing import (
    PackChoice,
    PackCurve,
    SlicedProduct,
    SlicingCosts,
    SlicingKernelCosts,
    choose_pack,
)
from .profiles import PRECISIONS, Power, Precision, StepCurve, StepProfile, iteration_s
from .standby import StandbyPolicy, SubsetChange


__all__ = [
    "PRECISIONS",
    "Balancer",
    "BalancerOptions",
    "CollectiveModel",
    "CollectiveTiming",
    "Link",
    "PackChoice",
    "PackCurve",
    "Power",
    "Precision",
    "SlicedProduct",
    "SlicingCosts",
    "SlicingKernelCosts",
    "SplitChange",
    "SplitForecast",
    "StandbyPolicy",
    "StepCurve",
    "StepProfile",
    "SubsetChange",
    "choose_pack",
    "forecast_split",
    "iteration_s",
    "ring_s",
    "split_batch",
    "split_for_energy",
    "step_seconds",
]
