"""The ledger of one study: keeps plan and history in step and collects records to write."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from thrifty.core import (
    Artifact,
    CheckpointLost,
    Clock,
    EpochDone,
    Event,
    Refused,
    StageDone,
    StageFailed,
    StageStarted,
    TaskError,
    plain_logger,
)
from thrifty.plan import Answer, Node, SearchPlan
from thrifty.search import Decision, History, Proposal, Stop, Trial
from thrifty.space import Timeline, TimeUnit
from thrifty.space._ladder import averaged_by
from thrifty.space._units import EPOCHS
from thrifty.store import (
    Changes,
    CheckpointAdded,
    CheckpointRemoved,
    EpochRecord,
    NodeRecord,
    PlanRecords,
    Record,
    RefusalRecord,
    StageRecord,
    StudyRecords,
    TrialAsked,
    TrialFailed,
    TrialReported,
    TrialStopped,
)
from thrifty.store._epoch_times import last_attributes, mean_curve, standard_errors
from thrifty.store._records import LinesLogged

from ._goals import Goals
from ._trained_epochs import TrainedEpochs
from ._trial_events import FailureLog, TrialAdvanced, TrialBegan, TrialEnded, TrialEvent


logger = plain_logger(__name__)


class Ledger:
    """The bookkeeping of a study, in memory and without files.

    It applies decisions and events to plan and history; ``outbox`` collects records for the store.
    """

    unit: TimeUnit = EPOCHS
    """The unit in which the study shows what it trains."""
    log_bytes: int = 0
    """How much of what trials log is kept; see ``Storage.log_bytes``."""
    first_length: int | None = None
    """The shortest ``max_epochs`` that the study had before it was made longer."""

    def __init__(
        self,
        plan: SearchPlan,
        *,
        goals: Goals,
        max_epochs: int,
        clock: Clock,
        num_seeds: int = 1,
        prior: Sequence[Trial] = (),
        study_id: int = 0,
        plan_id: int = 0,
    ) -> None:
        self.plan = plan
        self.history = History(prior=prior, max_epochs=max_epochs)
        self.goals, self.max_epochs, self.num_seeds = goals, max_epochs, num_seeds
        self.outbox: list[Record] = []
        self.news: list[TrialEvent] = []
        """Events that observers have not received yet."""
        self.nodes_of: list[tuple[int, ...]] = []
        """The nodes that the timelines of each trial's replicas end on, by trial number."""
        self.errors: dict[int, tuple[str, str, str]] = {}
        """Kind, message and traceback of failed trials."""
        self.epochs = TrainedEpochs(study_id=study_id, plan_id=plan_id)
        """The known epochs of the plan."""
        self.kept_bytes = 0
        self.touched: set[int] = set()
        """Nodes with checkpoints that may have become superseded since the last check."""
        self.stands: Counter[tuple[int, int]] = Counter()
        """How many trials have each state as their latest one, by node and epoch."""
        self.failure_log = FailureLog()
        # A heap of (-first objective, trial, epoch). Outdated entries stay until they are popped.
        self._ranked: list[tuple[float, int, int]] = []
        self.trial_epochs = 0
        """Epochs that the trials have reached, each trial counted separately."""
        self._clock = clock
        self.study_id, self.plan_id = study_id, plan_id
        # CPU threads with which each worker trains the plan, if fixed.
        self.threads: int | None = None
        # Whether a process runs the study; if not, trials in training are paused.
        self.is_run = False
        # The reason why a structure of the plan is not fused, by key.
        self.refused: dict[str, str] = {}
        # The revision of the plan in the store up to which all records are known.
        self.revision = 0
        self._num_nodes_recorded = 0
        self._stage_began: dict[tuple[int, int], tuple[float, float]] = {}
        """When each stage began, as a date and on a monotonic clock."""

    # -- decisions --------------------------------------------------------------------

    def decide(self, decisions: Sequence[Decision]) -> None:
        """Apply an algorithm's decisions; requests for known results are answered at once."""
        self._decide(decisions)
        self.failure_log.say_diverged(self.errors)

    def _decide(self, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            number = self.history.record_decision(decision)
            if isinstance(decision, Stop):
                self.outbox.append(TrialStopped(study=self.study_id, trial=number))
                if not is_done(self.history[number]):
                    self.news.append(TrialEnded(trial=number, state="stopped"))
                continue
            if decision.config is not None:
                self.nodes_of.append(self._insert(number, decision.config))
                self.news.append(
                    TrialBegan(trial=number, config=decision.config, parent=decision.parent)
                )
            elif self.adds_nodes(decision):
                # Its timeline ended where the study did; the longer one begins as that one.
                self.nodes_of[number] = self._insert(number, self.history[number].config)
            self.outbox.append(self._asked(decision, number))
            self._request(number, decision.target)

    def adds_nodes(self, decision: Decision) -> bool:
        """Return whether a decision may add nodes to the plan."""
        if isinstance(decision, Stop):
            return False
        is_longer = self.first_length is not None and decision.target > self.first_length
        return decision.config is not None or is_longer

    def stop_trial(self, number: int) -> str:
        """Stop a trial for good because a person wants it; return why not, or an empty text.

        What it has reached stays. What other trials need of its training goes on.
        """
        if not 0 <= number < len(self.history):
            return f"there is no trial {number}"
        trial = self.history[number]
        if trial.state in ("stopped", "failed") or is_done(trial):
            state = "done" if is_done(trial) else trial.state
            return f"trial {number} is {state} already"
        if trial.state == "waiting":
            self._decide([Stop(trial=number)])
            return ""
        for node in self.nodes_of[number]:
            self.plan.release(number, node, trial.target)
        self.history.record_stop(number)
        self.outbox.append(TrialStopped(study=self.study_id, trial=number))
        self.news.append(TrialEnded(trial=number, state="stopped"))
        return ""

    def _request(self, number: int, target: int) -> None:
        """Request all replicas of a trial; a result that is known already is reported at once."""
        answers = [self.plan.request(number, node, target) for node in self.nodes_of[number]]
        known = [answer for answer in answers if answer is not None]
        failed = [answer for answer in known if answer.failure is not None]
        for answer in failed[:1] or known[:1]:
            self._answered(answer)

    @property
    def best_trial(self) -> Trial | None:
        """The feasible trial whose first objective is best at the epoch that it has reached.

        Failed trials do not count. Of equally good trials, the first is the best.
        """
        while self._ranked:
            _, number, epoch = self._ranked[0]
            trial = self.history[number]
            if trial.state != "failed" and trial.reached == epoch:
                return trial
            heapq.heappop(self._ranked)
        return None

    @property
    def best_value(self) -> float | None:
        """The first objective of the best trial, as the task measured it."""
        best = self.best_trial
        return None if best is None else self.goals.sign * best.objectives[0]

    def curve(self, number: int) -> list[Mapping[str, float]]:
        """Return all metrics of a trial after epochs 1, 2, ... up to the epoch it has reached.

        With several seeds, these are the means over the replicas. See ``replicas``.
        """
        return mean_curve(self.replicas(number))

    def replicas(self, number: int) -> list[list[Mapping[str, float]]]:
        """Return the metrics of each replica of a trial, up to the epoch that all have reached.

        A trial that is judged by averaged weights has their metrics in the place of the usual ones.
        """
        return self._curves(number, self.history[number].reached)

    def _curves(self, number: int, epoch: int) -> list[list[Mapping[str, float]]]:
        curves = [self.plan.curve(node, epoch) for node in self.nodes_of[number]]
        average = averaged_by(self.history[number].config)
        if not average:
            return curves
        return [_averaged(curve, average, needed=self.goals.names) for curve in curves]

    def places(self, number: int) -> Iterator[list[tuple[int, int]]]:
        """Yield, for each replica of a trial, the ``(node, epoch)`` it has passed, last first."""
        for node in self.nodes_of[number]:
            reached = self.history[number].reached
            yield [(self.plan.owner(node, epoch).id, epoch) for epoch in range(reached, 0, -1)]

    def user_attrs(self, number: int) -> dict[str, Any]:
        """Return the user attributes of a trial's first replica, up to the epoch it has reached."""
        found = self.epochs.attributes
        return last_attributes(self._path(number), found) if found else {}

    def artifacts_of(self, number: int) -> dict[str, Artifact]:
        """Return the artifacts of a trial's first replica by name, as ``user_attrs`` does."""
        found = self.epochs.artifacts
        return last_attributes(self._path(number), found) if found else {}

    def _path(self, number: int) -> list[tuple[int, int]]:
        """Return the nodes on the way to a trial's first replica, each with its last epoch."""
        path: list[tuple[int, int]] = []
        epoch = self.history[number].reached
        node: Node | None = self.plan.owner(self.nodes_of[number][0], epoch)
        while node is not None:
            path.append((node.id, epoch))
            epoch, node = node.start, node.parent
        return path[::-1]

    def _note_lines(self, event: EpochDone | StageFailed, epoch: int) -> None:
        if event.lines and self.log_bytes:
            self.outbox.append(
                LinesLogged(
                    plan=self.plan_id,
                    node=event.node,
                    epoch=epoch,
                    lines=event.lines,
                    max_bytes=self.log_bytes,
                )
            )

    def _insert(self, number: int, config: Mapping[str, Any]) -> tuple[int, ...]:
        horizon = self.history[number].horizon
        epochs = self.max_epochs if horizon is None else horizon
        nodes = tuple(
            self.plan.insert(Timeline(config, epochs=epochs, replica=replica))
            for replica in range(self.num_seeds)
        )
        fresh = self.plan.nodes[self._num_nodes_recorded :]
        self.outbox += [node_record(each, plan=self.plan_id) for each in fresh]
        self._num_nodes_recorded = len(self.plan.nodes)
        return nodes

    def _asked(self, proposal: Proposal, number: int) -> TrialAsked:
        return TrialAsked(
            study=self.study_id,
            trial=number,
            target=proposal.target,
            config=proposal.config,
            group=proposal.group,
            parent=proposal.parent,
            node=self.nodes_of[number][0],
            replicas=self.nodes_of[number][1:],
            horizon=proposal.horizon,
        )

    # -- events -----------------------------------------------------------------------

    def handle(self, event: Event) -> None:
        """Apply an event that an executor reported."""
        if isinstance(event, StageStarted):
            self._stage_began[event.node, event.start] = self._moment()
        elif isinstance(event, EpochDone):
            self._epoch_done(event)
        elif isinstance(event, StageDone):
            self._log_stage(event, state="done")
            if event.checkpoint is not None:
                self.touched.add(event.node)
                self.kept_bytes += event.checkpoint.num_bytes
                self.outbox.append(CheckpointAdded(plan=self.plan_id, ref=event.checkpoint))
        elif isinstance(event, StageFailed):
            self._log_stage(event, state=event.kind)
            self._note_lines(event, event.epoch + 1)
        elif isinstance(event, CheckpointLost):
            self._lost(event)
        elif isinstance(event, Refused):
            self._refuse(event)
        answers = self.plan.record(event)
        for answer in answers:
            self._answered(answer)
        if isinstance(event, StageFailed) and event.kind != "task":  # "task" errors are raised
            self.failure_log.say_stage(event, answers)
        self.failure_log.say_diverged(self.errors)

    def _epoch_done(self, event: EpochDone) -> None:
        record = self.epochs.add(event)
        if isinstance(record, EpochRecord):
            self._note_lines(event, event.epoch)
        self.outbox.append(record)

    def _answered(self, answer: Answer) -> None:
        number = answer.trial
        assert isinstance(number, int)
        if len(self.nodes_of[number]) > 1 and not self._is_settled(number, answer):
            return
        if answer.failure is not None:
            self._fail(number, answer.epoch, answer.failure)
            return
        before, best_before = self.history[number].reached, self.best_value
        curve = self._reached(number, answer.epoch)
        if curve is None:
            return
        self._advanced(number, curve[before:], best_before=best_before)
        goals, metrics = self.goals, curve[-1]
        self.outbox.append(
            TrialReported(
                study=self.study_id,
                trial=number,
                epoch=answer.epoch,
                value=goals.value(metrics),
                objectives=goals.values(metrics) if len(goals.metrics) > 1 else None,
                violation=goals.violation(metrics) if goals.constraints else None,
            )
        )

    def _is_settled(self, number: int, answer: Answer) -> bool:
        """Return whether an answer about one replica decides the request of its trial.

        A failure does, and so does the last result. A trial whose replica has failed fails: a mean
        over the replicas that are left would prefer configurations that fail now and then.
        """
        trial = self.history[number]
        if trial.state != "running" or trial.target != answer.epoch:
            return False  # another replica has failed, or all results came at once
        return answer.failure is not None or all(
            answer.epoch in self.plan.owner(node, answer.epoch).metrics
            for node in self.nodes_of[number]
        )

    def _advanced(
        self, number: int, metrics: Sequence[Mapping[str, float]], *, best_before: float | None
    ) -> None:
        """Tell observers what a trial has reached, with its metrics since the last report."""
        trial, goals = self.history[number], self.goals
        before = trial.reached - len(metrics)
        value = goals.value(metrics[-1])
        better = best_before is None or goals.sign * value > goals.sign * best_before
        self.news.append(
            TrialAdvanced(
                trial=number,
                first_epoch=before + 1,
                metrics=tuple(metrics),
                value=value,
                best=better and not trial.violation,
                shared_epochs=self._pass(number, before=before),
            )
        )
        if is_done(trial):
            self.news.append(TrialEnded(trial=number, state="done"))

    def _pass(self, number: int, *, before: int) -> int:
        """Record that a trial has passed the epochs after ``before``.

        Return how many of them another trial had passed already.
        """
        reached = self.history[number].reached
        shared = [
            self.epochs.passed(self.plan.owner(last, reached), reached=reached, before=before)
            for last in self.nodes_of[number]
        ]
        # Trials that share an epoch share it in all replicas, so the first one stands for all.
        return shared[0]

    def _reached(self, number: int, epoch: int) -> Sequence[Mapping[str, float]] | None:
        """Record that a trial has reached an epoch.

        Return its metrics up to there, or None if they make the trial fail.
        """
        goals = self.goals
        curves = self._curves(number, epoch)
        needed = set(goals.names)
        for metrics in chain.from_iterable(curves):
            if not needed <= metrics.keys():
                goals.check(metrics)
        curve = mean_curve(curves)
        metrics = curve[-1]
        if bad := goals.not_finite(metrics):
            values = ", ".join(f"{name} is {metrics[name]}" for name in bad)
            which = _which_replicas([bool(goals.not_finite(each[-1])) for each in curves])
            message = f"{values} after epoch {epoch}{which}"
            self._fail(number, epoch, ("diverged", message, ""))
            self.failure_log.note_diverged(number)
            return None
        violation = goals.violation(metrics)
        self._stand(number, epoch)
        self.trial_epochs += (epoch - self.history[number].reached) * len(curves)
        self.history.record_scores(
            number,
            [goals.score(m) for m in curve],
            objectives=goals.objectives(metrics),
            violation=violation,
            standard_errors=standard_errors([[goals.score(m) for m in each] for each in curves]),
        )
        if not violation:
            heapq.heappush(self._ranked, (-goals.objectives(metrics)[0], number, epoch))
        return curve

    def _stand(self, number: int, epoch: int) -> None:
        """Record that a trial has moved to another state."""
        before = self.history[number].reached
        for node in self.nodes_of[number]:
            if before:
                left = self.plan.owner(node, before).id, before
                self.stands[left] -= 1
                if not self.stands[left]:
                    del self.stands[left]
                    self.touched.add(left[0])
            self.stands[self.plan.owner(node, epoch).id, epoch] += 1

    def _fail(self, number: int, epoch: int, failure: tuple[str, str, str]) -> None:
        kind, message, traceback = failure
        if len(self.nodes_of[number]) > 1:  # the other replicas need no more training
            target = self.history[number].target
            for node in self.nodes_of[number]:
                self.plan.release(number, node, target)
                owner: Node | None = self.plan.owner(node, target)
                while owner is not None:
                    self.failure_log.withdrawn.add(owner.id)
                    owner = owner.parent
        self.news.append(TrialEnded(trial=number, state="failed", message=message))
        self.history.record_failure(number)
        self.errors[number] = failure
        self.outbox.append(
            TrialFailed(
                study=self.study_id,
                trial=number,
                epoch=epoch,
                kind=kind,
                message=message,
                traceback=traceback,
            )
        )

    def _log_stage(self, event: StageDone | StageFailed, *, state: str) -> None:
        began, began_s = self._stage_began.pop((event.node, event.start), self._moment())
        self.outbox.append(
            StageRecord(
                plan=self.plan_id,
                node=event.node,
                start=event.start,
                stop=event.stop,
                worker=event.worker,
                state=state,
                started_at=began,
                seconds=self._clock.monotonic() - began_s,
                error=event.message if isinstance(event, StageFailed) else "",
                device=None if event.use is None else event.use.device,
                peak_bytes=None if event.use is None else event.use.peak_bytes,
            )
        )

    def _moment(self) -> tuple[float, float]:
        return self._clock.now(), self._clock.monotonic()

    def _lost(self, event: CheckpointLost) -> None:
        ref = event.checkpoint
        logger.warning("%s; the stage that made it is trained again", event.reason)
        if not ref.borrowed:
            self.kept_bytes -= ref.num_bytes
        self.outbox.append(CheckpointRemoved(plan=self.plan_id, node=ref.node, epoch=ref.epoch))

    def _refuse(self, event: Refused) -> None:
        """Record that a structure is not fused, and log it once."""
        if event.key in self.refused:
            return
        self.refused[event.key] = event.reason
        logger.warning(
            "%s is trained by plain PyTorch, not fused: %s", event.structure, event.reason
        )
        self.outbox.append(
            RefusalRecord(
                plan=self.plan_id, key=event.key, reason=event.reason, study=self.study_id
            )
        )

    # -- loading records --------------------------------------------------------------

    def load_plan(self, records: PlanRecords) -> None:
        """Rebuild the plan from the store's records."""
        self.revision = records.revision
        self._learn(records)

    def learn(self, changes: Changes) -> None:
        """Apply what other drivers have done, and what they are training now."""
        self._learn(changes.news)
        self.plan.set_remote_running({
            claim.node: (claim.start, claim.stop) for claim in changes.claims
        })
        self.failure_log.say_diverged(self.errors)

    def _learn(self, records: PlanRecords) -> None:
        # Decisions of this study that are not recorded yet have added no nodes: nodes are
        # recorded at once.
        for node in records.nodes:
            # Another study of this plan may train for more or fewer epochs.
            made = self.plan.insert(node.timeline)
            assert made == node.node
        self._num_nodes_recorded = len(self.plan.nodes)
        self.epochs.learn(records.epochs)
        for ref in records.checkpoints:
            self.touched.add(ref.node)
            if not ref.borrowed and ref.epoch not in self.plan.nodes[ref.node].checkpoints:
                self.kept_bytes += ref.num_bytes
        answers = self.plan.learn([done(epoch) for epoch in records.epochs], records.checkpoints)
        for answer in answers:
            self._answered(answer)

    def load_study(self, records: StudyRecords) -> None:
        """Replay a study's decisions and reports in order, then request unfinished work again."""
        by_number = {trial.number: trial for trial in records.trials}
        for entry in records.log:
            if entry.kind == "enqueued":
                assert entry.config is not None
                self.history.record_enqueued(entry.config)
                continue
            trial = by_number[entry.trial]
            if entry.kind == "asked":
                fresh = entry.trial == len(self.history)
                self.history.record_decision(
                    Proposal(
                        target=entry.epoch,
                        trial=None if fresh else entry.trial,
                        config=trial.config if fresh else None,
                        group=_hashable(trial.group),
                        parent=trial.parent,
                        horizon=trial.horizon if fresh else None,
                    )
                )
                if fresh:
                    self.nodes_of.append((trial.node, *trial.replicas))
            elif entry.kind == "stopped" and self.history[entry.trial].state == "running":
                self.history.record_stop(entry.trial)
            elif entry.kind == "stopped":
                self.history.record_decision(Stop(trial=entry.trial))
            elif entry.kind == "failed":
                self.history.record_failure(entry.trial)
                self.errors[entry.trial] = trial.error
            else:
                before = self.history[entry.trial].reached
                if self._reached(entry.trial, entry.epoch) is not None:
                    self._pass(entry.trial, before=before)
        # Observers of earlier runs have received all of these events.
        self.news.clear()
        self.failure_log.forget_diverged()
        self._ask_again()

    def _ask_again(self) -> None:
        """Request again what was pending when the last run ended."""
        for number in range(len(self.history)):
            one = self.history[number]
            for node in self.nodes_of[number]:
                self.plan.note(node, one.target)
            if one.state == "running":
                self._request(number, one.target)

    def live(self) -> Iterable[tuple[int, int]]:
        """Yield the node and the epoch of each replica of the trials whose training may go on.

        Trials that have reached their horizon are left out: no training starts from their state.
        """
        for number in range(len(self.history)):
            trial = self.history[number]
            if trial.state in ("running", "waiting") and not is_done(trial):
                for node in self.nodes_of[number]:
                    yield node, trial.reached


def is_done(trial: Trial) -> bool:
    """Return whether a trial has reached its horizon."""
    return trial.horizon is not None and trial.reached >= trial.horizon


def _averaged(
    curve: Sequence[Mapping[str, float]], average: str, *, needed: Iterable[str]
) -> list[Mapping[str, float]]:
    """Return metrics in which those of averaged weights replace those of the weights.

    A metric without a twin stays: it is of the training, such as its loss.

    Raises:
        TaskError: A needed metric has no twin.
    """
    prefix = f"{average}_"
    for name in needed:
        if any(prefix + name not in metrics for metrics in curve):
            raise TaskError(
                f"a trial of the ladder needs the metric '{prefix}{name}', which the task does not "
                f"report; give the task average = thrifty.{average.upper()}(...), or leave "
                "averages out of the ladder"
            )
    return [
        {name: metrics.get(prefix + name, value) for name, value in metrics.items()}
        for metrics in curve
    ]


def node_record(node: Node, *, plan: int) -> NodeRecord:
    """Return the record of a node."""
    return NodeRecord(
        plan=plan,
        node=node.id,
        parent=None if node.parent is None else node.parent.id,
        start=node.start,
        config=node.timeline.config,
        epochs=node.timeline.epochs,
        replica=node.timeline.replica,
    )


def done(epoch: EpochRecord) -> EpochDone:
    """Return the event with which a worker reported the end of an epoch."""
    return EpochDone(
        node=epoch.node,
        epoch=epoch.epoch,
        metrics=epoch.metrics,
        seconds=epoch.seconds,
        worker=epoch.worker,
        evaluated=epoch.evaluated,
        attributes=epoch.attributes,
        artifacts=epoch.artifacts,
    )


def _which_replicas(bad: Sequence[bool]) -> str:
    """Return which replicas of a trial are bad as the end of a sentence."""
    if len(bad) == 1 or not any(bad):
        return ""
    return f" ({sum(bad)} of {len(bad)} seeds)"


def _hashable(group: Any) -> Any:
    return tuple(_hashable(item) for item in group) if isinstance(group, list) else group
