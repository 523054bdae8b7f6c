"""What a worker reports: the events of chains, and what its back-end has found out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from thrifty.core import (
    ActivationsKept,
    Calibrated,
    CheckpointLost,
    CheckpointRef,
    DivergedError,
    EpochDone,
    Refused,
    StageDone,
    StageFailed,
    StageStarted,
    StateError,
    WorkerLostError,
    error_text,
    error_traceback,
    plain_logger,
)
from thrifty.pack import AutoBackend, Calibration, Logged, TimeShare
from thrifty.pack.fused._activations import ActivationStore
from thrifty.plan import Stage

from ._alone import device_use
from ._executor import Report
from ._running_chain import RunningChain


logger = plain_logger(__name__)

_KINDS: Mapping[type[Exception], str] = {
    DivergedError: "diverged",
    StateError: "task",
    WorkerLostError: "lost",
}
"""Kinds of failures by error; a trial may be a distributed job and lose a worker of its own."""


class ChainEvents:
    """The events of a worker about the chains that it trains.

    Args:
        worker: Name of the worker.
        device: Where it trains.
    """

    def __init__(self, *, worker: str, device: torch.device) -> None:
        self._worker = worker
        self._device = device

    def started(self, running: RunningChain) -> StageStarted:
        """Return that a chain begins a stage."""
        stage = running.stage
        return StageStarted(
            node=stage.node, start=stage.start, stop=stage.stop, worker=self._worker
        )

    def epoch_done(
        self,
        running: RunningChain,
        backend: AutoBackend,
        metrics: Mapping[str, float],
        *,
        logged: Logged,
    ) -> EpochDone:
        """Return the epoch that a chain has ended, with the time that it took."""
        spent, dropped = running.spent, running.dropped
        running.spent = running.dropped = TimeShare()
        is_alone = not backend.is_fused(running.number)
        done = EpochDone(
            node=running.stage.node,
            epoch=running.epoch,
            metrics=metrics,
            seconds=spent.seconds,
            seconds_checks=spent.checks,
            seconds_alone=spent.seconds - spent.checks if is_alone else None,
            worker=self._worker,
            attributes=logged.attributes,
            artifacts=logged.artifacts,
            lines=running.lines.take(),
        )
        return with_time_alone(running, backend, plus(done, dropped))

    def stage_done(self, stage: Stage, checkpoint: CheckpointRef | None) -> StageDone:
        """Return that the final state of a stage is on disk."""
        return StageDone(
            node=stage.node,
            start=stage.start,
            stop=stage.stop,
            worker=self._worker,
            checkpoint=checkpoint,
            use=device_use(self._device),
        )

    def lost(self, checkpoint: CheckpointRef, error: Exception) -> CheckpointLost:
        """Return that a state cannot be used any more."""
        return CheckpointLost(checkpoint=checkpoint, reason=str(error), worker=self._worker)

    def failed(
        self, running: RunningChain, error: Exception, *, kind: str | None = None
    ) -> StageFailed:
        """Return that a chain has failed.

        Args:
            running: The chain.
            error: Why.
            kind: The kind of failure (default: by the error).
        """
        if kind is None:
            kind = next((k for each, k in _KINDS.items() if isinstance(error, each)), "error")
        return StageFailed(
            node=running.stage.node,
            start=running.stage.start,
            stop=running.stage.stop,
            epoch=running.epoch,
            kind=kind,
            message=error_text(error),
            worker=self._worker,
            traceback=error_traceback(error),
            lines=running.lines.take(),
            use=device_use(self._device),
        )


class BackendNews:
    """What a back-end finds out on its own: speeds, refusals, activations that it keeps.

    Args:
        worker: Name of the worker.
        structure: What is trained, in words.
        refused: Why structures are not fused, by their key; new reasons are added.
        activations: Where activations are kept.
    """

    def __init__(
        self, *, worker: str, structure: str, refused: dict[str, str], activations: ActivationStore
    ) -> None:
        self._worker = worker
        self._structure = structure
        self._refused = refused
        self._activations = activations
        self._newly_refused: list[tuple[str, str]] = []
        self._calibrated: list[Calibration] = []
        activations.take_news()  # that of earlier studies in this process

    def calibrated(self, calibration: Calibration) -> None:
        """Note a measurement of how fast packs are."""
        self._calibrated.append(calibration)

    def refuse(self, key: str, reason: str) -> None:
        """Note that a structure is not fused any more."""
        self._refused[key] = reason
        self._newly_refused.append((key, reason))

    def report(self, running: RunningChain) -> list[Report]:
        """Return reports of what is new, under the number of a chain."""
        events: list[Calibrated | Refused | ActivationsKept] = [
            Calibrated(
                key=calibration.key,
                structure=calibration.structure,
                device=calibration.device,
                curves=tuple(curve.to_json() for curve in calibration.curves),
                memory_bytes=calibration.memory_bytes,
                worker=self._worker,
            )
            for calibration in self._calibrated
        ]
        events += [
            Refused(key=key, structure=self._structure, reason=reason, worker=self._worker)
            for key, reason in self._newly_refused
        ]
        for kept in self._activations.take_news():
            event = ActivationsKept(
                num_samples=kept.num_samples,
                num_bytes=kept.num_bytes,
                saved=kept.saved,
                is_training=kept.is_training,
                worker=self._worker,
            )
            logger.info("%s: %s", self._worker, event)
            events.append(event)
        self._calibrated.clear()
        self._newly_refused.clear()
        return [running.report(event) for event in events]


def with_time_alone(running: RunningChain, backend: AutoBackend, done: EpochDone) -> EpochDone:
    """Add the time that a fused trial's epoch would take alone, if that is known by now."""
    if done.seconds_alone is not None or not backend.is_fused(running.number):
        return done
    values = running.chain.timeline.at(done.epoch - 1)
    alone = backend.alone_time(running.number, values)
    if alone is None:
        return done
    return replace(
        done,
        seconds_alone=alone.seconds,
        seconds_alone_low=alone.low,
        seconds_alone_high=alone.high,
    )


def plus(done: EpochDone, more: TimeShare) -> EpochDone:
    """Return an epoch with additional time."""
    return replace(
        done, seconds=done.seconds + more.seconds, seconds_checks=done.seconds_checks + more.checks
    )
