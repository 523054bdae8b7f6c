"""Random generators that data sets, transforms and collate functions keep; seeded for each batch.

A data set that draws from a generator of its own remembers how often it was read. A trial that is
resumed, or that reads it beside others, would get other samples. So the generators are seeded
before each batch, as the global streams are, and put back after it.

A data set may also draw from a copy of a generator that it keeps, so that the noise of a sample is
the same at each read. Seeding must not change that: while a generator is as it was seeded, copies
of it are as it was before (``_Original``).
"""

from __future__ import annotations

import copy
import copyreg
import random
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
import torch.utils.data

from thrifty.core import TaskError, derive_seed
from thrifty.pack.identity import slots_of, vars_of
from thrifty.pack.identity._contents import is_a


_MAX_DEPTH = 8
_MAX_ELEMENTS = 256
"""Elements of one container that are looked at; a list of samples may have millions."""
_MAX_OBJECTS = 10_000

_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class OwnGenerators:
    """The random generators within some objects.

    Looks at attributes, elements of small containers, and what functions enclose. Python's,
    NumPy's and PyTorch's global generators are left out: they are the global streams.

    Args:
        objects: Data sets and functions, by name.
        besides: Generators that are left out.

    >>> class Noisy:
    ...     def __init__(self):
    ...         self.rng = np.random.default_rng()
    >>> noisy = Noisy()
    >>> found = OwnGenerators({"data.train": noisy})
    >>> with found.seeded(1):
    ...     one = noisy.rng.random()
    >>> with found.seeded(1):
    ...     one == noisy.rng.random()
    True
    """

    def __init__(self, objects: Mapping[str, Any], *, besides: Iterable[Any] = ()) -> None:
        self._found = dict(_generators_in(objects, besides=besides))

    def __bool__(self) -> bool:
        """Return whether there is one."""
        return bool(self._found)

    def drawn_from(self) -> list[str]:
        """Return the names of those that were drawn from since they were seeded."""
        found = {name: _original_of(each) for name, each in self._found.items()}
        return [n for n, each in found.items() if each is not None and not _is_as_seeded(each)]

    def seed(self, seed: int) -> None:
        """Seed the generators, each by its name as well."""
        for name, each in self._found.items():
            own = derive_seed(seed, name)
            _remember(each, seed=own)
            _seed(each, own)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Put the generators back at the end.

        Raises:
            TaskError: Code has copied a seeded generator, and then drawn from the generator itself.
        """
        states = [(each, _state(each), _original_of(each)) for each in self._found.values()]
        before = [None if original is None else replace(original) for *_, original in states]
        mixed = None
        try:
            yield
            mixed = next((n for n, each in self._found.items() if _is_copied_and_drawn(each)), None)
        finally:
            for (each, state, _), original in zip(states, before, strict=True):
                _put_back(each, state)
                _forget(each, original)
        if mixed is not None:
            raise TaskError(
                f"the data copy the generator {mixed} when they are read, and draw from it as "
                "well, so what a copy draws depends on how often the data were read before; make "
                "the copy once, where the generator is made, or draw from one of them only"
            )

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Seed the generators, and put them back at the end."""
        with self.kept():
            self.seed(seed)
            yield

    def iterated(self, batches: Iterable[Any], seeds: Iterator[int]) -> Iterator[Any]:
        """Yield batches; the generators are seeded while the iterator is made and for each batch.

        Args:
            batches: A loader.
            seeds: A seed for the iterator, which may start processes, and one for each batch.
        """
        with self.seeded(next(seeds)):
            iterator = iter(batches)
        for seed in seeds:
            with self.seeded(seed):
                batch = next(iterator, _END)
            if batch is _END:
                return
            yield batch


class SeededWorker:
    """Seeds the generators in a process of a ``DataLoader``, which would be equal in all of them.

    Args:
        functions: Functions of the loader, by name.
        seed: The seed.
        then: The user's ``worker_init_fn``, which is called afterwards.
    """

    def __init__(
        self, functions: Mapping[str, Any], seed: int, *, then: Callable[[int], None] | None
    ) -> None:
        self._functions, self._seed, self._then = functions, seed, then

    def __call__(self, worker: int) -> None:
        info: Any = torch.utils.data.get_worker_info()
        found = OwnGenerators({"data": info.dataset, **self._functions})
        found.seed(derive_seed(self._seed, "worker", worker))
        if self._then is not None:
            self._then(worker)


_END = object()


def _generators_in(
    objects: Mapping[str, Any], *, besides: Iterable[Any]
) -> Iterator[tuple[str, Any]]:
    """Yield generators by how they are reached, the same in each process."""
    seen = {id(each) for each in (*_global_ones(), *besides)}
    queue = deque((name, value, 0) for name, value in objects.items())
    while queue and len(seen) < _MAX_OBJECTS:
        name, value, depth = queue.popleft()
        if id(value) in seen or is_a(value, _CLOSED):
            continue
        seen.add(id(value))
        if is_a(value, _KINDS):
            if _can_be_seeded(value):
                yield name, value
        elif depth < _MAX_DEPTH:
            parts = _parts(value)
            if type(value).__module__.partition(".")[0] == "datasets":
                # It draws from copies of its own generators, the same in each pass.
                parts = [(key, each) for key, each in parts if not is_a(each, _KINDS)]
            queue += ((f"{name}{key}", each, depth + 1) for key, each in parts)


_CLOSED = (
    type, ModuleType, torch.Tensor, np.ndarray, np.generic, str, bytes, bytearray, int, float,
    complex, type(None),
)  # fmt: skip
"""Types of objects that hold no generator, or that are not looked into."""


def _global_ones() -> Iterable[Any]:
    libraries: tuple[Any, Any] = (np.random.mtrand, random)
    return (torch.default_generator, libraries[0]._rand, libraries[1]._inst)


def _parts(value: Any) -> Iterable[tuple[str, Any]]:
    """Return the objects within a value, with how each is reached. Runs none of the user's code."""
    if is_a(value, FunctionType):
        cells = value.__closure__ or ()
        names = value.__code__.co_freevars
        held = ((f".<closure>.{n}", cell) for n, cell in zip(names, cells, strict=True))
        return (*held, *_elements(value.__defaults__ or ()), *_items(value.__kwdefaults__ or {}))
    if is_a(value, CellType):
        try:
            return (("", value.cell_contents),)
        except ValueError:  # it is empty
            return ()
    if is_a(value, MethodType):
        return ((".__func__", value.__func__), (".__self__", value.__self__))
    if is_a(value, partial):
        return ((".func", value.func), *_elements(value.args), *_items(value.keywords))
    for base in _SEQUENCES:
        if is_a(value, base):
            return (*_elements(base.__iter__(value)), *_attributes(value))
    if is_a(value, dict):
        return (*_items(value), *_attributes(value))
    return _attributes(value)


_SEQUENCES: tuple[Any, ...] = (list, tuple, deque)


def _elements(values: Iterable[Any]) -> Iterable[tuple[str, Any]]:
    return [(f"[{i}]", each) for i, each in enumerate(islice(values, _MAX_ELEMENTS))]


def _items(values: dict[Any, Any]) -> Iterable[tuple[str, Any]]:
    """Return the values of a mapping; keys that are no texts may have an address as their text."""
    return [
        (f"[{key!r}]" if isinstance(key, str) else f"[#{i}]", each)
        for i, (key, each) in enumerate(islice(dict.items(values), _MAX_ELEMENTS))
    ]


def _attributes(value: Any) -> Iterable[tuple[str, Any]]:
    out = [(f".{name}", each) for name, each in vars_of(value).items()]
    for kind in type(value).__mro__:
        for name in slots_of(kind):
            try:
                out.append((f".{name}", vars(kind)[name].__get__(value)))
            except (AttributeError, KeyError):  # an empty slot, or one of a base class
                continue
    return out


def is_readable_by_index(dataset: Any) -> bool:
    """Return whether a data set has items and a length."""
    kind = type(dataset)
    if issubclass(kind, torch.utils.data.IterableDataset):  # its item access only raises
        return False
    return hasattr(kind, "__len__") and hasattr(kind, "__getitem__")


# -- copies of seeded generators -----------------------------------------------------------


@dataclass(slots=True)
class _Original:
    """A generator that was seeded, and its state before that.

    Attributes:
        generator: The generator, so that no other object gets its place in memory.
        state: Its state before it was seeded first.
        seed: What it was seeded with.
        thread: The thread that seeded it, which reads data now.
        is_copied: Whether it was copied since.
    """

    generator: Any
    state: Any
    seed: int
    thread: int
    is_copied: bool = False


_originals: OrderedDict[int, _Original] = OrderedDict()
"""By the places of generators in memory; those of the last data sets that were read."""


def _remember(generator: Any, *, seed: int) -> None:
    """Note the state of a generator that is going to be seeded."""
    found, core = _original_of(generator), _core(generator)
    state = _state(generator) if found is None else found.state
    _originals[id(core)] = _Original(generator, state, seed, threading.get_ident())
    _originals.move_to_end(id(core))
    while len(_originals) > _MAX_OBJECTS:
        _originals.popitem(last=False)
    if type(core) not in copyreg.dispatch_table:
        copyreg.pickle(type(core), _reduced)


def _forget(generator: Any, original: _Original | None) -> None:
    """Forget that a generator was seeded; if it was so before, note that again."""
    if original is None:
        _originals.pop(id(_core(generator)), None)
    else:
        _originals[id(_core(generator))] = original


def _original_of(generator: Any) -> _Original | None:
    """Return what is noted of a generator, or of the bit generator of one."""
    core = _core(generator)
    found = _originals.get(id(core))
    return found if found is not None and _core(found.generator) is core else None


def _core(generator: Any) -> Any:
    """Return what holds the state of a generator."""
    return generator.bit_generator if isinstance(generator, np.random.Generator) else generator


def _is_copied_and_drawn(generator: Any) -> bool:
    original = _original_of(generator)
    return original is not None and original.is_copied and not _is_as_seeded(original)


def _is_as_seeded(original: _Original) -> bool:
    """Return whether nothing was drawn from a generator since it was seeded."""
    generator = original.generator
    now = _state(generator)
    _seed(generator, original.seed)
    seeded = _state(generator)
    _put_back(generator, now)
    return _same(now, seeded)


def _reduced(core: Any) -> Any:
    """Return what makes a copy of a generator, as ``copy`` and ``pickle`` ask for it."""
    original = _original_of(core)
    if original is None or original.thread != threading.get_ident() or not _is_as_seeded(original):
        return core.__reduce_ex__(_PROTOCOL)
    original.is_copied = True
    now = _state(original.generator)
    del _originals[id(core)]
    _put_back(original.generator, original.state)
    try:
        made = copy.deepcopy(core)
    finally:
        _put_back(original.generator, now)
        _originals[id(core)] = original
    return _itself, (made,)


def _itself(value: Any) -> Any:
    return value


_PROTOCOL = 4
"""That of ``copy``."""


# -- states of generators ------------------------------------------------------------------


def _same(one: Any, other: Any) -> bool:
    """Return whether two states are equal."""
    if isinstance(one, dict):
        return all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, tuple):
        return all(map(_same, one, other))
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other))
    if isinstance(one, np.random.SeedSequence):
        return bool(one.state == other.state)
    return bool(one == other)


_SEED_BYTES = 8
"""The state of a generator of PyTorch begins with its seed; on a CPU nothing is drawn from it."""


def _can_be_seeded(generator: Any) -> bool:
    if isinstance(generator, np.random.Generator):
        return type(generator.bit_generator).__module__.startswith("numpy.random")
    return not isinstance(generator, random.SystemRandom)


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.__getstate__()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state()
    return random.Random.getstate(generator)


def _put_back(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        bits: Any = generator.bit_generator
        bits.__setstate__(state)
    elif isinstance(generator, torch.Generator | np.random.RandomState):
        generator.set_state(state)
    else:
        random.Random.setstate(generator, state)


def _seed(generator: Any, seed: int) -> None:
    """Let a generator draw other numbers. Code that makes others from its seed still gets that.

    What a generator of NumPy spawns differs, too.
    """
    if isinstance(generator, torch.Generator):
        own = generator.get_state()
        generator.manual_seed(seed)
        if generator.device.type == "cpu":
            generator.set_state(torch.cat([own[:_SEED_BYTES], generator.get_state()[_SEED_BYTES:]]))
    elif isinstance(generator, np.random.Generator):
        bits: Any = generator.bit_generator
        state: Any = type(bits)(seed).state
        if isinstance(bits.__getstate__(), tuple):  # since NumPy 2
            state = (state, _spawning(bits.seed_seq, seed))
        bits.__setstate__(state)
    elif isinstance(generator, np.random.RandomState):
        generator.seed(seed % 2**32)
    else:
        random.Random.seed(generator, seed)


def _spawning(sequence: Any, seed: int) -> Any:
    """Return a seed sequence of the same seed that spawns other ones."""
    if not isinstance(sequence, np.random.SeedSequence):  # the user's own
        return sequence
    return np.random.SeedSequence(
        sequence.entropy,
        spawn_key=sequence.spawn_key,
        pool_size=sequence.pool_size,
        n_children_spawned=seed % 2**31,
    )
