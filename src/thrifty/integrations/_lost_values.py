"""Tries out whether values that a Trainer's checkpoint lacks are missed in the next epoch.

``_unsaved_values`` finds such values. Each epoch has a new model and a new Trainer. If training
changes a plain attribute, or freezes a parameter once, the next epoch does not know of it. Whether
this changes a result is found by an experiment: two short epochs in one run of the Trainer, and the
same epochs one by one.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DataLoader

from thrifty.core import StateError, derive_seed, plain_logger
from thrifty.pack import HyperParameters, borrowed_streams
from thrifty.pack._frozen import digest_of
from thrifty.pack._state import seed_everything
from thrifty.pack.task._task import unread
from thrifty.pack.verify import same

from ._trainer_runs import generators_within
from ._unsaved_values import Value, Values, in_use, values_of


logger = plain_logger(__name__)

FEW_BATCHES = 3
"""How many batches the epochs of an experiment have, for training and for each validation set."""

_MOST_EXPERIMENTS = 8
"""Experiments of a task and process; code that freezes layer by layer has new names each epoch."""


class CannotRehearseError(Exception):
    """The data cannot be read once more for an experiment."""


class FirstBatches:
    """The first batches of a loader, the same in each pass.

    Args:
        loader: The loader.
        kept: Batches that were read before, by name; those of this loader are added.
        name: The name of the loader.
        seed: Seed of what the loader draws.

    >>> kept = {}
    >>> list(FirstBatches(range(100), kept=kept, name="train", seed=0))
    [0, 1, 2]
    """

    def __init__(self, loader: Any, *, kept: dict[str, list[Any]], name: str, seed: int) -> None:
        if isinstance(loader, Iterator) or type(loader).__name__ == "CombinedLoader":
            raise CannotRehearseError(f"a {type(loader).__name__} cannot be read again")
        self._loader = loader
        if isinstance(loader, DataLoader):
            loader = copy.copy(loader)
            loader._iterator = None  # what workers that stay alive draw is for training
        if name not in kept:
            with borrowed_streams(), generators_within(loader).seeded(seed):
                seed_everything(seed)
                kept[name] = list(islice(loader, FEW_BATCHES))
        self._batches = kept[name]

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        """Yield copies of the batches, which training may change."""
        return iter(copy.deepcopy(self._batches))

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the loader, such as its data set."""
        if name.startswith("__") or name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)


@dataclass(slots=True, kw_only=True)
class Rehearsal:
    """A run of a Trainer for an experiment.

    Attributes:
        num_epochs: How many epochs it has.
        batches: The batches that all runs of an experiment train on, by loader.
        seed: Seed of what steps draw.
        kept: What its last epoch has left.
        outcome: What must be equal: weights, states of optimizers.
        metrics: The metrics after its last epoch.
        at_start: The values at the first batch of the last epoch.
        at_end: The values after it.
    """

    num_epochs: int
    batches: dict[str, list[Any]]
    seed: int
    kept: dict[str, Any] = field(default_factory=dict)
    outcome: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    at_start: Values = field(default_factory=dict)
    at_end: Values = field(default_factory=dict)


class Rehearse(Protocol):
    """Trains short epochs and notes their results."""

    def __call__(
        self, kept: dict[str, Any], *, epoch: int, hp: HyperParameters, run: Rehearsal
    ) -> None:
        """Train the epochs of a rehearsal, and fill it in.

        Args:
            kept: The state to begin with; empty: a fresh trial.
            epoch: The first epoch.
            hp: Hyper-parameters of all epochs.
            run: The rehearsal.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Mending:
    """How to keep values, for messages.

    Attributes:
        values: Where to keep attributes.
        frozen: How to freeze parameters.
    """

    values: str
    frozen: str


@dataclass(slots=True, kw_only=True)
class _Notes:
    """What was examined for a task in this process.

    Attributes:
        passed: Names of values, options and ranges of epochs.
        said: Warnings.
        num_experiments: The number of experiments.
    """

    passed: set[Any] = field(default_factory=set)
    said: set[str] = field(default_factory=set)
    num_experiments: int = 0


class Examined:
    """Stands for what was examined for a task in this process; all trials of the task share it.

    It has no attributes, which would count as variables that trials share.
    """

    __slots__ = ("__weakref__",)

    def __deepcopy__(self, memo: dict[int, Any]) -> Examined:
        """Return itself: the copies of a task share it."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Begin anew in another process."""
        return (Examined, ())


_NOTES: WeakKeyDictionary[Examined, _Notes] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """Values that an epoch has changed, to be examined before the next one."""

    kept: dict[str, Any]
    epoch: int
    hp: HyperParameters
    names: tuple[str, ...]
    key: Any
    seed: int


class LostValues:
    """Examines whether values are lost from one epoch of a trial to the next.

    It does so before the next epoch. Where a trial goes on from a checkpoint, that may never come
    here: each stage may be one epoch. Then it does so after the first epoch.

    Args:
        name: The adapter, for messages.
        mending: How to keep values.
        heavy: Keys of the parts of a state, or of its checkpoint, that are weights and moments.
            They are taken from after the epoch, since training changes the earlier ones in place.
        examined: What was examined before.
    """

    def __init__(
        self, name: str, *, mending: Mending, heavy: Collection[str], examined: Examined
    ) -> None:
        self._name = name
        self._mending = mending
        self._heavy = frozenset(heavy)
        self._task = examined
        self._before: tuple[dict[str, Any], Values] | None = None
        self._case: _Case | None = None
        self._is_first = True
        """Whether no epoch has ended since the trial began or was restored."""

    @property
    def _examined(self) -> _Notes:
        return _NOTES.setdefault(self._task, _Notes())

    def begin(self, kept: dict[str, Any], owners: Mapping[str, Any]) -> None:
        """Note what an epoch begins with.

        Args:
            kept: The state that the last epoch has left.
            owners: What ``owners_of`` returned.
        """
        self._before = None
        if self._examined.num_experiments < _MOST_EXPERIMENTS:
            self._before = (self._light(kept), values_of(owners))

    def end(
        self,
        kept: dict[str, Any],
        owners: Mapping[str, Any],
        *,
        epoch: int,
        hp: HyperParameters,
        seed: int,
        excused: Collection[str],
        rehearse: Rehearse,
    ) -> None:
        """Note which values an epoch has changed.

        Args:
            kept: The state that it leaves.
            owners: What ``owners_of`` returned.
            epoch: The epoch.
            hp: Its hyper-parameters.
            seed: The trial's seed.
            excused: Identifiers of attributes that may differ.
            rehearse: Trains short epochs.

        Raises:
            StateError: As ``examine`` does.
        """
        is_restored, self._is_first = self._is_first and epoch > 0, False
        if self._before is None:
            return
        light, before = self._before
        self._before = None
        after = values_of(owners)
        changed = {name: {**before, **after}[name] for name in _apart(before, after)}
        names = in_use(changed, owners, excused=excused)
        # Code that options switch on, and effects that come late, are examined again.
        hp = unread(hp)
        options = {(n, v) for n, v in unread(hp).items() if v is None or isinstance(v, bool | str)}
        key = (frozenset(names), frozenset(options), (epoch + 1).bit_length())
        if names and key not in self._examined.passed:
            whole = self._with_heavy(light, kept)
            self._case = _Case(kept=whole, epoch=epoch, hp=hp, names=names, key=key, seed=seed)
            if is_restored:
                self.examine(epoch + 1, rehearse)

    def examine(self, epoch: int, rehearse: Rehearse) -> None:
        """Compare two short epochs in one run with one after the other, if values may be lost.

        Args:
            epoch: The epoch that is about to begin.
            rehearse: Trains short epochs.

        Raises:
            StateError: Results differ, and values that the last epoch has changed differ, too.
        """
        case, self._case = self._case, None
        if case is None or case.epoch + 1 != epoch or case.key in self._examined.passed:
            return
        self._examined.num_experiments += 1
        experiment = _Experiment(case, rehearse)
        try:
            with borrowed_streams():
                experiment.run()
        except Exception as error:  # noqa: BLE001 (of the user's code, on data that are too short)
            self._warn(case.names, f"this could not be examined ({type(error).__name__}: {error})")
        else:
            if experiment.difference and experiment.apart:
                raise StateError(self._refusal(experiment.apart, experiment.difference))
            if experiment.difference:
                self._warn(case.names, f"two epochs in one run differ in {experiment.difference}")
            elif experiment.lost:
                self._warn(experiment.lost, "two short epochs do not show it, but later ones may")
        self._examined.passed.add(case.key)

    def _light(self, kept: dict[str, Any]) -> dict[str, Any]:
        light = {
            key: self._light(value) if key == "checkpoint" else value
            for key, value in kept.items()
            if key not in self._heavy
        }
        return copy.deepcopy(light)

    def _with_heavy(self, light: dict[str, Any], kept: dict[str, Any]) -> dict[str, Any]:
        if not light:
            return {}
        whole = {**light, **{key: kept[key] for key in self._heavy & kept.keys()}}
        if "checkpoint" in light:
            whole["checkpoint"] = self._with_heavy(light["checkpoint"], kept["checkpoint"])
        return whole

    def _warn(self, names: Sequence[str], why: str) -> None:
        text = (
            f"{self._name}: training changes {_listed(names)}, which the checkpoint does not hold, "
            f"so this is lost at the end of an epoch; {why}. {self._mend(names)}; or, if no "
            "result depends on it, name the attribute in not_state"
        )
        if text not in self._examined.said:
            self._examined.said.add(text)
            logger.warning("%s", text)

    def _refusal(self, names: Sequence[str], difference: str) -> str:
        return (
            f"{self._name}: training changes {_listed(names)}, which the checkpoint does not hold. "
            "Each epoch has a new model and a new Trainer, so this is lost at the end of an epoch: "
            f"two epochs in one run of the Trainer give another result ({difference} differs). "
            f"{self._mend(names)}"
        )

    def _mend(self, names: Sequence[str]) -> str:
        frozen = [name for name in names if name.endswith(" (requires_grad)")]
        parts = []
        if len(frozen) < len(names):
            parts.append(self._mending.values)
        if frozen:
            parts.append(self._mending.frozen)
        text = "; ".join(parts)
        return text[:1].upper() + text[1:]


class _Experiment:
    """Two short epochs in one run of a Trainer, and the same epochs one after the other.

    Attributes:
        difference: What differs, in words; "" if nothing does.
        apart: The names of the values that differ at the beginning or at the end of an epoch.
        lost: The names of the values that differ at both; a list that each epoch clears does not.
    """

    def __init__(self, case: _Case, rehearse: Rehearse) -> None:
        self._case = case
        self._rehearse = rehearse
        self._batches: dict[str, list[Any]] = {}
        self.difference = ""
        self.apart: list[str] = []
        self.lost: list[str] = []

    def run(self) -> None:
        """Train the epochs, and compare.

        Raises:
            CannotRehearseError: Equal epochs give different results.
        """
        whole = self._train(self._case.kept, self._case.epoch, 2)
        if not whole.at_start:
            raise CannotRehearseError("something ends training before the second epoch")
        first = self._train(self._case.kept, self._case.epoch, 1)
        second = self._train(first.kept, self._case.epoch + 1, 1)
        self._compare(whole, second)
        if not (self.difference or self.apart):
            return
        # What differs each time, such as a duration, says nothing.
        again = self._train(self._case.kept, self._case.epoch, 2)
        if not same(whole.outcome, again.outcome):
            raise CannotRehearseError("equal epochs give different results")
        others = again.metrics
        whole.metrics = {n: v for n, v in whole.metrics.items() if same(v, others.get(n))}
        for mine, its in ((whole.at_start, again.at_start), (whole.at_end, again.at_end)):
            for name in _apart(mine, its):
                for values in (whole.at_start, whole.at_end, second.at_start, second.at_end):
                    values.pop(name, None)
        self._compare(whole, second)

    def _compare(self, whole: Rehearsal, second: Rehearsal) -> None:
        started = _apart(whole.at_start, second.at_start)
        ended = _apart(whole.at_end, second.at_end)
        names = self._case.names
        self.difference = _difference(whole, second)
        self.apart = [name for name in names if name in started or name in ended]
        self.lost = [name for name in names if name in started and name in ended]

    def _train(self, kept: dict[str, Any], epoch: int, num_epochs: int) -> Rehearsal:
        run = Rehearsal(num_epochs=num_epochs, batches=self._batches, seed=self._case.seed)
        # Optimizers change the tensors of the state that they have loaded.
        self._rehearse(copy.deepcopy(kept), epoch=epoch, hp=self._case.hp, run=run)
        return run


def _apart(one: Values, other: Values) -> list[str]:
    names = dict.fromkeys((*one, *other))
    return [n for n in names if one.get(n, _NONE).content != other.get(n, _NONE).content]


_NONE = Value(None, frozenset())


def _difference(one: Rehearsal, other: Rehearsal) -> str:
    for name in sorted(one.metrics.keys() & other.metrics.keys()):
        if not same(one.metrics[name], other.metrics[name]):
            return f"the metric {name!r}"
    for name, value in one.outcome.items():
        if not same(value, other.outcome.get(name)):
            return name
    return ""


def outcome_of(weights: Mapping[str, Any], optimizers: Any) -> dict[str, Any]:
    """Return what two runs must have in common; digests need no memory of a device.

    Args:
        weights: The weights, by name.
        optimizers: The state of all optimizers.
    """
    digests = {repr(name): _digest(value) for name, value in weights.items()}
    return {**digests, "the optimizer's state": _digest(optimizers)}


def _digest(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return digest_of(value)
    if isinstance(value, Mapping):
        return {key: _digest(inside) for key, inside in value.items()}
    if isinstance(value, list | tuple):
        return [_digest(inside) for inside in value]
    return value


def _listed(names: Sequence[str]) -> str:
    few = [repr(name) for name in names[:5]]
    more = len(names) - len(few)
    return ", ".join(few) + (f" and {more} more" if more else "")


def check_rates(optimizers: Sequence[Any]) -> None:
    """Check that an epoch of a rehearsal trains something.

    Raises:
        CannotRehearseError: All learning rates are 0, as at the end of a schedule that counts the
            steps of short epochs.
    """
    rates = [group["lr"] for each in optimizers for group in each.param_groups]
    if rates and not any(float(rate) for rate in rates):
        raise CannotRehearseError("the learning rate of a short epoch is 0")


def seed_step(run: Rehearsal, *numbers: int) -> None:
    """Seed a step of a rehearsal, so that it draws the same in each run.

    Args:
        run: The rehearsal.
        numbers: The epoch, and the number of the step.
    """
    seed_everything(derive_seed(run.seed, "rehearsal", *numbers) % 2**32)
