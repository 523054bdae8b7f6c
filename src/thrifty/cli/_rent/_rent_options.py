"""What ``thrifty rent`` is given: options, and price lists, which ``thrifty catalogue`` shows."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from thrifty.agents import SCHEMA_VERSION
from thrifty.agents.documents import OfferDocument
from thrifty.cli._options import Pair, cell, json_option, print_document
from thrifty.cloud import Catalogue, Offer
from thrifty.perf import PRECISIONS, Precision


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


_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_PART = re.compile(r"(\d+(?:\.\d+)?)([smhd])")


@dataclass(frozen=True, slots=True, kw_only=True)
class RentOptions:
    """The option values as given; see their help texts."""

    name: str | None
    hp: tuple[tuple[str, Any], ...]
    profile: Path | None
    other_profile: tuple[Path, ...]
    device: str | None
    cache: Path | None
    steps: int | None
    epochs: int | None
    batch: int | None
    study: bool
    catalogue: tuple[Path | str, ...]
    cloud: tuple[str, ...]
    region: tuple[str, ...]
    accelerator: tuple[str, ...]
    max_nodes: int
    quota: tuple[tuple[str, int], ...]
    spot: bool
    prices: Path | None
    evictions: float
    mixed: bool
    accumulation: bool
    precision: tuple[Precision, ...]
    deadline: float | None
    budget: float | None
    median: bool
    probe: float | None
    probe_time: float
    plot: Path | None
    export: Path | None
    script: str | None
    launch: bool
    as_json: bool


class Duration(click.ParamType):  # type: ignore[type-arg]
    """A duration in seconds, written as 90m, 6h, 2d or 1h30m."""

    name = "duration"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the sum of the parts in seconds."""
        if isinstance(value, float):
            return value
        text = str(value).replace(" ", "")
        parts = _PART.findall(text)
        if not parts or "".join(number + unit for number, unit in parts) != text:
            self.fail(f"{value!r} is no duration; write 90m, 6h, 2d or 1h30m", param, ctx)
        return float(sum(float(number) * _SECONDS[unit] for number, unit in parts))


class Dollars(click.ParamType):  # type: ignore[type-arg]
    """An amount in dollars, written as 50 or $50."""

    name = "dollars"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the amount without the dollar sign."""
        try:
            usd = float(str(value).removeprefix("$"))
        except ValueError:
            usd = math.nan
        if not 0 <= usd < math.inf:
            self.fail(f"{value!r} is no sum of dollars; write 50 or 2.5", param, ctx)
        return usd


def _file(*, exists: bool = False) -> click.Path:
    return click.Path(exists=exists, dir_okay=False, path_type=Path)


_OPTIONS = (
    click.option("--name", help="Which study or task, if the file defines several."),
    click.option(
        "--hp",
        type=Pair(whole=False),
        multiple=True,
        help=(
            "Value of a hyper-parameter, NAME=VALUE; repeat for more  "
            "[default: the first value of each domain]."
        ),
    ),
    click.option(
        "--profile",
        type=_file(exists=True),
        help="Use this stored profile of a step (JSON) instead of measuring one.",
    ),
    click.option(
        "--other-profile",
        type=_file(exists=True),
        multiple=True,
        help="Use this stored profile of the same step on another GPU, instead of an estimate.",
    ),
    click.option(
        "--device",
        help="Accelerator on which the profile was measured, by SkyPilot's name  "
        "[default: the one that the profile names].",
    ),
    click.option(
        "--cache",
        type=click.Path(file_okay=False, path_type=Path),
        envvar="THRIFTY_CACHE",
        help="Folder in which profiles are kept  [default: the user's cache folder].",
    ),
    click.option("--steps", type=click.IntRange(min=1), help="Length of the training in steps."),
    click.option(
        "--epochs",
        type=click.IntRange(min=1),
        help="Length of the training in epochs  [default: the study's].",
    ),
    click.option(
        "--batch",
        type=click.IntRange(min=1),
        help="Samples in one step, over all machines  [default: the task's batch size].",
    ),
    click.option(
        "--study", is_flag=True, help="Plan for the whole study from its beginning, not one trial."
    ),
    click.option(
        "--catalogue",
        type=PriceList(),
        multiple=True,
        help=(
            "File of prices in SkyPilot's schema, or \"sky\" for SkyPilot's own lists  "
            "[default: SkyPilot's own, or a small table]."
        ),
    ),
    click.option("--cloud", multiple=True, help="Consider only this cloud; repeat for more."),
    click.option("--region", multiple=True, help="Consider only this region; repeat for more."),
    click.option(
        "--accelerator",
        multiple=True,
        help='Consider only this GPU ("": machines without one); repeat for more.',
    ),
    click.option(
        "--max-nodes",
        type=click.IntRange(min=1),
        default=64,
        show_default=True,
        help="Rent at most this many machines.",
    ),
    click.option(
        "--quota",
        type=Pair(whole=True),
        multiple=True,
        help="Rent at most this many machines of a VM type or an accelerator: p3.2xlarge=4.",
    ),
    click.option("--spot", is_flag=True, help="Also consider spot machines."),
    click.option("--prices", type=_file(exists=True), help="History of AWS's spot prices (CSV)."),
    click.option(
        "--evictions",
        type=click.FloatRange(min=0),
        default=0.1,
        show_default=True,
        help="Assumed evictions of a spot machine per hour; needs --prices.",
    ),
    click.option("--mixed", is_flag=True, help="Also consider fleets of several VM types."),
    click.option(
        "--accumulation/--no-accumulation",
        default=True,
        show_default=True,
        help="Train in micro-batches where a device cannot hold its samples at once.",
    ),
    click.option(
        "--precision",
        type=click.Choice(PRECISIONS),
        multiple=True,
        help="Train in this precision where it is faster  [default: the profile's].",
    ),
    click.option(
        "--deadline",
        type=Duration(),
        help="Find the cheapest fleet that ends in time: 90m, 6h, 2d.",
    ),
    click.option("--budget", type=Dollars(), help="Find the fastest fleet within this budget."),
    click.option(
        "--median",
        is_flag=True,
        help="Compare the median with the deadline or the budget, not the 90 % end.",
    ),
    click.option(
        "--probe",
        type=Dollars(),
        help="Suggest which measurements to pay for first, for at most this price.",
    ),
    click.option(
        "--probe-time",
        type=Duration(),
        default="10m",
        show_default=True,
        help="Longest time that these measurements may take.",
    ),
    click.option("--plot", type=_file(), help="Draw time against cost into this file."),
    click.option("--export", type=_file(), help="Write a task for SkyPilot (YAML)."),
    click.option(
        "--script",
        help="Script, with arguments, that torchrun starts on the machines  [default: FILE].",
    ),
    click.option(
        "--launch", is_flag=True, help="Let SkyPilot rent the machines, after you confirm."
    ),
    json_option,
)


def rent_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of ``RentOptions`` to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
