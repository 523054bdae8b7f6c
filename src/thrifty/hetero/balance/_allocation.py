"""Who trains in a step: the samples that each worker gets, and workers that stand by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from thrifty.core import Clock, DivergedError, HeteroError, plain_logger
from thrifty.hetero._job import HeteroOptions, StandbyChange, SummedNotes, WorkerInfo
from thrifty.hetero._samples import Place, SampleOrder, Share
from thrifty.hetero.workers._group import WorkerGroup
from thrifty.perf import (
    Balancer,
    SplitChange,
    StandbyPolicy,
    StepCurve,
    SubsetChange,
    forecast_split,
    split_batch,
    split_for_energy,
    step_seconds,
)


_PROBE_EVERY = 10
"""Steps between two probes of a worker that has been left out."""


class Allocation:
    """The split of one generation of workers, and the samples that follow from it.

    Args:
        names: Names of the workers, by rank.
        infos: What each worker reported about itself.
        batch: Requested samples per step; with ``options.growth`` there may be more.
        num_public: Samples that every worker can read.
        seed: Seed of the sample order.
        options: Options of the trainer.
    """

    def __init__(
        self,
        names: Sequence[str],
        infos: Sequence[WorkerInfo],
        *,
        batch: int,
        num_public: int,
        seed: int,
        options: HeteroOptions,
    ) -> None:
        curves = [info.curve for info in infos]
        self.names = tuple(names)
        self.batch = batch if options.growth is None else options.growth.batch(curves, batch)
        powers = [info.power for info in infos]

        def thrifty(curves: Sequence[StepCurve], batch: int) -> tuple[int, ...]:
            return split_for_energy(curves, powers, batch)

        def joules(curves: Sequence[StepCurve], split: Sequence[int]) -> float:
            return forecast_split(curves, split, powers=powers).joules or 0.0

        by_energy = options.objective == "energy"
        self._balancer = Balancer(
            curves,
            batch=self.batch,
            options=options.balancing,
            split=thrifty if by_energy else split_batch,
            cost=joules if by_energy else step_seconds,
        )
        self._order = SampleOrder(
            num_public,
            seed=seed,
            private={name: info.num_private for name, info in zip(names, infos, strict=True)},
            subsample=options.subsample,
        )

    @property
    def split(self) -> tuple[int, ...]:
        """Samples of each worker in a whole step."""
        return self._balancer.split

    @property
    def curves(self) -> tuple[StepCurve, ...]:
        """Current speed curves of the workers."""
        return self._balancer.curves

    @property
    def left_out(self) -> frozenset[str]:
        """Names of the workers without samples, because they would make the step slower."""
        named = zip(self.names, self.split, strict=True)
        return frozenset(name for name, size in named if not size)

    def left(self, place: Place) -> int:
        """Return the number of samples that are still to be trained in this epoch."""
        return self._order.left(place, self.split, self.names)

    def shares(self, place: Place) -> tuple[Share, ...]:
        """Return the next step's samples: by the split, or what is left of the epoch."""
        split = self.split
        own = self._order.own_left(place, split, self.names)
        public = self._order.num_public - place.public
        left = public + sum(own)
        short = any(size > public + mine for size, mine in zip(split, own, strict=True))
        if short or left < sum(split):
            split = _rest(self.curves, min(left, sum(split)), [public + mine for mine in own])
        return self._order.shares(place, split, self.names, own_left=own)

    def advance(self, place: Place, shares: Sequence[Share]) -> None:
        """Record that these shares were trained."""
        self._order.advance(place, shares, self.names)

    def probe(self, step: int) -> int:
        """Return how many samples workers without a share train in this step as a probe; mostly 0.

        A probe measures their speed and trains nothing. A worker that was left out because other
        jobs used its machine can thus return.
        """
        if step % _PROBE_EVERY or not self.left_out:
            return 0
        return max(1, self.batch // (4 * len(self.names)))

    def observe(
        self, busy_s: Sequence[float], sizes: Sequence[int], *, probed: int
    ) -> SplitChange | None:
        """Record the times of a step; the split may change from the next one on."""
        split = self.split
        change = self._balancer.observe(busy_s, sizes=sizes)
        if probed and change is None:
            for worker, size in enumerate(split):
                if not size and not sizes[worker]:
                    change = self._balancer.probe(worker, busy_s[worker], probed) or change
        return change


def _rest(curves: Sequence[StepCurve], batch: int, has: Sequence[int]) -> tuple[int, ...]:
    """Split what is left of an epoch among the workers that can read it."""
    able = [worker for worker, samples in enumerate(has) if samples]
    bounded = [
        replace(
            curves[worker],
            min_samples=0,
            max_samples=min(has[worker], curves[worker].max_samples or has[worker]),
        )
        for worker in able
    ]
    batch = min(batch, sum(curve.max_samples or 0 for curve in bounded))
    sizes = [0] * len(curves)
    for worker, size in zip(able, split_batch(bounded, batch), strict=True):
        sizes[worker] = size
    return tuple(sizes)


_log = plain_logger("thrifty.hetero")

_WAIT, _REJOIN, _STOP, _FAILED = range(4)
"""What a message to the workers that stand by says."""

_BEAT_S = 5.0
"""Seconds between two messages that those that train are alive."""


class Standby:
    """Decides which workers stand by, and carries messages to them.

    Args:
        group: The workers.
        options: Options of the trainer.
        clock: Clock of the messages.
    """

    def __init__(self, group: WorkerGroup, *, options: HeteroOptions, clock: Clock) -> None:
        self._group = group
        # A larger batch, or the fewest joules, would need a choice of its own.
        self._enabled = (
            options.stand_by is not False
            and options.objective == "throughput"
            and options.growth is None
        )
        self._only_says = options.stand_by is None
        self._clock = clock
        self._policy: StandbyPolicy | None = None
        self._infos: tuple[WorkerInfo, ...] = ()
        self._busy_s: float | None = None
        self._beat_at = 0.0

    @property
    def infos(self) -> list[WorkerInfo]:
        """What each worker that trains has reported about itself."""
        return [self._infos[rank] for rank in self._group.ranks]

    @property
    def calls(self) -> bool:
        """Whether those that train call the others back before the next step."""
        return (
            self._policy is not None
            and self._group.met
            and (not self._group.complete and len(self._policy.training) == len(self._infos))
        )

    @property
    def constant(self) -> tuple[int, ...]:
        """Ranks, among those that train, of the workers that have never stood by."""
        constant = range(len(self._infos)) if self._policy is None else self._policy.constant
        return tuple(at for at, rank in enumerate(self._group.ranks) if rank in constant)

    @property
    def has_stood_by(self) -> bool:
        """Whether a worker that trains has stood by before."""
        return len(self.constant) < len(self._group.ranks)

    def meet(self, infos: Sequence[WorkerInfo], *, batch: int) -> None:
        """Begin with workers that have just met; all of them train."""
        self._infos, self._busy_s = tuple(infos), None
        self._policy = None
        if self._enabled and self._group.can_narrow:
            private = [rank for rank, info in enumerate(infos) if info.num_private]
            self._policy = StandbyPolicy(len(infos), batch=batch, required=private)

    def observe(
        self,
        summed: SummedNotes,
        curves: Sequence[StepCurve],
        *,
        step: int,
        usual: bool,
        resplit: bool,
    ) -> StandbyChange | None:
        """Record a step; narrow the group at once if fewer workers train from the next one on.

        Args:
            summed: What the workers have told each other.
            curves: Present curves of the workers that train.
            step: Steps trained.
            usual: Whether this was a whole step without a check.
            resplit: Whether the split has changed after it.

        Raises:
            PeerLostError: A worker is gone.
        """
        if self._policy is None:
            return None
        busy_s, self._busy_s = self._busy_s, max(summed.busy_s) if usual else None
        change = None
        if busy_s is not None:
            change = self._policy.observe(
                self._current(curves), whole_s=summed.whole_s, busy_s=busy_s
            )
        if change is not None and self._only_says:
            self._say(change, step=step)
            self._policy = None
            return None
        if resplit:
            self._policy.settle()
        event = None if change is None else self._event(change, step=step)
        if self._group.complete and len(self._policy.training) < len(self._infos):
            self._keep(curves)
            self._group.narrow(self._policy.training)
            self._busy_s = None
            self._beat_at = self._clock.monotonic()
        return event

    def beat(self) -> None:
        """Tell those that stand by now and then that training goes on.

        Raises:
            PeerLostError: A worker is gone.
        """
        now = self._clock.monotonic()
        if not self._group.complete and now >= self._beat_at + _BEAT_S:
            self._beat_at = now
            self._group.call(_WAIT)

    def call(self, *, stop: bool) -> None:
        """Call back those that stand by, because training goes on with them or ends.

        Raises:
            PeerLostError: A worker is gone.
        """
        self._group.call(_STOP if stop else _REJOIN)

    def fail(self, error: Exception) -> None:
        """Tell those that stand by that training has failed.

        Raises:
            PeerLostError: A worker is gone.
        """
        diverged = "!" if isinstance(error, DivergedError) else ""
        self._group.call(_FAILED, f"{diverged}{type(error).__name__}: {error}")

    def await_call(self) -> bool:
        """Stand by until those that train call; return whether training goes on.

        Raises:
            DivergedError: The loss of the others is no longer finite.
            HeteroError: Training has failed on the others.
            PeerLostError: The workers that train are gone.
        """
        while True:
            code, text = self._group.await_call()
            if code == _FAILED:
                kind = DivergedError if text.startswith("!") else HeteroError
                raise kind(
                    f"training has failed while this worker stood by: {text.removeprefix('!')}"
                )
            if code != _WAIT:
                return code == _REJOIN

    def rejoined(self, infos: Sequence[WorkerInfo]) -> None:
        """Record that all workers train again."""
        self._infos, self._busy_s = tuple(infos), None

    def own_curve(self, curves: Sequence[StepCurve]) -> StepCurve:
        """Return this worker's curve, given the present ones of those that train."""
        rank = self._group.everyone.rank
        if self._group.stands_by:
            return self._infos[rank].curve
        return self._current(curves)[rank]

    def state(self) -> dict[str, Any]:
        """Return as plain values what a worker that stood by has to know."""
        return {} if self._policy is None else self._policy.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state`` returned."""
        if self._policy is not None:
            self._policy.load_state(state)

    def _current(self, curves: Sequence[StepCurve]) -> tuple[StepCurve, ...]:
        known = [info.curve for info in self._infos]
        for rank, curve in zip(self._group.ranks, curves, strict=True):
            known[rank] = curve
        return tuple(known)

    def _keep(self, curves: Sequence[StepCurve]) -> None:
        self._infos = tuple(
            replace(info, curve=curve)
            for info, curve in zip(self._infos, self._current(curves), strict=True)
        )

    def _say(self, change: SubsetChange, *, step: int) -> None:
        """Say once what standing by would save."""
        if self._group.view.rank == 0:
            would = _sentence(change, self._others(change), names=self._group.everyone.names)
            _log.info("step %d: with HeteroOptions(stand_by=True), %s", step, would)

    def _others(self, change: SubsetChange) -> tuple[str, ...]:
        """Return the names of the workers that stand by, or have stood by until now."""
        return tuple(
            name
            for rank, name in enumerate(self._group.everyone.names)
            if not (rank in change.training and rank in self._group.ranks)
        )

    def _event(self, change: SubsetChange, *, step: int) -> StandbyChange:
        names = self._group.everyone.names
        others = self._others(change)
        event = StandbyChange(
            step=step,
            reason=_sentence(change, others, names=names),
            training=tuple(names[rank] for rank in change.training),
            standing_by=() if len(change.training) == len(names) else others,
            step_s=change.step_s,
        )
        if self._group.view.rank == 0:
            _log.info("step %d: %s", step, event.reason)
        return event


def _sentence(change: SubsetChange, others: Sequence[str], *, names: Sequence[str]) -> str:
    training = [names[rank] for rank in change.training]
    gain = f"{change.step_s[0] / change.step_s[1]:.2g} times as fast"
    if change.reason == "exchange":
        who = f"{training[0]} alone trains" if len(training) == 1 else f"{_listed(training)} train"
        stand = "stands" if len(others) == 1 else "stand"
        return f"{who} {gain} as with {_listed(others)}; {_listed(others)} {stand} by"
    if change.reason == "slower":
        return f"with {_listed(others)} training should be {gain}; {_listed(others)} called back"
    return f"{_listed(others)} called back, to measure whether all workers are faster now"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names)
