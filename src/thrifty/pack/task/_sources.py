"""Data sets of trials: opened once, freed when no trial uses them, unshared if they change."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count, islice
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary, WeakSet, ref

import torch

from thrifty.core import StateError, TaskError, plain_logger
from thrifty.pack._frozen import bytes_of
from thrifty.pack._state import borrowed_streams, stream_positions
from thrifty.pack.identity import is_own, vars_of
from thrifty.pack.verify import MadeOnce, Watch, outside_of_state

from ._data import Source, datasets_of, open_source
from ._task import (
    HyperParameters,
    Task,
    are_same_values,
    count_text_as_read,
    share,
    unread,
    values_of,
)


logger = plain_logger(__name__)


NUM_RECENT = 2
"""How many of the data sets used last stay loaded for the next trial, even while unused."""

Key = TypeVar("Key")


_NUMBERS = count()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known(Generic[Key]):
    key: Key
    source: Callable[[], Source | None]
    number: int


class AliveSources(Generic[Key]):
    """Pairs of a key and a source; a pair lasts as long as its source is alive.

    This object keeps only the sources used last alive. The others live as long as their trials do.
    """

    def __init__(self) -> None:
        self._known: list[_Known[Key]] = []
        self._recent: list[Source] = []

    def __iter__(self) -> Iterator[tuple[Key, Source]]:
        self._known = [known for known in self._known if known.source() is not None]
        for known in tuple(self._known):
            source = known.source()
            if source is not None:
                yield known.key, source

    def add(self, key: Key, source: Source) -> None:
        """Record a source that was just loaded."""
        self._known.append(_Known(key=key, source=self._weakly(source), number=next(_NUMBERS)))
        self.use(source)

    def number_of(self, source: Source) -> int:
        """Return a number unique to a source in this process; unlike ``id``, it is never reused."""
        return next(known.number for known in self._known if known.source() is source)

    def use(self, source: Source) -> None:
        """Mark a source as the one used last, because a trial has begun with it."""
        others = [other for other in self._recent if other is not source]
        self._recent = [source, *others][:NUM_RECENT]

    def _weakly(self, source: Source) -> Callable[[], Source | None]:
        try:
            return ref(source)
        except TypeError:  # it allows no weak references: look it up among the recent sources
            number = id(source)
            return lambda: next((s for s in self._recent if id(s) == number), None)


class DataWatch:
    """The values that reading a source may change: attributes of data sets, globals, closures.

    Args:
        objects: The user's data sets and functions that make batches, by name.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._objects = objects
        self._watch = Watch(objects)
        self._inside = _inside(objects)
        self.written = frozenset[int]()
        """The identities of the objects that the change was written to."""

    def changed(self, *, besides: Collection[str]) -> str:
        """Return the name of a value that has changed; "" if there is none.

        Args:
            besides: Names of attributes whose changes mean nothing.
        """
        for change in self._watch.changes():
            if (
                not _derives_from_thrifty(change.holder)
                and change.name.rpartition(".")[2] not in besides
            ):
                self.written = change.objects
                return change.name
        for name, (now, number) in _inside(self._objects).items():
            before, _ = self._inside.get(name, (now, 0))
            new = frozenset[str]()
            if isinstance(now, frozenset) and isinstance(before, frozenset):
                new = now - before - set(besides)
            elif now != before and name.rpartition(".")[2] not in besides:
                new = frozenset({""})
            if new:
                self.written = frozenset({number})
                return f"{name}.{min(new)}".removesuffix(".")
        for name, number in self._watch.iterators.items():
            # The place in an open file is among what is inside.
            if name not in self._inside and name.rpartition(".")[2] not in besides:
                self.written = frozenset({number, *(n for _, n in self._inside.values())})
                return name
        return ""

    def objects(self) -> set[int]:
        """Return the identities of the objects that hold what is watched."""
        return self._watch.objects() | {number for _, number in self._inside.values()}

    def read_of(self, holder: object) -> frozenset[str]:
        """Return the names of the attributes that the data read of an object."""
        return self._watch.read_of(holder)


_MAX_DEPTH = 3
_MAX_ELEMENTS = 64
_MAX_SAMPLES = 256


def _inside(objects: Mapping[str, Any]) -> dict[str, tuple[Any, int]]:
    """Return what a watch does not see of objects and of the objects within them, by name.

    These are the names of their attributes, some elements of their tensors, which NumPy may write
    to, and the places in open files, each with the identity of the object.
    """
    out: dict[str, tuple[Any, int]] = {}
    seen: set[int] = set()
    queue = [(name, value, 0) for name, value in objects.items()]
    while queue:
        name, value, depth = queue.pop()
        if (
            id(value) in seen
            or isinstance(value, type)
            or _derives_from_thrifty(value)
            or depth > _MAX_DEPTH
        ):
            continue
        seen.add(id(value))
        content = _content(value)
        if content is not None:
            out[name] = content, id(value)
        queue += [(f"{name}{key}", each, depth + 1) for key, each in _parts(value)]
    return out


def _derives_from_thrifty(value: Any) -> bool:
    """Return whether an object is of a class of thrifty, or of one derived from it.

    Hyper-parameters note what is read of them, and graphs check the batches that they share.
    """
    names = (kind.__module__ for kind in type(value).__mro__)
    return any(n.startswith("thrifty.") and not n.startswith("thrifty.testing") for n in names)


def _content(value: Any) -> Any:
    """Return a stand-in for what may change in a value itself; None for nothing."""
    if isinstance(value, torch.Tensor):
        plain = value.layout is torch.strided and not (value.is_conj() or value.is_neg())
        if not plain or value.device.type != "cpu" or not value.is_contiguous():
            return None
        flat = value.detach().view(-1)
        return b"".join(bytes_of(flat[:: max(1, len(flat) // _MAX_SAMPLES)]))
    if isinstance(value, io.IOBase):
        return None if value.closed or not value.seekable() else value.tell()
    held = vars_of(value)
    # An installed class may fill caches of its own.
    return frozenset(map(str, held)) if held and is_own(type(value)) else None


def _parts(value: Any) -> Iterable[tuple[str, Any]]:
    """Return the objects within a value, with how each is reached."""
    if isinstance(value, torch.Tensor | io.IOBase):
        return ()
    if type(value) in (list, tuple):
        return ((f"[{i}]", each) for i, each in enumerate(value[:_MAX_ELEMENTS]))
    if type(value) is dict:
        return ((f"[{k!r}]", each) for k, each in islice(value.items(), _MAX_ELEMENTS))
    return ((f".{k}", each) for k, each in vars_of(value).items())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loaded:
    """How data were loaded, and what may change in them."""

    given: HyperParameters
    watch: DataWatch | None
    began: tuple[Any, ...]
    """The positions of the seeded streams before the data were loaded."""
    ended: tuple[Any, ...]
    """The positions after loading; they differ from those before if random numbers were drawn."""
    read_of_task: frozenset[str] = frozenset()
    users: WeakSet[Any] = field(default_factory=WeakSet)


class Sources:
    """Data sets, shared by trials that agree on what ``Task.data`` reads.

    If it draws random numbers, only trials of the same seed share them.

    Data that change while they are read are not shared: what one trial reads would depend on how
    often others have read before. Each trial then gets data of its own.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known = AliveSources[_Loaded]()
        self._changing = ""
        """What reading data has changed, so that no data of the task are shared; "" for nothing."""
        self._changed_watch: DataWatch | None = None
        """Keeps the data that were read alive, so that no other object gets their identity."""
        self._names: set[str] = set()
        """Hyper-parameters that data which change have read."""
        self.load_s = 0.0
        """How many seconds the last load of data took."""
        self.longest_load_s = 0.0
        """How many seconds the longest one took."""
        self.made: MadeOnce | None = None
        """What loads have kept since the first that left the random streams elsewhere."""
        self.is_checked = False
        """Whether it was checked that what loads keep does not depend on the seed, if possible."""

    def get(self, task: Task, hp: HyperParameters, *, user: object = None) -> Source:
        """Return the data for these hyper-parameters, and load them if necessary.

        Args:
            task: The task.
            hp: The hyper-parameters, which record what the data have read.
            user: The trial that will read them.
        """
        began = stream_positions(self._device)
        for loaded, source in () if self._changing else self._known:
            if loaded.began not in (began, loaded.ended):
                continue  # they were drawn for another seed
            # data may keep the hyper-parameters they were given, and read more of them later
            names = loaded.given.names_read
            if are_same_values(values_of(hp, names), values_of(loaded.given, names)):
                if self._changed(task, loaded):
                    break
                hp.names_read |= names
                share(loaded.given, hp)
                self._known.use(source)
                _note(loaded, user)
                return source
        is_watched = self.made is not None or self.is_checked
        made = None if is_watched else MadeOnce({"task": task})
        seconds = time.perf_counter()
        loaded, source = self._load(task, hp)
        self.load_s = time.perf_counter() - seconds
        self.longest_load_s = max(self.load_s, self.longest_load_s)
        if made is not None and loaded.ended != loaded.began:
            self.made = made  # it holds the task, so it is kept only where it is needed
        self._known.add(loaded, source)
        _note(loaded, user)
        hp.names_read |= loaded.given.names_read
        return source

    def check(self, task: Task, source: Source, *, own: Task) -> None:
        """Check before an epoch that a trial's data are what they are for the trial alone.

        Args:
            task: The task that made the data.
            source: The data.
            own: The trial's copy of the task.

        Raises:
            StateError: Data that several trials share have changed since they were loaded.
            TaskError: The data read an attribute of the task that the trial has changed.
        """
        loaded = next((key for key, each in self._known if each is source), None)
        if loaded is None:
            return
        apart = outside_of_state({"": task}, {"": own}) if loaded.read_of_task else []
        for name in apart:
            if name.partition(".")[0].partition("[")[0] in loaded.read_of_task:
                raise TaskError(
                    f"the data of {type(task).__name__} read the task's attribute {name!r}, which "
                    "a trial has changed, as in adapt; each trial has a copy of the task, so its "
                    "data would not follow; read what changes in loss or model instead"
                )
        if len(loaded.users) < 2:
            return
        what = self._changed(task, loaded)
        if what:
            raise StateError(
                f"the data of {type(task).__name__} have changed while several trials read them "
                f"({what!r}), so a trial's samples would depend on the other trials; keep nothing "
                "in a data set that changes while it is read, or name the attribute in not_state "
                "if it means nothing, as of a cache"
            )

    def _changed(self, task: Task, loaded: _Loaded) -> str:
        """Return the name of what has changed in loaded data, and log it once; "" for nothing."""
        if loaded.watch is None:
            return ""
        self._names |= loaded.given.names_read
        what = loaded.watch.changed(besides=task.not_state)
        if what and not self._changing:
            self._changing, self._changed_watch = what, loaded.watch
            logger.warning(
                "%s: reading its data changes %r, so each trial loads data of its own; if the "
                "change means nothing, as of a cache, name it in not_state, and trials share data",
                type(task).__name__,
                what,
            )
        return what

    @property
    def change_while_read(self) -> bool:
        """Whether reading data of the task changes them, so that each trial has its own."""
        return bool(self._changing)

    def drawn(self, source: Source) -> tuple[Any, ...] | None:
        """Return the positions of the streams after loading a source; None if it drew nothing."""
        loaded = next((key for key, each in self._known if each is source), None)
        return None if loaded is None or loaded.ended == loaded.began else loaded.ended

    def forget(self) -> None:
        """Forget all data, and undo what loading them has kept."""
        if self.made is not None:
            self.made.take_changed()
            self.made.undo()
        self._known, self.made = AliveSources[_Loaded](), None

    def number_of(self, source: Source) -> int:
        """Return a number unique to a source among all sources of this task, past ones included."""
        return self._known.number_of(source)

    def _load(self, task: Task, hp: HyperParameters) -> tuple[_Loaded, Source]:
        """Load data; return them with their hyper-parameters, which record what was read."""
        if not self._changing:
            with borrowed_streams():
                began = stream_positions(self._device)
                given, source, has_kept = self._open(task, hp)
                ended = stream_positions(self._device)
                watch = _watch_of(source)
                loaded = _Loaded(
                    given=given,
                    watch=watch,
                    began=began,
                    ended=ended,
                    read_of_task=_read_of(task, watch),
                )
                if has_kept and getattr(source, "has_workers", False):
                    # loader processes may read any hyper-parameter, which is not visible here
                    given.names_read.update(given)
                elif has_kept:
                    _read_a_row(source)
                elif loaded.watch is not None:
                    with suppress(Exception):  # the trial that meets this error will report it
                        _read_a_row(source)
                if not self._changed(task, loaded):
                    # the first row may have filled caches, whose results count from now on
                    return replace(loaded, watch=_watch_of(source)), source
        # Data that remember what was read: the trial gets some that are unread.
        began = stream_positions(self._device)
        given, source, _ = self._open(task, hp)
        ended = stream_positions(self._device)
        given.names_read |= self._names
        watch = _watch_of(source)
        changed = self._changed_watch
        if watch is not None and changed is not None and changed.written & watch.objects():
            raise StateError(
                f"reading the data of {type(task).__name__} changes {self._changing!r}, which is "
                "no part of what data(hp) makes anew, so trials would change each other's "
                "samples; make it in data(hp), or name it in not_state if the change means "
                "nothing, as of a cache"
            )
        # No other trial reads them, so nothing has to be watched.
        loaded = _Loaded(
            given=given, watch=None, began=began, ended=ended, read_of_task=_read_of(task, watch)
        )
        return loaded, source

    def _open(self, task: Task, hp: HyperParameters) -> tuple[HyperParameters, Source, bool]:
        """Open data; also return their hyper-parameters, and whether the data have kept them."""

        def load() -> tuple[ref[HyperParameters], set[str], Source]:
            given = unread(hp)
            source = open_source(task.data(given), device=self._device)
            count_text_as_read(given)
            return ref(given), given.names_read, source

        held, names, source = load()
        kept = held()
        if kept is not None:
            return kept, source, True
        given = unread(hp)
        given.names_read = names
        return given, source, False


def _note(loaded: _Loaded, user: object) -> None:
    if user is not None:
        loaded.users.add(user)


def _read_of(task: Task, watch: DataWatch | None) -> frozenset[str]:
    return frozenset() if watch is None else watch.read_of(task)


def _watch_of(source: Source) -> DataWatch | None:
    """Return a watch of the user's code that makes batches; None if there is none."""
    objects = datasets_of(source)
    return DataWatch(objects) if objects else None


def _read_a_row(source: Source) -> None:
    """Read a row, to find the hyper-parameters that it reads and what it changes."""
    next(iter(source.train_batches(seed=0, epoch=0, batch_size=1)), None)
    next(iter(source.valid_batches(batch_size=1)), None)


# kept as long as the task: the check before a study and the worker in this process load once
_SOURCES: WeakKeyDictionary[Task, dict[torch.device, Sources]] = WeakKeyDictionary()


def sources_of(task: Task, device: torch.device) -> Sources:
    """Return the shared sources of a task on a device."""
    return _SOURCES.setdefault(task, {}).setdefault(device, Sources(device))
