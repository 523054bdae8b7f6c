"""What happens while stages are trained, as frozen values.

The executor yields them, the store records them, observers (progress, loggers) watch them.
Epochs count states: epoch ``e`` is the state after ``e`` epochs of training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRef:
    """Where the state of ``node`` after ``epoch`` epochs lies.

    ``digest`` is the hexadecimal BLAKE2b of the file; a reader that finds another one
    treats the checkpoint as lost. ``train_loss`` is given for a state that comes from another plan
    of the same training: that of its last epoch, whose metrics are computed again from the state.
    """

    node: int
    epoch: int
    path: str
    num_bytes: int
    digest: str
    train_loss: float | None = None

    @property
    def borrowed(self) -> bool:
        """Whether the file belongs to another plan, which alone may delete it."""
        return self.train_loss is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStarted:
    """A worker has begun a stage."""

    node: int
    start: int
    stop: int
    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochDone:
    """One epoch was trained and evaluated.

    Attributes:
        node: The node of the search plan.
        epoch: Epochs of training so far.
        metrics: What the task has computed.
        seconds: Its share of the wall-clock time of the pack it was trained in, checks included.
        worker: The worker that trained it.
        seconds_checks: The part of ``seconds`` that went into checks of what packing and
            checkpoints do.
        seconds_alone: What it would have taken by itself, without checks: the time itself where it
            was trained alone, else the median time of verifying steps times the number of steps,
            and its evaluation. None: not measured.
        seconds_alone_low: Low end of the range of ``seconds_alone``; None where it was alone.
        seconds_alone_high: High end of this range.
        evaluated: Whether it was not trained: its state was kept, and only evaluated.
    """

    node: int
    epoch: int
    metrics: Mapping[str, float]
    seconds: float
    worker: str
    seconds_checks: float = 0.0
    seconds_alone: float | None = None
    seconds_alone_low: float | None = None
    seconds_alone_high: float | None = None
    evaluated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDone:
    """A stage reached its end; ``checkpoint`` is its state there, where one was kept."""

    node: int
    start: int
    stop: int
    worker: str
    checkpoint: CheckpointRef | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointLost:
    """The checkpoint that a stage wanted to start from cannot be read."""

    checkpoint: CheckpointRef
    reason: str
    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFailed:
    """A stage did not reach its end.

    ``epoch`` is the last good state. ``kind`` is "diverged" or "error" (both final: trying again would give
    the same), "timeout" (no epoch has ended for too long: final, too), "lost" (the worker died: worth another try), "evicted" (the worker's machine went away, as spot machines
    do: worth many tries), "crowded" (its worker failed while it trained others, too: worth another try, and no mark
    against this one) or "stopped" (asked to stop).
    """

    node: int
    start: int
    stop: int
    epoch: int
    kind: str
    message: str
    worker: str
    traceback: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """It is known how long joint steps of some models take on a device, newly measured or from before.

    ``curves`` are plain data (``thrifty.perf.PackCurve.to_json``), ``key`` names all that they depend on,
    ``structure`` and ``device`` say it in words; ``memory_bytes`` is what the device has.
    """

    key: str
    structure: str
    device: str
    curves: tuple[Mapping[str, object], ...]
    memory_bytes: float
    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A check has failed: trials of a structure are not fused again in this search plan.

    Attributes:
        key: Names the structure in every process.
        structure: The task, in words.
        reason: What differed, by how much, and why if that is known.
        worker: The worker that has found it.
    """

    key: str
    structure: str
    reason: str
    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PackShrunk:
    """A worker ran out of memory and trains at most ``size`` trials at a time from now on."""

    size: int
    reason: str
    worker: str


Event = (
    StageStarted
    | EpochDone
    | StageDone
    | CheckpointLost
    | StageFailed
    | Calibrated
    | PackShrunk
    | Refused
)
