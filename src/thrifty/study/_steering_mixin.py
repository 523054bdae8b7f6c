"""What people ask of a study: to stop it or a trial, notes, configurations, branches, deletion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from thrifty.core import StudyNotFoundError, UsageError, derive_seed, plain_text
from thrifty.search import Algorithm, Enqueued
from thrifty.space import Amount, Branched, Space, TimeUnit
from thrifty.space._conditions import branched
from thrifty.space._coordinates import fill_config, whole_config
from thrifty.space._units import EPOCHS
from thrifty.store import Store, StudyInfo
from thrifty.store._acts import Act, ActKind, tags_of
from thrifty.store._reports import no_such_trial
from thrifty.store._steering_requests import ask, this_user
from thrifty.store._trash import Deleted

from ._goals import EpochSizes
from ._ledger import Ledger
from ._reader import KnownEpoch, known_epochs
from ._repository import StudyRepository


class SteeringMixin:
    """The part of ``Study`` by which people steer it, also while another process runs it.

    They stop it or a trial, note and tag, and ask for configurations and branches to be trained
    first. The attributes that it needs are declared here and defined in ``Study``.
    """

    name: str
    seed: int
    seeds: int
    _sizes: EpochSizes
    _enqueued: list[Mapping[str, Any]]

    if TYPE_CHECKING:

        @property
        def space(self) -> Space: ...

        @property
        def algorithm(self) -> Algorithm: ...

        @property
        def unit(self) -> TimeUnit: ...

        def _repository(self) -> StudyRepository: ...

        def _current_ledger(self) -> Ledger: ...

        def _check_enqueues(self) -> None: ...

    @property
    def acts(self) -> list[Act]:
        """All requests to the study so far, with user and time; empty before its first run."""
        repository = self._repository()
        with suppress(StudyNotFoundError), repository.open(create=False) as store:
            return list(store.acts.of(store.studies.get(self.name).id))
        return []

    @property
    def tags(self) -> dict[int | None, list[str]]:
        """The tags of each trial, by number, and under None those of the study."""
        return tags_of(self.acts)

    def stop(self, trial: int | None = None) -> Act:
        """Ask the process that runs the study to stop it, or a trial of it.

        A study stops as by Ctrl-C: running epochs are finished and kept, and a later ``run`` goes
        on. A trial stops for good at the end of its epoch. What it has reached stays, other trials
        get what they share with it, and the algorithm takes it for one that has failed where it
        would have been compared. If no process runs the study, the next one applies the request
        before it trains; ``resume`` takes a stop of the study back.

        Args:
            trial: The number of a trial; None: the whole study.

        Returns:
            The act, which is queued until that process applies it, within a second or an epoch.

        Raises:
            StudyNotFoundError: The study does not exist yet.
            UsageError: The study is done, or there is no such trial.
        """
        return self._ask("stop" if trial is None else "stop trial", trial)

    def pause(self) -> Act:
        """Ask the process that runs the study to wait until ``resume`` is called.

        It finishes its running epochs, keeps their states, and begins no others. Its workers stay,
        with their memory; ``stop`` frees that. If no process runs the study, the next one waits
        before it trains, and says so.

        Raises:
            StudyNotFoundError: The study does not exist yet.
            UsageError: The study is done, or paused already.
        """
        return self._ask("pause", None)

    def resume(self) -> Act:
        """Ask the process that waits since ``pause`` to go on.

        If no process runs the study, this takes back a pause or a stop that is queued.

        Raises:
            StudyNotFoundError: The study does not exist yet.
            UsageError: Nothing holds the study; ``run`` goes on with one that was stopped.
        """
        return self._ask("resume", None)

    def note(self, text: str, *, trial: int | None = None) -> Act:
        """Keep a note about the study, or about one of its trials, in the database.

        Raises:
            StudyNotFoundError: The study does not exist yet.
            UsageError: The note is empty, or there is no such trial.
        """
        return self._ask("note", trial, text)

    def tag(self, tag: str, *, trial: int | None = None) -> Act:
        """Give the study, or one of its trials, a tag: a short text to find it by.

        Raises:
            StudyNotFoundError: The study does not exist yet.
            UsageError: The tag is empty or has several lines, or there is no such trial.

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
        >>> _ = study.tag("baseline", trial=0)
        >>> study.tags
        {0: ['baseline']}
        """
        return self._ask("tag", trial, tag)

    def untag(self, tag: str, *, trial: int | None = None) -> Act:
        """Remove a tag.

        Raises:
            StudyNotFoundError: The study does not exist yet.
            UsageError: There is no such tag.
        """
        return self._ask("untag", trial, tag)

    def delete(self) -> Deleted:
        """Delete the study from its database; ``restore`` undoes it.

        What it has trained stays there: a study of the same task and seed does not train it again.
        After a month, ``thrifty gc`` removes the study for good, and states that no study needs.

        Raises:
            StudyNotFoundError: The study does not exist.
            StoreBusyError: A process runs it.

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
        >>> study.delete().num_trials
        2
        >>> study.restore()
        >>> len(study.trials)
        2
        """
        with self._repository().open(create=False) as store:
            return store.trash.put(store.studies.get(self.name), who=this_user())

    def restore(self, *, name: str | None = None) -> None:
        """Restore the study of this name that was deleted last.

        Args:
            name: Another name for it, if a study of this name was made since (default: this name).

        Raises:
            StudyNotFoundError: No deleted study of this name can be restored.
            StudyMismatchError: There is a study of that name already.
        """
        with self._repository().open(create=False) as store:
            store.trash.restore(store.trash.find(self.name), name=name)

    def _ask(self, kind: ActKind, trial: int | None, text: str = "") -> Act:
        with self._repository().open(create=False) as store:
            return ask(store, self.name, kind, trial=trial, text=text)

    # -- configurations and branches to train first -------------------------------------------

    def known(
        self, config: Mapping[str, Any], *, epochs: int | Amount | None = None
    ) -> list[KnownEpoch]:
        """Return what is known of a configuration: its epochs that are trained already, in order.

        Nothing is trained, and nothing is written.

        Args:
            config: The configuration, with a value for each hyper-parameter that varies.
            epochs: How many of its first epochs to look at (default: all).

        Raises:
            SpaceError: The configuration is not in the space, or lacks a hyper-parameter.
            AlgorithmError: ``epochs`` is more than the study's ``max_epochs``.
        """
        whole = self._whole(config)
        horizon = self.space.horizon_of(whole) or self.algorithm.max_epochs
        return known_epochs(
            self._repository(),
            whole,
            epochs=min(horizon, self._first_epochs(epochs)),
            horizon=horizon,
            num_seeds=self.seeds,
        )

    def branch(
        self,
        trial: int,
        *,
        after: int | Amount,
        scale: Mapping[str, float] | None = None,
        change: Mapping[str, Any] | None = None,
    ) -> Branch:
        """Return a branch of a trial, which goes on differently from some epoch on.

        Nothing is trained or written: ``print`` it to see what it costs, and give it to
        ``enqueue_trial`` to have it trained. The epochs before are those of the trial, bit for bit,
        and are not trained again if the state after them is kept.

        Args:
            trial: The number of the trial.
            after: How many epochs of the trial the branch has; it begins after them.
            scale: What to multiply hyper-parameters by from there on.
            change: New values or schedules of hyper-parameters; the time of a schedule begins
                there.

        Raises:
            UsageError: There is no such trial, epoch or hyper-parameter, or nothing changes.
            ScheduleError: A factor or a schedule does not fit.

        >>> import thrifty as th
        >>> from thrifty.testing import LineTask
        >>> study = th.Study(
        ...     LineTask(),
        ...     th.Space(lr=th.Choice([0.1, 0.05])),
        ...     metric="mse",
        ...     mode="min",
        ...     name="line",
        ...     algorithm=th.GridSearch(max_epochs=4),
        ...     storage="sqlite://",
        ... )
        >>> branch = study.run(progress=False).branch(0, after=3, scale={"lr": 0.3})
        >>> branch.config
        {'lr': Branched(Constant(0.1), at=3, factor=0.3)}
        >>> study.enqueue_trial(branch)
        >>> study.run(progress=False).trials[-1].epochs
        4
        """
        if self.space.has_horizons:
            raise UsageError(
                f"the trials of a {type(self.space).__name__} end at horizons of their own, so "
                "they cannot branch; give it another rate or shape"
            )
        for part in (scale, change):
            if part is not None:
                check_is_config(part)
        ledger = self._current_ledger()
        is_number = isinstance(trial, int) and not isinstance(trial, bool)
        if not is_number or trial not in range(len(ledger.history)):
            raise UsageError(no_such_trial(self.name, trial, num_trials=len(ledger.history)))
        parent = ledger.history[trial]
        horizon = self.algorithm.max_epochs if parent.horizon is None else parent.horizon
        epoch = self._first_epochs(after) if isinstance(after, Amount) else after
        config = branched(
            parent.config,
            epoch=epoch,
            horizon=horizon,
            scale=scale or {},
            change=self._sizes.in_epochs(change or {}),
        )
        known = known_epochs(
            self._repository(), config, epochs=horizon, horizon=horizon, num_seeds=self.seeds
        )
        num, kept, again, to_train = cost_of(known, horizon=horizon, num_seeds=self.seeds)
        return Branch(
            trial=trial,
            epoch=epoch,
            config=config,
            known_epochs=num,
            kept_epoch=kept,
            epochs_again=again,
            epochs_to_train=to_train,
            unit=self.unit,
        )

    def _whole(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a configuration with all hyper-parameters, and all its amounts in epochs."""
        check_is_config(config)
        return whole_config(self.space, self._sizes.in_epochs(config))

    def _first_epochs(self, given: int | Amount | None) -> int:
        """Return how many first epochs of a trial are meant; None means all."""
        most = self.algorithm.max_epochs
        if isinstance(given, Amount):
            given = self._sizes.of((given,)).whole(given, what="epochs")
        return Enqueued(max_epochs=most, epochs=given).target

    def enqueue_trial(self, config: Mapping[str, Any] | Branch) -> None:
        """Enqueue a configuration, or a branch, that this run or the next one tries first.

        Missing hyper-parameters are drawn from the space. Once the algorithm is done, what is
        enqueued is trained to its end. The configuration is stored in the
        database (if the study does not exist yet, as soon as ``run`` creates it), so an
        interruption does not lose it. A configuration that was enqueued before is not enqueued
        again, so a script may be run again. ``acts`` says who has enqueued what of a study that
        exists already, and when.

        Raises:
            SpaceError: The configuration has a name or a value that is not in the space.
            StudyMismatchError: The database has a different study of this name.

        >>> import thrifty as th
        >>> from thrifty.testing import LineTask
        >>> study = th.Study(
        ...     LineTask(),
        ...     th.Space(lr=th.Float(0.01, 0.1)),
        ...     metric="mse",
        ...     mode="min",
        ...     name="line",
        ...     algorithm=th.RandomSearch(max_epochs=2, num_trials=3),
        ...     storage="sqlite://",
        ... )
        >>> study.enqueue_trial({"lr": 0.05})
        >>> study.run(progress=False).trials[0].config
        {'lr': 0.05}
        """
        self._check_enqueues()
        rng = np.random.default_rng(derive_seed(self.seed, "enqueue", len(self._enqueued)))
        if isinstance(config, Branch):
            self._enqueued.append(config.config)
        else:
            check_is_config(config)
            given = self._sizes.in_epochs(config)
            self._enqueued.append(fill_config(self.space, given, rng=rng))
        repository = self._repository()
        with suppress(StudyNotFoundError), repository.open(create=False) as store:
            info = repository.find(store)
            if info is not None:
                fresh = repository.enqueue(store, info, self._enqueued)
                if self._enqueued[-1] in fresh:
                    note_enqueued(store, info, config, given=self._enqueued[-1])

    @property
    def enqueued(self) -> list[Mapping[str, Any]]:
        """The configurations enqueued through this object, with all hyper-parameters."""
        return list(self._enqueued)


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A new trial with the first epochs of another one, and what it costs.

    ``Study.branch`` makes it; ``Study.enqueue_trial`` takes it. ``str()`` describes it.

    Attributes:
        trial: The number of the trial that it branches off.
        epoch: The last epoch that both have in common.
        config: Its hyper-parameters.
        known_epochs: How many of its first epochs are known.
        kept_epoch: The last of these epochs whose state is kept; 0 if none is.
        epochs_again: Known epochs that are trained again, because no later state is kept.
        epochs_to_train: All epochs that are trained for it, those again included; of all seeds.
    """

    trial: int
    epoch: int
    config: Mapping[str, Any]
    known_epochs: int
    kept_epoch: int
    epochs_again: int
    epochs_to_train: int
    unit: TimeUnit = EPOCHS

    @property
    def changes(self) -> list[str]:
        """What differs from the trial, in words such as ``lr times 0.3``."""
        return [
            f"{name} times {value.factor:g}"
            if value.after is None
            else f"{name} = {plain_text(value.after)}"
            for name, value in self.config.items()
            if isinstance(value, Branched) and value.at == self.epoch
        ]

    def __str__(self) -> str:
        changes = [
            f"  {name} = {plain_text(value)}"
            for name, value in self.config.items()
            if isinstance(value, Branched) and value.at == self.epoch
        ]
        text = self.unit.text
        lines = [
            f"branch of trial {self.trial} after {text(self.epoch)}:",
            *changes,
            f"{text(self.known_epochs)} known, {text(self.epochs_to_train)} to train",
        ]
        if self.epochs_again:
            since = f"after {text(self.kept_epoch)}" if self.kept_epoch else "kept"
            state = f"the last state is {since}" if self.kept_epoch else "no state is kept"
            lines.append(f"{state}, so {text(self.epochs_again)} of these are trained again")
        return "\n".join(lines)


def note_enqueued(
    store: Store, info: StudyInfo, asked: Mapping[str, Any] | Branch, *, given: Mapping[str, Any]
) -> None:
    """Record who has enqueued a configuration or a branch, and when.

    Args:
        store: The database.
        info: The study.
        asked: What the user has enqueued.
        given: The configuration that was made of it, with all hyper-parameters.
    """
    if isinstance(asked, Branch):
        text = f"after epoch {asked.epoch}: {', '.join(asked.changes)}"
        kind: ActKind = "branch"
        trial: int | None = asked.trial
    else:
        text = ", ".join(f"{name}={plain_text(value)}" for name, value in given.items())
        kind, trial = "enqueue", None
    store.acts.add(info, kind, trial=trial, text=text[:_MAX_TEXT], who=this_user())


_MAX_TEXT = 2_000


def cost_of(
    known: Sequence[KnownEpoch], *, horizon: int, num_seeds: int
) -> tuple[int, int, int, int]:
    """Return the known epochs, the last kept one, those to train again, and all to train."""
    num = len(known)
    if num >= horizon:
        return num, num, 0, 0
    kept = max((each.epoch for each in known if each.kept), default=0)
    return num, kept, num - kept, num_seeds * (horizon - kept)


def check_is_config(config: object) -> None:
    """Raise a UsageError unless something is a dict of hyper-parameters."""
    if not isinstance(config, Mapping):
        raise UsageError(f'a configuration is a dict such as {{"lr": 0.1}}, got {config!r}')
