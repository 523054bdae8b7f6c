"""Training of K trials on one device: tasks, optimizers by name, and back-ends.

This is a plain PyTorch library: it knows nothing of search, plans or databases.
The package itself is callable: ``thrifty.pack(models, ...)`` is ``thrifty.pack.pack``.
"""

import sys as _sys
from types import ModuleType as _ModuleType
from typing import Any as _Any

from ._backend import Backend, EpochPlan, Member, Outcome, TimeShare, UnverifiedError, out_of_memory
from ._pack import Pack, pack
from ._state import State, borrowed_streams, pack_state, seed_step, step_counters, unpack_state
from .backends._auto import AutoBackend, Prefer
from .backends._fused import FusedBackend
from .backends._fusion_policy import Calibration
from .backends._plain import ConcatenatedBackend, SoloBackend
from .fused import BlockOptions, Group, Packed, UnfusableError, register_rule
from .fused._activations import ACTIVATION_DISK, ActivationStore, keep_activations
from .identity import TaskIdentity
from .task._data import ArrayData, DatasetPair, Source, SourceData, epoch_order, open_source
from .task._data_contents import TokenFile
from .task._optimizer import SGD, Adagrad, Adam, AdamW, Optimizer, Optimizers, RMSprop, times
from .task._step_options import EMA, SWA
from .task._streams import StreamData
from .task._task import (
    HyperParameters,
    Logged,
    SelfDescribing,
    Task,
    Trainable,
    check_usual_step,
    optimizer_of,
    task_identity,
)
from .trial._plain_evaluation import evaluate
from .trial._probes import DataSize, TaskReport, Trial, inspect_task, measure_data
from .trial._state_check import StateCheck
from .trial._trial import TRAIN_LOSS, evaluate_state
from .trial._trial_needs import TrialInputs


__all__ = [
    "ACTIVATION_DISK",
    "EMA",
    "SGD",
    "SWA",
    "TRAIN_LOSS",
    "ActivationStore",
    "Adagrad",
    "Adam",
    "AdamW",
    "ArrayData",
    "AutoBackend",
    "Backend",
    "BlockOptions",
    "Calibration",
    "ConcatenatedBackend",
    "DataSize",
    "DatasetPair",
    "EpochPlan",
    "FusedBackend",
    "Group",
    "HyperParameters",
    "Logged",
    "Member",
    "Optimizer",
    "Optimizers",
    "Outcome",
    "Pack",
    "Packed",
    "Prefer",
    "RMSprop",
    "SelfDescribing",
    "SoloBackend",
    "Source",
    "SourceData",
    "State",
    "StateCheck",
    "StreamData",
    "Task",
    "TaskIdentity",
    "TaskReport",
    "TimeShare",
    "TokenFile",
    "Trainable",
    "Trial",
    "TrialInputs",
    "UnfusableError",
    "UnverifiedError",
    "borrowed_streams",
    "check_usual_step",
    "epoch_order",
    "evaluate",
    "evaluate_state",
    "inspect_task",
    "keep_activations",
    "measure_data",
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
