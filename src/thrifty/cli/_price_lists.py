"""The command ``thrifty catalogue``: price lists of machines, and how old they are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from thrifty.agents import SCHEMA_VERSION
from thrifty.agents.documents import OfferDocument
from thrifty.cloud import Catalogue, Offer

from ._options import cell, json_option, print_document


class PriceList(click.Path):
    """A CSV file in SkyPilot's schema, or ``sky`` for the lists that SkyPilot has stored."""

    name = "file"

    def __init__(self) -> None:
        super().__init__(exists=True, dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return ``"sky"`` or a path."""
        return value if value == "sky" else super().convert(value, param, ctx)


def chosen_offers(
    lists: Sequence[Path | str],
    *,
    cloud: Collection[str],
    region: Collection[str],
    accelerator: Collection[str],
) -> tuple[Catalogue, str]:
    """Return the chosen offers of some lists, and a name for where they come from.

    Without any list, these are SkyPilot's lists if it has stored some, and else those of thrifty.

    Args:
        lists: Files, and ``"sky"`` for SkyPilot's lists. Their offers give way to those of files.
        cloud: Names of the wanted clouds; all if there are none.
        region: Names of the wanted regions; all if there are none.
        accelerator: Names of the wanted accelerators; all if there are none.

    Raises:
        CloudError: A list cannot be read, or has no such offer.
    """
    found, source = _lists(lists)
    wanted = found.where(
        cloud=cloud or None, region=region or None, accelerator=accelerator or None
    )
    return wanted, source


def _lists(given: Sequence[Path | str]) -> tuple[Catalogue, str]:
    if given and "sky" not in given:
        return Catalogue.load(*given), ", ".join(map(str, given))
    if given or any(Path("~/.sky/catalogs").expanduser().glob("v*/*/vms.csv")):
        own = [path for path in given if path != "sky"]
        stored = Catalogue.from_skypilot()
        if not own:
            return stored, "SkyPilot's catalogue"
        both = stored.updated(Catalogue.load(*own))
        return both, ", ".join(["SkyPilot's catalogue", *map(str, own)])
    return Catalogue.shipped(), "the table that comes with thrifty"


@click.group("catalogue")
def catalogue_command() -> None:
    """Show the price lists that ``thrifty rent`` reads, and how old their rows are."""


@catalogue_command.command("show")
@click.option(
    "--catalogue",
    type=PriceList(),
    multiple=True,
    help="Prices in SkyPilot's schema, or \"sky\"  [default: SkyPilot's own, or a small table].",
)
@click.option("--cloud", multiple=True, help="Show only this cloud; repeat for more.")
@click.option("--region", multiple=True, help="Show only this region; repeat for more.")
@click.option(
    "--accelerator",
    multiple=True,
    help='Show only this GPU ("": machines without one); repeat for more.',
)
@json_option
def show_command(
    *,
    catalogue: tuple[Path | str, ...],
    cloud: tuple[str, ...],
    region: tuple[str, ...],
    accelerator: tuple[str, ...],
    as_json: bool,
) -> None:
    """Show all offers, the cheapest first, with the age of each price."""
    offers, source = chosen_offers(catalogue, cloud=cloud, region=region, accelerator=accelerator)
    if as_json:
        rows = [_offer_document(offer) for offer in sorted(offers, key=_price)]
        print_document({"schema_version": SCHEMA_VERSION, "source": source, "offers": rows})
        return
    table = Table(box=None, pad_edge=False)
    for column in ("machine", "where", "$/h", "spot $/h", "Gbit/s", "price of"):
        table.add_column(column, overflow="fold")
    today = datetime.now(UTC).date()
    for offer in sorted(offers, key=_price):
        where = f"{offer.cloud} {offer.zone or offer.region}"
        cells = (
            offer.spell(1).removeprefix("1 x "),
            where,
            _dollars(offer.price_usd_h),
            _dollars(offer.spot_usd_h),
            _gbps(offer),
            _age(offer.priced_on, today),
        )
        table.add_row(*map(cell, cells))
    console = Console()
    console.print(table)
    console.print(cell(f"{_counted(len(offers), 'offer')} from {source}"))


@catalogue_command.command("refresh")
@json_option
def refresh_command(*, as_json: bool) -> None:
    """Let SkyPilot download its price lists again; say how old the rows of each cloud are."""
    found = Catalogue.from_skypilot(refresh=True)
    by_cloud: dict[str, list[Offer]] = defaultdict(list)
    for offer in found:
        by_cloud[offer.cloud].append(offer)
    table = Table(box=None, pad_edge=False)
    for column in ("cloud", "offers", "oldest price", "newest price"):
        table.add_column(column)
    today = datetime.now(UTC).date()
    rows = []
    for cloud, offers in sorted(by_cloud.items()):
        days = sorted(offer.priced_on for offer in offers if offer.priced_on is not None)
        ends = (days[0], days[-1]) if days else (None, None)
        oldest, newest = map(_day, ends)
        rows.append({"cloud": cloud, "num_offers": len(offers), "oldest": oldest, "newest": newest})
        table.add_row(*map(cell, (cloud, f"{len(offers):,}", *(_age(d, today) for d in ends))))
    if as_json:
        print_document({"schema_version": SCHEMA_VERSION, "clouds": rows})
        return
    Console().print(table)


def _offer_document(offer: Offer) -> OfferDocument:
    return {
        "cloud": offer.cloud,
        "region": offer.zone or offer.region,
        "instance_type": offer.instance_type,
        "accelerator": offer.accelerator,
        "accelerator_count": offer.accelerator_count,
        "price_usd_h": offer.price_usd_h,
        "spot_usd_h": offer.spot_usd_h,
        "baseline_gbps": offer.baseline_gbps,
        "peak_gbps": offer.peak_gbps,
        "priced_on": _day(offer.priced_on),
    }


def _day(day: date | None) -> str | None:
    return None if day is None else day.isoformat()


def _price(offer: Offer) -> float:
    known = [each for each in (offer.price_usd_h, offer.spot_usd_h) if each is not None]
    return min(known)


def _dollars(price: float | None) -> str:
    return "" if price is None else f"{price:,.3f}"


def _gbps(offer: Offer) -> str:
    if offer.baseline_gbps is None:
        return "?" if offer.peak_gbps is None else f"up to {offer.peak_gbps:g}"
    return f"{offer.baseline_gbps:g}"


def _age(day: date | None, today: date) -> str:
    if day is None:
        return "no date"
    return f"{day} ({_counted((today - day).days, 'day')} ago)"


def _counted(num: int, what: str) -> str:
    return f"{num:,} {what}{'' if num == 1 else 's'}"
