"""What training costs: measured curves of time and memory of packs, the pack size that ends a study first, whether slices of a product pay, and how a batch is split among unequal workers.

Curves are plain numbers, measured elsewhere and kept by the store; nothing here touches a tensor or a device.
"""

from ._balancer import (
    Balancer as Balancer,
    BalancerOptions as BalancerOptions,
    SplitChange as SplitChange,
    step_seconds as step_seconds,
)
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


__all__ = [
    "Balancer",
    "BalancerOptions",
    "PackChoice",
    "PackCurve",
    "Power",
    "SlicedProduct",
    "SlicingCosts",
    "SplitChange",
    "SplitForecast",
    "StepCurve",
    "choose_pack",
    "forecast_split",
    "split_batch",
    "split_for_energy",
    "step_seconds",
]
