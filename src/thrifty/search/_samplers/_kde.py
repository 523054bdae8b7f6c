"""BOHB's sampler: kernel densities of good and bad trials."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from thrifty.core import AlgorithmError
from thrifty.search._check import check_counts, check_shares
from thrifty.search._history import History
from thrifty.search._observations import Observations, coordinates_of, observe, points_of
from thrifty.space import Coordinates, Space

from ._base import Sampler
from ._density import Density, FloatArray, IntArray, impute
from ._prefix import Picker


@dataclass(frozen=True, slots=True, kw_only=True)
class KDESampler(Sampler):
    """Proposes what is likely among good trials and unlikely among bad ones; never exhausted.

    Falkner, Klein and Hutter, "BOHB: Robust and Efficient Hyperparameter Optimization at Scale",
    ICML 2018, with the constants of the authors' HpBandSter. At the largest epoch that enough
    trials have reached, the best ``top_share`` of them and the others each get a kernel density. Of
    ``num_candidates`` candidates drawn near good trials, the one with the highest ratio of
    densities is taken. A share ``random_share`` of the draws is random, and all draws are until
    there is enough to learn from. The ratio is lowered near trials in training and near recent
    draws (as in local penalization, González et al., AISTATS 2016), so that a batch spreads.

    Args:
        top_share: share of the trials that are good.
        num_candidates: number of candidates that are compared for each draw.
        random_share: share of the draws that are random.
        bandwidth_factor: ratio of the spread of the candidates to the density of the good trials.
        min_bandwidth: least width of a kernel in the unit cube. With the 0.001 of BOHB's authors,
            good trials may contract around one that is not the best; 0.1 did better on most smooth
            functions tried.
        min_points: number of good and of bad trials that it needs (default: one more than there are
            coordinates).
        share: part of the best candidate's lead over the median that may be given up to share
            training.

    Raises:
        AlgorithmError: an option is out of range.

    >>> from thrifty.search import History
    >>> from thrifty.space import Choice, Space
    >>> space, rng = Space(lr=Choice([0.1])), np.random.default_rng(0)
    >>> KDESampler().sample(History(), space, num=1, rng=rng)
    [{'lr': 0.1}]
    """

    adapts: ClassVar[bool] = True
    top_share: float = 0.15
    num_candidates: int = 64
    random_share: float = 1 / 3
    bandwidth_factor: float = 3.0
    min_bandwidth: float = 0.1
    min_points: int | None = None
    share: float = 0.0

    def __post_init__(self) -> None:
        check_counts(self, num_candidates=self.num_candidates)
        check_shares(
            self, top_share=self.top_share, random_share=self.random_share, share=self.share
        )
        if self.min_points is not None:
            check_counts(self, min_points=self.min_points)
        for name in ("bandwidth_factor", "min_bandwidth"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and value > 0):
                raise AlgorithmError(
                    f"KDESampler({name}={value!r}): {name} must be a positive number"
                )

    def sample(
        self, history: History, space: Space, *, num: int, rng: np.random.Generator
    ) -> Sequence[Mapping[str, Any]]:
        """Draw configurations."""
        coordinates = coordinates_of(space)
        least = self.min_points or len(coordinates) + 1
        picker = Picker(history, share=self.share)
        is_random = rng.random(num) < self.random_share
        if is_random.all():
            return [picker.draw(space, rng) for _ in range(num)]
        seen = observe(history, coordinates, min_points=2 * least)
        if len(seen) < 2 * least:
            return [picker.draw(space, rng) for _ in range(num)]
        good, bad = self._densities(seen, coordinates.num_options, least=least, rng=rng)
        taken = impute(
            points_of(seen.pending, coordinates), good.points, good.num_options, rng=rng
        )
        configs = []
        for at_random in is_random.tolist():
            picked = None
            if not at_random:
                points = good.draw(self.num_candidates, factor=self.bandwidth_factor, rng=rng)
                lead = good.log_density(points) - bad.log_density(points)
                # Adding these points to the bad trials would hardly matter: bad kernels are wide
                # and many.
                lead += good.log_distance(points, taken)
                picked = picker.pick(lead, _configs(coordinates, points))
            config = picker.draw(space, rng) if picked is None else picked[1]
            point = points_of([config], coordinates)
            point = impute(point, good.points, good.num_options, rng=rng)
            taken = np.concatenate([taken, point])
            configs.append(config)
        return configs

    def _densities(
        self,
        seen: Observations,
        num_options: IntArray,
        *,
        least: int,
        rng: np.random.Generator,
    ) -> tuple[Density, Density]:
        order = np.argsort(-seen.scores, kind="stable")
        num_good = max(least, int(self.top_share * len(seen)))
        num_good = min(num_good, len(seen) - least)
        good, bad = seen.points[order[:num_good]], seen.points[order[num_good:]]
        good, bad = (impute(points, points, num_options, rng=rng) for points in (good, bad))
        return (
            Density.fit(good, num_options, min_bandwidth=self.min_bandwidth),
            Density.fit(bad, num_options, min_bandwidth=self.min_bandwidth),
        )


def _configs(coordinates: Coordinates, points: FloatArray) -> Callable[[int], dict[str, Any]]:
    return lambda index: coordinates.from_unit(points[index])
