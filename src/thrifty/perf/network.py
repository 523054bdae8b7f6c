"""Times of links and collectives."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from thrifty.core import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A ring over machines, and a ring inside each of them; the slowest link sets the pace.

    Args:
        bytes_per_s: Bandwidth between machines.
        latency_s: Latency of each message between machines.
        inner_bytes_per_s: Bandwidth between the devices of a machine.
        inner_latency_s: Latency of each message between them.

    Raises:
        UsageError: A bandwidth is not positive, or a latency is negative.

    >>> Link(bytes_per_s=1e9).all_reduce_s(num_bytes=1e9, nodes=2)
    1.0
    """

    bytes_per_s: float = math.inf
    latency_s: float = 0.0
    inner_bytes_per_s: float = math.inf
    inner_latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not (self.bytes_per_s > 0 and self.inner_bytes_per_s > 0):
            raise UsageError(
                f"a link carries something: bytes_per_s={self.bytes_per_s}, "
                f"inner_bytes_per_s={self.inner_bytes_per_s}"
            )
        if not (self.latency_s >= 0 and self.inner_latency_s >= 0):
            raise UsageError(
                f"a latency is not negative: latency_s={self.latency_s}, "
                f"inner_latency_s={self.inner_latency_s}"
            )

    def all_reduce_s(self, *, num_bytes: float, nodes: int, per_node: int = 1) -> float:
        """Return the seconds of an all-reduce, inside and between machines.

        A ring of ``n`` members sends 2 (n - 1) messages, each of 1/n of the bytes.

        Args:
            num_bytes: Bytes to sum.
            nodes: Number of machines.
            per_node: Devices per machine.
        """
        return float(
            ring_s(num_bytes, nodes, self.bytes_per_s, self.latency_s)
            + ring_s(num_bytes, per_node, self.inner_bytes_per_s, self.inner_latency_s)
        )


def ring_s(  # noqa: PLR0917 -- the symbols of a formula
    num_bytes: ArrayLike, members: ArrayLike, bytes_per_s: ArrayLike, latency_s: ArrayLike
) -> np.ndarray:
    """Return the seconds of a ring all-reduce; arguments broadcast (Patarasuk and Yuan, 2009)."""
    n = np.maximum(np.asarray(members, float), 1.0)
    share = np.asarray(num_bytes, float) / n / np.asarray(bytes_per_s, float)
    out: np.ndarray = 2 * (n - 1) * (np.asarray(latency_s, float) + share)
    return out


_ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "broadcast": 1}
"""Number of times that each collective goes around the ring."""

_PRIOR_SIGMA = math.log(3.0) / NormalDist().inv_cdf(0.95)
"""Standard deviation of the log error of a network's nominal speed.

The nominal speed is right within a factor of 3 in nine cases of ten.
"""

_FOLDS = 32
_TINY_S = 1e-12

Shape = tuple[int, int]
"""Machines, and devices per machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTiming:
    """One measured collective.

    Args:
        name: Name of the network, such as a VM type.
        num_bytes: Bytes that each device contributes.
        nodes: Number of machines.
        per_node: Devices per machine.
        seconds: Measured time.
        collective: "all_reduce", "all_gather", "reduce_scatter" or "broadcast".

    Raises:
        UsageError: A number cannot be a measurement, or the collective is unknown.
    """

    name: str
    num_bytes: float
    nodes: int
    seconds: float
    per_node: int = 1
    collective: str = "all_reduce"

    def __post_init__(self) -> None:
        _check_collective(self.collective)
        if not (0 < self.num_bytes < math.inf and 0 < self.seconds < math.inf):
            raise UsageError(
                f"an exchange has bytes and takes time: num_bytes={self.num_bytes}, "
                f"seconds={self.seconds} of {self.name!r}"
            )
        if self.nodes < 1 or self.per_node < 1 or self.nodes * self.per_node < 2:
            raise UsageError(
                f"an exchange needs two devices: nodes={self.nodes}, per_node={self.per_node} "
                f"of {self.name!r}"
            )

    @property
    def shape(self) -> Shape:
        """Machines, and devices per machine."""
        return self.nodes, self.per_node


class CollectiveModel:
    """Seconds of collectives by network, bytes, machines and devices per machine, with quantiles.

    The model fits a ring between the machines and a ring inside each machine to the measurements.
    For a measured number of machines it uses the measured times themselves: linear between the
    measured sizes, proportional to the ring below them, with the ring's slope above them. For other
    numbers of machines it corrects the ring by the measured deviations, which count less the
    farther away they are.

    Quantiles come from the errors of each measurement against a model fitted without it. Where
    nothing was measured, the model uses the prior, which holds within a factor of 3 in nine cases
    of ten.

    >>> timings = [
    ...     CollectiveTiming(name="vm", num_bytes=b, nodes=2, seconds=1e-4 + b / 1e9)
    ...     for b in (1e4, 1e6, 1e8)
    ... ]
    >>> model = CollectiveModel.fit(timings)
    >>> model.seconds("vm", num_bytes=[1e6, 1e8], nodes=2).round(4).tolist()
    [0.0011, 0.1001]
    >>> bool(
    ...     model.seconds("vm", num_bytes=1e6, nodes=4, quantile=0.9)
    ...     > model.seconds("vm", num_bytes=1e6, nodes=4)
    ... )
    True
    """

    def __init__(
        self, timings: Sequence[CollectiveTiming], prior: Mapping[str, Link] | None = None
    ) -> None:
        self._timings = tuple(timings)
        self._prior = dict(prior or {})
        groups: dict[tuple[str, str], list[CollectiveTiming]] = {}
        for timing in self._timings:
            groups.setdefault((timing.name, timing.collective), []).append(timing)
        self._rings = {key: _MeasuredRing(group) for key, group in groups.items()}
        self._errors = {key: _left_out_errors(group) for key, group in groups.items()}

    @classmethod
    def fit(
        cls, measurements: Sequence[CollectiveTiming], *, prior: Mapping[str, Link] | None = None
    ) -> CollectiveModel:
        """Fit a model to measurements.

        Args:
            measurements: Timings of any networks; repeated timings of one kind are welcome.
            prior: Networks by name, for what was not measured.
        """
        return cls(measurements, prior)

    @property
    def names(self) -> tuple[str, ...]:
        """Networks with measurements or a prior."""
        return tuple(sorted({name for name, _ in self._rings} | self._prior.keys()))

    def seconds(
        self,
        name: str,
        *,
        num_bytes: ArrayLike,
        nodes: ArrayLike,
        per_node: ArrayLike = 1,
        collective: str = "all_reduce",
        quantile: float = 0.5,
    ) -> np.ndarray:
        """Return the seconds of a collective; one device alone takes none.

        Args:
            name: Name of the network.
            num_bytes: Bytes that each device contributes; broadcasts with ``nodes`` and
                ``per_node``.
            nodes: Number of machines.
            per_node: Devices per machine.
            collective: See ``CollectiveTiming``.
            quantile: 0.5 is the median; 0.95 is exceeded once in twenty times.

        Raises:
            UsageError: An argument is out of range, or nothing is known of this network, or nothing
                of the links between (or inside) its machines.
        """
        _check_collective(collective)
        if not 0 < quantile < 1:
            raise UsageError(f"`quantile` must be between 0 and 1, got {quantile}")
        sizes, machines, devices = np.broadcast_arrays(
            np.asarray(num_bytes, float), np.asarray(nodes), np.asarray(per_node)
        )
        if not ((sizes >= 0).all() and (machines >= 1).all() and (devices >= 1).all()):
            raise UsageError("num_bytes is not negative, and nodes and per_node are 1 or more")
        key = name, collective
        ring = self._rings.get(key)
        link = self._link_terms(name, collective)
        self._check_known(key, between=bool((machines > 1).any()), inside=bool((devices > 1).any()))
        out = np.zeros(sizes.shape)
        for shape in sorted(set(zip(machines.flat, devices.flat, strict=True)) - {(1, 1)}):
            here = (machines == shape[0]) & (devices == shape[1])
            if ring is None:
                middle, errors = _terms(sizes[here], shape) @ link, np.empty(0)
            else:
                middle = ring.seconds(sizes[here], shape, link)
                errors = self._errors[key] if ring.has_seen(shape) else np.empty(0)
            out[here] = middle * math.exp(_deviation(errors, quantile))
        return out

    def to_json(self) -> dict[str, Any]:
        """Return plain data, from which ``from_json`` restores the model."""
        return {
            "timings": [asdict(timing) for timing in self._timings],
            "prior": {name: _finite(asdict(link)) for name, link in self._prior.items()},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CollectiveModel:
        """Restore a model from the data that ``to_json`` returned.

        Raises:
            UsageError: The data does not come from ``to_json``.
        """
        try:
            return cls(
                [CollectiveTiming(**timing) for timing in data["timings"]],
                {name: Link(**link) for name, link in data["prior"].items()},
            )
        except (AttributeError, KeyError, TypeError) as error:
            raise UsageError(f"this is no model of collectives: {error!r}") from error

    def _link_terms(self, name: str, collective: str) -> np.ndarray:
        """Return the seconds of each term by the prior for this network; zeros without a prior."""
        link = self._prior.get(name)
        if link is None:
            return np.zeros(4)
        each = np.array([
            link.latency_s, 1 / link.bytes_per_s, link.inner_latency_s, 1 / link.inner_bytes_per_s
        ])  # fmt: skip
        return each * _ROUNDS[collective] / _ROUNDS["all_reduce"]

    def _check_known(self, key: tuple[str, str], *, between: bool, inside: bool) -> None:
        name, collective = key
        if name in self._prior:
            return
        ring = self._rings.get(key)
        if ring is None:
            raise UsageError(
                f"nothing is known of {collective} on {name!r}: measure it, or give a prior "
                f"for it; there are {', '.join(self.names) or 'none'}"
            )
        for asked, known, where in (
            (between, ring.between, "between machines"),
            (inside, ring.inside, "inside a machine"),
        ):
            if asked and not known:
                raise UsageError(
                    f"{collective} on {name!r} was never measured {where}: measure it, or "
                    "give a prior for it"
                )


class _MeasuredRing:
    """Measurements of one collective on one network."""

    def __init__(self, timings: Sequence[CollectiveTiming]) -> None:
        terms = np.stack([_terms(np.array(t.num_bytes), t.shape) for t in timings])
        self._each = _nonnegative(terms, np.array([t.seconds for t in timings]))
        self.between = any(t.nodes > 1 for t in timings)
        self.inside = any(t.per_node > 1 for t in timings)
        by_shape: dict[Shape, dict[float, list[float]]] = {}
        for t in timings:
            by_shape.setdefault(t.shape, {}).setdefault(t.num_bytes, []).append(t.seconds)
        self._curves = {shape: _rising(points) for shape, points in by_shape.items()}

    def has_seen(self, shape: Shape) -> bool:
        """Return whether each ring that this shape needs was measured, at some shape."""
        return (self.between or shape[0] == 1) and (self.inside or shape[1] == 1)

    def seconds(self, sizes: np.ndarray, shape: Shape, link: np.ndarray) -> np.ndarray:
        """Return the median seconds; rings that were not measured use the terms in ``link``."""
        if shape in self._curves:
            return self._measured(sizes, shape)
        known = np.repeat([self.between, self.inside], 2)
        ring: np.ndarray = _terms(sizes, shape) @ np.where(known, self._each, link) + _TINY_S
        distances = {other: math.dist(np.log2(shape), np.log2(other)) for other in self._curves}
        deviations = [
            np.log(self._measured(sizes, other) / self._ring(sizes, other)) for other in distances
        ]
        weights = np.array(list(distances.values())) ** -2.0
        mean = np.average(deviations, axis=0, weights=weights)
        # The weight halves per doubling: half of the deviation found at 2 machines applies at 4.
        out: np.ndarray = ring * np.exp(mean / (1 + min(distances.values())))
        return out

    def _ring(self, sizes: np.ndarray, shape: Shape) -> np.ndarray:
        out: np.ndarray = _terms(sizes, shape) @ self._each + _TINY_S
        return out

    def _measured(self, sizes: np.ndarray, shape: Shape) -> np.ndarray:
        x, y = self._curves[shape]
        ring = self._ring(sizes, shape)
        first, last = self._ring(x[[0, -1]], shape)
        beyond = np.where(sizes < x[0], y[0] * ring / first, y[-1] + ring - last)
        within = (sizes >= x[0]) & (sizes <= x[-1])
        out: np.ndarray = np.where(within, np.interp(sizes, x, y), beyond)
        return out


def _terms(sizes: np.ndarray, shape: Shape) -> np.ndarray:
    """Return the terms of two rings that their time is linear in, [..., 4].

    They are messages and bytes between machines, then messages and bytes inside a machine.
    """
    return np.stack(
        [
            ring_s(sizes * by_bytes, members, 1.0, 1 - by_bytes)
            for members, by_bytes in product(shape, (0.0, 1.0))
        ],
        axis=-1,
    )


def _nonnegative(terms: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Return non-negative seconds per term with the smallest squared relative error.

    All subsets of terms are tried, so that no solver is needed.
    """
    rows = terms / seconds[:, None]
    scale = np.maximum(rows.max(axis=0), _TINY_S)
    best, least = np.zeros(rows.shape[1]), math.inf
    for chosen in product([True, False], repeat=rows.shape[1]):
        each = np.zeros(rows.shape[1])
        each[list(chosen)] = np.linalg.lstsq(
            rows[:, chosen] / scale[list(chosen)], np.ones(len(rows)), rcond=None
        )[0]
        error = float(((rows / scale @ each - 1) ** 2).sum())
        # Larger subsets come first, so terms that measurements cannot tell apart share the time.
        if (each >= 0).all() and error < least - 1e-12:
            best, least = each, error
    out: np.ndarray = best / scale
    return out


def _rising(points: Mapping[float, Sequence[float]]) -> tuple[np.ndarray, np.ndarray]:
    """Return sizes, and seconds that never fall: more bytes never take less time."""
    sizes = np.array(sorted(points))
    y = np.log([float(np.median(points[size])) for size in sizes])
    least = np.minimum.accumulate(y[::-1])[::-1]
    return sizes, np.exp((np.maximum.accumulate(y) + least) / 2)


def _left_out_errors(timings: Sequence[CollectiveTiming]) -> np.ndarray:
    """Return the sorted absolute log errors of measurements held out by size and shape."""
    errors = [
        abs(math.log(t.seconds / float(ring.seconds(np.array(t.num_bytes), t.shape, np.zeros(4)))))
        for ring, left_out in _without(timings)
        for t in left_out
        if ring.has_seen(t.shape)
    ]
    return np.sort(errors)


def _without(
    timings: Sequence[CollectiveTiming],
) -> Iterator[tuple[_MeasuredRing, list[CollectiveTiming]]]:
    kinds = {kind: at for at, kind in enumerate(sorted({(t.shape, t.num_bytes) for t in timings}))}
    folds = min(len(kinds), _FOLDS)
    for fold in range(folds if folds > 1 else 0):
        held = [kinds[t.shape, t.num_bytes] % folds == fold for t in timings]
        seen = [t for t, out in zip(timings, held, strict=True) if not out]
        yield _MeasuredRing(seen), [t for t, out in zip(timings, held, strict=True) if out]


def _deviation(errors: np.ndarray, quantile: float) -> float:
    """Return the log ratio of a quantile to the median.

    It is conformal where there are enough errors; beyond them, it is at least the prior's.
    """
    level = abs(2 * quantile - 1)
    num = len(errors)
    if num and level <= num / (num + 1):
        levels = np.arange(num + 1) / (num + 1)
        width = float(np.interp(level, levels, [0.0, *errors]))
    else:
        prior = _PRIOR_SIGMA * NormalDist().inv_cdf((1 + level) / 2)
        width = max(prior, float(errors[-1]) if num else 0.0)
    return math.copysign(width, quantile - 0.5)


def _finite(link: Mapping[str, float]) -> dict[str, float]:
    """Drop infinite speeds: JSON cannot store them, and they are the defaults of ``Link``."""
    return {name: value for name, value in link.items() if math.isfinite(value)}


def _check_collective(name: str) -> None:
    if name not in _ROUNDS:
        raise UsageError(f"`collective` must be one of {', '.join(_ROUNDS)}, got {name!r}")
