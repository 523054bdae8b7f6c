"""Events of training, as frozen dataclasses.

The executor reports events, the store records them, and observers (progress, loggers) watch them.
Epochs count states: epoch ``e`` is the state after ``e`` epochs of training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ._files import size_text
from ._trial_log import Artifact, LogLine


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRef:
    """The checkpoint file of ``node`` after ``epoch`` epochs.

    ``digest`` is the hexadecimal BLAKE2b of the file. A reader that computes another digest treats
    the checkpoint as lost. ``train_loss`` is set only for a state that another plan with the same
    training has produced: it is the training loss of the last epoch, and the other metrics are
    computed again from the state.
    """

    node: int
    epoch: int
    path: str
    num_bytes: int
    digest: str
    train_loss: float | None = None

    @property
    def borrowed(self) -> bool:
        """Whether the file belongs to another plan. Only that plan may delete it."""
        return self.train_loss is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStarted:
    """A worker has started a stage."""

    node: int
    start: int
    stop: int
    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochDone:
    """One epoch was trained and evaluated.

    Attributes:
        node: Node of the search plan.
        epoch: Number of epochs trained so far.
        metrics: Metrics that the task has computed.
        seconds: This trial's share of the wall-clock time of its pack, checks included.
        worker: Worker that trained the epoch.
        seconds_checks: Part of ``seconds`` spent on checking packing and checkpoints.
        seconds_alone: Seconds that the epoch takes in a trial trained alone, without checks. This
            is the measured time if the trial was alone. Otherwise it is the median time of a
            verifying step times the number of steps, plus the evaluation. None: not measured.
        seconds_alone_low: Low end of the range of ``seconds_alone``; None if the trial was alone.
        seconds_alone_high: High end of this range.
        evaluated: Whether the epoch was not trained, but only evaluated from a stored state.
        attributes: User attributes that the trial has set in this epoch, as JSON values.
        artifacts: Artifacts that the trial has logged in this epoch.
        lines: The last lines that user code has logged in this epoch.
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
    attributes: Mapping[str, Any] = field(default_factory=dict)
    artifacts: tuple[Artifact, ...] = ()
    lines: tuple[LogLine, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """What the worker of a stage has used.

    Attributes:
        device: Its device, such as ``"cpu"``.
        peak_bytes: Peak memory of its process so far: what PyTorch has allocated on the GPU, or
            resident memory where there is no GPU. None: not measured.
    """

    device: str
    peak_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDone:
    """A stage reached its end.

    ``checkpoint`` is its final state, or None if none was kept. ``use`` is None if nothing was
    measured.
    """

    node: int
    start: int
    stop: int
    worker: str
    checkpoint: CheckpointRef | None = None
    use: DeviceUse | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointLost:
    """The checkpoint from which a stage was to start cannot be read."""

    checkpoint: CheckpointRef
    reason: str
    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFailed:
    """A stage did not reach its end.

    ``epoch`` is the last good state. ``kind`` is one of:

    - ``"diverged"`` or ``"error"``: final, because a retry would give the same result.
    - ``"timeout"``: no epoch ended within the limit. This is final, too.
    - ``"lost"``: the worker died. Worth another try.
    - ``"evicted"``: the worker's machine went away, as spot machines do. Worth many tries.
    - ``"crowded"``: the worker failed while it trained other trials, too. Worth another try, and
      the failure does not count against this trial.
    - ``"stopped"``: the stage was asked to stop.

    ``reached`` is the last epoch that was reported since, None if none was or it is not known.
    ``lines`` are the last lines that user code has logged since that state.
    ``use`` is None if nothing was measured.
    """

    node: int
    start: int
    stop: int
    epoch: int
    kind: str
    message: str
    worker: str
    traceback: str = ""
    reached: int | None = None
    lines: tuple[LogLine, ...] = ()
    use: DeviceUse | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """The times of joint steps of some models on a device, newly measured or already known.

    ``curves`` are plain data (``thrifty.perf.PackCurve.to_json``). ``key`` identifies everything
    that the curves depend on, and ``structure`` and ``device`` describe it in words.
    ``memory_bytes`` is the memory of the device.
    """

    key: str
    structure: str
    device: str
    curves: tuple[Mapping[str, object], ...]
    memory_bytes: float
    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A check failed, so trials of this structure are no longer fused in this search plan.

    Attributes:
        key: Identifier of the structure, equal in every process.
        structure: The task, in words.
        reason: What differed, by how much, and why if that is known.
        worker: Worker whose check failed.
    """

    key: str
    structure: str
    reason: str
    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PackShrunk:
    """A worker ran out of memory and now trains at most ``size`` trials at a time."""

    size: int
    reason: str
    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationsKept:
    """Activations of frozen layers will be kept, from the first pass over some samples on.

    Attributes:
        num_samples: Number of samples.
        num_bytes: Bytes of memory that this takes.
        saved: The share of multiplications that each later pass does not compute again, of those
            that a trial alone computes; by count, not measured.
        is_training: Whether these are training samples; otherwise they are for validation.
        worker: The worker that keeps them.
    """

    num_samples: int
    num_bytes: int
    saved: float
    is_training: bool
    worker: str

    def __str__(self) -> str:
        what = "training" if self.is_training else "validation"
        return (
            f"activations of frozen layers are kept for {self.num_samples:,} {what} samples, "
            f"{size_text(self.num_bytes)}: each later pass computes {1 - self.saved:.0%} of a "
            "trial's multiplications"
        )


Event = (
    StageStarted
    | EpochDone
    | StageDone
    | CheckpointLost
    | StageFailed
    | Calibrated
    | PackShrunk
    | Refused
    | ActivationsKept
)
