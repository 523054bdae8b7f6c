"""The class that users write, its identity, and hyper-parameters as it reads them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy, deepcopy
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import Dataset

from thrifty.core import Artifact, TaskError, check_hyperparameter_names
from thrifty.pack._backend import EpochPlan
from thrifty.pack.identity import TaskIdentity, identify, is_legacy_asked, legacy_identity

from ._data import Batch
from ._optimizer import Optimizer, Optimizers
from ._step_options import Average, Precision, StepOptions, step_options


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


_LENT: ContextVar[Mapping[str, torch.optim.Optimizer] | None] = ContextVar("lent", default=None)
"""The torch optimizers of the trial whose task takes a step now."""


@contextmanager
def lent_optimizers(optimizers: Mapping[str, torch.optim.Optimizer]) -> Iterator[None]:
    """Let ``Task.optimizers`` return a trial's torch optimizers within this context."""
    token = _LENT.set(optimizers)
    try:
        yield
    finally:
        _LENT.reset(token)


class _LentOptimizers:
    """The attribute ``Task.optimizers``; a task may have an attribute of this name itself."""

    def __get__(self, task: Task | None, owner: type) -> Any:
        if task is None:
            return self
        lent = _LENT.get()
        if lent is None:
            raise TaskError(
                f"{owner.__name__}.optimizers exists only while step(model, batch) runs; read it "
                "there"
            )
        return lent


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
        steps_per_epoch: Optimizer steps of an epoch, whatever the data; None for a pass over the
            training data. Passes go on across epochs: an epoch begins where the last one ended.
            ``batch_size`` must then keep its value during a trial.
        tokens_per_sample: The tokens of a training sample, for times in ``tokens(...)``; None if
            the data say it, as a ``TokenFile`` does, or if samples vary.
        precision: The precision of forward and backward passes: ``"fp32"``, ``"bf16-mixed"``,
            ``"fp16-mixed"`` or ``"bf16"``.
        accumulate: Into how many parts each batch is split, whose gradients are summed: a number,
            or the name of a hyper-parameter.
        average: ``EMA`` or ``SWA``, or several, which are evaluated beside the weights.
        compile: Whether the model is compiled.
        version: A text to change when something that thrifty cannot see has changed.
        not_state: Names of attributes that are deliberately not in a checkpoint.

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
    steps_per_epoch: int | None = None
    tokens_per_sample: int | None = None
    precision: Precision = "fp32"
    accumulate: int | str = 1
    average: Average | Sequence[Average] | None = None
    compile: bool = False
    optimizers = _LentOptimizers()
    """The trial's torch optimizers by name, while ``step`` runs."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.step is not Task.step and cls.loss is Task.loss:
            cls.loss = _no_loss  # type: ignore[assignment,method-assign]

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

    def step(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Take one training step, and return the loss to report.

        Define it where a step needs several losses or backward passes (GAN, SAM); ``loss`` may then
        be left out. ``self.optimizers`` has the torch optimizers by the names in ``Optimizers``; a
        single one is ``self.optimizers["optimizer"]``. Gradients that were used are cleared before
        each call. If the step clears those of an optimizer itself, all others stay until it does.

        By default, thrifty computes ``loss``, its gradients, clips them and updates the parameters.
        """
        raise NotImplementedError

    def loss_weight(self, batch: Batch) -> float | None:
        """Return how much a part of a batch counts, such as its tokens; None: its number of rows.

        Define it if ``accumulate`` splits batches and ``loss`` is a mean over something else than
        rows.
        """
        raise NotImplementedError

    def __thrifty_unchanged__(self) -> None:
        """Check that files which the identity names are as they were; a new trial begins.

        Raises:
            TaskError: They are not.
        """

    def meta_model(self, hp: HyperParameters) -> torch.nn.Module | None:
        """Return the model on PyTorch's meta device, for a forecast of its memory.

        ``Study.plan()`` forecasts memory only for tasks that override it, because a model without
        values costs nothing. By default, returns None.
        """
        return None

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """What a trial keeps of an epoch beside its metrics.

    Attributes:
        attributes: User attributes, as JSON values.
        artifacts: Files.
    """

    attributes: Mapping[str, Any] = field(default_factory=dict)
    artifacts: tuple[Artifact, ...] = ()


class SelfDescribing(Trainable):
    """A trainable that is made of something else, such as a function, and knows its own space."""

    name: str
    """What messages call it."""
    module: str
    """Name of the module that defines it."""
    preparation: str
    """What messages call the part that reads hyper-parameters once; a key of ``_MENDS``."""
    mend: str
    """What to do with state that is not kept."""
    internals: Collection[str]
    """Its own attributes that are no state of the user's code."""
    can_resume: bool = True
    """Whether another process can go on from its state; else a trial is trained from its start."""

    @abstractmethod
    def space(self) -> Any:
        """Return its ``thrifty.Space``; this may run its code in a process of its own."""

    def take_logged(self) -> Logged:
        """Return the user attributes and artifacts of the last epoch; each only once."""
        return Logged()

    def unread(self) -> Collection[str]:
        """Return the names of what later epochs read, and whose content nothing can see whole."""
        return ()

    def looked_at(self) -> Mapping[str, Any]:
        """Return the objects, by name, whose attributes trials may carry beside their state."""
        return {"self": self}

    def drawn(self) -> tuple[Any, ...] | None:
        """Return the positions of the seeded streams when its preparation had ended.

        It runs the preparation if it has not run yet. None if there is none of its own.
        """
        return None


def _no_loss(task: Task, *_: Any) -> torch.Tensor:
    raise TaskError(
        f"{type(task).__name__} has a step of its own and no loss, which is needed here; define "
        "loss(model, batch), too"
    )


def options_of(task: Task) -> StepOptions:
    """Return how a task takes its steps.

    Raises:
        TaskError: An attribute is invalid, or two exclude each other.
    """
    kind = type(task)
    return step_options(
        task, owns_step=kind.step is not Task.step, weighs=kind.loss_weight is not Task.loss_weight
    )


def check_usual_step(task: Task, *, where: str, counts_steps: bool = False) -> None:
    """Refuse a task whose step is not the usual one where only that is possible.

    Args:
        task: The task.
        where: What cannot do it, such as ``"HeteroTask"``.
        counts_steps: Whether ``steps_per_epoch`` means nothing there.

    Raises:
        TaskError: The step is special; the message says in which way.
    """
    reason = options_of(task).why_special
    if not reason and isinstance(task.optimizer, Optimizers):
        reason = "it has several optimizers"
    if not reason and getattr(task.optimizer, "clip_value", None) is not None:
        reason = "it clips gradients by value"
    if not reason and task.steps_per_epoch is not None and not counts_steps:
        reason = "it counts epochs in steps (steps_per_epoch)"
    if reason:
        raise TaskError(
            f"{where} cannot train {type(task).__name__}, because {reason}; train it with an "
            "executor such as thrifty.Local(), or change the task"
        )


def hold_batch_size(task: Task, options: StepOptions, readings: Readings) -> None:
    """Refuse a batch size that changes where epochs are counted in steps.

    Raises:
        TaskError: It has a schedule. Which rows a step reads would depend on all earlier epochs.
    """
    if options.steps_per_epoch is not None and isinstance(task.batch_size, str):
        readings.hold(
            task.batch_size,
            "batch_size follows it, and steps_per_epoch is set: step s of a trial is a batch of "
            "its passes over the data, which have batches of one size; give "
            f"{task.batch_size!r} a fixed value, or leave steps_per_epoch out",
        )
        readings.check_held()


def optimizer_of(task: Task, hp: HyperParameters) -> Optimizer:
    """Return the optimizer specification of a task, whether it is an attribute or a method.

    Raises:
        TaskError: The task has several optimizers.
    """
    spec = task.optimizer
    found = spec if isinstance(spec, Optimizer | Optimizers) else spec(hp)
    if isinstance(found, Optimizers):
        raise TaskError(
            f"{type(task).__name__} has several optimizers ({', '.join(found)}); only one can be "
            "used here"
        )
    return found


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


class HyperParameters(Mapping[str, Any]):
    """Read-only values by name: ``hp.width`` or ``hp["width"]``.

    Use ``hp.get("x", 0)`` for optional ones. The object records which names were read, to tell what
    depends on them. Iterating over it, ``**hp``, ``items()`` and ``values()`` read all names.

    >>> hp = HyperParameters({"width": 64, "lr": 0.1})
    >>> hp.width, sorted(hp.names_read)
    (64, ['width'])

    Raises:
        SpaceError: A hyper-parameter is named like a method, such as ``values``.
    """

    __slots__ = ("__weakref__", "_sharers", "_values", "_was_shown", "names_read")

    def __init__(self, values: Mapping[str, Any]) -> None:
        check_hyperparameter_names(values)
        self._values = dict(values)
        self._sharers: list[Mapping[str, Any]] = []
        self.names_read: set[str] = set()
        self._was_shown = False
        """Whether a text of it was made, which depends on all names, but reads none."""

    def __getitem__(self, name: str) -> Any:
        self.names_read.add(name)
        if self._sharers:
            self._check_shared(name)
        return self._values[name]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError:
            known = ", ".join(self._values) or "none"
            raise TaskError(
                f"the task reads hyper-parameter {name!r}, which this trial does not have (it has: "
                f"{known}); add it to the space, or, if it has a condition (.when), read it with "
                f"hp.get({name!r}, default)"
            ) from None

    def __iter__(self) -> Iterator[str]:
        self.names_read.update(self._values)
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        self._was_shown = True
        return f"HyperParameters({self._values!r})"

    def _check_shared(self, name: str) -> None:
        value = self._values.get(name, MISSING)
        if any(not is_same_value(other.get(name, MISSING), value) for other in self._sharers):
            raise TaskError(
                f"hp.{name} is read after data(hp) has returned, and trials that differ in it "
                f"share the data; read it in data(hp) and keep the value, such as self.{name} = "
                f"hp.{name}"
            )

    def __copy__(self) -> HyperParameters:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> HyperParameters:
        # a model may hold this object and be copied: reads by the copy are recorded here as well
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # reads in another process cannot be seen here, so all names count as read
        self.names_read.update(self._values)
        return HyperParameters, (self._values,)


def unread(hp: HyperParameters) -> HyperParameters:
    """Return the same hyper-parameters, with no name read yet."""
    return HyperParameters(hp._values)


def count_text_as_read(hp: HyperParameters) -> None:
    """Count all names as read if code has made a text of the hyper-parameters.

    Printing them is not reading. But what a function returns may depend on their text, such as data
    from a file that is named after them. So this is for functions whose results are kept for other
    values of what they have not read.
    """
    if hp._was_shown:
        hp.names_read.update(hp._values)


class _Missing:
    """Stands for the value of a hyper-parameter that a trial does not have."""

    def __repr__(self) -> str:
        return "<missing>"


MISSING: Any = _Missing()


def values_of(hp: HyperParameters, names: Iterable[str]) -> dict[str, Any]:
    """Return the values of some names, ``MISSING`` for missing ones; does not count as reading."""
    return {name: hp._values.get(name, MISSING) for name in sorted(names)}


def is_same_value(value: Any, other: Any) -> bool:
    """Return whether no code can tell two values of a hyper-parameter apart.

    Python calls some values equal that code treats in other ways: for scikit-learn, 1 is a number
    of columns and 1.0 a share of them.

    >>> is_same_value(1, 1.0), is_same_value((1, 2), (True, 2)), is_same_value(0.5, 0.5)
    (False, False, True)
    """
    if value is other:
        return True
    if type(value) is not type(other) or repr(value) != repr(other):
        return False
    try:
        return bool(value == other)
    except Exception:  # noqa: BLE001 (of any type: classes say how they are compared)
        return False


def are_same_values(values: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two dictionaries have the same names and, for each, the same value."""
    return values.keys() == other.keys() and all(
        is_same_value(value, other[name]) for name, value in values.items()
    )


def share(hp: HyperParameters, other: HyperParameters) -> None:
    """Record that what was made with ``hp`` is also used with ``other``.

    The two agree on every name read so far.

    If a name in which they differ is read later, that read raises a TaskError.
    """
    hp._sharers.append(other._values)


_MENDS = {
    "data": "data are loaded once for the whole run, so give {name!r} a fixed value",
    "model": "override Task.adapt(model, hp) and read hp.{name} there to follow it, or give "
    "{name!r} a fixed value",
    "optimizer": "pass it to the optimizer as an option, such as thrifty.SGD(lr={name!r}), or give "
    "{name!r} a fixed value",
    "setup": "read it in train(epoch, hp), too, or give {name!r} a fixed value",
    "prologue": "read its .value within the loop over trial.epochs(), too, or give {name!r} a "
    "fixed value",
}


class Readings:
    """Which hyper-parameters one trial reads once, before training, and which ones it follows.

    A value that is read once is always the value at epoch 0, whatever epoch a trial resumes from.

    Args:
        task: The name of its class.
        first: The hyper-parameters at epoch 0.
        moving: The hyper-parameters known to change during training.

    Attributes:
        moving: As given.
        followed: The hyper-parameters that the optimizer, the batch size, ``adapt`` or ``train``
            follows.
    """

    def __init__(self, task: str, first: Mapping[str, Any], *, moving: Iterable[str] = ()) -> None:
        self.first = first
        self.followed: set[str] = set()
        self._task = task
        self.moving = frozenset(moving)
        self._given: dict[str, HyperParameters] = {}
        self._once: dict[str, frozenset[str]] = {}
        self._held: dict[str, str] = {}

    def once(self, method: str) -> HyperParameters:
        """Return hyper-parameters for a method called once; every read from them is recorded."""
        return self._given.setdefault(method, HyperParameters(self.first))

    def note_once(self, method: str, names: Iterable[str]) -> None:
        """Record that a method has read some names once."""
        self._once[method] = frozenset(names)

    def hold(self, name: str, reason: str) -> None:
        """Record that a hyper-parameter must not change, even if something follows it."""
        self._held[name] = reason

    @property
    def read_once(self) -> dict[str, str]:
        """The method that reads a hyper-parameter once, by the hyper-parameter's name."""
        by_method = {**{m: hp.names_read for m, hp in self._given.items()}, **self._once}
        return {name: method for method, names in by_method.items() for name in names}

    def check(self, moving: Iterable[str] = ()) -> None:
        """Refuse hyper-parameters that change, are read once and are not followed.

        Args:
            moving: Names in addition to those known at first.

        Raises:
            TaskError: There is one; the message names the method that reads it.
        """
        self.check_held(moving)
        read_once = self.read_once
        names = (self.moving | set(moving)) & read_once.keys() - self.followed
        if names:
            name = min(names)
            method = read_once[name]
            raise TaskError(
                f"{name!r} has a schedule, but {self._task}.{method} reads it only once, "
                f"before training: "
                + _MENDS.get(method, "give {name!r} a fixed value").format(name=name)
            )

    def check_held(self, moving: Iterable[str] = ()) -> None:
        """Refuse changes of hyper-parameters that must not change. The argument is as in ``check``.

        Raises:
            TaskError: One of them changes.
        """
        names = (self.moving | set(moving)) & self._held.keys()
        if names:
            name = min(names)
            raise TaskError(f"{name!r} has a schedule, but {self._task}.{self._held[name]}")

    def check_epoch(self, plan: EpochPlan) -> None:
        """Check what changes within an epoch or has changed by then. Raises as ``check`` does."""
        moved = {
            name
            for name, value in plan.values.items()
            if not is_same_value(value, self.first.get(name, value))
        }
        self.check(moved | set(plan.moving))
