"""Runs of a Trainer for one epoch each: their batches, and hooks of the user's.

``StepBatches`` makes epochs of a fixed number of batches from passes over a loader, one after
another. Hooks that a Trainer calls once in a run are called in each epoch here. What they change is
kept out of the epochs that follow, as in one run.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Sized
from itertools import count, islice
from typing import Any, TypedDict

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from thrifty.core import TaskError, derive_seed, plain_logger
from thrifty.pack import borrowed_streams
from thrifty.pack._frozen import checksums
from thrifty.pack._state import seed_everything, state_versions, with_versions
from thrifty.pack.task._own_generators import OwnGenerators
from thrifty.pack.verify import same

from ._model_copies import Digests


class StepBatches:
    """The batches ``start`` to ``start + num_batches`` of endless passes over a loader.

    When the data end, the next pass begins. The order of a pass depends only on the seed and on the
    number of the pass, so an epoch that begins within a pass goes on where the last one ended.
    Batches before ``start`` are skipped without being read where the loader is a ``DataLoader``
    over a map-style data set; other loaders are read from their beginning.

    Args:
        loader: A ``DataLoader``, or any iterable of batches that can be read several times.
        seed: Seed of the order of all passes.
        epoch_seed: Seed of what the loader draws in this epoch besides the order.
        start: How many batches earlier epochs have taken.
        num_batches: Length of the epoch, in batches.

    Raises:
        TaskError: The loader is an iterator, which can be read only once, or has no batches.

    >>> list(StepBatches([1, 2, 3], seed=0, epoch_seed=0, start=4, num_batches=4))
    [2, 3, 1, 2]
    """

    def __init__(
        self, loader: Iterable[Any], *, seed: int, epoch_seed: int, start: int, num_batches: int
    ) -> None:
        if isinstance(loader, Iterator):
            raise TaskError(
                f"steps_per_epoch: the training data are a {type(loader).__name__}, which can be "
                "read only once, and a trial that is resumed has to read it again; give a "
                "DataLoader, or a list or class of your own that returns a new iterator each time"
            )
        self._loader = loader
        self._seed = seed
        self._epoch_seed = epoch_seed
        self._start = start
        self._num_batches = num_batches

    def __len__(self) -> int:
        """Return the length of the epoch, in batches."""
        return self._num_batches

    @property
    def dataset(self) -> Any:
        """The data set of the loader."""
        return self._loader.dataset  # type: ignore[attr-defined]

    def __iter__(self) -> Iterator[Any]:
        """Yield the epoch's batches."""
        length = _length(self._loader)
        first, to_skip = divmod(self._start, length) if length else (0, self._start)
        is_indexed = isinstance(self._loader, DataLoader) and not _is_stream(self._loader)
        left = self._num_batches
        for number in count(first):
            batches, num_skipped = (self._indexed if is_indexed else self._read)(
                number, to_skip, left
            )
            to_skip -= num_skipped
            num_taken = 0
            for batch in batches:
                num_taken += 1
                yield batch
            left -= num_taken
            if not left:
                return
            if not num_taken + num_skipped:
                raise TaskError("steps_per_epoch: the training data have no batches")

    def _indexed(self, number: int, start: int, num: int) -> tuple[Iterator[Any], int]:
        """Return up to ``num`` batches of a pass, and how many before them were skipped.

        Their order is drawn before they are read.
        """
        loader: Any = self._loader
        seed = derive_seed(self._seed, "pass", number)
        by_batch = loader.batch_sampler is not None
        with borrowed_streams():
            seed_everything(seed)
            begin_pass(self._loader, number, seed)
            places = iter(loader.batch_sampler if by_batch else loader.sampler)
            num_skipped = sum(1 for _ in islice(places, start))
            order = list(islice(places, num))
        # A DataLoader refuses to exchange its sampler, and not each subclass can be made again.
        part = copy.copy(loader)
        vars(part)["batch_sampler" if by_batch else "sampler"] = order
        vars(part)["persistent_workers"] = False
        vars(part)["_iterator"] = None
        reseed(part, derive_seed(self._epoch_seed, "pass", number))
        return iter(part), num_skipped

    def _read(self, number: int, start: int, num: int) -> tuple[Iterator[Any], int]:
        """Do the same for a loader that has to be read to skip batches."""
        batches = self._drawn(number)
        num_skipped = sum(1 for _ in islice(batches, start))
        return islice(batches, num), num_skipped

    def _drawn(self, number: int) -> Iterator[Any]:
        """Yield the batches of a pass; each is read with random streams of its own."""
        seed = derive_seed(self._seed, "pass", number)
        with borrowed_streams():
            seed_everything(seed)
            begin_pass(self._loader, number, seed)
            batches = iter(self._loader)
        for place in count():
            with borrowed_streams():
                seed_everything(derive_seed(seed, "batch", place))
                batch = next(batches, _END)
            if batch is _END:
                return
            yield batch


_END = object()


class PassSampler(Sampler[Any]):
    """A sampler whose order in a pass depends only on the seed and on the number of the pass.

    Args:
        sampler: The sampler, which may draw from a global stream.
        seed: Seed of the order of all passes.
        first: Number of the pass that is drawn first, unless ``set_epoch`` says another.

    >>> sampler = PassSampler(torch.utils.data.RandomSampler(range(100)), seed=0, first=1)
    >>> order = list(sampler)
    >>> sampler.set_epoch(1)
    >>> order == list(sampler), order == list(sampler)
    (True, False)
    """

    def __init__(self, sampler: Any, *, seed: int, first: int = 0) -> None:
        self._sampler = sampler
        self._seed = seed
        self._number = first

    def __len__(self) -> int:
        """Return the length of a pass."""
        return len(self._sampler)

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the pass that is drawn next."""
        self._number = epoch

    def __iter__(self) -> Iterator[Any]:
        """Yield the order of a pass, which is drawn as a whole."""
        seed = derive_seed(self._seed, "pass", self._number)
        with borrowed_streams():
            seed_everything(seed)
            begin_pass(self._sampler, self._number, seed)
            order = list(self._sampler)
        self._number += 1
        yield from order


class PassBatches(PassSampler):
    """The same for a sampler of a loader that the user's code has made.

    It has all attributes of the sampler, which libraries read. The order of a sampler without a
    length may have no end, so it is drawn place by place.

    >>> sampler = torch.utils.data.RandomSampler(range(100), generator=torch.Generator())
    >>> batches = PassBatches(torch.utils.data.BatchSampler(sampler, 4, False), seed=0)
    >>> batches.batch_size, len(batches), list(batches) == list(batches)
    (4, 25, False)
    """

    def __getattr__(self, name: str) -> Any:
        if name == "_sampler":  # while it is copied
            raise AttributeError(name)
        return getattr(self._sampler, name)

    def __iter__(self) -> Iterator[Any]:
        """Yield the order of a pass."""
        if _has_length(self._sampler):
            yield from super().__iter__()
            return
        seed = derive_seed(self._seed, "pass", self._number)
        with borrowed_streams():
            seed_everything(seed)
            begin_pass(self._sampler, self._number, seed)
            places = iter(self._sampler)
        self._number += 1
        for number in count():
            with borrowed_streams():
                seed_everything(derive_seed(seed, "place", number))
                place = next(places, _END)
            if place is _END:
                return
            yield place


def by_passes(loader: Any, *, seed: int, first: int) -> Any:
    """Return a loader whose order in a pass depends only on the seed and on the number of the pass.

    Args:
        loader: A ``DataLoader`` over a data set with a length, which stays as it is.
        seed: Seed of the order of all passes.
        first: Number of the pass that is read first.
    """
    if any(isinstance(each, PassSampler) for each in _samplers(loader)):
        return loader
    for each in _samplers(loader):
        if isinstance(getattr(each, "initial_seed", None), int):
            # accelerate's sampler adds the number of the pass to a seed, here that of the epoch.
            each.initial_seed = seed % 2**32
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    order = PassBatches(getattr(loader, name), seed=seed, first=first)
    loader = copy.copy(loader)
    if "base_dataloader" in vars(loader):  # of accelerate
        vars(loader)["base_dataloader"] = copy.copy(loader.base_dataloader)
    for each in (loader, vars(loader).get("base_dataloader")):
        if each is not None:
            vars(each)[name] = order  # a DataLoader refuses to exchange its sampler
            vars(each)["_iterator"] = None
    return loader


def _has_length(sampler: Any) -> bool:
    try:
        return len(sampler) >= 0
    except (TypeError, NotImplementedError):
        return False


def begin_pass(loader: Any, number: int, seed: int) -> None:
    """Reseed what a loader or a sampler brings along, and tell it which pass begins."""
    reseed(loader, seed)
    for each in (loader, *_samplers(loader)):
        if hasattr(each, "set_epoch"):
            each.set_epoch(number)


def _length(loader: Any) -> int | None:
    """Return how many batches a pass has, None if only reading it shows that."""
    if not isinstance(loader, Sized) or _is_stream(loader):
        return None
    try:
        return len(loader)
    except TypeError:  # a sampler without end
        return None


def _is_stream(loader: Any) -> bool:
    return isinstance(getattr(loader, "dataset", None), IterableDataset)


def _samplers(loader: Any) -> tuple[Any, ...]:
    batch_sampler = getattr(loader, "batch_sampler", None)
    return (
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
    )


def reseed(loaders: Any, seed: int) -> None:
    """Reseed the generators that loaders, their data sets and their functions bring along.

    They would otherwise run on from epoch to epoch, and differ in a trial that is resumed.
    """
    if isinstance(loaders, Mapping):
        loaders = list(loaders.values())
    if isinstance(loaders, list | tuple):
        for number, loader in enumerate(loaders):
            reseed(loader, derive_seed(seed, "loader", number))
        return
    for generator in _generators_of(loaders):
        generator.manual_seed(seed)
    generators_within(loaders).seed(seed)


def generators_within(loader: Any) -> OwnGenerators:
    """Return the generators of a loader's data set, functions and samplers.

    Those of the loader and its samplers that PyTorch knows are not among them: they say the order.
    """
    objects = {name: getattr(loader, name, None) for name in _READING}
    objects |= {f"sampler {i}": each for i, each in enumerate(_samplers(loader))}
    if objects["dataset"] is None:  # a loader of the user's own
        objects["loader"] = loader
    return OwnGenerators(objects, besides=_generators_of(loader))


_READING = ("dataset", "collate_fn", "worker_init_fn")
"""Attributes of a ``DataLoader`` that are the user's code."""


def _generators_of(loader: Any) -> list[torch.Generator]:
    held = (getattr(each, "generator", None) for each in (loader, *_samplers(loader)))
    return [each for each in held if isinstance(each, torch.Generator)]


# -- hooks that a Trainer calls once ------------------------------------------------------

logger = plain_logger(__name__)

_said: set[str] = set()
"""Warnings of this process."""

Weights = dict[str, torch.Tensor]
"""Parameters and persistent buffers of a module, by name."""


class Finished(TypedDict):
    """The weights that the hooks at the end of a run have left, if they differ.

    Attributes:
        weights: The weights.
        frozen: Digests of what is left out of them.
    """

    weights: Mapping[str, Any]
    frozen: Digests


def overridden(
    owners: Iterable[Any], hooks: Collection[str], *, bases: Collection[type]
) -> list[str]:
    """Return the names of the hooks that objects have of their own, for messages.

    Args:
        owners: The objects.
        hooks: Names of methods.
        bases: Classes whose methods do nothing of interest.

    >>> class Hooks:
    ...     def on_end(self): ...
    >>> class Mine(Hooks):
    ...     def on_end(self): ...
    >>> overridden([Hooks(), Mine()], ["on_end"], bases=[Hooks])
    ['Mine.on_end']
    """
    found = []
    for owner in owners:
        kind: Any = type(owner)
        for hook in hooks:
            by = next((each for each in kind.__mro__ if hook in vars(each)), None)
            is_own = by is not None and by not in bases
            if is_own or hook in getattr(owner, "__dict__", ()):
                found.append(f"{kind.__name__}.{hook}")
    return list(dict.fromkeys(found))


def copied(value: Any, *, device: torch.device | None = None) -> Any:
    """Return a nested state with copies of all its tensors.

    Args:
        value: The state: dicts, lists, tuples and tensors.
        device: Where the copies are; None: where the tensors are.
    """
    if isinstance(value, torch.Tensor):
        where = value.device if device is None else device
        return value.detach().to(where, copy=True)
    if isinstance(value, Mapping):
        held = {key: copied(inside, device=device) for key, inside in value.items()}
        return with_versions(held, state_versions(value))
    if type(value) in (list, tuple):
        return type(value)(copied(inside, device=device) for inside in value)
    return value


def weights_of(module: torch.nn.Module) -> Weights:
    """Return a module's parameters and its persistent buffers.

    >>> sorted(weights_of(torch.nn.BatchNorm1d(1, affine=False)))
    ['num_batches_tracked', 'running_mean', 'running_var']
    """
    found: Weights = dict(module.named_parameters(remove_duplicate=False))
    for path, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                found[f"{path}.{name}" if path else name] = buffer
    return {name: tensor.detach() for name, tensor in found.items()}


def put_back(module: torch.nn.Module, before: Weights) -> str | None:
    """Give a module the weights that it had before.

    Returns:
        The name of a weight that was added, removed or has another shape; None if there is none.
    """
    now = weights_of(module)
    for name in (*now, *before):
        if name not in before or name not in now or now[name].shape != before[name].shape:
            return name
    with torch.no_grad():
        for name, tensor in before.items():
            now[name].copy_(tensor)
    return None


def sums_of(weights: Weights) -> dict[str, list[int]]:
    """Return checksums of weights, by name; of those that have some."""
    return {
        name: checksums(tensor.contiguous()).tolist()
        for name, tensor in weights.items()
        if tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_quantized)
    }


def first_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """Return the first name whose value differs; None if there is none."""
    names = dict.fromkeys((*one, *other))
    return next((name for name in names if one.get(name) != other.get(name)), None)


def finished(
    after: tuple[Mapping[str, Any], Digests],
    *,
    before: tuple[Mapping[str, Any], Digests],
    hooks: Sequence[str],
) -> Finished | None:
    """Return the weights that hooks at the end of a run have left; None if they changed nothing.

    Args:
        after: The weights after the hooks, and the digests of what they leave out.
        before: The same before them: what training goes on from.
        hooks: The names of the hooks.
    """
    (weights, frozen), (held, held_frozen) = after, before
    changed = {*weights, *frozen} ^ {*held, *held_frozen}
    changed |= {n for n in weights.keys() & held.keys() if _shape(weights[n]) != _shape(held[n])}
    if changed:
        text = (
            f"{' or '.join(hooks)} changes which weights the model has, such as {min(changed)!r}; "
            "load_model() returns the model as it was before that"
        )
        if text not in _said:
            _said.add(text)
            logger.warning("%s", text)
        return None
    cpu = torch.device("cpu")
    weights = copied(weights, device=cpu)
    if frozen.keys() == held_frozen.keys() and same(weights, copied(held, device=cpu)):
        return None
    return {"weights": weights, "frozen": frozen}


def _shape(value: Any) -> Any:
    return getattr(value, "shape", None)
