"""What people ask of a study: to stop it or a trial, notes and tags, and branches of trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from thrifty.core import StudyNotFoundError, plain_text
from thrifty.space import Branched, TimeUnit
from thrifty.space._units import EPOCHS
from thrifty.store import Store, StudyInfo
from thrifty.store._acts import Act, ActKind, tags_of
from thrifty.store._steering_requests import ask, this_user
from thrifty.store._trash import Deleted

from ._reader import KnownEpoch
from ._repository import StudyRepository


class SteeringMixin:
    """The part of ``Study`` by which people steer it, also while another process runs it.

    The attributes that it needs are declared here and defined in ``Study``.
    """

    name: str

    if TYPE_CHECKING:

        def _repository(self) -> StudyRepository: ...

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
