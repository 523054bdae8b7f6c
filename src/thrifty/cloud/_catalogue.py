"""Catalogue of machines for rent, with their prices."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from importlib.resources import as_file, files
from pathlib import Path

from thrifty.core import CloudError

from ._offer import Offer
from ._skypilot import SKYPILOT_FILE, read_offers, refresh_skypilot, write_offers


_MOST_NAMES = 12
"""Most names to list in an error message."""

_ALIKE = 0.75
"""Least similarity of a name to be suggested; with difflib's 0.6, V1000 suggests P100."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """Offers from files in SkyPilot's schema.

    The required columns are InstanceType, AcceleratorName, AcceleratorCount, vCPUs, MemoryGiB,
    Price and Region. GpuInfo, SpotPrice and AvailabilityZone are optional. Columns beyond
    SkyPilot's are Cloud, BaselineGbps and PeakGbps (network bandwidth, built in for many types of
    AWS, Azure and Google), Fabric (yes or no: InfiniBand, EFA and the like), PricedOn (a date such
    as 2024-06-01) and Source (where the price was read, in a word).

    Rows without any price, TPUs, and machines with a fraction of a GPU are left out. A row without
    Price is offered as spot only. GPUs in a row without InstanceType, as in Google's list, are
    attached to the machines of their zone that can carry them.

    Args:
        offers: At least one offer.

    Raises:
        CloudError: There are no offers.

    >>> catalogue = Catalogue.shipped()
    >>> cheap = catalogue.where(
    ...     cloud="gcp", accelerator=["L4", "A100"], region="us-central1", spot=True
    ... )
    >>> sorted({offer.instance_type for offer in cheap})[:2]
    ['a2-highgpu-1g', 'a2-highgpu-2g']
    """

    offers: tuple[Offer, ...]

    def __post_init__(self) -> None:
        if not self.offers:
            raise CloudError("a catalogue has at least one offer; Catalogue.shipped() has some")

    @classmethod
    def load(cls, *paths: Path | str) -> Catalogue:
        """Load offers from CSV files.

        An offer in a later file replaces the same offer in an earlier one.
        A file named vms.csv needs no column Cloud: as in SkyPilot, its folder is named after the
        cloud.

        Raises:
            CloudError: A file cannot be read, lacks a column or has an invalid row, or there is no
                offer.
        """
        return _merged(read_offers(Path(path)) for path in paths)

    @classmethod
    def shipped(cls) -> Catalogue:
        """Load the small table that comes with the package.

        Prices are list prices that were read on different days; each offer carries the date and
        the source of its price. They go stale: ``stale`` and ``from_skypilot`` help.
        """
        with as_file(files(__package__) / "catalogue.csv") as path:
            return cls.load(path)

    @classmethod
    def from_skypilot(cls, folder: Path | str | None = None, *, refresh: bool = False) -> Catalogue:
        """Load the lists that SkyPilot has stored on this machine, from its newest schema.

        The files' modification dates become the dates of the prices.

        Args:
            folder: SkyPilot's catalogues; None: ``~/.sky/catalogs``.
            refresh: Whether SkyPilot downloads the lists of its clouds again first.

        Raises:
            CloudError: There is no such file, or one cannot be read.
            MissingExtraError: ``refresh`` is set and SkyPilot is not installed.
        """
        root = Path("~/.sky/catalogs").expanduser() if folder is None else Path(folder)
        if refresh:
            refresh_skypilot(path.parent.name for path in _newest(root))
        paths = _newest(root)
        if not paths:
            raise CloudError(
                f"SkyPilot has stored no {SKYPILOT_FILE} in {root}: fetch them by `sky "
                "show-gpus` or refresh=True, or take Catalogue.shipped()"
            )
        return _merged(
            read_offers(path, priced_on=date.fromtimestamp(path.stat().st_mtime)) for path in paths
        )

    def updated(self, other: Catalogue) -> Catalogue:
        """Return all offers of both; where both have the same one, that of the other catalogue."""
        return _merged([self, other])

    def save(self, path: Path | str) -> None:
        """Write an editable file that ``load`` can read, atomically: either all of it or nothing.

        Raises:
            CloudError: The file cannot be written.
        """
        write_offers(Path(path), self.offers)

    def where(
        self,
        *,
        cloud: str | Collection[str] | None = None,
        region: str | Collection[str] | None = None,
        accelerator: str | Collection[str] | None = None,
        instance_type: str | Collection[str] | None = None,
        spot: bool | None = None,
    ) -> Catalogue:
        """Return the offers that match every given filter; upper and lower case are the same.

        Args:
            cloud: Names of clouds to keep.
            region: Names of regions to keep.
            accelerator: Names of accelerators to keep; "": machines without one.
            instance_type: Names of instance types to keep.
            spot: True: keep offers with a spot price; False: keep those with an on-demand price.

        Raises:
            CloudError: No offer matches.
        """
        respects = {
            "cloud": cloud,
            "region": region,
            "accelerator": accelerator,
            "instance_type": instance_type,
        }
        left, so_far = self.offers, ""
        for respect, names in respects.items():
            if names is None:
                continue
            wanted = [names] if isinstance(names, str) else list(names)
            keep = {name.casefold() for name in wanted}
            kept = tuple(each for each in left if getattr(each, respect).casefold() in keep)
            if not kept:
                there = {getattr(each, respect) for each in left}
                raise CloudError(
                    f"no offer{so_far} has {respect}={names!r}{_nearest(wanted, there)}"
                )
            left, so_far = kept, f"{so_far or ' with'} {respect}={names!r}"
        if spot is not None:
            left = tuple(each for each in left if each.usd_h(spot=spot) is not None)
            if not left:
                raise CloudError(
                    f"no offer{so_far} has a price {'as spot' if spot else 'on demand'}"
                )
        return Catalogue(offers=left)

    def stale(self, today: date, days: int = 30) -> tuple[Offer, ...]:
        """Return offers whose prices are older than ``days`` days or have no date."""
        oldest = today - timedelta(days=days)
        return tuple(
            each for each in self.offers if each.priced_on is None or each.priced_on < oldest
        )

    def __iter__(self) -> Iterator[Offer]:
        return iter(self.offers)

    def __len__(self) -> int:
        return len(self.offers)


def _merged(parts: Iterable[Iterable[Offer]]) -> Catalogue:
    found = {
        (each.cloud, each.region, each.zone, each.instance_type, each.accelerator): each
        for part in parts
        for each in part
    }
    return Catalogue(offers=tuple(found.values()))


def _newest(root: Path) -> list[Path]:
    """Return each cloud's file in the folder of the highest schema version that has any."""
    versions = [path for path in root.glob("v*") if re.fullmatch(r"v\d+", path.name)]
    for version in sorted(versions, key=lambda path: int(path.name[1:]), reverse=True):
        if paths := sorted(version.glob(f"*/{SKYPILOT_FILE}")):
            return paths
    return []


def _nearest(wanted: Iterable[str], there: set[str]) -> str:
    by_key = {name.casefold(): name for name in sorted(there)}
    near = [
        repr(by_key[key])
        for name in wanted
        for key in difflib.get_close_matches(name.casefold(), by_key, n=3, cutoff=_ALIKE)
    ]
    shown = ", ".join(map(repr, sorted(there)[:_MOST_NAMES]))
    more = f" and {len(there) - _MOST_NAMES} more" if len(there) > _MOST_NAMES else ""
    meant = f"; did you mean {' or '.join(near)}?" if near else ""
    return f"{meant} There is {shown}{more}" if meant else f": there is {shown}{more}"
