"""Options of ``thrifty rent``."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from thrifty.cli._options import Pair, json_option
from thrifty.cli._price_lists import PriceList
from thrifty.perf import PRECISIONS, Precision


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
