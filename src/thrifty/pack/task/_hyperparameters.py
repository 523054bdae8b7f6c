"""Hyper-parameters as tasks read them, and a record of what was read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from thrifty.core import TaskError, check_hyperparameter_names
from thrifty.pack._backend import EpochPlan


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

    __slots__ = ("__weakref__", "_sharers", "_values", "names_read")

    def __init__(self, values: Mapping[str, Any]) -> None:
        check_hyperparameter_names(values)
        self._values = dict(values)
        self._sharers: list[Mapping[str, Any]] = []
        self.names_read: set[str] = set()

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
        return f"HyperParameters({self._values!r})"

    def _check_shared(self, name: str) -> None:
        value = self._values.get(name)
        if any(other.get(name) != value for other in self._sharers):
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


def values_of(hp: HyperParameters, names: Iterable[str]) -> dict[str, Any]:
    """Return the values of some names, None for missing ones; does not count as reading."""
    return {name: hp._values.get(name) for name in sorted(names)}


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

    def __init__(
        self, task: str, first: Mapping[str, Any], *, moving: Iterable[str] = ()
    ) -> None:
        self.first = first
        self.followed: set[str] = set()
        self._task = task
        self.moving = frozenset(moving)
        self._given: dict[str, HyperParameters] = {}
        self._once: dict[str, frozenset[str]] = {}

    def once(self, method: str) -> HyperParameters:
        """Return hyper-parameters for a method called once; every read from them is recorded."""
        return self._given.setdefault(method, HyperParameters(self.first))

    def note_once(self, method: str, names: Iterable[str]) -> None:
        """Record that a method has read some names once."""
        self._once[method] = frozenset(names)

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

    def check_epoch(self, plan: EpochPlan) -> None:
        """Check what changes within an epoch or has changed by then. Raises as ``check`` does."""
        moved = {n for n, value in plan.values.items() if value != self.first.get(n, value)}
        self.check(moved | set(plan.moving))
