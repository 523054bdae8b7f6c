"""Frozen values: stages and chains that a worker trains, and answers to requests."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from thrifty.core import CheckpointRef
from thrifty.space import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Epochs ``start + 1 .. stop`` of a node, with a checkpoint at the end.

    ``kept`` holds the states of epochs that another plan has trained. These epochs are not trained
    again: their states are loaded and evaluated.
    """

    node: int
    start: int
    stop: int
    kept: tuple[CheckpointRef, ...] = ()

    def kept_at(self, epoch: int) -> CheckpointRef | None:
        """Return the kept state after an epoch, or None if the epoch must be trained."""
        return next((ref for ref in self.kept if ref.epoch == epoch), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Stages that one worker trains in sequence; the model state stays on the worker.

    ``resume`` is the checkpoint from which the first stage starts (None: a fresh model). All stages
    lie on the path of ``timeline``.
    """

    stages: tuple[Stage, ...]
    timeline: Timeline
    resume: CheckpointRef | None = None

    @property
    def num_epochs(self) -> int:
        """The number of epochs in all stages."""
        return sum(stage.stop - stage.start for stage in self.stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to a trial's request: ``metrics``, or a ``failure`` (kind, message, traceback)."""

    trial: Hashable
    epoch: int
    metrics: Mapping[str, float] | None = None
    failure: tuple[str, str, str] | None = None
