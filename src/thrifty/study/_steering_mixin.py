"""What people ask of a study while it runs: to stop it or a trial, notes and tags, deletion."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from thrifty.core import StudyNotFoundError
from thrifty.store._acts import Act, ActKind, tags_of
from thrifty.store._steering_requests import ask, this_user
from thrifty.store._trash import Deleted

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
