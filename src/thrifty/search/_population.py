"""Population-based training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from thrifty.core import AlgorithmError
from thrifty.space import Choice, Constant, Domain, Float, Int, Schedule, Space

from ._algorithm import Algorithm
from ._history import Decision, History, Proposal, Stop
from ._options import check_at_least, draw
from ._samplers import RandomSampler, Sampler


@dataclass(frozen=True, slots=True, kw_only=True)
class PopulationBasedTraining(Algorithm):
    """Every ``interval`` epochs the worst of a population go on from the best, with changed hyper-parameters.

    Jaderberg et al., "Population Based Training of Neural Networks", 2017. Exploit is a branch in the plan: the loser is
    stopped, and a new trial has the winner's timeline up to here and the explored values from here
    on; nothing is copied. Only the hyper-parameters in ``explore`` change: each is drawn again with
    probability ``resample``, else multiplied by one of ``perturb`` (a Choice moves to a neighbour).
    A generation is judged when all of it is there.

    >>> PopulationBasedTraining(max_epochs=20, population=4, interval=5, explore=("lr",)).interval
    5
    """

    max_epochs: int
    population: int
    interval: int
    explore: tuple[str, ...] = ()
    perturb: tuple[float, ...] = (0.8, 1.25)
    quantile: float = 0.25
    resample: float = 0.25
    sampler: Sampler = RandomSampler()

    def __post_init__(self) -> None:
        check_at_least(1, max_epochs=self.max_epochs, interval=self.interval)
        check_at_least(2, population=self.population)
        if not self.explore:
            raise AlgorithmError(
                'explore is empty; name the hyper-parameters that may change midway, such as explore=("lr",)'
            )
        if not 0.0 < self.quantile <= 0.5:
            raise AlgorithmError(
                f"quantile is {self.quantile}; it must be above 0 and at most 0.5"
            )
        if not self.perturb or not 0.0 <= self.resample <= 1.0:
            raise AlgorithmError(
                "perturb needs at least one factor, and resample is a probability"
            )

    def ask(
        self,
        history: History,
        space: Space,
        *,
        num: int,
        rng: np.random.Generator,
    ) -> Sequence[Decision]:
        """The population at first, then the next generation when the present one is there."""
        self._check(space)
        first = min(self.interval, self.max_epochs)
        if len(history) == 0:
            return draw(
                self.sampler, history, space, num=self.population, target=first, rng=rng
            )
        waiting = [trial.number for trial in history if trial.state == "waiting"]
        if history.num_running or not waiting:
            return []
        at = max(history[number].reached for number in waiting)
        alive = sorted(
            (n for n in waiting if history[n].reached == at),
            key=lambda n: (-history[n].scores[-1], n),
        )
        if at >= self.max_epochs:
            return []
        return self._next_generation(history, space, alive=alive, at=at, rng=rng)

    def _next_generation(
        self,
        history: History,
        space: Space,
        *,
        alive: Sequence[int],
        at: int,
        rng: np.random.Generator,
    ) -> list[Decision]:
        target = min(at + self.interval, self.max_epochs)
        num_replaced = int(len(alive) * self.quantile)
        best, losers = alive[: max(num_replaced, 1)], alive[len(alive) - num_replaced :]
        decisions: list[Decision] = [Stop(trial=number) for number in losers]
        decisions += [
            Proposal(target=target, trial=number) for number in alive if number not in losers
        ]
        # places of trials that failed are filled as well: the population keeps its size
        for _ in range(self.population - len(alive) + len(losers)):
            donor = best[int(rng.integers(len(best)))]
            config = self._explore(history[donor].config, space, at=at, rng=rng)
            decisions.append(Proposal(target=target, config=config, parent=(donor, at)))
        return decisions

    def _explore(
        self, config: Any, space: Space, *, at: int, rng: np.random.Generator
    ) -> dict[str, Any]:
        out = dict(config)
        for name in self.explore:
            if name not in config:
                continue  # its condition does not hold
            before = config[name]
            old = before if isinstance(before, Schedule) else Constant(before)
            value = self._new_value(space[name], _last_value(before), rng)
            out[name] = old.then(value, at=at)
        return out

    def _new_value(self, domain: Any, value: Any, rng: np.random.Generator) -> Any:
        if rng.random() < self.resample or isinstance(value, Schedule):
            return domain.sample(rng)
        if isinstance(domain, Choice):
            index = domain.options.index(value) + (1 if rng.random() < 0.5 else -1)
            return domain.options[min(max(index, 0), len(domain.options) - 1)]
        assert isinstance(domain, Float | Int)
        factor = self.perturb[int(rng.integers(len(self.perturb)))]
        moved = min(max(value * factor, domain.low), domain.high)
        return round(moved) if isinstance(domain, Int) else float(moved)

    def _check(self, space: Space) -> None:
        for name in self.explore:
            if name not in space.names:
                raise AlgorithmError(
                    f"explore names {name!r}, which the space does not have ({', '.join(space.names)})"
                )
            if not isinstance(space[name], Domain):
                raise AlgorithmError(
                    f"explore names {name!r}, which is fixed; give it a Float, an Int or a Choice"
                )


def _last_value(value: Any) -> Any:
    """The value in force: the last of a chain of exploits."""
    second = getattr(value, "second", None)
    if second is not None:
        return _last_value(second)
    return value.value if isinstance(value, Constant) else value
