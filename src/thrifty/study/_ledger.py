"""The books of one study: plan and history in step, and what has to be written down."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from thrifty.core import (
    CheckpointLost,
    Clock,
    EpochDone,
    Event,
    StageDone,
    StageFailed,
    StageStarted,
    TaskError,
)
from thrifty.plan import Answer, SearchPlan
from thrifty.search import Decision, History, Proposal, Stop
from thrifty.space import Timeline
from thrifty.store import (
    CheckpointAdded,
    CheckpointRemoved,
    EpochRecord,
    NodeRecord,
    PlanRecords,
    Record,
    StageRecord,
    StudyRecords,
    TrialAsked,
    TrialFailed,
    TrialReported,
    TrialStopped,
)


logger = logging.getLogger(__name__)


class Ledger:
    """Applies decisions and events to plan and history; ``outbox`` collects the records for the store.

    Pure bookkeeping, no files: the forecast runs it on made-up events.
    """

    def __init__(
        self,
        plan: SearchPlan,
        *,
        metric: str,
        mode: str,
        max_epochs: int,
        clock: Clock,
        study_id: int = 0,
        plan_id: int = 0,
    ) -> None:
        self.plan = plan
        self.history = History()
        self.metric = metric
        self.max_epochs = max_epochs
        self.outbox: list[Record] = []
        self.node_of: list[int] = []
        """The node that each trial's timeline ends on, by trial number."""
        self.errors: dict[int, tuple[str, str, str]] = {}
        """Kind, message and traceback of failed trials."""
        self.seconds: dict[tuple[int, int], tuple[float, float]] = {}
        """Seconds that each ``(node, epoch)`` took, and what it would have taken without others beside it."""
        self.kept_bytes = 0
        self.best: float | None = None
        """The best score so far."""
        self.trial_epochs = 0
        """Epochs that the trials have reached, each counted for itself."""
        self._sign = 1.0 if mode == "max" else -1.0
        self._clock = clock
        self._study_id = study_id
        self._plan_id = plan_id
        self._num_nodes_recorded = 0
        self._stage_began: dict[tuple[int, int], float] = {}

    # -- decisions --------------------------------------------------------------------

    def decide(self, decisions: Sequence[Decision]) -> None:
        """Applies an algorithm's decisions; what is known already is answered at once."""
        for decision in decisions:
            number = self.history.record_decision(decision)
            if isinstance(decision, Stop):
                self.outbox.append(TrialStopped(study=self._study_id, trial=number))
                continue
            if decision.config is not None:
                self.node_of.append(self._insert(decision.config))
            self.outbox.append(self._asked(decision, number))
            answer = self.plan.request(number, self.node_of[number], decision.target)
            if answer is not None:
                self._answered(answer)

    def value(self, score: float) -> float:
        """The metric behind a score."""
        return self._sign * score

    def _insert(self, config: Mapping[str, Any]) -> int:
        node = self.plan.insert(Timeline(config, epochs=self.max_epochs))
        for fresh in self.plan.nodes[self._num_nodes_recorded :]:
            self.outbox.append(
                NodeRecord(
                    plan=self._plan_id,
                    node=fresh.id,
                    parent=None if fresh.parent is None else fresh.parent.id,
                    start=fresh.start,
                    config=fresh.timeline.config,
                    epochs=fresh.timeline.epochs,
                )
            )
        self._num_nodes_recorded = len(self.plan.nodes)
        return node

    def _asked(self, proposal: Proposal, number: int) -> TrialAsked:
        return TrialAsked(
            study=self._study_id,
            trial=number,
            target=proposal.target,
            config=proposal.config,
            group=proposal.group,
            parent=proposal.parent,
            node=self.node_of[number],
        )

    # -- events -----------------------------------------------------------------------

    def handle(self, event: Event) -> None:
        """Applies what an executor reported."""
        if isinstance(event, StageStarted):
            self._stage_began[event.node, event.start] = self._clock.now()
        elif isinstance(event, EpochDone):
            alone = event.seconds if event.seconds_alone is None else event.seconds_alone
            self.seconds.setdefault((event.node, event.epoch), (event.seconds, alone))
            self.outbox.append(
                EpochRecord(
                    plan=self._plan_id,
                    node=event.node,
                    epoch=event.epoch,
                    metrics=event.metrics,
                    seconds=event.seconds,
                    seconds_alone=event.seconds_alone,
                    worker=event.worker,
                )
            )
        elif isinstance(event, StageDone):
            self._log_stage(event, state="done")
            if event.checkpoint is not None:
                self.kept_bytes += event.checkpoint.num_bytes
                self.outbox.append(CheckpointAdded(plan=self._plan_id, ref=event.checkpoint))
        elif isinstance(event, StageFailed):
            self._log_stage(event, state=event.kind)
            logger.warning("stage of node %d failed: %s", event.node, event.message)
        elif isinstance(event, CheckpointLost):
            self._lost(event)
        for answer in self.plan.record(event):
            self._answered(answer)

    def _answered(self, answer: Answer) -> None:
        number = answer.trial
        assert isinstance(number, int)
        if answer.failure is not None:
            self._fail(number, answer.epoch, answer.failure)
            return
        scores = [
            self._score(metrics)
            for metrics in self.plan.curve(self.node_of[number], answer.epoch)
        ]
        if math.isinf(scores[-1]):
            message = f"{self.metric} is not finite after epoch {answer.epoch}"
            self._fail(number, answer.epoch, ("diverged", message, ""))
            return
        self._reached(number, scores)
        self.outbox.append(
            TrialReported(
                study=self._study_id,
                trial=number,
                epoch=answer.epoch,
                value=self.value(scores[-1]),
            )
        )

    def _reached(self, number: int, scores: Sequence[float]) -> None:
        self.trial_epochs += len(scores) - self.history[number].reached
        self.best = scores[-1] if self.best is None else max(self.best, scores[-1])
        self.history.record_scores(number, scores)

    def _score(self, metrics: Mapping[str, float]) -> float:
        """Higher is better; what is not finite is worse than anything."""
        if self.metric not in metrics:
            raise TaskError(
                f"the study's metric {self.metric!r} is not among the task's metrics "
                f"({', '.join(sorted(metrics))}); name one of these"
            )
        score = self._sign * metrics[self.metric]
        return score if math.isfinite(score) else -math.inf

    def _fail(self, number: int, epoch: int, failure: tuple[str, str, str]) -> None:
        kind, message, traceback = failure
        self.history.record_failure(number)
        self.errors[number] = failure
        self.outbox.append(
            TrialFailed(
                study=self._study_id,
                trial=number,
                epoch=epoch,
                kind=kind,
                message=message,
                traceback=traceback,
            )
        )

    def _log_stage(self, event: StageDone | StageFailed, *, state: str) -> None:
        began = self._stage_began.pop((event.node, event.start), self._clock.now())
        self.outbox.append(
            StageRecord(
                plan=self._plan_id,
                node=event.node,
                start=event.start,
                stop=event.stop,
                worker=event.worker,
                state=state,
                started_at=began,
                seconds=self._clock.now() - began,
                error=event.message if isinstance(event, StageFailed) else "",
            )
        )

    def _lost(self, event: CheckpointLost) -> None:
        ref = event.checkpoint
        logger.warning("%s; the stage that made it is trained again", event.reason)
        self.kept_bytes -= ref.num_bytes
        self.outbox.append(
            CheckpointRemoved(plan=self._plan_id, node=ref.node, epoch=ref.epoch)
        )

    # -- from the records -------------------------------------------------------------

    def load_plan(self, records: PlanRecords) -> None:
        """Rebuilds the plan from what the store has."""
        for node in records.nodes:
            self._insert(node.config)
        self.outbox.clear()
        for epoch in records.epochs:
            alone = epoch.seconds if epoch.seconds_alone is None else epoch.seconds_alone
            self.seconds[epoch.node, epoch.epoch] = (epoch.seconds, alone)
            self.plan.record(
                EpochDone(
                    node=epoch.node,
                    epoch=epoch.epoch,
                    metrics=epoch.metrics,
                    seconds=epoch.seconds,
                    worker=epoch.worker,
                )
            )
        for ref in records.checkpoints:
            self.kept_bytes += ref.num_bytes
            self.plan.restore(ref)

    def load_study(self, records: StudyRecords) -> None:
        """Replays a study's decisions and reports in order, then asks again for what was still under way."""
        by_number = {trial.number: trial for trial in records.trials}
        for entry in records.log:
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
                    )
                )
                if fresh:
                    self.node_of.append(trial.node)
            elif entry.kind == "stopped":
                self.history.record_decision(Stop(trial=entry.trial))
            elif entry.kind == "failed":
                self.history.record_failure(entry.trial)
                self.errors[entry.trial] = trial.error
            else:
                curve = self.plan.curve(trial.node, entry.epoch)
                self._reached(entry.trial, [self._score(m) for m in curve])
        for number in range(len(self.history)):
            one = self.history[number]
            self.plan.note(self.node_of[number], one.target)
            if one.state == "running":
                answer = self.plan.request(number, self.node_of[number], one.target)
                if answer is not None:
                    self._answered(answer)

    def live(self) -> Iterable[tuple[int, int]]:
        """Where trials stand that may still be asked to go on, or have gone all the way."""
        for number in range(len(self.history)):
            trial = self.history[number]
            if trial.state in ("running", "waiting"):
                yield self.node_of[number], trial.reached


def _hashable(group: Any) -> Any:
    return tuple(_hashable(item) for item in group) if isinstance(group, list) else group
