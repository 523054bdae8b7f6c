"""Spot machines: prices and evictions as known at a given moment, and the time that they cost."""

from __future__ import annotations

import csv
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Protocol, Self

import numpy as np

from thrifty.core import CloudError, require

from ._offer import Interval, Offer
from ._workload import Workload


_DAY_S = 86400.0

_WEIGHT = 0.5
"""Evictions added to the observed ones (Jeffreys' prior).

With it, a machine that has not been evicted yet still has a rate above zero.
"""

_AWS_COLUMNS = ("instance_type", "az", "timestamp", "usd_per_hour")

Place = tuple[str, str]
"""Instance type and zone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceSeries:
    """Price over time: each price holds until the next one.

    Args:
        times_s: Moments of change, ascending; seconds since 1970, UTC.
        usd_h: Price in dollars per hour from each of these moments on.

    Raises:
        CloudError: The moments and prices do not match, are not ascending, or are out of range.

    >>> prices = PriceSeries(times_s=(0.0, 3600.0), usd_h=(1.0, 4.0))
    >>> prices.at(1800.0), prices.usd(1800.0, 5400.0)
    (1.0, 2.5)
    """

    times_s: tuple[float, ...]
    usd_h: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.times_s or len(self.times_s) != len(self.usd_h):
            raise CloudError(
                "each moment has its price, and there is at least one: not "
                f"{len(self.times_s)} moments and {len(self.usd_h)} prices"
            )
        if any(after <= before for before, after in pairwise(self.times_s)):
            raise CloudError(
                "moments of prices ascend: sort them, and leave out those that come twice"
            )
        if not all(0 <= price < math.inf for price in self.usd_h):
            raise CloudError("prices are finite and not negative")

    def at(self, moment: float) -> float:
        """Return the price in dollars per hour at a moment.

        Raises:
            CloudError: The moment is before the first price.
        """
        return self.usd_h[self._index(moment)]

    def usd(self, begin: float, end: float) -> float:
        """Return the cost in dollars of a machine from ``begin`` to ``end``, billed by the second.

        Raises:
            CloudError: ``begin`` is before the first price.
        """
        return sum(seconds * price for seconds, price in self._pieces(begin, end)) / _HOUR_S

    def quantile(self, share: float, begin: float, end: float) -> float:
        """Return the quantile ``share`` of the price, weighted by time.

        ``begin`` may be before the first price.

        Raises:
            CloudError: ``end`` is not after the first price, or not after ``begin``.
        """
        begin = max(begin, self.times_s[0])
        if end <= begin:
            raise CloudError(
                f"there are no prices before {_when(end)}: they begin at {_when(self.times_s[0])}"
            )
        pieces = sorted((price, seconds) for seconds, price in self._pieces(begin, end))
        wanted = share * (end - begin) * (1 - 1e-12)
        for price, seconds in pieces:
            wanted -= seconds
            if wanted <= 0:
                return price
        return pieces[-1][0]

    def _pieces(self, begin: float, end: float) -> Iterator[tuple[float, float]]:
        """Yield the seconds and the price of each stretch."""
        index = self._index(begin)
        while begin < end:
            last = index + 1 == len(self.times_s)
            until = end if last else min(end, self.times_s[index + 1])
            yield until - begin, self.usd_h[index]
            begin, index = until, index + 1

    def _index(self, moment: float) -> int:
        index = bisect_right(self.times_s, moment) - 1
        if index < 0:
            raise CloudError(
                f"there is no price at {_when(moment)}: they begin at {_when(self.times_s[0])}"
            )
        return index


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedLifetime:
    """Observed lifetime of one spot machine.

    Args:
        instance_type: Its instance type.
        zone: Its zone.
        begin_s: Moment when it was rented; seconds since 1970, UTC.
        end_s: Moment when it was evicted, returned, or last seen.
        evicted: Whether it was evicted.

    Raises:
        CloudError: ``end_s`` is before ``begin_s``.
    """

    instance_type: str
    zone: str
    begin_s: float
    end_s: float
    evicted: bool

    def __post_init__(self) -> None:
        if not self.end_s >= self.begin_s:
            raise CloudError(
                f"{self.instance_type} in {self.zone} ends at {self.end_s}, before it begins "
                f"at {self.begin_s}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotMarket:
    """Spot prices and eviction rates, from history before a given moment.

    Args:
        prices: Price history by instance type and zone.
        lifetimes: Observed machines by instance type and zone.
        until_s: Moment from which history is ignored; ``inf``: use all of it.
        days: Days before that moment whose prices count.
        unknown_evictions_per_h: Eviction rate of an instance type that was never observed; None:
            raise an error.

    Raises:
        CloudError: A number is out of range.

    >>> lifetimes = [
    ...     ObservedLifetime(
    ...         instance_type="p2.xlarge", zone="a", begin_s=0.0, end_s=36000.0, evicted=True
    ...     )
    ... ]
    >>> market = SpotMarket.from_lifetimes(lifetimes)
    >>> round(
    ...     market.evictions_per_h(
    ...         Offer(cloud="aws", region="a", zone="a", instance_type="p2.xlarge", price_usd_h=0.9)
    ...     ),
    ...     3,
    ... )
    0.15
    """

    prices: Mapping[Place, PriceSeries] = field(default_factory=dict)
    lifetimes: Mapping[Place, tuple[ObservedLifetime, ...]] = field(default_factory=dict)
    until_s: float = math.inf
    days: float = 7.0
    unknown_evictions_per_h: float | None = None

    def __post_init__(self) -> None:
        if not self.days > 0:
            raise CloudError(f"`days` must be greater than 0, got {self.days}")
        if self.unknown_evictions_per_h is not None and not self.unknown_evictions_per_h >= 0:
            raise CloudError(
                f"`unknown_evictions_per_h` must be at least 0, got {self.unknown_evictions_per_h}"
            )

    @classmethod
    def from_aws_csv(cls, path: str | Path, *, product: str = "Linux/UNIX") -> Self:
        """Read prices from the output of ``aws ec2 describe-spot-price-history``, one per line.

        Args:
            path: CSV file with the columns ``instance_type``, ``az``, ``timestamp`` (ISO 8601),
                ``usd_per_hour`` and optionally ``product``; the lines may be in any order.
            product: Operating system; lines of others are skipped.

        Raises:
            CloudError: The file cannot be read, or is not such a file.
        """
        changes: dict[Place, dict[float, float]] = {}
        for place, moment, price in _aws_rows(Path(path), product):
            changes.setdefault(place, {})[moment] = price
        return cls(prices={place: _series(of_it) for place, of_it in changes.items()})

    @classmethod
    def from_lifetimes(cls, lifetimes: Iterable[ObservedLifetime]) -> Self:
        """Return a market with these observed evictions; prices are those of the offers."""
        return cls().with_lifetimes(lifetimes)

    def with_lifetimes(self, lifetimes: Iterable[ObservedLifetime]) -> Self:
        """Return a copy with these observed machines added."""
        grouped = {place: list(known) for place, known in self.lifetimes.items()}
        for life in lifetimes:
            grouped.setdefault((life.instance_type, life.zone), []).append(life)
        return replace(self, lifetimes={place: tuple(known) for place, known in grouped.items()})

    def at(self, moment: float) -> Self:
        """Return a copy that sees only the history before ``moment``."""
        return replace(self, until_s=moment)

    def spot_usd_h(self, offer: Offer) -> float:
        """Return the price in dollars per hour: the median of the last ``days`` days.

        For an offer without a zone, it is the price of the cheapest zone. Without any price
        history, it is the offer's own.

        Raises:
            CloudError: There is neither a history nor a price of the offer.
        """
        return self.price_quantile(offer, 0.5)

    def price_quantile(self, offer: Offer, share: float) -> float:
        """Return the quantile ``share`` of the last days' prices, otherwise like ``spot_usd_h``.

        Raises:
            CloudError: No price is known, or ``share`` is not between 0 and 1.
        """
        if not 0 <= share <= 1:
            raise CloudError(f"a share of time must be between 0 and 1, got {share}")
        series = [
            prices
            for place, prices in self.prices.items()
            if _is_in(place, offer) and prices.times_s[0] < self.until_s
        ]
        if series:
            # One second more, so that the very last price change counts.
            end = min(self.until_s, max(each.times_s[-1] for each in self.prices.values()) + 1)
            begin = end - self.days * _DAY_S
            return min(each.quantile(share, begin, end) for each in series)
        if offer.spot_usd_h is None:
            raise CloudError(
                f"{offer}: no spot price is known, neither from history before the moment nor "
                "from the catalogue: give Offer.spot_usd_h, or rent it on demand"
            )
        return offer.spot_usd_h

    def evictions_per_h(self, offer: Offer) -> float:
        """Return the expected evictions per hour of one machine.

        Machines that were not evicted count with the time for which they were observed. Where few
        were observed, the rate is close to that of the instance type in other places.

        Raises:
            CloudError: No machine of this instance type was observed, and
                ``unknown_evictions_per_h`` is None.
        """
        shape, hours = self._posterior(offer)
        return shape / hours

    def evictions(self, offer: Offer) -> Interval:
        """Return the eviction rate as its mean and 90 % interval (chi-square quantiles).

        Raises:
            CloudError: As in ``evictions_per_h``.
            MissingExtraError: scipy is not installed.
        """
        chi2 = require("scipy.stats", extra="cloud").chi2
        shape, hours = self._posterior(offer)
        low, high = (float(chi2.ppf(share, 2 * shape)) / (2 * hours) for share in (0.05, 0.95))
        return Interval(median=shape / hours, low=low, high=high)

    def _posterior(self, offer: Offer) -> tuple[float, float]:
        """Return the gamma distribution of the rate: its shape (evictions) and its rate (hours)."""
        evicted, hours = self._seen(offer, here=True)
        elsewhere, their_hours = self._seen(offer, here=False)
        if their_hours:
            hours += _WEIGHT * their_hours / (elsewhere + _WEIGHT)
        elif not hours:
            unknown = self.unknown_evictions_per_h
            if unknown is None:
                raise CloudError(
                    f"{offer}: its eviction rate is unknown; give SpotMarket lifetimes of such "
                    "machines, or unknown_evictions_per_h"
                )
            hours = _WEIGHT / unknown if unknown else math.inf
        return evicted + _WEIGHT, hours

    def _seen(self, offer: Offer, *, here: bool) -> tuple[int, float]:
        """Return evictions and machine hours before the moment, in the offer's place or not."""
        evicted, seconds = 0, 0.0
        for place, lifetimes in self.lifetimes.items():
            if place[0] != offer.instance_type or _is_in(place, offer) != here:
                continue
            for life in lifetimes:
                if life.begin_s < self.until_s:
                    evicted += life.evicted and life.end_s < self.until_s
                    seconds += min(life.end_s, self.until_s) - life.begin_s
        return evicted, seconds / _HOUR_S


def _is_in(place: Place, offer: Offer) -> bool:
    """Return whether a place is in the offer's zone, or in its region if it has no zone."""
    kind, zone = place
    same = zone == offer.zone if offer.zone else zone.startswith(offer.region)
    return same and kind == offer.instance_type


def _aws_rows(path: Path, product: str) -> Iterator[tuple[Place, float, float]]:
    """Yield the place, the moment and the price of each line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CloudError(f"{path} cannot be read: {error}") from error
    found = False
    rows = csv.DictReader(text.splitlines())
    missing = [name for name in _AWS_COLUMNS if name not in (rows.fieldnames or ())]
    if missing:
        raise CloudError(
            f"{path} lacks the columns {', '.join(missing)}; it has "
            f"{', '.join(rows.fieldnames or ()) or 'none'}"
        )
    for row in rows:
        if row.get("product") not in {None, product}:
            continue
        found = True
        try:
            moment = datetime.fromisoformat(row["timestamp"])
            price = float(row["usd_per_hour"])
        except (TypeError, ValueError) as error:
            raise CloudError(f"{path}, line {rows.line_num}: {error}") from error
        if not 0 <= price < math.inf:
            raise CloudError(f"{path}, line {rows.line_num}: {price} is no price")
        moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        yield (row["instance_type"], row["az"]), moment.timestamp(), price
    if not found:
        raise CloudError(f"{path} has no line of the product {product!r}")


def _series(changes: Mapping[float, float]) -> PriceSeries:
    moments = sorted(changes)
    return PriceSeries(times_s=tuple(moments), usd_h=tuple(changes[moment] for moment in moments))


def _when(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="seconds")


# -- the time that evictions cost ------------------------------------------------------------------


_HOUR_S = 3600.0
_LARGEST_EXPONENT = 700.0


def young_s(save_s: float, mtbf_s: float) -> float:
    """Return the seconds of work between checkpoints by Young's first-order rule (CACM 1974).

    Args:
        save_s: Seconds to write a checkpoint.
        mtbf_s: Mean seconds between evictions.

    Raises:
        CloudError: A time is out of range.

    >>> young_s(8.0, 3600.0), young_s(8.0, math.inf)
    (240.0, inf)
    """
    _check_times(save_s, mtbf_s)
    return math.inf if math.isinf(mtbf_s) else math.sqrt(2 * save_s * mtbf_s)


def daly_s(save_s: float, mtbf_s: float) -> float:
    """Return the seconds of work between checkpoints by Daly's higher-order rule (FGCS 2006).

    The rule is good for frequent evictions, too.

    Args:
        save_s: Seconds to write a checkpoint.
        mtbf_s: Mean seconds between evictions.

    Raises:
        CloudError: A time is out of range.

    >>> round(daly_s(8.0, 3600.0), 1), daly_s(60.0, 20.0)
    (234.7, 20.0)
    """
    _check_times(save_s, mtbf_s)
    if math.isinf(mtbf_s):
        return math.inf
    ratio = save_s / (2 * mtbf_s)
    if ratio >= 1:
        return mtbf_s
    return young_s(save_s, mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def spot_seconds(
    work_s: float, *, evictions_per_h: float, save_s: float, restart_s: float
) -> tuple[float, float]:
    """Return the expected seconds of a job with evictions, and its checkpoint interval.

    Evictions come at a constant rate, during checkpoints and restarts, too. Each one loses the work
    since the last checkpoint. This is Daly's complete formula (FGCS 2006), but without a checkpoint
    after the end.

    Args:
        work_s: Seconds without evictions and checkpoints.
        evictions_per_h: Expected evictions per hour.
        save_s: Seconds to write a checkpoint.
        restart_s: Seconds from an eviction until work resumes.

    Returns:
        Expected seconds, and seconds of work between checkpoints. The interval is all of ``work_s``
        if no checkpoint is worth its time, and ``inf`` without evictions.

    Raises:
        CloudError: A number is out of range.

    >>> seconds, interval = spot_seconds(8 * 3600, evictions_per_h=0.1, save_s=30, restart_s=300)
    >>> round(seconds / 3600, 2), round(interval)
    (8.4, 1440)
    """
    numbers = (work_s, evictions_per_h, save_s, restart_s)
    if not all(0 <= number < math.inf for number in numbers):
        raise CloudError(
            f"work, evictions and seconds must be finite and not negative, got work_s={work_s}, "
            f"evictions_per_h={evictions_per_h}, save_s={save_s}, restart_s={restart_s}"
        )
    if work_s == 0 or evictions_per_h == 0:
        return work_s, math.inf
    mtbf_s = _HOUR_S / evictions_per_h
    restarts = 1 + _expm1(restart_s / mtbf_s)
    if save_s == 0:
        return work_s * restarts, 0.0
    # Daly's job also saves at its end. Ours writes one checkpoint fewer, so longer pieces may be
    # better.
    about = math.ceil(work_s / daly_s(save_s, mtbf_s))
    seconds, pieces = min(
        (_seconds_of(work_s, count, save_s=save_s, mtbf_s=mtbf_s), count)
        for count in range(max(1, about - 2), about + 1)
    )
    return restarts * seconds, work_s / pieces


def _seconds_of(work_s: float, pieces: int, *, save_s: float, mtbf_s: float) -> float:
    """Return the expected seconds of ``pieces`` equal pieces with checkpoints between them.

    Restarts take no time here.
    """
    piece_s = work_s / pieces
    saved = (pieces - 1) * _expm1((piece_s + save_s) / mtbf_s) if pieces > 1 else 0.0
    return mtbf_s * (saved + _expm1(piece_s / mtbf_s))


def _expm1(exponent: float) -> float:
    return math.expm1(exponent) if exponent < _LARGEST_EXPONENT else math.inf


def _check_times(save_s: float, mtbf_s: float) -> None:
    if not (0 <= save_s < math.inf and mtbf_s > 0):
        raise CloudError(
            "saving takes 0 s or more, and evictions are some time apart, not "
            f"save_s={save_s}, mtbf_s={mtbf_s}"
        )


_SAVE_S = 1.0
"""Seconds to write the smallest checkpoint."""

_SAVED_BYTES_PER_S = 200e6
"""Bandwidth at which checkpoints are written and read: that of a network file system."""

_WORK_S = 1e6
"""Seconds of work for which the slowdown is computed: long compared with checkpoint intervals."""

ASSUMED_PER_H = 0.1
"""Assumed evictions per machine hour if no history is given."""


class SpotHistory(Protocol):
    """Interface to prices and evictions of spot machines, known before renting them."""

    def evictions_per_h(self, offer: Offer) -> float:
        """Return the evictions per hour of one machine."""
        ...

    def spot_usd_h(self, offer: Offer) -> float:
        """Return the price of one machine in dollars per hour."""
        ...


def spot_terms(offer: Offer, history: SpotHistory | None) -> tuple[float, float] | None:
    """Return one machine's price and evictions per hour; None if it is not offered as spot.

    Raises:
        CloudError: The history has no data on this machine.
    """
    if history is not None:
        return history.spot_usd_h(offer), history.evictions_per_h(offer)
    return None if offer.spot_usd_h is None else (offer.spot_usd_h, ASSUMED_PER_H)


def slowdowns(workload: Workload, evictions_per_h: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the slowdown by evictions, and the seconds between checkpoints.

    The slowdown is a factor on the seconds of work; it is infinite where the work never completes.
    Short work with few evictions takes slightly less, since nothing is saved after its end.

    Args:
        workload: Training whose checkpoints are saved.
        evictions_per_h: Evictions per hour of all machines of a fleet together, because any
            eviction stops the whole fleet.
    """
    save_s = _SAVE_S + workload.state_bytes / _SAVED_BYTES_PER_S
    rates, places = np.unique(evictions_per_h, return_inverse=True)
    found = np.empty((2, rates.size))
    for index, rate in enumerate(rates.tolist()):
        seconds, every_s = spot_seconds(
            _WORK_S, evictions_per_h=rate, save_s=save_s, restart_s=workload.setup_s + save_s
        )
        found[:, index] = seconds / _WORK_S, every_s
    slow, every = found[:, places.reshape(evictions_per_h.shape)]
    return slow, every
