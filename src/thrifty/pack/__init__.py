"""Training of K trials on one device: tasks, optimizers by name, and back-ends.

This is a plain PyTorch library: it knows nothing of search, plans or databases.
The package itself is callable: ``thrifty.pack(models, ...)`` is ``thrifty.pack.pack``.
"""

import sys as _sys
from types import ModuleType as _ModuleType
from typing import Any as _Any

from ._auto import AutoBackend as AutoBackend, Prefer as Prefer
from ._backend import (
    Backend as Backend,
    EpochPlan as EpochPlan,
    Member as Member,
    Outcome as Outcome,
    TimeShare as TimeShare,
    UnverifiedError as UnverifiedError,
    out_of_memory as out_of_memory,
)
from ._concatenated import ConcatenatedBackend as ConcatenatedBackend
from ._data import (
    ArrayData as ArrayData,
    DatasetPair as DatasetPair,
    Source as Source,
    SourceData as SourceData,
    epoch_order as epoch_order,
    open_source as open_source,
)
from ._evaluate import evaluate_state as evaluate_state
from ._fused import FusedBackend as FusedBackend
from ._fusion_policy import Calibration as Calibration
from ._hyperparameters import HyperParameters as HyperParameters
from ._inspect import TaskReport as TaskReport, inspect_task as inspect_task
from ._optimizer import (
    SGD as SGD,
    Adagrad as Adagrad,
    Adam as Adam,
    AdamW as AdamW,
    Optimizer as Optimizer,
    RMSprop as RMSprop,
    times as times,
)
from ._pack import Pack as Pack, pack as pack
from ._random import borrowed_streams as borrowed_streams, seed_step as seed_step
from ._solo import SoloBackend as SoloBackend
from ._state import (
    State as State,
    pack_state as pack_state,
    step_counters as step_counters,
    unpack_state as unpack_state,
)
from ._state_check import StateCheck as StateCheck
from ._state_probe import Trial as Trial
from ._task import (
    Task as Task,
    Trainable as Trainable,
    optimizer_of as optimizer_of,
    task_identity as task_identity,
)
from ._trial import TRAIN_LOSS as TRAIN_LOSS, evaluate as evaluate
from .fused import (
    BlockOptions as BlockOptions,
    Group as Group,
    Packed as Packed,
    UnfusableError as UnfusableError,
    register_rule as register_rule,
)
from .identity import TaskIdentity as TaskIdentity


__all__ = [
    "SGD",
    "TRAIN_LOSS",
    "Adagrad",
    "Adam",
    "AdamW",
    "ArrayData",
    "AutoBackend",
    "Backend",
    "BlockOptions",
    "Calibration",
    "ConcatenatedBackend",
    "DatasetPair",
    "EpochPlan",
    "FusedBackend",
    "Group",
    "HyperParameters",
    "Member",
    "Optimizer",
    "Outcome",
    "Pack",
    "Packed",
    "Prefer",
    "RMSprop",
    "SoloBackend",
    "Source",
    "SourceData",
    "State",
    "StateCheck",
    "Task",
    "TaskIdentity",
    "TaskReport",
    "TimeShare",
    "Trainable",
    "Trial",
    "UnfusableError",
    "UnverifiedError",
    "borrowed_streams",
    "epoch_order",
    "evaluate",
    "evaluate_state",
    "inspect_task",
    "open_source",
    "optimizer_of",
    "out_of_memory",
    "pack",
    "pack_state",
    "register_rule",
    "seed_step",
    "step_counters",
    "task_identity",
    "times",
    "unpack_state",
]


class _CallablePackage(_ModuleType):
    """A module type that lets ``thrifty.pack`` be both the package and its main function."""

    def __call__(self, *args: _Any, **kwargs: _Any) -> Pack:
        return pack(*args, **kwargs)


_sys.modules[__name__].__class__ = _CallablePackage
