"""A longer ``max_epochs`` of a study that is there: which trials go on, and what that costs."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from thrifty.core import StudyNotFoundError, ThriftyError, UsageError, error_text
from thrifty.plan import SearchPlan
from thrifty.search import Algorithm
from thrifty.space import Amount, Space, Timeline, TimeUnit
from thrifty.space._units import EPOCHS
from thrifty.store import Store, StudyInfo

from ._epoch_size import EpochSizes
from ._ledger import Ledger
from ._reader import Reader
from ._repository import Storage, StudyRepository


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """What a longer ``max_epochs`` means for the trials of a study; ``str()`` describes it.

    Epochs that trials share count once, each seed by itself.

    Attributes:
        before: The stored ``max_epochs``.
        after: The new one.
        num_trials: How many trials have reached ``before`` and may go on. A grid or random search
            goes on with all of them, an algorithm with rungs with the best.
        known_epochs: Epochs of these trials that are known.
        epochs_again: Known epochs that are trained again, because no later state is kept.
        most_epochs_to_train: Epochs to train if all of these trials go on to ``after``, those
            again included.
    """

    before: int
    after: int
    num_trials: int
    known_epochs: int
    epochs_again: int
    most_epochs_to_train: int
    unit: TimeUnit = EPOCHS

    def __str__(self) -> str:
        text = self.unit.text
        trials = "1 trial" if self.num_trials == 1 else f"{self.num_trials:,} trials"
        lines = [
            f"from {text(self.before)} to {text(self.after)}: {trials} may go on",
            f"{text(self.known_epochs)} known, at most {text(self.most_epochs_to_train)} to train",
        ]
        if self.epochs_again:
            lines.append(f"states are missing, so {text(self.epochs_again)} are trained again")
        return "\n".join(lines)


def extension_of(ledger: Ledger, *, before: int, after: int) -> Extension:
    """Return what training to ``after`` means for trials that have ended at ``before``."""
    numbers = [
        trial.number
        for trial in ledger.history
        if trial.state == "waiting" and trial.reached == before
    ]
    known, again = set[tuple[int, int]](), set[tuple[int, int]]()
    longer = SearchPlan()
    ends: list[int] = []
    for number in numbers:
        config = ledger.history[number].config
        for replica, way in enumerate(ledger.places(number)):
            known.update(way)
            kept = (
                index
                for index, (node, epoch) in enumerate(way)
                if epoch in ledger.plan.nodes[node].checkpoints
            )
            again.update(way[: next(kept, len(way))])
            ends.append(longer.insert(Timeline(config, epochs=after, replica=replica)))
    for end in ends:
        longer.note(end, before)
    num_before = longer.num_epochs_needed
    for end in ends:
        longer.note(end, after)
    return Extension(
        before=before,
        after=after,
        num_trials=len(numbers),
        known_epochs=len(known),
        epochs_again=len(again),
        most_epochs_to_train=longer.num_epochs_needed - num_before + len(again),
        unit=ledger.unit,
    )


class ExtensionMixin:
    """The part of ``Study`` that makes a stored study longer.

    The attributes that it needs are declared here and defined in ``Study``.
    """

    name: str
    storage: Storage
    _reader: Reader
    _sizes: EpochSizes

    if TYPE_CHECKING:

        @property
        def algorithm(self) -> Algorithm: ...

        @property
        def _in_epochs(self) -> tuple[Space, Algorithm, TimeUnit]: ...

        def _repository(self) -> StudyRepository: ...

    def extension(self, *, max_epochs: int | Amount) -> Extension:
        """Return what a longer ``max_epochs`` means for the stored study; write nothing.

        Args:
            max_epochs: How many epochs the study is to train a trial; in another unit, such as
                ``steps(5_000)``, if it is written so.

        Raises:
            StudyNotFoundError: The study does not exist.
            StudyMismatchError: It cannot be made longer; the message says why.
            UsageError: ``max_epochs`` is not more than the study has.
        """
        repository = self._longer(max_epochs)._repository()
        with repository.open(create=False) as store:
            return self._priced(repository, store, self._found(repository, store))

    def extend(self, *, max_epochs: int | Amount) -> Extension:
        """Let a study that no process runs train its trials for longer; ``run`` goes on.

        Trials that have ended go on from their kept states, and nothing is trained again but what
        ``Extension.epochs_again`` counts. Giving ``Study`` a larger ``max_epochs`` and running it
        does the same.

        Args:
            max_epochs: How many epochs the study is to train a trial; in another unit, such as
                ``steps(5_000)``, if it is written so.

        Raises:
            StudyNotFoundError: The study does not exist.
            StudyMismatchError: What was trained or decided would be others: a schedule depends on
                ``max_epochs``, or the rungs would be others.
            StoreBusyError: A process runs the study.
            UsageError: ``max_epochs`` is not more than the study has.

        >>> import tempfile
        >>> import thrifty as th
        >>> from thrifty.testing import LineTask
        >>> study = th.Study(
        ...     LineTask(),
        ...     th.Space(lr=th.Choice([0.1, 0.2])),
        ...     metric="mse",
        ...     mode="min",
        ...     name="line",
        ...     algorithm=th.GridSearch(max_epochs=2),
        ...     storage=f"sqlite:///{tempfile.mkdtemp()}/t.db",
        ... ).run(progress=False)
        >>> print(study.extend(max_epochs=5))
        from 2 epochs to 5 epochs: 2 trials may go on
        4 epochs known, at most 6 epochs to train
        >>> [trial.epochs for trial in study.run(progress=False).trials]
        [5, 5]
        """
        longer = self._longer(max_epochs)
        repository = longer._repository()
        with repository.open(create=False) as store:
            info = self._found(repository, store)
            with store.lease(info, shared=self.storage.is_shared):
                found = self._priced(repository, store, info)
                repository.extend(store, info)
        self.__dict__.update(_in_epochs=longer._in_epochs, _reader=longer._reader)
        return found

    def as_stored(self) -> Self:
        """Return the study with the ``max_epochs`` that its database has, if that is larger.

        ``thrifty extend`` changes the database, not the file that defines the study.
        """
        spec: Mapping[str, Any] = {}
        with (
            suppress(StudyNotFoundError),
            Store.open(
                self.storage.url, checkpoints=self.storage.checkpoints, create=False
            ) as store,
        ):
            spec = store.studies.get(self.name).spec
        # Otherwise nothing is asked of the study, whose space may have to be found first.
        if "earlier_max_epochs" not in spec or spec["max_epochs"] <= self.algorithm.max_epochs:
            return self
        return self._longer(spec["max_epochs"])

    def _longer(self, max_epochs: int | Amount) -> Self:
        """Return the same study with another ``max_epochs``.

        Raises:
            UsageError: Its algorithm cannot have it.
        """
        made = copy.copy(self)
        if isinstance(max_epochs, Amount):
            max_epochs = self._sizes.of([max_epochs]).whole(max_epochs, what="max_epochs")
        try:
            algorithm: Any = replace(self.algorithm, max_epochs=max_epochs)  # type: ignore[type-var]
        except ThriftyError:
            raise
        except Exception as error:
            raise UsageError(
                f"{type(self.algorithm).__name__} cannot be made with max_epochs={max_epochs!r} "
                f"({error_text(error)}); give the longer study an algorithm and a name of its own"
            ) from error
        space, _, unit = self._in_epochs
        made.__dict__.update(_in_epochs=(space, algorithm, unit), _reader=Reader())
        return made

    def _found(self, repository: StudyRepository, store: Store) -> StudyInfo:
        """Return the stored study, which is shorter."""
        info, max_epochs = store.studies.get(self.name), repository.recipe.algorithm.max_epochs
        if max_epochs <= info.spec["max_epochs"]:
            raise UsageError(
                f"study {self.name!r} trains {info.spec['max_epochs']} epochs already, and got "
                f"max_epochs={max_epochs}; give a larger number"
            )
        repository.find(store)
        return info

    @staticmethod
    def _priced(repository: StudyRepository, store: Store, info: StudyInfo) -> Extension:
        repository.check_lengths(store, info)
        after = repository.recipe.algorithm.max_epochs
        return extension_of(
            repository.load(store, info), before=info.spec["max_epochs"], after=after
        )
