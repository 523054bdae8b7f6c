"""Prices and evictions of spot machines, as far as a moment's past shows them."""

from __future__ import annotations

import csv
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Self

from thrifty.core import CloudError, MissingExtraError

from ._fleet import Interval
from ._offer import Offer


_HOUR_S = 3600.0
_DAY_S = 86400.0

_WEIGHT = 0.5
"""Evictions that are added to those seen: Jeffreys' prior, so that a machine that nobody took yet has a rate above zero."""

_AWS_COLUMNS = ("instance_type", "az", "timestamp", "usd_per_hour")

Place = tuple[str, str]
"""Instance type and zone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceSeries:
    """A price over time: each holds until the next one.

    Args:
        times_s: moments of change, ascending; seconds since 1970, UTC.
        usd_h: price of an hour from each of them on.

    Raises:
        CloudError: the numbers do not fit together.

    >>> prices = PriceSeries(times_s=(0.0, 3600.0), usd_h=(1.0, 4.0))
    >>> prices.at(1800.0), prices.usd(1800.0, 5400.0)
    (1.0, 2.5)
    """

    times_s: tuple[float, ...]
    usd_h: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.times_s or len(self.times_s) != len(self.usd_h):
            raise CloudError(
                f"each moment has its price, and there is at least one: not {len(self.times_s)} moments and {len(self.usd_h)} prices"
            )
        if any(after <= before for before, after in pairwise(self.times_s)):
            raise CloudError(
                "moments of prices ascend: sort them, and leave out those that come twice"
            )
        if not all(0 <= price < math.inf for price in self.usd_h):
            raise CloudError("prices are finite and not negative")

    def at(self, moment: float) -> float:
        """Price of an hour then.

        Raises:
            CloudError: it is before the first price.
        """
        return self.usd_h[self._index(moment)]

    def usd(self, begin: float, end: float) -> float:
        """What a machine costs from one moment to another, billed by the second.

        Raises:
            CloudError: ``begin`` is before the first price.
        """
        return sum(seconds * price for seconds, price in self._pieces(begin, end)) / _HOUR_S

    def quantile(self, share: float, begin: float, end: float) -> float:
        """The price that so large a share of the time was not above; ``begin`` may be before the first price.

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
        """Seconds and price of each stretch."""
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
class Life:
    """What became of one spot machine.

    Args:
        instance_type: of it.
        zone: where it was.
        begin_s: when it was had; seconds since 1970, UTC.
        end_s: when it was taken away, given back, or last seen.
        evicted: it was taken away.

    Raises:
        CloudError: it ends before it begins.
    """

    instance_type: str
    zone: str
    begin_s: float
    end_s: float
    evicted: bool

    def __post_init__(self) -> None:
        if not self.end_s >= self.begin_s:
            raise CloudError(
                f"{self.instance_type} in {self.zone} ends at {self.end_s}, before it begins at {self.begin_s}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotMarket:
    """What spot machines cost and how often they are taken away, by history before a moment.

    Args:
        prices: by instance type and zone.
        lives: of machines, the same.
        until_s: nothing at or after this moment is looked at; ``inf``: all is past.
        days: before it whose prices count.
        unknown_evictions_per_h: of an instance type without any lives; None: that is an error.

    Raises:
        CloudError: a number makes no sense.

    >>> lives = [Life(instance_type="p2.xlarge", zone="a", begin_s=0.0, end_s=36000.0, evicted=True)]
    >>> market = SpotMarket.from_lives(lives)
    >>> round(market.evictions_per_h(Offer(cloud="aws", region="a", zone="a", instance_type="p2.xlarge", price_usd_h=0.9)), 3)
    0.15
    """

    prices: Mapping[Place, PriceSeries] = field(default_factory=dict)
    lives: Mapping[Place, tuple[Life, ...]] = field(default_factory=dict)
    until_s: float = math.inf
    days: float = 7.0
    unknown_evictions_per_h: float | None = None

    def __post_init__(self) -> None:
        if not self.days > 0:
            raise CloudError(f"prices of some days count, not of {self.days}")
        if self.unknown_evictions_per_h is not None and not self.unknown_evictions_per_h >= 0:
            raise CloudError(
                f"unknown_evictions_per_h is not negative, not {self.unknown_evictions_per_h}"
            )

    @classmethod
    def from_aws_csv(cls, path: str | Path, *, product: str = "Linux/UNIX") -> Self:
        """Prices as ``aws ec2 describe-spot-price-history`` gives them, one a line.

        Args:
            path: a file with the columns ``instance_type``, ``az``, ``timestamp`` (ISO 8601), ``usd_per_hour`` and perhaps ``product``, in any order of lines.
            product: operating system; other lines are left out.

        Raises:
            CloudError: the file is not there, or not such a file.
        """
        changes: dict[Place, dict[float, float]] = {}
        for place, moment, price in _aws_rows(Path(path), product):
            changes.setdefault(place, {})[moment] = price
        return cls(prices={place: _series(of_it) for place, of_it in changes.items()})

    @classmethod
    def from_lives(cls, lives: Iterable[Life]) -> Self:
        """Evictions as they were seen; prices are those of the offers."""
        return cls().with_lives(lives)

    def with_lives(self, lives: Iterable[Life]) -> Self:
        """The same with these lives besides."""
        grouped = {place: list(known) for place, known in self.lives.items()}
        for life in lives:
            grouped.setdefault((life.instance_type, life.zone), []).append(life)
        return replace(self, lives={place: tuple(known) for place, known in grouped.items()})

    def at(self, moment: float) -> Self:
        """The same as it was known at a moment."""
        return replace(self, until_s=moment)

    def spot_usd_h(self, offer: Offer) -> float:
        """Price of an hour: the median of the last days; for an offer without a zone, of the cheapest one; without any history, the offer's own.

        Raises:
            CloudError: there is neither.
        """
        return self.price_quantile(offer, 0.5)

    def price_quantile(self, offer: Offer, share: float) -> float:
        """As ``spot_usd_h``, but the price that such a share of the last days was not above.

        Raises:
            CloudError: no price is known, or ``share`` is not between 0 and 1.
        """
        if not 0 <= share <= 1:
            raise CloudError(f"a share of time is between 0 and 1, not {share}")
        series = [
            prices
            for place, prices in self.prices.items()
            if _is_in(place, offer) and prices.times_s[0] < self.until_s
        ]
        if series:
            # A second more, so that the last change of all counts.
            end = min(self.until_s, max(each.times_s[-1] for each in self.prices.values()) + 1)
            begin = end - self.days * _DAY_S
            return min(each.quantile(share, begin, end) for each in series)
        if offer.spot_usd_h is None:
            raise CloudError(
                f"{offer}: no spot price is known, neither from history before the moment nor from the catalogue: give Offer.spot_usd_h, or rent it on demand"
            )
        return offer.spot_usd_h

    def evictions_per_h(self, offer: Offer) -> float:
        """Expected evictions of one machine in an hour.

        Machines that were not taken away count with the time that they were seen. Where few were seen, the rate is near that of the instance type elsewhere.

        Raises:
            CloudError: no machine of this instance type was seen, and nothing is said for unknown ones.
        """
        shape, hours = self._posterior(offer)
        return shape / hours

    def evictions(self, offer: Offer) -> Interval:
        """The rate of ``evictions_per_h`` as its mean, and what it lies between in nine cases of ten (quantiles of chi-square).

        Raises:
            CloudError: as ``evictions_per_h``.
            MissingExtraError: scipy is not installed.
        """
        try:
            from scipy.stats import chi2  # noqa: PLC0415
        except ImportError as error:
            raise MissingExtraError("scipy", extra="cloud") from error
        shape, hours = self._posterior(offer)
        low, high = (float(chi2.ppf(share, 2 * shape)) / (2 * hours) for share in (0.05, 0.95))
        return Interval(median=shape / hours, low=low, high=high)

    def _posterior(self, offer: Offer) -> tuple[float, float]:
        """Of the rate, a gamma distribution: its shape, in evictions, and its rate, in hours."""
        evicted, hours = self._seen(offer, here=True)
        elsewhere, their_hours = self._seen(offer, here=False)
        if their_hours:
            hours += _WEIGHT * their_hours / (elsewhere + _WEIGHT)
        elif not hours:
            unknown = self.unknown_evictions_per_h
            if unknown is None:
                raise CloudError(
                    f"{offer}: how often it is taken away is not known: give SpotMarket lives of such machines, or unknown_evictions_per_h"
                )
            hours = _WEIGHT / unknown if unknown else math.inf
        return evicted + _WEIGHT, hours

    def _seen(self, offer: Offer, *, here: bool) -> tuple[int, float]:
        """Evictions and machine hours before the moment, in the offer's place or in all others."""
        evicted, seconds = 0, 0.0
        for place, lives in self.lives.items():
            if place[0] != offer.instance_type or _is_in(place, offer) != here:
                continue
            for life in lives:
                if life.begin_s < self.until_s:
                    evicted += life.evicted and life.end_s < self.until_s
                    seconds += min(life.end_s, self.until_s) - life.begin_s
        return evicted, seconds / _HOUR_S


def _is_in(place: Place, offer: Offer) -> bool:
    """In its zone, or in any zone of its region if it has none."""
    kind, zone = place
    same = zone == offer.zone if offer.zone else zone.startswith(offer.region)
    return same and kind == offer.instance_type


def _aws_rows(path: Path, product: str) -> Iterator[tuple[Place, float, float]]:
    """Place, moment and price of each line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CloudError(f"{path} cannot be read: {error}") from error
    found = False
    rows = csv.DictReader(text.splitlines())
    missing = [name for name in _AWS_COLUMNS if name not in (rows.fieldnames or ())]
    if missing:
        raise CloudError(
            f"{path} lacks the columns {', '.join(missing)}; it has {', '.join(rows.fieldnames or ()) or 'none'}"
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
    return PriceSeries(
        times_s=tuple(moments), usd_h=tuple(changes[moment] for moment in moments)
    )


def _when(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="seconds")
