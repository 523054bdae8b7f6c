"""A longer ``max_epochs`` of a study that is there: which trials go on, and what that costs."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from thrifty.core import (
    StoreBusyError,
    StudyNotFoundError,
    ThriftyError,
    UsageError,
    error_text,
    plain_logger,
)
from thrifty.plan import SearchPlan
from thrifty.search import Algorithm
from thrifty.space import Amount, Space, Timeline, TimeUnit
from thrifty.space._units import EPOCHS
from thrifty.store import Store, StudyInfo
from thrifty.store._acts import Act
from thrifty.store._records import ActApplied
from thrifty.store._reports import trials_text
from thrifty.store._steering_requests import ask_longer, check_longer

from ._goals import EpochSizes
from ._ledger import Ledger
from ._reader import Reader
from ._repository import Storage, StudyRepository


logger = plain_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """What a longer ``max_epochs`` means for the trials of a study; ``str()`` describes it.

    Epochs that trials share count once, each seed by itself.

    Attributes:
        before: The stored ``max_epochs``.
        after: The new one.
        num_trials: How many trials have reached ``before`` and may go on. A grid or random search
            goes on with all of them, an algorithm with rungs with the best.
        num_unfinished: How many trials have not reached ``before`` yet, because the run of the
            study was interrupted or goes on. All of them go on with the next run.
        known_epochs: Epochs of these trials that are known.
        epochs_again: Known epochs that are trained again, because no later state is kept.
        most_epochs_to_train: Epochs to train if all of these trials go on to ``after``, those
            again included. Trials that the algorithm has not proposed yet are not counted.
        is_queued: Whether it was only requested, because a process runs the study. The numbers
            are then those of now.
    """

    before: int
    after: int
    num_trials: int
    known_epochs: int
    epochs_again: int
    most_epochs_to_train: int
    unit: TimeUnit = EPOCHS
    is_queued: bool = False
    num_unfinished: int = 0

    def __str__(self) -> str:
        text = self.unit.text
        ended, unfinished = trials_text(self.num_trials), trials_text(self.num_unfinished)
        what = [f"{ended} may go on"] if self.num_trials or not self.num_unfinished else []
        if self.num_unfinished:
            unfinished += (
                " is not finished and goes"
                if self.num_unfinished == 1
                else (" are not finished and go")
            )
            what.append(f"{unfinished} on with the next run (thrifty resume)")
        lines = [
            f"from {text(self.before)} to {text(self.after)}: {', '.join(what)}",
            f"{text(self.known_epochs)} known, at most {text(self.most_epochs_to_train)} to train",
        ]
        if self.epochs_again:
            lines.append(f"states are missing, so {text(self.epochs_again)} are trained again")
        if self.is_queued:
            lines.append(
                "queued: the process that runs the study goes on with it once it has trained, "
                "or the next run does"
            )
        return "\n".join(lines)


def extension_of(ledger: Ledger, *, before: int, after: int) -> Extension:
    """Return what training to ``after`` means for trials that have ended or go on to ``before``."""
    ended = [
        trial.number
        for trial in ledger.history
        if trial.state == "waiting" and trial.reached == before
    ]
    unfinished = [trial.number for trial in ledger.history if trial.state == "running"]
    known, again = set[tuple[int, int]](), set[tuple[int, int]]()
    longer = SearchPlan()
    ends: list[tuple[int, int]] = []
    for number in (*ended, *unfinished):
        config = ledger.history[number].config
        for replica, node in enumerate(ledger.nodes_of[number]):
            way = _known_way(ledger.plan, node, before)
            known.update(way)
            kept = (
                index
                for index, (place, epoch) in enumerate(way)
                if epoch in ledger.plan.nodes[place].checkpoints
            )
            again.update(way[: next(kept, len(way))])
            end = longer.insert(Timeline(config, epochs=after, replica=replica))
            ends.append((end, len(way)))
    for end, epoch in ends:
        if epoch:
            longer.note(end, epoch)
    num_before = longer.num_epochs_needed
    for end, _ in ends:
        longer.note(end, after)
    return Extension(
        before=before,
        after=after,
        num_trials=len(ended),
        num_unfinished=len(unfinished),
        known_epochs=len(known),
        epochs_again=len(again),
        most_epochs_to_train=longer.num_epochs_needed - num_before + len(again),
        unit=ledger.unit,
    )


def _known_way(plan: SearchPlan, node: int, most: int) -> list[tuple[int, int]]:
    """Return the ``(node, epoch)`` of the known epochs on the way to a node, last first."""
    way: list[tuple[int, int]] = []
    for epoch in range(1, most + 1):
        owner = plan.owner(node, epoch)
        if epoch not in owner.metrics:
            break
        way.append((owner.id, epoch))
    return way[::-1]


def requests_for_longer(store: Store, info: StudyInfo) -> Sequence[Act]:
    """Return the queued requests for a longer ``max_epochs``, in order."""
    return [act for act in store.acts.of(info.id) if act.is_queued and act.kind == "lengthen"]


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

        @cached_property
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
        """Let a study train its trials for longer; the next ``run`` goes on.

        Trials that have ended go on from their kept states, and nothing is trained again but what
        ``Extension.epochs_again`` counts. Giving ``Study`` a larger ``max_epochs`` and running it
        does the same. While a process runs the study, the extension is queued: that process goes on
        with it once it has trained, and if it was stopped before that, the next ``run`` does.

        Args:
            max_epochs: How many epochs the study is to train a trial; in another unit, such as
                ``steps(5_000)``, if it is written so.

        Raises:
            StudyNotFoundError: The study does not exist.
            StudyMismatchError: What was trained or decided would be others: a schedule depends on
                ``max_epochs``, or the rungs would be others.
            UsageError: ``max_epochs`` is not more than the study has, or more than a million while
                a process runs the study.

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
            try:
                lease = store.lease(info, shared=self.storage.is_shared)
            except StoreBusyError:
                found = self._priced(repository, store, info)
                ask_longer(store, self.name, max_epochs=longer.algorithm.max_epochs)
                return replace(found, is_queued=True)
            with lease:
                found = self._priced(repository, store, info)
                repository.extend(store, info)
        self._in_epochs, self._reader = longer._in_epochs, longer._reader
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

    def _as_requested(self) -> Self:
        """Return the study as its next ``run`` trains it: longer if that was requested of it.

        Raises:
            StudyMismatchError: The database has a different study of this name.
        """
        repository = self._repository()
        with suppress(StudyNotFoundError), repository.open(create=False) as store:
            info = repository.find(store)
            requests = [] if info is None else requests_for_longer(store, info)
            for epochs in sorted(map(_epochs, requests), reverse=True):
                if epochs <= self.algorithm.max_epochs:
                    break
                assert info is not None
                longer, _ = self._tried(repository, store, info, max_epochs=epochs)
                if longer is not None:
                    return self._longer(epochs)
        return self

    def _lengthened(
        self, repository: StudyRepository, store: Store, info: StudyInfo
    ) -> tuple[StudyRepository, StudyInfo]:
        """Apply the queued requests for a longer ``max_epochs``, under the study's lease.

        The largest that can be done counts, and all are answered.

        Returns:
            The repository with the longer algorithm, and the record of the study; both as they were
            if no request could be done.
        """
        requests = sorted(requests_for_longer(store, info), key=lambda act: (-_epochs(act), act.id))
        refused: list[ActApplied] = []
        for place, act in enumerate(requests):
            longer, why = self._tried(repository, store, info, max_epochs=_epochs(act))
            if longer is None:
                logger.info(
                    "study %r is not made longer, as %s requests: %s", self.name, act.who, why
                )
                refused.append(ActApplied(act=act.id, answer=why))
                continue
            others = [
                ActApplied(act=other.id, answer=f"a request for {act.text} epochs counts")
                for other in requests[place + 1 :]
            ]
            answers = [*refused, ActApplied(act=act.id), *others]
            info = longer.extend(store, info, who=act.who, answers=answers)
            self._in_epochs = self._longer(_epochs(act))._in_epochs
            return longer, info
        store.acts.answer(refused)
        return repository, info

    def _tried(
        self, repository: StudyRepository, store: Store, info: StudyInfo, *, max_epochs: int
    ) -> tuple[StudyRepository | None, str]:
        """Return the repository with a longer algorithm, or None and why it cannot be longer."""
        try:
            check_longer(info, max_epochs)
            algorithm = self._longer(max_epochs).algorithm
            self._in_epochs[0].check(max_epochs=max_epochs)
        except UsageError as error:
            return None, str(error)
        recipe = replace(repository.recipe, algorithm=algorithm)
        longer = replace(repository, recipe=recipe)
        why = longer.why_not_longer(store, info)
        return (None, why) if why else (longer, "")

    def _longer(self, max_epochs: int | Amount) -> Self:
        """Return the same study with another ``max_epochs``.

        Raises:
            UsageError: Its algorithm cannot have it.
        """
        made = copy.copy(self)
        if isinstance(max_epochs, Amount):
            max_epochs = self._sizes.of([max_epochs]).whole(max_epochs, what="max_epochs")
        try:
            given: Any = self.algorithm
            algorithm: Any = replace(given, max_epochs=max_epochs)
        except ThriftyError:
            raise
        except Exception as error:
            raise UsageError(
                f"{type(self.algorithm).__name__} cannot be made with max_epochs={max_epochs!r} "
                f"({error_text(error)}); give the longer study an algorithm and a name of its own"
            ) from error
        space, _, unit = self._in_epochs
        made._in_epochs, made._reader = (space, algorithm, unit), Reader()
        return made

    def _found(self, repository: StudyRepository, store: Store) -> StudyInfo:
        """Return the stored study, which is shorter."""
        info = store.studies.get(self.name)
        check_longer(info, repository.recipe.algorithm.max_epochs)
        repository.find(store)
        return info

    @staticmethod
    def _priced(repository: StudyRepository, store: Store, info: StudyInfo) -> Extension:
        repository.check_lengths(store, info)
        after = repository.recipe.algorithm.max_epochs
        return extension_of(
            repository.load(store, info), before=info.spec["max_epochs"], after=after
        )


def _epochs(act: Act) -> int:
    """Return how many epochs an act requests."""
    assert act.max_epochs is not None
    return act.max_epochs
