"""Performance models: time, memory and energy of training steps.

They cover:

- The step time and memory of packed trials, and the pack size with which a study finishes first.
- Whether slicing a product by its dropout mask pays.
- How to split a batch among unequal workers.
- How long an iteration takes on many machines.

All curves are plain numbers, measured elsewhere and kept by the store. Nothing here touches a
tensor or a device.
"""

from ._slicing_costs import SlicedProduct as SlicedProduct, SlicingCosts as SlicingCosts
from .balancing import (
    Balancer as Balancer,
    BalancerOptions as BalancerOptions,
    SplitChange as SplitChange,
    SplitForecast as SplitForecast,
    forecast_split as forecast_split,
    split_batch as split_batch,
    split_for_energy as split_for_energy,
    step_seconds as step_seconds,
)
from .network import (
    CollectiveModel as CollectiveModel,
    CollectiveTiming as CollectiveTiming,
    Link as Link,
    ring_s as ring_s,
)
from .packing import (
    PackChoice as PackChoice,
    PackCurve as PackCurve,
    choose_pack as choose_pack,
)
from .profiles import (
    Power as Power,
    StepCurve as StepCurve,
    StepProfile as StepProfile,
    iteration_s as iteration_s,
)


__all__ = [
    "Balancer",
    "BalancerOptions",
    "CollectiveModel",
    "CollectiveTiming",
    "Link",
    "PackChoice",
    "PackCurve",
    "Power",
    "SlicedProduct",
    "SlicingCosts",
    "SplitChange",
    "SplitForecast",
    "StepCurve",
    "StepProfile",
    "choose_pack",
    "forecast_split",
    "iteration_s",
    "ring_s",
    "split_batch",
    "split_for_energy",
    "step_seconds",
]
