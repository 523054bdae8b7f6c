"""Allocation of the samples of a step to the workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from thrifty.hetero._job import HeteroOptions, WorkerInfo
from thrifty.hetero._order import Place, SampleOrder, Share
from thrifty.perf import (
    Balancer,
    SplitChange,
    StepCurve,
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
