"""Where a study keeps its records."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch

from thrifty.core import (
    CheckpointError,
    CheckpointRef,
    Clock,
    StoreError,
    StudyMismatchError,
    StudyNotFoundError,
    UsageError,
    fingerprint,
    plain_logger,
)
from thrifty.pack import TRAIN_LOSS
from thrifty.plan import SearchPlan
from thrifty.run import model_of, read_state, train_alone
from thrifty.search import Auto
from thrifty.space import TimeUnit, config_to_json
from thrifty.space._timeline import starts_alike
from thrifty.store import (
    CheckpointAdded,
    NodeRecord,
    PlanInfo,
    PlanRecords,
    PriorRecord,
    Store,
    StudyInfo,
    redact_url,
)
from thrifty.store._address import redact_root, shell_command
from thrifty.store._plan_files import MAX_BASE_BYTES, ArtifactFiles
from thrifty.store._records import ActApplied
from thrifty.store._reports import is_legacy, no_such_trial
from thrifty.store._steering_requests import this_user
from thrifty.store._trial_lines import LOG_BYTES, TrialLine

from ._identity import CannotGrowError, Recipe, goals_of
from ._ledger import Ledger, done, node_record
from ._preflight import check_goals, prior_trials, priors_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """A database for the records and a folder for the checkpoints.

    Args:
        url: The address of an SQLite or PostgreSQL database in SQLAlchemy's format.
        checkpoints: A folder, or any fsspec address (default: beside the database).
        disk_budget_bytes: How much the checkpoints of a plan may take, including the files that
            killed runs have left (default: no limit). Over the budget, the states that are cheapest
            to train again are deleted first, including those of trials that are done. Three kinds
            of states stay: those from which a trial may go on, those from which pending work
            starts, and those of the best trials. If these alone are over the budget, one warning
            says so. ``load_model`` trains a deleted state again.
        shared: Whether several processes may run studies of one task and seed at the same time.
            Together they train each stage only once (default: True on PostgreSQL).
        max_base_bytes: How much the frozen bases of a plan may take beside its checkpoints
            (default: 2 GiB). A base is stored once; with it, a trial can go on and be loaded even
            if the task makes another base by then. A larger base is not stored: 0 stores none.
        checkpoint_every: Also keep the state of each trial after every ``checkpoint_every``
            epochs, so that a branch there trains none of them again (default: only states from
            which a stage may start).
        log_bytes: How much of what the code of a trial logs with ``logging`` is kept, the last
            lines (default: 64 KiB for each node of the search plan, so for what several trials
            share and for what a trial trains alone; 0 keeps nothing).

    Raises:
        UsageError: ``checkpoint_every`` is no whole number of epochs, or ``log_bytes`` is no whole
            number of bytes.
    """

    url: str = "sqlite:///thrifty.db"
    checkpoints: str | None = None
    disk_budget_bytes: float = float("inf")
    shared: bool | None = None
    max_base_bytes: float = MAX_BASE_BYTES
    checkpoint_every: int | None = None
    log_bytes: int = LOG_BYTES

    def __post_init__(self) -> None:
        every = self.checkpoint_every
        if every is not None and (type(every) is not int or every < 1):
            raise UsageError(
                f"Storage(checkpoint_every={every!r}): it must be a whole number of epochs, 1 or "
                "more"
            )
        if type(self.log_bytes) is not int or self.log_bytes < 0:
            raise UsageError(
                f"Storage(log_bytes={self.log_bytes!r}): it must be a whole number of bytes, 0 or "
                "more"
            )

    def __repr__(self) -> str:
        parts = [f"url={redact_url(self.url)!r}"]
        if self.checkpoints is not None:
            parts.append(f"checkpoints={redact_root(self.checkpoints)!r}")
        if self.disk_budget_bytes != float("inf"):
            parts.append(f"disk_budget_bytes={self.disk_budget_bytes!r}")
        if self.shared is not None:
            parts.append(f"shared={self.shared!r}")
        if self.max_base_bytes != MAX_BASE_BYTES:
            parts.append(f"max_base_bytes={self.max_base_bytes!r}")
        if self.checkpoint_every is not None:
            parts.append(f"checkpoint_every={self.checkpoint_every!r}")
        if self.log_bytes != LOG_BYTES:
            parts.append(f"log_bytes={self.log_bytes!r}")
        return f"Storage({', '.join(parts)})"

    @classmethod
    def of(cls, value: Storage | str) -> Storage:
        """Return a storage unchanged, or the storage for an address.

        Raises:
            UsageError: The value is neither a storage nor an address.
        """
        if not isinstance(value, Storage | str):
            raise UsageError(
                f"storage is {value!r}; give an address such as 'sqlite:///thrifty.db', or a "
                "Storage"
            )
        return value if isinstance(value, Storage) else cls(url=value)

    @property
    def is_shared(self) -> bool:
        """Whether other processes may train for the same plan at the same time."""
        return self.url.startswith("postgresql") if self.shared is None else self.shared


def taken_over(relatives: Sequence[PlanRecords]) -> list[NodeRecord | CheckpointAdded]:
    """Return the nodes and states of other plans as records of a new plan that has no id yet.

    Epochs are left out: their metrics are computed again, from the states or by training.

    Args:
        relatives: Plans of the same family. If several have a state, the first one counts.
    """
    merged = SearchPlan()
    states: dict[tuple[int, int], CheckpointRef] = {}
    for records in relatives:
        places = {node.node: merged.insert(node.timeline) for node in records.nodes}
        losses = {(e.node, e.epoch): e.metrics.get(TRAIN_LOSS) for e in records.epochs}
        for ref in records.checkpoints:
            loss = losses.get((ref.node, ref.epoch), ref.train_loss)
            if loss is None:  # without the training loss, the metrics would be incomplete
                continue
            owner = merged.owner(places[ref.node], ref.epoch).id
            states.setdefault((owner, ref.epoch), replace(ref, node=owner, train_loss=loss))
    return [
        *(node_record(node, plan=0) for node in merged.nodes),
        *(CheckpointAdded(plan=0, ref=ref) for ref in states.values()),
    ]


logger = plain_logger(__name__)

Source = str | tuple["StudyRepository", Ledger]
"""An earlier study: its name in the same database, or a repository with its ledger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRepository:
    """Access to the records of one study."""

    recipe: Recipe
    storage: Storage
    name: str
    clock: Clock

    @property
    def delete_command(self) -> str:
        """The shell command that deletes the study of this name."""
        return shell_command("delete", name=self.name, url=self.storage.url)

    def joined(self) -> StudyRepository:
        """Return the same repository for a task whose metrics change what is trained."""
        return replace(self, recipe=replace(self.recipe, apart=False))

    def open(self, *, create: bool = True) -> Store:
        """Open the store that holds the study, or will hold it."""
        return Store.open(
            self.storage.url, checkpoints=self.storage.checkpoints, clock=self.clock, create=create
        )

    def find(self, store: Store) -> StudyInfo | None:
        """Return the study's record, or None if the study does not exist yet.

        A different study whose trials have all failed gives way, as after a correction of the task.

        Raises:
            StudyMismatchError: A different study of this name exists.
        """
        info = store.studies.find(self.name)
        if info is not None:
            url = redact_url(self.storage.url)
            where = f"{url} has a different study {self.name!r}"
            recipe = self.recipe.like(info.spec)
            identity = recipe.plan_identity(legacy=is_legacy(info.spec))
            same_plan = store.plans.get(info.plan).identity == identity
            try:
                recipe.check_same(info.spec, same_plan=same_plan, where=where)
            except CannotGrowError as error:
                raise StudyMismatchError(
                    f"study {self.name!r} in {url} cannot be extended {error}"
                ) from None
            except StudyMismatchError as error:
                if self._gives_way(store):
                    return None
                raise StudyMismatchError(f"{error}{self._how_to_replace(store, info)}") from None
        return info

    def _gives_way(self, store: Store) -> bool:
        """Return whether the stored study has nothing but failed trials, and no process runs it."""
        summary = store.studies.summary(self.name)
        num_trials = sum(summary.num_trials.values())
        return summary.state not in (
            "running",
            "paused",
        ) and 0 < num_trials == summary.num_trials.get("failed", 0)

    def _make_room(self, store: Store) -> None:
        """Delete a different study of this name that gives way; it can be restored."""
        info = store.studies.find(self.name)
        if info is None or self.find(store) is not None:
            return
        store.trash.put(info, who=this_user())
        logger.warning(
            "all trials of the stored study %r have failed, and it is a different one, so this one "
            "takes its place; to undo that: %s",
            self.name,
            shell_command("restore", name=self.name, url=self.storage.url),
        )

    def planned(self, *, num_workers: int = 1) -> Recipe:
        """Return the recipe with the algorithm that the study has, or that it would choose.

        Raises:
            StudyMismatchError: A different study of this name exists.
        """
        if not isinstance(self.recipe.algorithm, Auto):
            return self.recipe
        with contextlib.suppress(StudyNotFoundError), self.open(create=False) as store:
            info = self.find(store)
            if info is not None:
                return self.recipe.chosen_as(info.spec)
        return self.recipe.chosen_for(num_workers)

    def _how_to_replace(self, store: Store, info: StudyInfo) -> str:
        """Return how to free the name of the stored study, as the last sentence of a message."""
        has_results = (
            store.studies.summary(self.name).best_value is not None
            or "constraints" in info.spec  # its trials may all break them
        )
        which = "" if has_results else ", which has no results"
        return f". To replace the stored study{which}, delete it first: {self.delete_command}"

    def open_plan(self, store: Store) -> PlanInfo:
        """Open the plan that a new study trains in.

        A new plan takes over the states that plans of the same training have kept.
        """
        recipe = self.recipe
        identity, family = recipe.plan_identity(), recipe.family()
        content: list[NodeRecord | CheckpointAdded] = []
        if store.plans.find(identity) is None:
            relatives = store.plans.relatives(family)
            content = taken_over([store.plans.load(each.id) for each in relatives])
        return store.plans.open(
            identity, task=type(recipe.task).__qualname__, family=family, content=content
        )

    def known(self) -> SearchPlan:
        """Return what is known of the plan that this study trains in, or would train in."""
        plan, _, _ = self.known_with_origins()
        return plan

    def mean_epoch_s(self) -> float | None:
        """Return the mean time of an epoch that any study of this plan trained; None if unknown."""
        try:
            store = self.open(create=False)
        except StudyNotFoundError:
            return None
        with store:
            epochs = self._known_records(store).epochs
        spent = [each.seconds for each in epochs if not each.evaluated]
        return sum(spent) / len(spent) if spent else None

    def known_with_origins(
        self,
    ) -> tuple[SearchPlan, Mapping[tuple[int, int], int | None], Mapping[int, str]]:
        """Return what is known of the plan as ``known`` does, and who has trained it.

        Returns:
            The plan, the id of the study that trained each ``(node, epoch)`` (None: it was
            deleted), and the names of studies by id.
        """
        plan = SearchPlan()
        try:
            store = self.open(create=False)
        except StudyNotFoundError:
            return plan, {}, {}
        with store:
            records = self._known_records(store)
            names = {number: info.name for number, info in store.studies.made().items()}
        for node in records.nodes:
            plan.insert(node.timeline)
        plan.learn([done(epoch) for epoch in records.epochs], records.checkpoints)
        return plan, {(each.node, each.epoch): each.study for each in records.epochs}, names

    def _known_records(self, store: Store) -> PlanRecords:
        try:
            info = self.find(store)
        except StudyMismatchError:
            info = None  # a study of this name that trains something else
        if info is not None:
            return store.plans.load(info.plan)
        recipe = self.recipe
        for each in (recipe, replace(recipe, apart=False)):
            found = store.plans.find(each.plan_identity())
            if found is not None:
                return store.plans.load(found.id)
        relatives = store.plans.relatives(recipe.family())
        records = taken_over([store.plans.load(each.id) for each in relatives])
        return PlanRecords(
            nodes=[each for each in records if isinstance(each, NodeRecord)],
            epochs=[],
            checkpoints=[each.ref for each in records if isinstance(each, CheckpointAdded)],
        )

    def make(
        self,
        store: Store,
        *,
        plan: int,
        file: str | None,
        enqueued: Sequence[Mapping[str, Any]],
        sources: Sequence[Source],
        num_workers: int = 1,
    ) -> StudyInfo:
        """Create the study with the trials of earlier studies.

        ``Auto`` chooses its algorithm for ``num_workers``. If another process has just created the
        same study, return that one, with the algorithm that was chosen there.
        """
        self._make_room(store)
        try:
            return store.studies.create(
                self.name,
                plan=plan,
                spec={**self.recipe.chosen_for(num_workers).spec(), "file": file},
                enqueued=not_in(enqueued, ()),
                priors=self.priors(store, sources),
            )
        except StudyMismatchError:
            made = self.find(store)
            if made is None:
                raise
            return made

    def at_home(self, store: Store, info: StudyInfo, *, file: str | Path | None) -> StudyInfo:
        """Record the file that has the study at its top level, if the database names none that has.

        A session may have made the study, so that the database names the module of the task or
        nothing. Or its file has been moved; on a shared database, it may be on another machine.
        Nothing is recorded where a database can only be read.
        """
        stored = info.spec.get("file")
        if file is None or stored == (path := str(Path(file).resolve())):
            return info
        module = sys.modules.get(type(self.recipe.task).__module__)
        is_of_task = stored == str(Path(getattr(module, "__file__", None) or "").resolve())
        is_there = stored is not None and (self.storage.is_shared or Path(stored).is_file())
        if is_there and not is_of_task:
            return info
        with contextlib.suppress(StoreError):
            return store.studies.set_file(info, path)
        return info

    def enqueue(
        self, store: Store, info: StudyInfo, enqueued: Sequence[Mapping[str, Any]]
    ) -> Sequence[Mapping[str, Any]]:
        """Record the enqueued configurations that are not recorded yet, and return these.

        Raises:
            StudyNotFoundError: Another process has deleted the study.
        """
        # A database that cannot be written may be read, so write nothing without a need.
        fresh: list[Mapping[str, Any]] = []
        if self.not_enqueued(store, info, enqueued):

            def choose(known: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
                fresh[:] = not_in(enqueued, known)
                return fresh

            store.studies.enqueue(info, choose)
        return fresh

    def extend(
        self,
        store: Store,
        info: StudyInfo,
        *,
        who: str | None = None,
        answers: Sequence[ActApplied] = (),
    ) -> StudyInfo:
        """Let a stored study have the trials and the length of this one, if it has less.

        A longer ``max_epochs`` is recorded as an act.

        Args:
            store: The database.
            info: The stored study.
            who: The user and the machine that requested it (default: those of this process).
            answers: The requests that are applied with it, in the same transaction.

        Raises:
            StudyNotFoundError: Another process has deleted the study.
            StudyMismatchError: A trial has a schedule that depends on ``max_epochs``.
        """
        info = self.find(store) or info  # another process may have made it longer meanwhile
        if not self.recipe.extends(info.spec):
            return info
        algorithm = self.recipe.chosen_as(info.spec).algorithm
        before = info.spec["max_epochs"]
        after = algorithm.max_epochs
        if after > before:
            self.check_lengths(store, info)
        logger.info("study %r goes on: it is %s now", self.name, algorithm)
        return store.studies.extend(
            info,
            algorithm=repr(algorithm),
            max_epochs=after,
            who=this_user() if who is None else who,
            answers=answers,
        )

    def check_lengths(self, store: Store, info: StudyInfo) -> None:
        """Check that the recorded trials begin in the same way if they are trained for longer.

        A branch of a trial may have schedules that the space lacks.

        Raises:
            StudyMismatchError: A trial would have other values in epochs that it has trained.
        """
        why = self._changed_trial(store, info)
        if why:
            after = self.recipe.algorithm.max_epochs
            raise StudyMismatchError(
                f"{redact_url(self.storage.url)}: study {self.name!r} cannot go on to {after} "
                f"epochs: {why}. Give the longer study another name: in the same database, it "
                "trains only epochs that no study has trained yet"
            )

    def why_not_longer(self, store: Store, info: StudyInfo) -> str:
        """Return why a stored study cannot have the larger ``max_epochs`` of this one.

        Empty if it can.
        """
        recipe = self.recipe.chosen_as(info.spec)
        why = recipe.why_not_longer(info.spec["max_epochs"])
        return why or self._changed_trial(store, info)

    def _changed_trial(self, store: Store, info: StudyInfo) -> str:
        """Return which recorded trial would begin in another way in a longer study, and why."""
        before, after = info.spec["max_epochs"], self.recipe.algorithm.max_epochs
        for trial in store.studies.load(info.id).trials:
            if trial.horizon is None and not starts_alike(trial.config, before=before, after=after):
                return (
                    f"a schedule of trial {trial.number} depends on max_epochs, so its first "
                    f"{before} epochs would have other values"
                )
        return ""

    def not_enqueued(
        self, store: Store, info: StudyInfo, enqueued: Sequence[Mapping[str, Any]]
    ) -> list[Mapping[str, Any]]:
        """Return the configurations that are not recorded yet."""
        return not_in(enqueued, store.studies.enqueued(info.id))

    def priors(self, store: Store, sources: Sequence[Source]) -> list[PriorRecord]:
        """Return the trials of earlier studies.

        Raises:
            StudyNotFoundError: An earlier study does not exist.
            StudyMismatchError: An earlier study had different objectives.
        """
        out: list[PriorRecord] = []
        goals, space = self.recipe.goals, self.recipe.space
        for source in sources:
            if isinstance(source, str):
                info = store.studies.get(source)
                name, theirs = source, goals_of(info.spec)
                ledger = Ledger(
                    SearchPlan(), goals=theirs, max_epochs=info.spec["max_epochs"], clock=self.clock
                )
                records = store.studies.snapshot(info)
                ledger.load_plan(records.plan)
                ledger.load_study(records.study)
            else:
                repository, ledger = source
                name, theirs = repository.name, repository.recipe.goals
            check_goals(goals, source=name, theirs=theirs)
            out += priors_of(ledger, space, source=name, goals=goals)
        return out

    def _unit(self, info: StudyInfo) -> TimeUnit:
        """Return the unit of this study, or else the one that it was made with."""
        mine = self.recipe.unit
        return TimeUnit.from_json(info.spec.get("unit")) if mine.is_epochs else mine

    def load(self, store: Store, info: StudyInfo) -> Ledger:
        """Rebuild the ledger from the records.

        Raises:
            StudyNotFoundError: Another process has deleted the study.
        """
        records = store.studies.snapshot(info)
        space = self.recipe.space
        # Another object or process may have made the study longer.
        max_epochs = max(self.recipe.algorithm.max_epochs, info.spec.get("max_epochs", 0))
        branches = space.branches(max_epochs=max_epochs)
        every = self.storage.checkpoint_every or max_epochs
        ledger = Ledger(
            SearchPlan(
                cuts=sorted({*branches.epochs, *range(every, max_epochs, every)}),
                intervals=branches.intervals,
                keep_branches=self.storage.is_shared,
            ),
            goals=self.recipe.goals,
            max_epochs=max_epochs,
            num_seeds=self.recipe.num_seeds,
            clock=self.clock,
            prior=prior_trials(records.priors, self.recipe.goals),
            study_id=info.id,
            plan_id=info.plan,
        )
        ledger.threads = records.threads
        ledger.log_bytes = self.storage.log_bytes
        ledger.first_length = min(info.spec.get("earlier_max_epochs", ()), default=None)
        ledger.unit = self._unit(info)
        ledger.load_plan(records.plan)
        ledger.load_study(records.study)
        return ledger

    def foreseen(
        self, enqueued: Sequence[Mapping[str, Any]], sources: Sequence[Source]
    ) -> tuple[list[Mapping[str, Any]], list[PriorRecord]]:
        """Return all enqueued configurations and the trials of earlier studies.

        The study itself may not exist yet.
        """
        try:
            store = self.open(create=False)
        except StudyNotFoundError:
            if any(isinstance(source, str) for source in sources):
                raise
            # Priors from other databases can be read without this one.
            store = Store.open("sqlite://", clock=self.clock)
        with store:
            info = self.find(store)
            if info is None:
                return not_in(enqueued, ()), self.priors(store, sources)
            known = store.studies.enqueued(info.id)
            return [*known, *not_in(enqueued, known)], list(store.studies.priors(info.id))

    def load_model(
        self, ledger: Ledger, number: int, *, replica: int = 0, average: str | None = None
    ) -> torch.nn.Module:
        """Return a trial's trained model, from its checkpoint or trained again.

        Raises:
            UsageError: The trial has not reported yet, or the study has no such replica or average.
        """
        epochs = ledger.history[number].reached
        if not epochs:
            raise UsageError(f"trial {number} has not reported yet: there is no model to load")
        nodes = ledger.nodes_of[number]
        if not 0 <= replica < len(nodes):
            raise UsageError(
                f"load_model(replica={replica!r}): trial {number} was trained with {len(nodes)} "
                f"seed{'s' if len(nodes) > 1 else ''}; give a number from 0 to {len(nodes) - 1}"
            )
        node = ledger.plan.owner(nodes[replica], epochs)
        timeline = ledger.plan.nodes[nodes[replica]].timeline
        ref = node.checkpoints.get(epochs)
        state = None
        if ref is not None:
            with self.open(create=False) as store:
                try:
                    state = (epochs, read_state(store.checkpoints, ref))
                except CheckpointError as error:
                    logger.warning("%s; training trial %d again", error, number)
        backend, _ = train_alone(
            self.recipe.task,
            timeline,
            seed=self.recipe.seed,
            epochs=epochs,
            state=state,
            threads=ledger.threads,
        )
        return model_of(backend, average=average)

    def _check_trial(self, ledger: Ledger, number: int) -> None:
        if type(number) is not int or not 0 <= number < len(ledger.history):
            raise UsageError(no_such_trial(self.name, number, num_trials=len(ledger.history)))

    def log_lines(self, ledger: Ledger, number: int) -> Sequence[TrialLine]:
        """Return what a trial has logged.

        Raises:
            UsageError: There is no such trial.
        """
        self._check_trial(ledger, number)
        with self.open(create=False) as store:
            return store.log_lines.of(store.studies.get(self.name), number)

    def open_artifact(self, ledger: Ledger, number: int, name: str) -> IO[bytes]:
        """Return an artifact of a trial as a file that is open for reading.

        Raises:
            UsageError: There is no such trial, or it has no such artifact.
            CheckpointError: The file was not stored, or is missing or damaged.
        """
        self._check_trial(ledger, number)
        found = ledger.artifacts_of(number)
        if name not in found:
            names = ", ".join(map(repr, found)) or "none"
            raise UsageError(f"trial {number} has no artifact {name!r}; it has: {names}")
        with self.open(create=False) as store:
            folder = store.plans.get(ledger.plan_id).identity
            return ArtifactFiles(store.checkpoints, folder=folder).open(found[name])


def not_in(
    configs: Sequence[Mapping[str, Any]], known: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return the configurations that are not known yet, each once.

    A script that runs again enqueues the same configurations again.
    """
    seen = {_key(config) for config in known}
    out: list[Mapping[str, Any]] = []
    for config in configs:
        if _key(config) not in seen:
            seen.add(_key(config))
            out.append(config)
    return out


def _key(config: Mapping[str, Any]) -> str:
    return fingerprint(config_to_json(config))
