"""The default algorithm, chosen once for a study."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, ClassVar, NamedTuple

import numpy as np

from thrifty.core import AlgorithmError
from thrifty.space import Space, Timeline

from ._algorithm import Algorithm, GridSearch, RandomSearch
from ._checked_algorithms import CheckedASHA, CheckedBOSS
from ._history import Decision, History
from ._scores import coordinates_of
from ._sub_sampling import WideBOSS
from .samplers import GridSampler, KDESampler
from .samplers._base_sampler import check_counts


MOST_FOR_A_GRID = 1.5
"""A whole grid is trained if it takes at most this many times the epochs that rungs would take.

See docs/design/search.md for the measurement."""

MANY_TRIALS = 300
"""From this number of trials on, configurations come from a sampler that learns.

With 32 workers and 600 trials it is better than random ones, with 8 workers and 150 trials it is
not surely so."""


class AutoChoice(NamedTuple):
    """What ``Auto`` has chosen.

    Attributes:
        name: The name under which a study records it; see ``Auto.built``.
        algorithm: The algorithm.
        reason: Why, as one sentence without an end.
    """

    name: str
    algorithm: Algorithm
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Auto(Algorithm):
    """Chooses an algorithm for the study from its space, its size and its number of workers.

    A study chooses when it first runs, says what it has chosen and why, and records it. From then
    on it is a study of that algorithm, also with another number of workers.

    Args:
        max_epochs: Most epochs that any trial is trained.
        num_trials: Most configurations that are tried.
        workers: The number of workers to choose for (default: those with which the study first
            runs; 1 for ``Study.plan``).

    Raises:
        AlgorithmError: An option is out of range.

    >>> from thrifty.space import Float, Int, Space
    >>> space = Space(lr=Float(0.1, 0.3), width=Int(1, 512))
    >>> choice = Auto(max_epochs=81, num_trials=100).chosen(space, workers=8)
    >>> choice.name, choice.reason
    ('CheckedASHA', '8 workers never wait for each other')
    """

    max_epochs: int
    num_trials: int
    workers: int | None = None
    follows_horizons: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.amounts():
            return
        check_counts(self, max_epochs=self.max_epochs, num_trials=self.num_trials)
        if self.workers is not None:
            check_counts(self, workers=self.workers)

    def chosen(self, space: Space, *, workers: int = 1, num_objectives: int = 1) -> AutoChoice:
        """Return the algorithm for a space; equal arguments give the same one.

        Args:
            space: The search space.
            workers: The number of workers, unless ``Auto(workers=)`` says it.
            num_objectives: The number of metrics that are optimised.

        >>> from thrifty.space import Choice, Space
        >>> auto = Auto(max_epochs=81, num_trials=100)
        >>> auto.chosen(Space(lr=Choice([0.1, 0.2])), num_objectives=2).name
        'GridSearch'
        """
        return _chosen(self, space, workers=self.workers or workers, num_objectives=num_objectives)

    def built(self, name: str, space: Space) -> Algorithm:
        """Return the algorithm of a recorded choice.

        Raises:
            AlgorithmError: This version of thrifty knows no choice of this name.

        >>> from thrifty.space import Choice, Space
        >>> Auto(max_epochs=9, num_trials=5).built("GridSearch", Space(lr=Choice([0.1, 0.2])))
        GridSearch(max_epochs=9, levels=2)
        """
        epochs, num = self.max_epochs, self.num_trials
        if name == "GridSearch":
            return GridSearch(max_epochs=epochs, levels=_most_levels(space) or 1)
        if name == "CheckedASHA over the grid":
            sampler = GridSampler(levels=_most_levels(space) or 1)
            return CheckedASHA(max_epochs=epochs, num_trials=num, sampler=sampler)
        if name == "RandomSearch":
            return RandomSearch(max_epochs=epochs, num_trials=num)
        if name == "CheckedASHA":
            return CheckedASHA(max_epochs=epochs, num_trials=num)
        if name == "CheckedASHA with KDESampler":
            return CheckedASHA(max_epochs=epochs, num_trials=num, sampler=KDESampler())
        if name == "CheckedBOSS":
            return CheckedBOSS(max_epochs=epochs, num_trials=num)
        # No rule chooses these any more. Studies that have recorded them go on with them.
        if name in ("WideBOSS", "BOSS"):
            return WideBOSS(max_epochs=epochs, num_trials=num)
        raise AlgorithmError(
            f"the study records that Auto has chosen {name!r}, which this version of thrifty does "
            "not know; use the version that made the study, or a newer one"
        )

    def ask(
        self, history: History, space: Space, *, num: int, rng: np.random.Generator
    ) -> Sequence[Decision]:
        """Return what the algorithm for ``workers`` (default: 1) does next."""
        return self.chosen(space).algorithm.ask(history, space, num=num, rng=rng)


@lru_cache(maxsize=32)
def _chosen(auto: Auto, space: Space, *, workers: int, num_objectives: int) -> AutoChoice:
    """Return the choice; cached by the identity of the space, because it never changes."""
    name, reason = _rule(auto, space, workers=workers, num_objectives=num_objectives)
    return AutoChoice(name, auto.built(name, space), reason)


def _rule(auto: Auto, space: Space, *, workers: int, num_objectives: int) -> tuple[str, str]:
    """Return the name of the choice and the reason."""
    grid = _small_grid(space, most=auto.num_trials)
    rungs = CheckedASHA(max_epochs=auto.max_epochs, num_trials=auto.num_trials).rungs()
    for holds, why in (
        (space.has_horizons, "each trial ends at a horizon of its own"),
        (num_objectives > 1, "rungs would compare trials by the first metric only"),
        (len(rungs) == 1, f"max_epochs={auto.max_epochs} is too short for rungs"),
    ):
        if holds:
            whole = "the space has an interval or more configurations than num_trials"
            return ("RandomSearch", f"{why}, and {whole}") if grid is None else ("GridSearch", why)
    if grid is not None:
        total = _num_epochs(grid, epochs=auto.max_epochs)
        halved = CheckedASHA(max_epochs=auto.max_epochs, num_trials=len(grid)).budget()
        name = "GridSearch" if total <= MOST_FOR_A_GRID * halved else "CheckedASHA over the grid"
        return name, (
            f"all {len(grid):,} configurations take {total:,} epochs, rungs about {halved:,}"
        )
    if workers == 1:
        reason = "one worker trains one round after the other, and checks if curves cross"
        return "CheckedBOSS", reason
    reason = f"{workers:,} workers never wait for each other"
    if auto.num_trials >= MANY_TRIALS:
        learns = f"a sampler learns from {auto.num_trials:,} trials"
        return "CheckedASHA with KDESampler", f"{reason}, and {learns}"
    return "CheckedASHA", reason


def _small_grid(space: Space, *, most: int) -> list[Mapping[str, Any]] | None:
    """Return all configurations of a space, or None if there are infinitely many or too many."""
    levels = _most_levels(space)
    if levels is None:
        return None
    found: list[Mapping[str, Any]] = list(islice(space.grid(levels=levels), most + 1))
    return found if len(found) <= most else None


def _most_levels(space: Space) -> int | None:
    """Return the most values that any hyper-parameter has; None if there are infinitely many."""
    sizes = (coordinate.domain.size() for coordinate in coordinates_of(space).coordinates)
    most = max(sizes, default=1.0)
    return None if math.isinf(most) else int(most)


def _num_epochs(grid: Iterable[Mapping[str, Any]], *, epochs: int) -> int:
    """Return the epochs of a whole grid, where epochs that configurations share count once."""
    lengths: dict[tuple[int, int, Hashable], int] = {}
    names: dict[tuple[int, int, Hashable], int] = {}
    for config in grid:
        parent = -1
        for run in Timeline(config, epochs=epochs).runs:
            # Equal stages after equal stages are one stage of the forest, as long as the longest.
            stage = (parent, run.start, run.key)
            lengths[stage] = max(lengths.get(stage, 0), run.stop - run.start)
            parent = names.setdefault(stage, len(names))
    return sum(lengths.values())
