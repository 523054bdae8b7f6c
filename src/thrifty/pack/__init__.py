"""Training of K trials on one device: tasks, optimisers by name, and back-ends.

A plain PyTorch library: it knows nothing of search, plans or databases.
"""

from ._backend import Backend as Backend, EpochPlan as EpochPlan, Member as Member
from ._data import (
    ArrayData as ArrayData,
    DatasetPair as DatasetPair,
    epoch_order as epoch_order,
)
from ._hyperparameters import HyperParameters as HyperParameters
from ._inspect import TaskReport as TaskReport, inspect_task as inspect_task
from ._optimizer import (
    SGD as SGD,
    Adagrad as Adagrad,
    Adam as Adam,
    AdamW as AdamW,
    Optimizer as Optimizer,
    RMSprop as RMSprop,
)
from ._random import borrowed_streams as borrowed_streams
from ._solo import TRAIN_LOSS as TRAIN_LOSS, SoloBackend as SoloBackend
from ._state import State as State, pack_state as pack_state, unpack_state as unpack_state
from ._task import Task as Task, Trainable as Trainable, optimizer_of as optimizer_of


__all__ = [
    "SGD",
    "TRAIN_LOSS",
    "Adagrad",
    "Adam",
    "AdamW",
    "ArrayData",
    "Backend",
    "DatasetPair",
    "EpochPlan",
    "HyperParameters",
    "Member",
    "Optimizer",
    "RMSprop",
    "SoloBackend",
    "State",
    "Task",
    "TaskReport",
    "Trainable",
    "borrowed_streams",
    "epoch_order",
    "inspect_task",
    "optimizer_of",
    "pack_state",
    "unpack_state",
]
