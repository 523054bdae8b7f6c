"""What a job on unequal workers is given and what it reports: options, notes, steps, a plot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Literal, Protocol

from torch import Tensor

from thrifty.core import HeteroError, require
from thrifty.perf import BalancerOptions, Power, SplitChange, StepCurve

from ._samples import Share


if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchScaling:
    """Gives every worker its most efficient batch, and scales the learning rate.

    As in Stannis, section 3, the slowest worker gets the smallest batch at which it reaches
    ``efficiency`` of its best speed. The others get as much as they can train in the same time. The
    result is then no longer that of one process with the requested batch: it is a different run
    with more samples per step, and is reported as such.

    Args:
        rule: How the learning rate grows with the batch: "linear", "sqrt" or "none".
        warmup_steps: Steps over which the learning rate grows.
        efficiency: Share of the slowest worker's best speed, between 0 and 1.
        max_batch: Maximum number of samples of the global batch.

    Raises:
        HeteroError: An option is out of its range.

    >>> growth = BatchScaling(warmup_steps=10)
    >>> growth.factor(batch=512, base=128, step=5), growth.factor(batch=512, base=128, step=50)
    (2.5, 4.0)
    """

    rule: Literal["linear", "sqrt", "none"] = "linear"
    warmup_steps: int = 0
    efficiency: float = 0.9
    max_batch: int | None = None

    def __post_init__(self) -> None:
        if self.rule not in {"linear", "sqrt", "none"}:
            raise HeteroError(f"`rule` must be 'linear', 'sqrt' or 'none', got {self.rule!r}")
        if not 0 < self.efficiency < 1:
            raise HeteroError(f"`efficiency` must be between 0 and 1, got {self.efficiency}")
        if self.warmup_steps < 0 or (self.max_batch is not None and self.max_batch < 1):
            raise HeteroError("warmup_steps is not negative, and max_batch is at least 1")

    def batch(self, curves: Sequence[StepCurve], base: int) -> int:
        """Return the global batch for these workers, at least ``base``.

        >>> BatchScaling().batch([StepCurve(fixed_s=0.1, sample_s=0.01)] * 2, 64)
        180
        """
        share = self.efficiency / (1 - self.efficiency)
        knees = [
            max(1, math.ceil(share * curve.fixed_s / curve.sample_s - 1e-9)) for curve in curves
        ]
        max_batch = self.max_batch or 2**20
        end = max(
            curve.seconds(curve.capacity(curve.seconds(knee), max_batch))
            for curve, knee in zip(curves, knees, strict=True)
        )
        return max(base, min(max_batch, sum(curve.capacity(end, max_batch) for curve in curves)))

    def factor(self, *, batch: int, base: int, step: int) -> float:
        """Return the factor by which the learning rate is multiplied."""
        if self.rule == "none":
            return 1.0
        whole = batch / base if self.rule == "linear" else math.sqrt(batch / base)
        warm = min(1.0, step / self.warmup_steps) if self.warmup_steps else 1.0
        return 1.0 + (whole - 1.0) * warm


@dataclass(frozen=True, slots=True, kw_only=True)
class HeteroOptions:
    """Options of a ``HeteroTrainer``.

    They are equal on all workers, except ``curve``, ``power`` and ``micro_batch``.

    Args:
        batch_norm: "global": statistics over the global batch, as in one process (layers change
            their class, with the same ``state_dict``; layers with a ``forward`` of their own are
            refused). "local": statistics of each worker's share, which changes the result.
        clip_norm: Norm to clip the gradient of the global batch to; None: no clipping.
        objective: "throughput", or "energy" for the fewest joules per step (needs ``power``).
        power: Power model of this worker.
        growth: Lets the global batch and the learning rate grow with the workers; None: the batch
            is fixed.
        subsample: Leave out private samples beyond a worker's share of the epoch.
        balancing: When the split follows the workers' speed.
        curve: Speed curve of this worker (default: measured).
        bucket_cap_mb: MiB of a gradient bucket (the first one: 1 MiB). Buckets are summed while the
            backward pass continues. None: all gradients are summed at once, after it.
        micro_batch: Most samples that fit into one forward and backward pass of this worker; a
            larger share is trained in equal parts, and the gradient is summed over the workers once
            a step (gradient accumulation). The result is that of one process, but for rounding.
            With a plan of ``thrifty.cloud``, it is ``MachineGroup.micro_batch``. None: a share is
            trained in one pass.
        admit_every: Steps between two polls for new workers.
        stand_by: Let workers stand by while the others train faster without them, because the
            exchange of gradients takes longer than they save. A worker that stands by reports no
            steps until it is called back, so code in your loop that all workers run together, such
            as a barrier, or that only one of them runs, such as saving on rank 0, would miss it.
            None: a ``HeteroTask`` does so, and a ``HeteroTrainer`` only says in its log what it
            would save. It applies with ``FixedMembership``, ``objective="throughput"`` and without
            ``growth``. Workers with private samples always train.
        verify: Check while training that the gradient is that of one process. False: each worker
            trains its share with its own loss unchecked, which may change the result.

    Raises:
        HeteroError: An option is invalid.

    >>> HeteroOptions(clip_norm=1.0).batch_norm
    'global'
    """

    batch_norm: Literal["global", "local"] = "global"
    clip_norm: float | None = None
    objective: Literal["throughput", "energy"] = "throughput"
    power: Power | None = None
    growth: BatchScaling | None = None
    subsample: bool = False
    balancing: BalancerOptions = field(default_factory=BalancerOptions)
    curve: StepCurve | None = None
    bucket_cap_mb: float | None = 25.0
    micro_batch: int | None = None
    admit_every: int = 10
    stand_by: bool | None = None
    verify: bool = True

    def __post_init__(self) -> None:
        if self.batch_norm not in {"global", "local"}:
            raise HeteroError(f"`batch_norm` must be 'global' or 'local', got {self.batch_norm!r}")
        if self.objective not in {"throughput", "energy"}:
            raise HeteroError(
                f"`objective` must be 'throughput' or 'energy', got {self.objective!r}"
            )
        if self.objective == "energy" and self.power is None:
            raise HeteroError(
                "objective='energy' needs power=Power(idle_w=..., busy_w=...) of this worker"
            )
        if self.clip_norm is not None and self.clip_norm <= 0:
            raise HeteroError(f"`clip_norm` must be positive, got {self.clip_norm}")
        if self.bucket_cap_mb is not None and not self.bucket_cap_mb > 0:
            raise HeteroError(f"`bucket_cap_mb` must be positive, got {self.bucket_cap_mb}")
        if self.micro_batch is not None and self.micro_batch < 1:
            raise HeteroError(f"`micro_batch` must be at least 1, got {self.micro_batch}")
        if self.admit_every < 1:
            raise HeteroError(f"`admit_every` must be at least 1, got {self.admit_every}")


REFUSED = 1
"""Value of ``news``: this worker's loss or data cannot be split over workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What one worker sends.

    Attributes:
        busy_s: Seconds that it worked on this step.
        news: 0 for no news; ``REFUSED``; or a digest of the trained parameters if they have
            changed.
        settings: Digest of its optimizer's settings; 0 where they are not compared.
        joules: Energy that it used; None if it has no meter.
        loss: Its part of the loss.
        weight: Weight of its share in the mean.
        check_s: Seconds that it spent on checking the loss.
        buffers: Whether its forward pass changed buffers.
        whole_s: Seconds of the step before, including the sums.
    """

    busy_s: float
    news: int
    settings: int
    joules: float | None
    loss: float
    weight: float
    check_s: float
    buffers: bool
    whole_s: float

    def write(self, control: Tensor, *, rank: int) -> None:
        """Write the note into the control numbers; their sum is read as ``SummedNotes``.

        Args:
            control: ``SummedNotes.num(workers)`` zeros.
            rank: Rank of this worker.
        """
        workers = (len(control) - SummedNotes.COMMON) // SummedNotes.EACH
        control[rank] = self.busy_s
        control[workers + rank] = self.news
        control[2 * workers + rank] = self.settings
        common = (
            0.0 if self.joules is None else self.joules,
            self.joules is not None,
            self.loss,
            self.weight,
            self.check_s,
            self.buffers,
            self.whole_s,
        )
        for at, value in enumerate(common, SummedNotes.EACH * workers):
            control[at] = float(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class SummedNotes:
    """The notes of all workers, summed.

    Attributes:
        busy_s: Seconds of each worker.
        news: News of each worker; see ``Note``.
        settings: Digest of the settings of each worker's optimizer.
        joules: Energy of the workers with a meter; None if no worker has one.
        loss: Loss of the global batch.
        weight: Weight of the global batch.
        check_s: Mean seconds that a worker spent on checking the loss.
        buffers: Whether a forward pass changed buffers.
        whole_s: Mean seconds of the step before, including the sums.
    """

    busy_s: tuple[float, ...]
    news: tuple[int, ...]
    settings: tuple[int, ...]
    joules: float | None
    loss: float
    weight: float
    check_s: float
    buffers: bool
    whole_s: float

    EACH = 3
    COMMON = 7

    @classmethod
    def num(cls, workers: int) -> int:
        """Return how many control numbers ``workers`` workers need."""
        return cls.EACH * workers + cls.COMMON

    @classmethod
    def read(cls, control: Tensor) -> SummedNotes:
        """Read the sum of all workers' notes."""
        numbers = control.tolist()
        workers = (len(numbers) - cls.COMMON) // cls.EACH
        joules, meters, loss, weight, check_s, buffers, whole_s = numbers[cls.EACH * workers :]
        return cls(
            busy_s=tuple(numbers[:workers]),
            news=tuple(round(each) for each in numbers[workers : 2 * workers]),
            settings=tuple(round(each) for each in numbers[2 * workers : 3 * workers]),
            joules=joules if meters else None,
            loss=loss,
            weight=weight,
            check_s=check_s / workers,
            buffers=bool(buffers),
            whole_s=whole_s / workers,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """A worker's report as a row of numbers; it reveals only the number of its samples.

    Attributes:
        curve: Current speed curve.
        num_private: Samples that only this worker can read.
        power: Power model; zeros if none is declared.
        new: Whether the worker has just joined.
        structure: Digest of the names, shapes and types of its model's parameters and buffers.
        trained: Digest of the parameters that it trains.
    """

    curve: StepCurve
    num_private: int
    power: Power
    new: bool
    structure: int = 0
    trained: int = 0

    NUM = 10

    def to_row(self) -> list[float]:
        """Return the report as ``NUM`` numbers."""
        max_samples = self.curve.max_samples
        return [
            self.curve.sample_s,
            self.curve.fixed_s,
            -1.0 if max_samples is None else float(max_samples),
            float(self.curve.min_samples),
            float(self.num_private),
            self.power.idle_w,
            self.power.busy_w,
            float(self.new),
            float(self.structure),  # 48 bits are exact in double precision
            float(self.trained),
        ]

    @classmethod
    def from_row(cls, row: Sequence[float]) -> WorkerInfo:
        """Restore a report from the row that ``to_row`` returned.

        >>> info = WorkerInfo(
        ...     curve=StepCurve(sample_s=0.5),
        ...     num_private=3,
        ...     power=Power(idle_w=0, busy_w=1),
        ...     new=True,
        ... )
        >>> WorkerInfo.from_row(info.to_row()) == info
        True
        """
        (
            sample_s,
            fixed_s,
            max_samples,
            min_samples,
            num_private,
            idle_w,
            busy_w,
            new,
            *digests,
        ) = row
        return cls(
            curve=StepCurve(
                sample_s=sample_s,
                fixed_s=fixed_s,
                max_samples=None if max_samples < 0 else int(max_samples),
                min_samples=int(min_samples),
            ),
            num_private=int(num_private),
            power=Power(idle_w=idle_w, busy_w=busy_w),
            new=bool(new),
            structure=int(digests[0]),
            trained=int(digests[1]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MembersChanged:
    """The set of workers has changed, and a new generation continues.

    Attributes:
        step: Steps trained when the generation began.
        generation: Number of the generation.
        names: Names of the workers, by rank.
        joined: Names of the workers that are new.
        lost: Names of the workers that are gone.
        split: Samples of each worker in a step.
        batch: Samples of all workers in a step.
    """

    step: int
    generation: int
    names: tuple[str, ...]
    joined: tuple[str, ...]
    lost: tuple[str, ...]
    split: tuple[int, ...]
    batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StandbyChange:
    """Other workers train from now on, and the rest stands by.

    Attributes:
        step: Steps trained before the change.
        reason: A sentence, such as "0 alone trains 1.3 times as fast as with 1; 1 stands by".
        training: Names of the workers that train.
        standing_by: Names of the workers that stand by.
        step_s: Estimated seconds of a step before and after the change.
    """

    step: int
    reason: str
    training: tuple[str, ...]
    standing_by: tuple[str, ...]
    step_s: tuple[float, float]


Event = SplitChange | MembersChanged | StandbyChange
"""What a report tells besides its step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One trained step, as the workers that trained it report it.

    It is equal on all of them except for ``rank``, ``share`` and ``step_s``. A worker that stands
    by reports nothing.

    Attributes:
        epoch: Epoch, from 0.
        step: Steps trained, including this one.
        loss: Mean over the global batch.
        rank: Rank of this worker among those that train.
        names: Names of the workers that train, by rank.
        sizes: Samples that each worker trained.
        share: This worker's samples.
        busy_s: Seconds that each worker was busy with the step.
        step_s: Seconds from the end of the previous step to the end of this one, without the time
            that the caller spent between steps.
        joules: Energy of this step on the workers with a meter; None if no worker has one.
        events: Changes that preceded this step or follow from it.
        check_s: Mean seconds that a worker spent on checking the loss. No other time includes it.
    """

    epoch: int
    step: int
    loss: float
    rank: int
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    share: Share
    busy_s: tuple[float, ...]
    step_s: float
    joules: float | None
    events: tuple[Event, ...]
    check_s: float = 0.0


class Step(Protocol):
    """The fields of a step that are plotted: a ``StepReport`` or a ``SimulatedStep``."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the workers."""
        ...

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples of each worker."""
        ...

    @property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds that each worker was busy."""
        ...


def plot_steps(steps: Sequence[Step]) -> Figure:
    """Plot each worker's samples and busy seconds over the steps of a job (matplotlib).

    Where the lower lines coincide, no worker waits. Vertical lines mark changes of the workers and
    of the split.

    Args:
        steps: Steps of a job or a simulation, in order.

    Raises:
        HeteroError: There are no steps.
        MissingExtraError: matplotlib is not installed.
    """
    require("matplotlib.figure", extra="plots")
    if not steps:
        raise HeteroError("there are no steps to draw")
    names = sorted({name for step in steps for name in step.names})
    library = import_module("thrifty.core._figure")
    figure: Figure = library.NotebookFigure(figsize=(8, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    at = range(1, len(steps) + 1)
    sizes = [[_of(step, step.sizes, name) for step in steps] for name in names]
    above.stackplot(at, sizes, labels=names, step="mid", alpha=0.85)
    for name in names:
        seconds = [_of(step, step.busy_s, name) or float("nan") for step in steps]
        below.plot(at, seconds, label=name, linewidth=1.2)
    for number, step in zip(at, steps, strict=True):
        for event in _events(step):
            new = not isinstance(event, SplitChange)
            for axes in (above, below):
                axes.axvline(number, color="black" if new else "grey", linewidth=0.8, alpha=0.6)
    above.set(ylabel="samples of a step", xlim=(1, max(2, len(steps))), ylim=(0, None))
    below.set(ylabel="seconds at work", xlabel="step", ylim=(0, None))
    above.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return figure


def _of(step: Step, values: Sequence[float], name: str) -> float:
    return values[step.names.index(name)] if name in step.names else 0.0


def _events(step: Step) -> Sequence[Event]:
    """Return the events of a report, or the single change of a simulated step."""
    change = getattr(step, "change", None)
    events: Sequence[Event] = getattr(step, "events", () if change is None else (change,))
    return events
