"""Uneven data parallelism: train one model on workers of unequal speed without stragglers.

Implements Stannis (HeydariGorji et al., DAC 2020) and HyperTune (ICCAD 2020). This is a plain
PyTorch library that does not depend on studies.
"""

from thrifty.perf import BalancerOptions, Link, Power, SplitChange, StepCurve

from ._hetero_task import HeteroTask
from ._job import BatchScaling, HeteroOptions, MembersChanged, StandbyChange, StepReport, plot_steps
from ._samples import Place, SampleOrder, Share
from ._trainer import HeteroTrainer, balance
from .balance._profile import profile_step
from .balance._simulator import JobSimulation, Load, SimulatedStep, SimulatedWorker, simulate_job
from .training._model_state import WholeBatchNorm
from .workers._elastic import ElasticMembership
from .workers._measure import Meter, PowerMeter, ZeusMeter, measure_curve
from .workers._membership import (
    FixedMembership,
    Membership,
    PartialMembership,
    Wait,
    WorkerView,
    measure_all_reduce,
)


__all__ = [
    "BalancerOptions",
    "BatchScaling",
    "ElasticMembership",
    "FixedMembership",
    "HeteroOptions",
    "HeteroTask",
    "HeteroTrainer",
    "JobSimulation",
    "Link",
    "Load",
    "MembersChanged",
    "Membership",
    "Meter",
    "PartialMembership",
    "Place",
    "Power",
    "PowerMeter",
    "SampleOrder",
    "Share",
    "SimulatedStep",
    "SimulatedWorker",
    "SplitChange",
    "StandbyChange",
    "StepCurve",
    "StepReport",
    "Wait",
    "WholeBatchNorm",
    "WorkerView",
    "ZeusMeter",
    "balance",
    "measure_all_reduce",
    "measure_curve",
    "plot_steps",
    "profile_step",
    "simulate_job",
]
