"""Performance models: time, memory and energy of training steps.

They cover:

- The step time and memory of packed trials, and the pack size with which a study finishes first.
- Whether slicing a product by its dropout mask pays.
- How to split a batch among unequal workers.
- How long an iteration takes on many machines.

All curves are plain numbers, measured elsewhere and kept by the store. Nothing here touches a
tensor or a device.
"""

from ._balancer import (
    Balancer as Balancer,
    BalancerOptions as BalancerOptions,
    SplitChange as SplitChange,
    step_seconds as step_seconds,
)
from ._collective import (
    CollectiveModel as CollectiveModel,
    CollectiveTiming as CollectiveTiming,
)
from ._iteration import iteration_s as iteration_s
from ._link import Link as Link, ring_s as ring_s
from ._pack_choice import PackChoice as PackChoice, choose_pack as choose_pack
from ._pack_curve import PackCurve as PackCurve
from ._power import Power as Power
from ._slicing_costs import SlicedProduct as SlicedProduct, SlicingCosts as SlicingCosts
from ._split import (
    SplitForecast as SplitForecast,
    forecast_split as forecast_split,
    split_batch as split_batch,
    split_for_energy as split_for_energy,
)
from ._step_curve import StepCurve as StepCurve
from ._step_profile import StepProfile as StepProfile


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
