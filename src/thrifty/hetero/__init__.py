"""Uneven data parallelism: train one model on workers of unequal speed without stragglers.

Implements Stannis (HeydariGorji et al., DAC 2020) and HyperTune (ICCAD 2020). This is a plain
PyTorch library that does not depend on studies.
"""

from thrifty.perf import BalancerOptions, Link, Power, SplitChange, StepCurve

from ._batch_norm import WholeBatchNorm
from ._collectives import measure_all_reduce
from ._elastic import ElasticMembership
from ._measure import Meter, PowerMeter, ZeusMeter, measure_curve
from ._membership import FixedMembership, Membership, View, Wait
from ._options import BatchScaling, HeteroOptions
from ._order import Place, SampleOrder, Share
from ._plot import plot_steps
from ._profile import profile_step
from ._report import MembersChanged, StepReport
from ._simulator import Load, SimulatedStep, SimulatedWorker, Simulation, simulate
from ._task import HeteroTask
from ._trainer import HeteroTrainer, balance


__all__ = [
    "BalancerOptions",
    "BatchScaling",
    "ElasticMembership",
    "FixedMembership",
    "HeteroOptions",
    "HeteroTask",
    "HeteroTrainer",
    "Link",
    "Load",
    "MembersChanged",
    "Membership",
    "Meter",
    "Place",
    "Power",
    "PowerMeter",
    "SampleOrder",
    "Share",
    "SimulatedStep",
    "SimulatedWorker",
    "Simulation",
    "SplitChange",
    "StepCurve",
    "StepReport",
    "View",
    "Wait",
    "WholeBatchNorm",
    "ZeusMeter",
    "balance",
    "measure_all_reduce",
    "measure_curve",
    "plot_steps",
    "profile_step",
    "simulate",
]
