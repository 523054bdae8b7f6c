"""Uneven data parallelism: train one model on workers of unequal speed without stragglers.

Implements Stannis (HeydariGorji et al., DAC 2020) and HyperTune (ICCAD 2020). This is a plain
PyTorch library that does not depend on studies.
"""

from thrifty.perf import (
    BalancerOptions as BalancerOptions,
    Link as Link,
    Power as Power,
    SplitChange as SplitChange,
    StepCurve as StepCurve,
)

from ._batch_norm import WholeBatchNorm as WholeBatchNorm
from ._collectives import measure_all_reduce as measure_all_reduce
from ._elastic import ElasticMembership as ElasticMembership
from ._measure import (
    Meter as Meter,
    PowerMeter as PowerMeter,
    ZeusMeter as ZeusMeter,
    measure_curve as measure_curve,
)
from ._membership import (
    FixedMembership as FixedMembership,
    Membership as Membership,
    View as View,
    Wait as Wait,
)
from ._options import BatchScaling as BatchScaling, HeteroOptions as HeteroOptions
from ._order import Place as Place, SampleOrder as SampleOrder, Share as Share
from ._plot import plot_steps as plot_steps
from ._profile import profile_step as profile_step
from ._report import MembersChanged as MembersChanged, StepReport as StepReport
from ._simulator import (
    Load as Load,
    SimulatedStep as SimulatedStep,
    SimulatedWorker as SimulatedWorker,
    Simulation as Simulation,
    simulate as simulate,
)
from ._task import HeteroTask as HeteroTask
from ._trainer import HeteroTrainer as HeteroTrainer, balance as balance


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
