"""What adapters of other libraries share: kept trainers, options, descriptions of objects."""

from __future__ import annotations

import functools
import hashlib
import inspect
import math
import re
import sysconfig
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any, ClassVar

import numpy as np
import torch
from torch.optim.lr_scheduler import LambdaLR

from thrifty.core import DivergedError, TaskError, derive_seed
from thrifty.pack import HyperParameters, Task, Trainable, borrowed_streams
from thrifty.pack._state import seed_everything, state_versions, with_versions
from thrifty.pack.task._task import are_same_values, count_text_as_read, unread, values_of


class HpMemo:
    """Calls ``make(hp)`` once for a trial, and again if what it reads of ``hp`` has changed.

    Trials never share what it returns: a data module may count its epochs, and one trial would see
    the count of another. Random draws of ``make`` depend only on the trial's seed.

    >>> rows = HpMemo(lambda hp: list(range(hp.rows)))
    >>> first = rows.get(HyperParameters({"rows": 3, "lr": 0.1}), seed=0)
    >>> first is rows.get(HyperParameters({"rows": 3, "lr": 0.2}), seed=0)
    True
    """

    def __init__(self, make: Callable[[HyperParameters], Any]) -> None:
        self._make = make
        self._read: HyperParameters | None = None
        self.made: Any = None

    def get(self, hp: HyperParameters, *, seed: int) -> Any:
        """Return the object that ``make`` returns for these hyper-parameters."""
        # Compare names now: a data module may keep its `hp` and read more of it later.
        names = set() if self._read is None else self._read.names_read
        if self._read is None or not are_same_values(
            values_of(hp, names), values_of(self._read, names)
        ):
            self._read = unread(hp)
            with borrowed_streams():
                seed_everything(derive_seed(seed, "data"))
                self.made = self._make(self._read)
            count_text_as_read(self._read)
        hp.names_read |= self._read.names_read
        return self.made


class KeptTrainable(Trainable):
    """A task whose only state between epochs is what the last epoch left.

    That state is ``_kept``. It includes the epoch's ``metrics``, ``ended`` if the user's code has
    stopped training, and ``finished`` if hooks at the end of a run leave other weights than those
    that the next epoch begins with.
    """

    _thrifty_internals: ClassVar[frozenset[str]] = frozenset(("_kept",))
    """Its own attributes that are no state of the user's code."""
    _thrifty_of_data: ClassVar[tuple[str, ...]] = ("self._data.", "self._made[", "task._datasets[")
    """How the names of values begin that data keep, for messages."""

    def __init__(self, *, version: str) -> None:
        if version:  # else that of a subclass counts
            self.version = version
        self._kept: dict[str, Any] = {}

    def setup(self, hp: HyperParameters, *, seed: int, device: torch.device) -> None:
        """Discard the state of the previous trial."""
        self._hp, self._seed, self._device = hp, seed, device
        self._kept = {}

    def evaluate(self) -> Mapping[str, float]:
        """Return the metrics of the last epoch.

        Raises:
            TaskError: No epoch has been trained.
        """
        if not self._kept:
            raise TaskError(f"nothing has been trained yet: {type(self).__name__} has no metrics")
        metrics: Mapping[str, float] = self._kept["metrics"]
        return metrics

    def _has_ended(self, hp: HyperParameters) -> bool:
        """Return whether the user's code has stopped training in an earlier epoch.

        Such a trial trains nothing: its last metrics hold for all later epochs.
        """
        if not self._kept.get("ended"):
            return False
        self._hp = hp
        return True

    def _finished(
        self, weights: Mapping[str, Any], frozen: Mapping[str, str]
    ) -> tuple[Mapping[str, Any], Mapping[str, str]]:
        """Return the weights of the finished model, and the digests of what they leave out.

        Args:
            weights: The weights that the next epoch begins with.
            frozen: The digests of what they leave out.
        """
        left = self._kept.get("finished")
        return (weights, frozen) if left is None else (left["weights"], left["frozen"])

    def state(self) -> Any:
        """Return weights, optimizers, schedulers, and the progress of the trainer."""
        return self._kept

    def load_state(self, state: Any) -> None:
        """Restore what ``state`` returned."""
        self._kept = state


def check_loss(loss: float, *, epoch: int, clipping: str) -> None:
    """Check that the loss is finite.

    Args:
        loss: Training loss of the epoch.
        epoch: The epoch.
        clipping: The trainer's name of the option for gradient clipping, for the message.

    Raises:
        DivergedError: The loss is not finite.
    """
    if not math.isfinite(loss):
        raise DivergedError(
            f"the training loss of epoch {epoch + 1} is {loss}; a smaller learning rate, a warm-up "
            f"or {clipping} may help"
        )


def set_by_class(task: Task | Trainable, of: type, given: Mapping[str, Any]) -> set[str]:
    """Return the options at their defaults that a subclass of the user's sets as attributes.

    Args:
        task: The task.
        of: The class of thrifty whose ``__init__`` has the options.
        given: Their values.
    """
    options = inspect.signature(of).parameters
    kinds = type(task).__mro__[: type(task).__mro__.index(of)]
    return {
        name
        for name, value in given.items()
        if value is options[name].default and any(name in vars(kind) for kind in kinds)
    }


def check_class(task: Task | Trainable, of: type, given: Mapping[str, Any]) -> None:
    """Check that no subclass sets options as attributes, which would have no effect.

    Raises:
        TaskError: One does.
    """
    for name in sorted(set_by_class(task, of, given)):
        raise TaskError(
            f"{type(task).__name__}.{name} is set in the class, which has no effect; give it to "
            f"{of.__name__}: super().__init__(..., {name}=...)"
        )


def check_steps(name: str, steps_per_epoch: int | None, *, max_steps: int | None = None) -> None:
    """Check how long an epoch is, and when training ends, both in optimizer steps.

    Args:
        name: The adapter, for the message.
        steps_per_epoch: Length of an epoch; None: one pass over the data.
        max_steps: Length of the training; None: unknown.

    Raises:
        TaskError: One of them is not positive, or ``steps_per_epoch`` is missing although there is
            ``max_steps``.
    """
    for option, value in (("steps_per_epoch", steps_per_epoch), ("max_steps", max_steps)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise TaskError(f"{name}: {option} must be a positive integer, got {value!r}")
    if steps_per_epoch is None and max_steps is not None:
        raise TaskError(
            f"{name}: max_steps={max_steps} needs steps_per_epoch, the number of optimizer "
            "steps after which a trial is evaluated and may be stopped; add steps_per_epoch "
            "to the task, or leave max_steps out and let an epoch be a pass over the data"
        )


def check_max_steps(
    name: str, max_steps: int | None, *, steps_per_epoch: int | None, epoch: int
) -> None:
    """Check that training has not ended before an epoch does.

    Args:
        name: The option that says ``max_steps``, for the message.
        max_steps: Length of the training in optimizer steps; None: unknown.
        steps_per_epoch: Length of an epoch in optimizer steps.
        epoch: The epoch.

    Raises:
        TaskError: The epoch ends after ``max_steps``.
    """
    if max_steps is not None and steps_per_epoch and max_steps < (epoch + 1) * steps_per_epoch:
        raise TaskError(
            f"{name}: training ends after {max_steps} steps, and epoch {epoch + 1} of "
            f"{steps_per_epoch} steps ends after {(epoch + 1) * steps_per_epoch}; give it "
            "steps_per_epoch times the max_epochs of the algorithm"
        )


_TAG = "thrifty:kind"


def to_plain(value: Any) -> Any:
    """Convert a nested state to dicts, lists, tensors and plain values.

    Other containers are marked with their kind. NumPy numbers become Python numbers, NumPy arrays
    become tensors. Values of unknown types stay as they are.

    >>> to_plain({"milestones": {3, 1}, "best": np.float64(0.5)})
    {'milestones': {'thrifty:kind': 'set', 'inside': [1, 3]}, 'best': 0.5}
    """
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return _marked("array", torch.from_numpy(value.copy()))
    if isinstance(value, Counter):
        return _marked("counter", [[to_plain(k), count] for k, count in value.items()])
    if isinstance(value, set | frozenset):
        return _marked(type(value).__name__, [to_plain(item) for item in sorted(value, key=repr)])
    if isinstance(value, deque):
        return _marked("deque", [value.maxlen, *(to_plain(item) for item in value)])
    if isinstance(value, Mapping):
        plain = {key: to_plain(inside) for key, inside in value.items()}
        return with_versions(plain, state_versions(value))
    if isinstance(value, list | tuple):
        # A named tuple comes back as a plain tuple.
        return (list if isinstance(value, list) else tuple)(to_plain(item) for item in value)
    return value


def from_plain(value: Any) -> Any:
    """Return the value that ``to_plain`` converted.

    >>> from_plain(to_plain({"milestones": {3, 1}}))
    {'milestones': {1, 3}}
    """
    if isinstance(value, Mapping):
        kind = value.get(_TAG)
        if kind is None:
            held = {key: from_plain(inside) for key, inside in value.items()}
            return with_versions(held, state_versions(value))
        return _unmarked(kind, value["inside"])
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(from_plain(item) for item in value)
    return value


def _marked(kind: str, inside: Any) -> dict[str, Any]:
    return {_TAG: kind, "inside": inside}


def _unmarked(kind: str, inside: Any) -> Any:
    if kind == "array":
        return inside.numpy()
    items = from_plain(inside)
    if kind == "counter":
        return Counter(dict(items))
    if kind == "deque":
        return deque(items[1:], maxlen=items[0])
    return set(items) if kind == "set" else frozenset(items)


Options = list[list[dict[str, Any]]]
"""Options by optimizer, by parameter group, by name."""

_PLAIN_OPTIONS = (bool, int, float, str, tuple, type(None), torch.Tensor)


def options_of(optimizers: Sequence[torch.optim.Optimizer]) -> Options:
    """Return the options of fresh optimizers.

    A learning rate that a scheduler controls is given by the value at which the scheduler started.

    >>> layer = torch.nn.Linear(1, 1)
    >>> options_of([torch.optim.SGD(layer.parameters(), lr=0.1)])[0][0]["lr"]
    0.1
    """
    return [[_options(group) for group in optimizer.param_groups] for optimizer in optimizers]


def follow(
    optimizers: Sequence[torch.optim.Optimizer],
    schedulers: Sequence[Any],
    *,
    before: Options,
    now: Options,
) -> None:
    """Update options that differ between two fresh optimizers in optimizers with restored state.

    Raises:
        TaskError: The learning rate has changed, but a scheduler controls it that does not multiply
            it; or there are other parameter groups than before.
    """
    for optimizer, old_groups, new_groups in zip(optimizers, before, now, strict=True):
        if not len(old_groups) == len(new_groups) == len(optimizer.param_groups):
            raise TaskError(
                f"{type(optimizer).__name__} had {len(old_groups)} parameter groups in the epoch "
                f"before and has {len(new_groups)} now; it is made anew for each epoch, so groups "
                "that a callback adds later are lost: give it all groups from the beginning, with "
                "a schedule of rates for those that are to train later"
            )
        for index, (old, new) in enumerate(zip(old_groups, new_groups, strict=True)):
            group = optimizer.param_groups[index]
            for name, value in new.items():
                if name not in old or old[name] == value:
                    continue
                scheduler = _scheduler_of(optimizer, schedulers) if name == "lr" else None
                if scheduler is not None:
                    _restart(scheduler, group, index, lr=value)
                else:
                    _put(group, name, value)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    out = {
        name: float(value) if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name not in ("params", "param_names", "initial_lr") and isinstance(value, _PLAIN_OPTIONS)
    }
    if "initial_lr" in group:
        out["lr"] = float(group["initial_lr"])
    return out


def _put(group: dict[str, Any], name: str, value: Any) -> None:
    if isinstance(group[name], torch.Tensor):
        group[name].fill_(value)
    else:
        group[name] = value


def _restart(scheduler: Any, group: dict[str, Any], index: int, *, lr: float) -> None:
    if not isinstance(scheduler, LambdaLR):
        raise TaskError(
            f"the learning rate follows a hyper-parameter that changes over time (now {lr:g}), and "
            f"{type(scheduler).__name__} of the model's own code changes it, too; leave one of "
            "them out: the schedule of the space, or the scheduler"
        )
    group["initial_lr"] = scheduler.base_lrs[index] = lr
    _put(group, "lr", lr * scheduler.lr_lambdas[index](scheduler.last_epoch))


def _scheduler_of(optimizer: Any, schedulers: Sequence[Any]) -> Any:
    owned = [s for s in schedulers if _bare(s.optimizer) is _bare(optimizer)]
    return owned[0] if owned else None


def _bare(optimizer: Any) -> Any:
    """Return the inner optimizer, since some libraries wrap optimizers."""
    return getattr(optimizer, "optimizer", optimizer)


Describe = Callable[[Any], str]
Otherwise = Callable[[Any, Describe], str]
"""Describes a value that is neither code nor plain, given the function for its parts."""

_LIBRARIES = tuple(
    str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "purelib", "platlib")
)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...))


def by_shape(value: Any, describe: Describe) -> str:  # noqa: ARG001
    """Describe data by shape, because they may be large.

    If you change only the values of data, change ``version``, too.
    """
    if isinstance(value, torch.Tensor | np.ndarray):
        return f"{type(value).__name__}{tuple(value.shape)}:{value.dtype}"
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def described(value: Any, *, otherwise: Otherwise = by_shape) -> str:
    """Describe a value in text that does not change from run to run.

    A function is described by its code, its captured values, and the user's own classes and
    functions that it names. Libraries are described by their names only.

    >>> described(lambda hp: hp.width) == described(lambda hp: hp.width)
    True
    >>> described(lambda hp: hp.width) == described(lambda hp: hp.depth)
    False
    """
    return _Description(otherwise).of(value)


class _Description:
    def __init__(self, otherwise: Otherwise) -> None:
        self._otherwise = otherwise
        self._within: list[Callable[..., Any]] = []
        """Functions being described. A captured value may refer back to one of them."""

    def of(self, value: Any) -> str:
        if isinstance(value, _PLAIN):
            return repr(value)
        if isinstance(value, functools.partial):
            return f"partial({self.of((value.func, value.args, value.keywords))})"
        if inspect.ismethod(value):
            return f"method({self.of((value.__self__, value.__func__))})"
        if inspect.isfunction(value):
            return self._function(inspect.unwrap(value))
        if isinstance(value, type):
            return _class(value)
        return self._collection(value)

    def _collection(self, value: Any) -> str:
        if isinstance(value, Mapping):
            items = sorted((repr(key), self.of(inside)) for key, inside in value.items())
            return f"{{{', '.join(f'{key}: {inside}' for key, inside in items)}}}"
        if isinstance(value, list | tuple):
            return f"({', '.join(map(self.of, value))})"
        if isinstance(value, set | frozenset):
            return f"{{{', '.join(sorted(map(self.of, value)))}}}"
        return self._otherwise(value, self.of)

    def _function(self, function: Callable[..., Any]) -> str:
        if function in self._within:
            return f"function number {self._within.index(function)}"
        plain: Any = function
        if not plain.__closure__ and not _source(plain):
            return f"{plain.__module__}.{plain.__qualname__}"
        self._within.append(function)
        code: CodeType = plain.__code__
        parts = [_code(code), self.of(plain.__defaults__), self.of(plain.__kwdefaults__)]
        parts += [self._captured(cell) for cell in plain.__closure__ or ()]
        parts += [f"{name}={text}" for name, text in _named(code, plain.__globals__)]
        self._within.pop()
        return f"function {_digest(*parts)}"

    def _captured(self, cell: Any) -> str:
        try:
            value = cell.cell_contents
        except ValueError:  # not bound yet
            return ""
        return self.of(value)


def _code(code: CodeType) -> str:
    inside = [_code(c) if isinstance(c, CodeType) else described(c) for c in code.co_consts]
    return _digest(code.co_code.hex(), *code.co_names, *code.co_varnames, *inside)


def _named(code: CodeType, names: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the user's own objects that code names, with descriptions.

    Classes and functions are described by their source, plain values by themselves.
    """
    for name in code.co_names:
        value = names.get(name)
        if isinstance(value, type):
            yield name, _class(value)
        elif inspect.isfunction(value):
            yield name, _source(value) or value.__qualname__
        elif isinstance(value, bool | int | float | str):
            yield name, repr(value)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _named(constant, names)


def _class(kind: type) -> str:
    sources = [text for base in kind.__mro__ if (text := _source(base))]
    return f"{kind.__module__}.{kind.__qualname__} {_digest(*sources)}"


def _source(thing: Any) -> str:
    """Return the source of a user's object; an empty text for a library's."""
    try:
        file = Path(inspect.getfile(thing)).resolve()
        if str(file).startswith(_LIBRARIES) or "site-packages" in file.parts:
            return ""
        return inspect.getsource(thing)
    except (OSError, TypeError):  # built in, or typed at a prompt
        members = vars(thing).items() if isinstance(thing, type) else [("", thing)]
        codes = [getattr(member, "__code__", None) for _, member in sorted(members, key=_name)]
        return _digest(*(_code(code) for code in codes if code is not None))


def _name(item: tuple[str, Any]) -> str:
    return item[0]


def _digest(*parts: str) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for part in parts:
        digest.update(part.encode())
        digest.update(b"\0")
    return digest.hexdigest()
