"""The class that users write, and its identity."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from copy import copy, deepcopy
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import Dataset

from thrifty.pack.identity import TaskIdentity, identify, is_legacy_asked, legacy_identity

from ._data import Batch
from ._hyperparameters import HyperParameters
from ._optimizer import Optimizer


LARGE_BYTES = 2**20
"""The size in bytes from which arrays are shared, so that trials do not each copy a data set."""

AnyTask = TypeVar("AnyTask")


def own_task(task: AnyTask) -> AnyTask:
    """Copy a task for one trial, its attributes included.

    Data sets, large arrays, and attributes that cannot be copied are shared.

    >>> class Noting:
    ...     def __init__(self):
    ...         self.notes = []
    >>> task = Noting()
    >>> own_task(task).notes.append(1)
    >>> task.notes
    []
    """
    out = copy(task)
    memo: dict[int, Any] = {id(task): out}
    for name, value in vars(task).items():
        if not _is_shared(value):
            try:
                vars(out)[name] = deepcopy(value, memo)
            except Exception:  # noqa: BLE001 (an attribute may be a lock, a generator, a file)
                continue
    return out


def _is_shared(value: Any) -> bool:
    if isinstance(value, Dataset):
        return True
    if isinstance(value, torch.Tensor | np.ndarray):
        return bool(value.nbytes >= LARGE_BYTES)
    if isinstance(value, list | tuple):
        return any(map(_is_shared, value))
    return isinstance(value, dict) and any(map(_is_shared, value.values()))


class _Identified:
    """An object with an identity, by which studies of the same task share trained stages."""

    version: str = ""
    """Change it when something that thrifty cannot see has changed, such as a file that is read."""

    not_state: Collection[str] = ()
    """Names of attributes, of the task and of modules, that are deliberately not in a checkpoint.

    thrifty compares a restored trial with the live one and accepts differences in these attributes.
    """

    def identity(self) -> Mapping[str, str]:
        """Return everything that training and evaluation depend on, apart from hyper-parameters.

        By default, thrifty finds that by content: the code of the class and of the user's own
        functions and classes that it reaches, the values that these read, ``version``, and the
        versions of installed packages. Studies of equal identity and seed share one search plan.

        Override it to take over: then only what you return counts. To replace only the attributes
        of a task or of any object, define ``__thrifty_identity__(self)``, which returns plain data.

        Raises:
            TaskError: A value has no content, such as an open file; the message names it.
        """
        if is_legacy_asked():
            return self._legacy_identity()
        found = self._content()
        return {**found.training, **found.evaluation}

    def _content(self) -> TaskIdentity:
        """Return the identity by content."""
        return identify(self, contract=vars(Trainable))

    def _legacy_identity(self) -> Mapping[str, str]:
        """Return what ``identity`` returned up to database version 4."""
        return legacy_identity(self)


class Task(_Identified, ABC):
    """What one trial trains, alone or packed, on any executor.

    Subclass it and write plain PyTorch. ``hp`` holds the trial's hyper-parameters: ``hp.width``.

    A hyper-parameter that changes during training has to be followed: by the optimizer, by
    ``batch_size``, or by an ``adapt`` that reads it. If only ``data`` or ``model`` reads it,
    thrifty raises an error before training. These two are called with the values of the first
    epoch, also when a trial resumes.

    Attributes:
        optimizer: ``SGD``, ``AdamW`` and so on, whose string options name hyper-parameters that
            are followed; or a method of ``hp`` that returns one, called again whenever a value
            that it reads has changed.
        batch_size: Samples per training batch: a number, or the name of a hyper-parameter.
        eval_batch_size: Samples per validation batch.

    >>> from thrifty.pack import ArrayData
    >>> class Line(Task):
    ...     optimizer = Optimizer(torch.optim.SGD, lr="lr")
    ...
    ...     def data(self, hp):
    ...         x = torch.linspace(-1, 1, 32)[:, None]
    ...         return ArrayData(train=(x, 2 * x), valid=(x, 2 * x))
    ...
    ...     def model(self, hp):
    ...         return torch.nn.Linear(1, 1)
    ...
    ...     def loss(self, model, batch):
    ...         x, y = batch
    ...         return (model(x) - y).square().mean()
    ...
    ...     def metrics(self, model, batch):
    ...         return {"mse": self.loss(model, batch)}
    """

    optimizer: Any
    batch_size: int | str = 64
    eval_batch_size: int = 4096

    @abstractmethod
    def data(self, hp: HyperParameters) -> Any:
        """Return ``ArrayData(train=(x, y), valid=(x, y))``, or a pair of torch datasets.

        thrifty calls it once for all trials that agree on the hyper-parameters it reads.
        """

    @abstractmethod
    def model(self, hp: HyperParameters) -> torch.nn.Module:
        """Return a fresh model. The trial's seed seeds its random initialisation."""

    @abstractmethod
    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Return the training loss of a batch: a scalar, the mean over the batch."""

    @abstractmethod
    def metrics(self, model: torch.nn.Module, batch: Batch) -> Mapping[str, Any]:
        """Return the metrics of a validation batch by name: scalars, each the mean over the batch.

        thrifty averages them over the batches, weighted by batch size.
        """

    def _content(self) -> TaskIdentity:
        return identify(self, evaluation=_EVALUATED, contract=vars(Task))

    def adapt(self, model: torch.nn.Module, hp: HyperParameters) -> None:
        """Bring a model up to date with hyper-parameters that changed; called before each epoch.

        Override it to let something other than the optimizer, such as a dropout rate, follow a
        schedule.
        """


class Trainable(_Identified, ABC):
    """The same interface for code that owns its loop (Lightning, scikit-learn, anything).

    One instance is one trial. Everything random must come from ``seed`` and the epoch.
    Stages are shared exactly as for a ``Task``.
    """

    @abstractmethod
    def setup(self, hp: HyperParameters, *, seed: int, device: torch.device) -> None:
        """Create everything anew for one trial."""

    @abstractmethod
    def train(self, epoch: int, hp: HyperParameters) -> None:
        """Train one epoch (0, 1, ...) with the hyper-parameters of that epoch."""

    @abstractmethod
    def evaluate(self) -> Mapping[str, float]:
        """Return the metrics of the present state."""

    @abstractmethod
    def state(self) -> Any:
        """Return everything needed to continue: nested dicts, lists, tensors and plain values."""

    @abstractmethod
    def load_state(self, state: Any) -> None:
        """Restore what ``state`` returned."""


def optimizer_of(task: Task, hp: HyperParameters) -> Optimizer:
    """Return the optimizer specification of a task, whether it is an attribute or a method."""
    spec = task.optimizer
    return spec if isinstance(spec, Optimizer) else spec(hp)


def adapts(task: Task) -> bool:
    """Return whether a task overrides ``adapt``."""
    return type(task).adapt is not Task.adapt


def task_identity(task: Task | Trainable) -> TaskIdentity:
    """Identify a task by content, or by what its own ``identity`` returns.

    Raises:
        TaskError: A value has no content, such as an open file; the message names it.
    """
    if type(task).identity is _Identified.identity:
        return task._content()
    named = {str(name): str(value) for name, value in task.identity().items()}
    return TaskIdentity(training=named, evaluation={})


_EVALUATED = frozenset({"metrics", "eval_batch_size"})
"""The members of a task that only evaluation uses."""
