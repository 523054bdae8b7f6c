"""Choice of cloud machines: a catalogue of offers, forecasts for fleets, and fleet planning.

The planner picks a fleet for a deadline or a budget, after Srifty (Luo et al., MLSys 2022). Nothing
here trains a model or touches a tensor: profiles and measurements come in as values.
"""

from ._catalogue import Catalogue as Catalogue
from ._fleet import Fleet as Fleet, Interval as Interval, Rented as Rented
from ._hardware import ACCELERATORS as ACCELERATORS, Accelerator as Accelerator
from ._hardware_estimates import HardwareEstimates as HardwareEstimates
from ._market import Life as Life, PriceSeries as PriceSeries, SpotMarket as SpotMarket
from ._offer import Offer as Offer
from ._plot import plot_front as plot_front
from ._probe import Measured as Measured, Probe as Probe, Probes as Probes
from ._replan import replan as replan
from ._replay import (
    ByExpectedCost as ByExpectedCost,
    Cheapest as Cheapest,
    Replayed as Replayed,
    SpotJob as SpotJob,
    SpotPlace as SpotPlace,
    SpotPolicy as SpotPolicy,
    replay as replay,
)
from ._skypilot import (
    launch as launch,
    time_estimator as time_estimator,
    to_skypilot as to_skypilot,
)
from ._spot import (
    SpotHistory as SpotHistory,
    daly_s as daly_s,
    spot_seconds as spot_seconds,
    young_s as young_s,
)
from ._workload import Workload as Workload, widths_of as widths_of
from .planning._estimate import estimate as estimate
from .planning._options import FleetOptions as FleetOptions
from .planning._planner import FleetPlan as FleetPlan, plan_fleet as plan_fleet


__all__ = [
    "ACCELERATORS",
    "Accelerator",
    "ByExpectedCost",
    "Catalogue",
    "Cheapest",
    "Fleet",
    "FleetOptions",
    "FleetPlan",
    "HardwareEstimates",
    "Interval",
    "Life",
    "Measured",
    "Offer",
    "PriceSeries",
    "Probe",
    "Probes",
    "Rented",
    "Replayed",
    "SpotHistory",
    "SpotJob",
    "SpotMarket",
    "SpotPlace",
    "SpotPolicy",
    "Workload",
    "daly_s",
    "estimate",
    "launch",
    "plan_fleet",
    "plot_front",
    "replan",
    "replay",
    "spot_seconds",
    "time_estimator",
    "to_skypilot",
    "widths_of",
    "young_s",
]
