"""Simulated clusters: run the balancing policy over curves, traces and loads in virtual time."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from thrifty.core import HeteroError, TooFewWorkersError
from thrifty.perf import Balancer, Link, Power, SplitChange, StepCurve


class Policy(Protocol):
    """A rule that splits the batch: ``thrifty.perf.Balancer`` or a rule to compare it with.

    Attributes:
        split: Samples of each worker in the next step.
    """

    split: tuple[int, ...]

    def observe(self, seconds: Sequence[float]) -> SplitChange | None:
        """Record the times of a step. This may change ``split``."""
        ...


MakePolicy = Callable[[Sequence[StepCurve], int], Policy]
"""Builds a policy from the present workers' curves and the global batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedWorker:
    """A worker of a simulated cluster.

    Args:
        name: Unique name.
        curve: Step time without any other load.
        power: Power model. None: the worker's energy is not counted.
        slowness: Slowdown factor of each step in order, as from a trace. Steps beyond its end have
            factor 1.
        joins_s: Time at which the worker joins.
        dies_s: Time at which the worker dies.

    >>> SimulatedWorker(name="host", curve=StepCurve(sample_s=0.01)).dies_s
    inf
    """

    name: str
    curve: StepCurve
    power: Power | None = None
    slowness: Sequence[float] = ()
    joins_s: float = 0.0
    dies_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Another workload on one worker.

    Args:
        worker: Name of the worker.
        begin_s: Time at which the load begins.
        end_s: Time at which the load ends.
        slowness: Factor by which all work on the worker takes longer meanwhile.
    """

    worker: str
    begin_s: float
    end_s: float
    slowness: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """One completed step.

    Attributes:
        end_s: Time at which the step ended.
        names: Names of the workers.
        sizes: Samples of each worker.
        busy_s: Seconds that each worker was busy.
        change: The change of the split after this step, if there was one.
    """

    end_s: float
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    busy_s: tuple[float, ...]
    change: SplitChange | None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSimulation:
    """The result of a simulated job.

    Attributes:
        seconds: Seconds from start to end.
        samples: Trained samples.
        joules: Energy of the workers that have a power model.
        steps: Completed steps.
        lost_steps: Steps that were trained again because a worker died during them.
    """

    seconds: float
    samples: int
    joules: float
    steps: tuple[SimulatedStep, ...] = field(repr=False)
    lost_steps: int = 0

    @property
    def samples_per_s(self) -> float:
        """Throughput of the whole job."""
        return self.samples / self.seconds

    @property
    def joules_per_sample(self) -> float:
        """Energy per sample."""
        return self.joules / self.samples


def simulate_job(  # noqa: PLR0913 -- all but `workers` are keyword-only
    workers: Sequence[SimulatedWorker],
    *,
    batch: int,
    num_steps: int,
    link: Link = Link(),
    gradient_bytes: float = 0.0,
    state_bytes: float = 0.0,
    loads: Sequence[Load] = (),
    detect_s: float = 5.0,
    policy: MakePolicy | None = None,
) -> JobSimulation:
    """Simulate training on a cluster.

    The simulation advances from one event to the next: ends of steps, loads that begin or end,
    deaths and joins. A worker's step takes the time of its curve, stretched by its trace and by the
    loads that are active during it. A death costs the step in which it happens and ``detect_s``. A
    worker that joins receives the state over the link.

    Args:
        workers: At least one worker, present from the start or joining later.
        batch: Global batch: samples of one step over all workers.
        num_steps: Steps to complete.
        link: Network link between the workers.
        gradient_bytes: Bytes exchanged at each step.
        state_bytes: Bytes sent to a worker that joins.
        loads: Loads of other users.
        detect_s: Seconds until a death is noticed.
        policy: Builds the balancing policy (default: a ``Balancer`` with its default options).

    Raises:
        HeteroError: There is no worker, names are not unique, or a load names an unknown worker.
        TooFewWorkersError: All workers have died.

    >>> host = SimulatedWorker(name="host", curve=StepCurve(sample_s=0.01))
    >>> device = SimulatedWorker(name="device", curve=StepCurve(sample_s=0.03))
    >>> run = simulate_job([host, device], batch=40, num_steps=10)
    >>> run.steps[0].sizes, round(run.samples_per_s)
    ((30, 10), 133)
    """
    _check(workers, loads)
    job = _RunningJob(
        workers,
        batch=batch,
        link=link,
        gradient_bytes=gradient_bytes,
        state_bytes=state_bytes,
        loads=loads,
        detect_s=detect_s,
        make_policy=policy or (lambda curves, batch: Balancer(curves, batch=batch)),
    )
    while len(job.steps) < num_steps:
        job.admit()
        job.step()
    return JobSimulation(
        seconds=job.now,
        samples=sum(sum(step.sizes) for step in job.steps),
        joules=job.joules,
        steps=tuple(job.steps),
        lost_steps=job.num_lost,
    )


class _RunningJob:
    """A simulated job while it runs; the options are those of ``simulate_job``.

    Attributes:
        now: Seconds since the start.
        joules: Energy so far.
        steps: Completed steps.
        num_lost: Steps in which a worker died.
    """

    def __init__(
        self,
        workers: Sequence[SimulatedWorker],
        *,
        batch: int,
        link: Link,
        gradient_bytes: float,
        state_bytes: float,
        loads: Sequence[Load],
        detect_s: float,
        make_policy: MakePolicy,
    ) -> None:
        self.now, self.joules, self.num_lost = 0.0, 0.0, 0
        self.steps: list[SimulatedStep] = []
        self._workers = workers
        self._batch = batch
        self._link = link
        self._gradient_bytes, self._state_bytes = gradient_bytes, state_bytes
        self._stretches = {worker.name: _stretch(worker.name, loads) for worker in workers}
        self._detect_s = detect_s
        self._make_policy = make_policy
        self._coming = [(worker.joins_s, at) for at, worker in enumerate(workers)]
        heapq.heapify(self._coming)
        self._present: list[SimulatedWorker] = []
        self._policy: Policy | None = None

    def admit(self) -> None:
        """Let workers join whose time has come; if none is present, wait for the next one.

        Raises:
            TooFewWorkersError: All workers have died.
        """
        if not self._present and self._coming:
            self.now = max(self.now, self._coming[0][0])
        while self._coming and self._coming[0][0] <= self.now:
            self._present.append(self._workers[heapq.heappop(self._coming)[1]])
            if self._policy is not None and self._state_bytes:
                self.now += self._link.latency_s + self._state_bytes / self._link.bytes_per_s
            self._policy = None
        if not self._present:
            num = len(self.steps)
            raise TooFewWorkersError(f"after {num} steps all simulated workers are dead")

    def step(self) -> None:
        """Train a step on the present workers; it is lost if one of them dies."""
        present = self._present
        if self._policy is None:
            self._policy = self._make_policy([worker.curve for worker in present], self._batch)
        sizes = self._policy.split
        busy = [self._busy_s(worker, size) for worker, size in zip(present, sizes, strict=True)]
        exchange_s = self._link.all_reduce_s(num_bytes=self._gradient_bytes, nodes=len(present))
        end = self.now + max(busy) + exchange_s
        dead = [worker for worker in present if worker.dies_s <= end]
        if dead:
            self._lose(dead, busy, end=end)
            return
        self.joules += _joules(present, busy, end - self.now)
        self.now = end
        self.steps.append(
            SimulatedStep(
                end_s=end,
                names=tuple(worker.name for worker in present),
                sizes=tuple(sizes),
                busy_s=tuple(busy),
                change=self._policy.observe(busy),
            )
        )

    def _busy_s(self, worker: SimulatedWorker, num_samples: int) -> float:
        """Return how long a worker's share of the next step takes, loads included."""
        work_s = worker.curve.seconds(num_samples) * _at(worker.slowness, len(self.steps))
        return _pass(self._stretches[worker.name], self.now, work_s)

    def _lose(self, dead: Sequence[SimulatedWorker], busy: Sequence[float], *, end: float) -> None:
        """Lose a step in which workers died, and go on without them.

        Args:
            dead: These workers.
            busy: Seconds that each present worker was busy.
            end: When the step would have ended.
        """
        noticed = max(end, min(worker.dies_s for worker in dead) + self._detect_s)
        self.joules += _joules(self._present, busy, noticed - self.now)
        self._present = [worker for worker in self._present if worker not in dead]
        self.now, self._policy = noticed, None
        self.num_lost += 1


def _check(workers: Sequence[SimulatedWorker], loads: Sequence[Load]) -> None:
    names = [worker.name for worker in workers]
    if not names:
        raise HeteroError("a simulated cluster has at least one worker")
    if len(set(names)) < len(names):
        raise HeteroError(f"names of simulated workers must be unique, got {names}")
    strangers = sorted({load.worker for load in loads} - set(names))
    if strangers:
        raise HeteroError(f"there are loads on {strangers}, but no such worker")


def _at(slowness: Sequence[float], step: int) -> float:
    return slowness[step] if step < len(slowness) else 1.0


def _stretch(name: str, loads: Sequence[Load]) -> list[tuple[float, float]]:
    """Return the times from 0 on at which a worker's slowness changes, with the new slowness."""
    mine = [load for load in loads if load.worker == name]
    times = sorted({0.0, *(t for load in mine for t in (load.begin_s, load.end_s))})
    return [
        (t, math.prod(load.slowness for load in mine if load.begin_s <= t < load.end_s))
        for t in times
    ]


def _pass(stretch: Sequence[tuple[float, float]], begin: float, work_s: float) -> float:
    """Return the seconds that ``work_s`` seconds of undisturbed work take from ``begin`` on."""
    now, left = begin, work_s
    for (since, slowness), after in zip(stretch, [*stretch[1:], None], strict=True):
        until = math.inf if after is None else after[0]
        if until <= now or since > now:
            continue
        if now + left * slowness <= until:
            return now + left * slowness - begin
        left -= (until - now) / slowness
        now = until
    return now + left - begin


def _joules(workers: Sequence[SimulatedWorker], busy: Sequence[float], whole_s: float) -> float:
    return sum(
        worker.power.joules(busy_s=seconds, whole_s=whole_s)
        for worker, seconds in zip(workers, busy, strict=True)
        if worker.power is not None
    )
