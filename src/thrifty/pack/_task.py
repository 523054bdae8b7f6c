"""What one trial trains: the user's side of the contract."""

from __future__ import annotations

import hashlib
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import CodeType
from typing import Any

import torch

from ._data import Batch
from ._hyperparameters import HyperParameters
from ._optimizer import Optimizer


class _Identified:
    """What a task is, so that studies of the same task can share what was trained."""

    version: str = ""
    """Change it when something the source of the class does not show has changed (a data file, a helper)."""

    def identity(self) -> Mapping[str, str]:
        """Names everything that training depends on apart from hyper-parameters and seed.

        By default: the class, the source of it and its bases, its attributes and ``version``.
        Studies of equal identity and seed share one search plan.
        """
        kind = type(self)
        return {
            "class": f"{_module_of(kind)}.{kind.__qualname__}",
            "source": _source_digest(kind),
            "attributes": repr(sorted((k, repr(v)) for k, v in vars(self).items())),
            "version": self.version,
        }


class Task(_Identified, ABC):
    """What one trial trains; alone or packed, on any executor.

    Subclass it and write plain PyTorch. ``hp`` holds the trial's hyper-parameters: ``hp.width``.

    A hyper-parameter that moves during training has to be followed: by the optimizer, by
    ``batch_size``, or by ``adapt``, which reads it. One that only ``data`` or ``model`` read is an
    error before training. They are called with the values of the first epoch, also where a trial is
    continued.

    Attributes:
        optimizer: ``SGD``, ``AdamW`` and so on, whose string options name hyper-parameters that are
            followed; or a method of ``hp`` that returns one, called again whenever something that
            it reads has moved.
        batch_size: Samples of a training batch: a number, or the name of a hyper-parameter.
        eval_batch_size: Samples of a validation batch.

    >>> from thrifty.pack import ArrayData
    >>> class Line(Task):
    ...     optimizer = Optimizer(torch.optim.SGD, lr="lr")
    ...     def data(self, hp):
    ...         x = torch.linspace(-1, 1, 32)[:, None]
    ...         return ArrayData(train=(x, 2 * x), valid=(x, 2 * x))
    ...     def model(self, hp):
    ...         return torch.nn.Linear(1, 1)
    ...     def loss(self, model, batch):
    ...         x, y = batch
    ...         return (model(x) - y).square().mean()
    ...     def metrics(self, model, batch):
    ...         return {"mse": self.loss(model, batch)}
    """

    optimizer: Any
    batch_size: int | str = 64
    eval_batch_size: int = 4096

    @abstractmethod
    def data(self, hp: HyperParameters) -> Any:
        """``ArrayData(train=(x, y), valid=(x, y))``, or a pair of torch datasets.

        Called once for all trials that agree on what it reads of ``hp``.
        """

    @abstractmethod
    def model(self, hp: HyperParameters) -> torch.nn.Module:
        """A fresh model. Random initialisation is seeded by the trial's seed."""

    @abstractmethod
    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """The training loss of a batch: a scalar, mean over the batch."""

    @abstractmethod
    def metrics(self, model: torch.nn.Module, batch: Batch) -> Mapping[str, Any]:
        """Metrics of a validation batch by name: scalars, means over the batch (then averaged by size)."""

    def adapt(self, model: torch.nn.Module, hp: HyperParameters) -> None:
        """Brings a model up to date with hyper-parameters that changed; called before each epoch.

        Override it to let something other than the optimiser follow a schedule, such as a dropout rate.
        """


class Trainable(_Identified, ABC):
    """The same contract for code that owns its loop (Lightning, scikit-learn, anything).

    One instance is one trial. Everything random must come from ``seed`` and the epoch.
    Stages are shared exactly as for a ``Task``.
    """

    @abstractmethod
    def setup(self, hp: HyperParameters, *, seed: int, device: torch.device) -> None:
        """Makes everything anew for one trial."""

    @abstractmethod
    def train(self, epoch: int, hp: HyperParameters) -> None:
        """Trains one epoch (0, 1, ...) with the hyper-parameters of that epoch."""

    @abstractmethod
    def evaluate(self) -> Mapping[str, float]:
        """Metrics of the present state."""

    @abstractmethod
    def state(self) -> Any:
        """Everything needed to go on: nested dicts and lists of tensors and plain values."""

    @abstractmethod
    def load_state(self, state: Any) -> None:
        """Goes back to what ``state`` returned."""


def optimizer_of(task: Task, hp: HyperParameters) -> Optimizer:
    """The optimizer specification of a task, whether it is an attribute or a method."""
    spec = task.optimizer
    return spec if isinstance(spec, Optimizer) else spec(hp)


def adapts(task: Task) -> bool:
    """Whether a task overrides ``adapt``."""
    return type(task).adapt is not Task.adapt


def _module_of(kind: type) -> str:
    """The module of a class; of a script that runs its name, as if somebody had imported it (``thrifty run`` does)."""
    if kind.__module__ != "__main__":
        return kind.__module__
    script = Path(getattr(sys.modules["__main__"], "__file__", ""))
    return script.stem if script.is_file() else "__main__"


def _source_digest(kind: type) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for base in kind.__mro__:
        if base.__module__.startswith("thrifty.") or base in (object, ABC):
            continue
        try:
            digest.update(inspect.getsource(base).encode())
        except (OSError, TypeError):  # typed at a prompt: the compiled code will do
            for name, member in sorted(vars(base).items()):
                digest.update(
                    name.encode() + _compiled(member) if name not in _NOT_CODE else b""
                )
    return digest.hexdigest()


_NOT_CODE = frozenset({
    "__abstractmethods__", "__dict__", "__doc__", "__module__", "__slotnames__", "__weakref__", "_abc_impl",
})  # fmt: skip
"""What Python adds to a class by itself, some of it with an address, some of it when it is first pickled."""


def _compiled(member: Any) -> bytes:
    function = getattr(member, "__func__", getattr(member, "fget", member))
    code = getattr(function, "__code__", None)
    return repr(member).encode() if code is None else _code(code)


def _code(code: CodeType) -> bytes:
    """Instructions with what they refer to: alone they are the same for ``relu(x) * 2`` and ``tanh(x) * 3``."""
    constants = [_constant(each) for each in code.co_consts]
    return b"\0".join((code.co_code, repr(code.co_names).encode(), *constants))


def _constant(value: Any) -> bytes:
    if isinstance(value, CodeType):
        return _code(value)
    # a set's order changes from process to process
    return repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value).encode()
