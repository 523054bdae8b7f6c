"""Executors, which train stages on local, remote or simulated workers."""

from ._alone import model_of as model_of, train_alone as train_alone
from ._executor import (
    Assignment as Assignment,
    Executor as Executor,
    ExecutorConfig as ExecutorConfig,
    Report as Report,
)
from ._local import Local as Local
from ._ray import Ray as Ray
from ._simulated import Faults as Faults
from ._states import state_from_arrays as state_from_arrays, state_to_arrays as state_to_arrays
from ._worker import Worker as Worker


__all__ = [
    "Assignment",
    "Executor",
    "ExecutorConfig",
    "Faults",
    "Local",
    "Ray",
    "Report",
    "Worker",
    "model_of",
    "state_from_arrays",
    "state_to_arrays",
    "train_alone",
]
