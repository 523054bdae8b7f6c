"""What a worker is given, and what comes of a request: frozen values."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from thrifty.core import CheckpointRef
from thrifty.space import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Epochs ``start + 1 .. stop`` of a node; its end is kept as a checkpoint.

    ``kept`` holds states of epochs in it that another plan has trained: these epochs are not
    trained, their states are loaded and evaluated.
    """

    node: int
    start: int
    stop: int
    kept: tuple[CheckpointRef, ...] = ()

    def kept_at(self, epoch: int) -> CheckpointRef | None:
        """The state after an epoch, if it only has to be evaluated."""
        return next((ref for ref in self.kept if ref.epoch == epoch), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Stages that one worker trains one after the other, its state staying where it is.

    ``resume`` is the state the first stage starts from (None: a fresh model). All stages lie on
    the path of ``timeline``.
    """

    stages: tuple[Stage, ...]
    timeline: Timeline
    resume: CheckpointRef | None = None

    @property
    def num_epochs(self) -> int:
        """How many epochs it trains."""
        return sum(stage.stop - stage.start for stage in self.stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A trial's request is met (``metrics``) or cannot be (``failure``: kind, message, traceback)."""

    trial: Hashable
    epoch: int
    metrics: Mapping[str, float] | None = None
    failure: tuple[str, str, str] | None = None
