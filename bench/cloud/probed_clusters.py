"""Forecasts for a new application: on a cluster that others have used, and after two probes.

A probe is a short run on some machines, at the batch sizes of the profile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np

from bench.cloud.clusters import (
    CLUSTERS,
    GRADIENT_MB,
    VENDORS,
    Placement,
    Row,
    by_priors,
    forecasts,
    kind_of,
    needed_widths,
    offer_of,
    profile_of,
    summary,
)
from thrifty.cloud import HardwareEstimates, Interval, NetworkPriors, StepTiming, calibrate
from thrifty.cloud._networks import NetworkKind


Pair = tuple[str, str]
"""A cluster and an application."""

_COVERAGE = 0.9
_LEVELS = np.linspace(0, 1, 101)
_FACTORS = np.exp2(np.arange(-2.5, 3.5, 0.5)).tolist()
"""Factors on the vendors' seconds of a sum that are tried."""
_SETUPS = 30
"""Setups of an application that tell of a cluster's network."""
_EVERY = 5
"""Every how manieth setup counts where intervals are calibrated, and in the variants."""
_FULL = {"aws": 4, "azure": 8, "dgx": 8, "rtx": 8}
_MOST = {"aws": 4, "azure": 4, "dgx": 2, "rtx": 3}
"""Machines of the second probe: four, or all that were measured."""

_BY_VENDORS = NetworkPriors(
    **{name: middle for name, (middle, _) in VENDORS.items()}, widths={}, observed=1.0
)


def rows_of(rows: Sequence[Row], pair: Pair) -> list[Row]:
    """Return the rows of one application on one cluster."""
    return [row for row in rows if (row.cluster, row.app) == pair]


def timings_of(rows: Sequence[Row]) -> list[StepTiming]:
    """Return measured steps on equal machines."""
    return [
        StepTiming(
            offer=offer_of(row.cluster, row.placement[0]),
            num=len(row.placement),
            batch=row.batch,
            seconds=row.step_s,
        )
        for row in rows
        if len(set(row.placement)) == 1
    ]


# -- an application that is new, on a cluster that others have used ------------------------------


class KnownClusters:
    """Estimates for an application, from the other applications on the same cluster.

    They differ from the vendors' priors in two factors, on sums inside machines and between them,
    and in the width of intervals. Nothing of them was fitted to the application itself.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows
        self._losses = cache(self._losses_of)

    def estimates(self, cluster: str, app: str) -> HardwareEstimates:
        """Return estimates whose intervals hold for nine of ten setups of the others.

        Each of the others is forecast from the remaining three.
        """
        others = [each for each in GRADIENT_MB if each != app]
        needed: dict[bool, list[float]] = {False: [], True: []}
        for other in others:
            rest = [each for each in others if each != other]
            mine = some_of(rows_of(self._rows, (cluster, other)), _EVERY)
            found = forecasts(mine, lambda *_, rest=rest: self._from(cluster, rest))
            beyond = [row for row in mine if sum(row.placement) > 1]
            width = needed_widths(beyond, found)
            several = np.array([len(row.placement) > 1 for row in beyond])
            for each, parts in needed.items():
                # Each application counts the same, however many of its setups were measured.
                parts += np.quantile(width[several == each], _LEVELS).tolist()
        one, many = (float(np.quantile(needed[each], _COVERAGE)) for each in (False, True))
        known = self._from(cluster, others)
        widths: dict[NetworkKind, float] = {
            kind_of(cluster, several=several): width
            for several, width in ((False, one), (True, many))
        }
        return replace(known, networks=replace(known.networks, widths=widths))

    def _from(self, cluster: str, apps: Sequence[str]) -> HardwareEstimates:
        """Return the estimates with the factors that suit these applications best."""
        losses = np.mean([self._losses(cluster, app) for app in apps], axis=0)
        inner, network = np.unravel_index(losses.argmin(), losses.shape)
        return self._with(cluster, inner=_FACTORS[int(inner)], network=_FACTORS[int(network)])

    def _with(self, cluster: str, *, inner: float, network: float) -> HardwareEstimates:
        known = by_priors(_BY_VENDORS)(cluster, "")
        offer = offer_of(cluster, _FULL[cluster])
        return known.probed(
            inner={offer.instance_type: _surer(known.inner(offer), inner)},
            network={offer.instance_type: _surer(known.network(offer), network)},
        )

    def _losses_of(self, cluster: str, app: str) -> np.ndarray:
        """Return a robust error for each pair of factors, [inner, network]."""
        mine = rows_of(self._rows, (cluster, app))
        mine = some_of(mine, max(1, len(mine) // _SETUPS))
        true = np.log([row.step_s for row in mine if sum(row.placement) > 1])
        out = np.empty((len(_FACTORS), len(_FACTORS)))
        for inner, network in product(range(len(_FACTORS)), repeat=2):
            factors = _FACTORS[inner], _FACTORS[network]
            known = self._with(cluster, inner=factors[0], network=factors[1])
            away = np.log(forecasts(mine, lambda *_, known=known: known)[:, 0]) - true
            unlikely = float((np.log(factors) ** 2).sum())
            out[inner, network] = np.mean(np.sqrt(0.01 + away**2)) + 0.01 * unlikely
        return out


def some_of(rows: Sequence[Row], every: int) -> list[Row]:
    """Return the steps of one device, and every so manieth of the others."""
    alone = [row for row in rows if row.placement == (1,)]
    return alone + [row for row in rows if row.placement != (1,)][::every]


def _surer(interval: Interval, factor: float) -> Interval:
    """Return an interval around ``factor``, half as wide as that of the kind of network.

    Four applications with one opinion each would halve it.
    """
    middle = factor * interval.median
    return Interval(
        median=middle,
        low=middle * (interval.low / interval.median) ** 0.5,
        high=middle * (interval.high / interval.median) ** 0.5,
    )


# -- after two probes -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Which steps two probes measure.

    Args:
        most: most machines of the second probe; the first has one.
        sizes: most batch sizes of each.
    """

    most: int = 4
    sizes: int = 100

    def placements(self, cluster: str) -> list[Placement]:
        """Return the placements of both probes: whole machines."""
        num = min(self.most, _MOST[cluster])
        return [(_FULL[cluster],), (_FULL[cluster],) * num]

    def of(self, rows: Sequence[Row]) -> list[Row]:
        """Return the measured rows among those of one application on one cluster."""
        out = []
        for placement in self.placements(rows[0].cluster):
            mine = sorted(
                (row for row in rows if row.placement == placement), key=lambda row: row.batch
            )
            picked = np.linspace(0, len(mine) - 1, min(self.sizes, len(mine)))
            if self.sizes == 1:
                picked = np.array([len(mine) // 2])
            out += [mine[round(each)] for each in picked]
        return out


def after_probes(
    rows: Sequence[Row],
    known: Mapping[Pair, HardwareEstimates],
    runs: Runs,
    *,
    same_cluster: bool,
    every: int = 1,
) -> tuple[list[Row], np.ndarray]:
    """Return the setups that were not probed, and forecasts for them.

    Args:
        rows: measurements.
        known: estimates before the probes.
        runs: what the probes measure.
        same_cluster: whether the width of the intervals is calibrated on other applications on the
            same cluster, instead of on other applications on other clusters.
        every: every how manieth setup is forecast.
    """
    kept: dict[Pair, list[Row]] = {}
    found: dict[Pair, np.ndarray] = {}
    for pair, estimates in known.items():
        mine = rows_of(rows, pair)
        probed = calibrate(
            profile_of(mine, cluster=pair[0], app=pair[1]),
            timings_of(runs.of(mine)),
            estimates=estimates,
        )
        left = [row for row in mine if row.placement not in runs.placements(pair[0])]
        left = some_of(left, every)
        found[pair] = forecasts(left, lambda *_, probed=probed: probed)
        kept[pair] = [row for row in left if sum(row.placement) > 1]
    out = []
    for pair, plain in found.items():
        needed = [
            np.quantile(_distances(kept[other], each), _LEVELS)
            for other, each in found.items()
            if other[1] != pair[1] and (other[0] == pair[0]) == same_cluster
        ]
        wider = float(np.quantile(np.concatenate(needed), _COVERAGE))
        # The same as ``NetworkPriors(observed=wider)`` gives.
        out.append(plain[:, :1] * (plain / plain[:, :1]) ** wider)
    return [row for each in kept.values() for row in each], np.concatenate(out)


def _distances(rows: Sequence[Row], guessed: np.ndarray) -> np.ndarray:
    """Return how far measured steps are from the medians, in half intervals."""
    away = np.abs(np.log([row.step_s for row in rows] / guessed[:, 0]))
    out: np.ndarray = away / np.log(guessed[:, 2] / guessed[:, 0])
    return out


VARIANTS = {
    "two machines in the second probe": Runs(most=2),
    "one batch size": Runs(sizes=1),
    "three batch sizes": Runs(sizes=3),
}


def new_applications(
    rows: Sequence[Row], unknown: Mapping[str, NetworkPriors]
) -> dict[str, list[dict[str, Any]]]:
    """Return errors and coverage for new applications, by how much is known.

    Args:
        rows: measurements.
        unknown: priors that were fitted without a cluster, by that cluster.
    """
    pairs = [(cluster, app) for cluster in CLUSTERS for app in GRADIENT_MB]
    pairs = [pair for pair in pairs if any(sum(r.placement) > 1 for r in rows_of(rows, pair))]
    clusters = KnownClusters(rows)
    known = {pair: clusters.estimates(*pair) for pair in pairs}
    strange = {pair: by_priors(unknown[pair[0]])(*pair) for pair in pairs}
    by_pair = [row for pair in pairs for row in rows_of(rows, pair)]
    out = {
        "known cluster": summary(by_pair, forecasts(by_pair, lambda *pair: known[pair])),
        "known cluster, two probes": summary(*after_probes(rows, known, Runs(), same_cluster=True)),
        "unknown cluster, two probes": summary(
            *after_probes(rows, strange, Runs(), same_cluster=False)
        ),
    }
    for name, runs in VARIANTS.items():
        out[f"known cluster, {name}"] = summary(
            *after_probes(rows, known, runs, same_cluster=True, every=_EVERY)
        )
    return out
