"""Choice of cloud machines: a catalogue of offers, forecasts for fleets, and fleet planning.

The planner picks a fleet for a deadline or a budget, after Srifty (Luo et al., MLSys 2022). Nothing
here trains a model or touches a tensor: profiles and measurements come in as values.
"""

from ._catalogue import Catalogue
from ._hardware import HardwareEstimates
from ._market import (
    ObservedLifetime,
    PriceSeries,
    SpotHistory,
    SpotMarket,
    daly_s,
    spot_seconds,
    young_s,
)
from ._networks import NetworkPriors, UncertaintyFactor
from ._offer import ACCELERATORS, Accelerator, Fleet, Interval, MachineGroup, Offer
from ._plan_plot import plot_front
from ._probe import Probe, ProbeResult, Probes
from ._skypilot import launch, time_estimator, to_skypilot
from ._workload import StepTiming, Workload, parallelism_phases_of
from .planning._estimate import estimate
from .planning._fleet_options import FleetOptions, calibrate
from .planning._planner import FleetPlan, plan_fleet, replan
from .planning._table import CloseCall


__all__ = [
    "ACCELERATORS",
    "Accelerator",
    "Catalogue",
    "CloseCall",
    "Fleet",
    "FleetOptions",
    "FleetPlan",
    "HardwareEstimates",
    "Interval",
    "MachineGroup",
    "NetworkPriors",
    "ObservedLifetime",
    "Offer",
    "PriceSeries",
    "Probe",
    "ProbeResult",
    "Probes",
    "SpotHistory",
    "SpotMarket",
    "StepTiming",
    "UncertaintyFactor",
    "Workload",
    "calibrate",
    "daly_s",
    "estimate",
    "launch",
    "parallelism_phases_of",
    "plan_fleet",
    "plot_front",
    "replan",
    "spot_seconds",
    "time_estimator",
    "to_skypilot",
    "young_s",
]
