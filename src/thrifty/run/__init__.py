"""Executors, which train stages on local, remote or simulated workers."""

from ._alone import model_of, train_alone
from ._ask_tell import AskedTrial, External
from ._executor import Assignment, Executor, ExecutorConfig, Report
from ._local import Local
from ._ray import Ray
from ._running_chain import read_state, state_from_arrays, state_to_arrays
from ._simulated import Faults
from ._slurm import Slurm
from ._worker import Worker


__all__ = [
    "AskedTrial",
    "Assignment",
    "Executor",
    "ExecutorConfig",
    "External",
    "Faults",
    "Local",
    "Ray",
    "Report",
    "Slurm",
    "Worker",
    "model_of",
    "read_state",
    "state_from_arrays",
    "state_to_arrays",
    "train_alone",
]
