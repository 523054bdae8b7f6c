"""What adapters of other libraries' trainers share."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LambdaLR

from thrifty.core import DivergedError, TaskError, derive_seed
from thrifty.pack import HyperParameters, Trainable, borrowed_streams
from thrifty.pack._random import seed_everything
from thrifty.pack._state import state_versions, with_versions
from thrifty.pack.task._hyperparameters import unread, values_of


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
        if self._read is None or values_of(hp, names) != values_of(self._read, names):
            self._read = unread(hp)
            with borrowed_streams():
                seed_everything(derive_seed(seed, "data"))
                self.made = self._make(self._read)
        hp.names_read |= self._read.names_read
        return self.made


class KeptTrainable(Trainable):
    """A task whose only state between epochs is what the last epoch left.

    That state is ``_kept``. It includes the epoch's ``metrics``.
    """

    def __init__(self, *, version: str) -> None:
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
            raise TaskError(
                f"nothing has been trained yet: {type(self).__name__} has no metrics"
            )
        metrics: Mapping[str, float] = self._kept["metrics"]
        return metrics

    def state(self) -> Any:
        """Return weights, optimisers, schedulers, and the progress of the trainer."""
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
        return _marked(
            type(value).__name__, [to_plain(item) for item in sorted(value, key=repr)]
        )
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
"""Options by optimiser, by parameter group, by name."""

_PLAIN = (bool, int, float, str, tuple, type(None), torch.Tensor)


def options_of(optimizers: Sequence[torch.optim.Optimizer]) -> Options:
    """Return the options of fresh optimisers.

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
    """Update options that differ between two fresh optimisers in optimisers with restored state.

    Raises:
        TaskError: The learning rate has changed, but a scheduler controls it that does not multiply
            it.
    """
    for optimizer, old_groups, new_groups in zip(optimizers, before, now, strict=True):
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
        if name not in ("params", "param_names", "initial_lr") and isinstance(value, _PLAIN)
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
    """Return the inner optimiser, since some libraries wrap optimisers."""
    return getattr(optimizer, "optimizer", optimizer)
