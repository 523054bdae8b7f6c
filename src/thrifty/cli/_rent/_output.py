"""Output of a rental plan, on the terminal and as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from thrifty.cli._options import cell
from thrifty.cloud import Fleet, FleetPlan, Interval, Probe


_MOST_ROWS = 10
_COLUMNS = ("", "fleet", "where", "batch", "time", "cost", "why")


def show_plan(plan: FleetPlan, *, console: Console) -> None:
    """Print the chosen fleet and some others of the Pareto front of time and cost."""
    table = Table(box=None, pad_edge=False)
    for column in _COLUMNS:
        table.add_column(column, overflow="fold")
    rows = _some(plan)
    for fleet in rows:
        chosen = fleet == plan.best
        table.add_row(
            *(cell("→" if chosen else ""), *map(cell, _cells(fleet))),
            style="bold" if chosen else None,
        )
    console.print(table)
    more = len({*plan.front, plan.best} - {None}) - len(rows)
    rest = f", {more} more of them with --json" if more > 0 else ""
    console.print(
        f"{plan.num_considered:,} fleets considered; shown are those that no other is cheaper and "
        f"faster than{rest}",
        highlight=False,
    )


def show_probes(probes: Sequence[Probe], ended: str, *, console: Console) -> None:
    """Print what to measure first, in order."""
    if probes:
        console.print("\nworth measuring first, in this order:", highlight=False)
    for number, probe in enumerate(probes, start=1):
        text = (
            f"  {number}. {probe} in {_where(probe)}: ${probe.usd:.2f}, "
            f"{probe.seconds / 60:.0f} min; {probe.why}"
        )
        console.print(cell(text))
    console.print(cell(f"{'then ' if probes else ''}{ended}"))


def show_values(values: Mapping[str, Any]) -> str:
    """Return hyper-parameters in one line."""
    from thrifty.cli._train import format_value  # noqa: PLC0415 -- torch takes seconds

    return ", ".join(f"{name} = {format_value(value)}" for name, value in values.items())


def plan_json(plan: FleetPlan) -> dict[str, Any]:
    """Return a plan as plain data, without its notes."""
    return {
        "best": None if plan.best is None else _fleet_json(plan.best),
        "front": [_fleet_json(fleet) for fleet in plan.front],
        "num_considered": plan.num_considered,
    }


def _fleet_json(fleet: Fleet) -> dict[str, Any]:
    """Return a fleet as plain data."""
    return {
        "machines": [
            {
                "cloud": each.offer.cloud,
                "region": each.offer.region,
                "zone": each.offer.zone,
                "instance_type": each.offer.instance_type,
                "accelerator": each.offer.accelerator,
                "accelerator_count": each.offer.accelerator_count,
                "num": each.num,
                "device_batch": each.batch,
                "spot": each.spot,
                "usd_h": each.usd_h,
            }
            for each in fleet.machines
        ],
        "step_s": _ends(fleet.step_s),
        "time_s": _ends(fleet.time_s),
        "cost_usd": _ends(fleet.cost_usd),
        "checkpoint_s": fleet.checkpoint_s,
        "why": fleet.why,
    }


def probe_json(probe: Probe) -> dict[str, Any]:
    """Return a probe as plain data."""
    return {
        "instance_type": probe.offer.instance_type,
        "where": _where(probe),
        "num": probe.num,
        "spot": probe.spot,
        "finds": list(probe.finds),
        "usd": probe.usd,
        "seconds": probe.seconds,
        "gain": probe.gain,
        "why": probe.why,
    }


def _some(plan: FleetPlan) -> list[Fleet]:
    """Return the chosen fleet, then others spread along the front, including its ends."""
    others = [fleet for fleet in plan.front if fleet != plan.best]
    best = [] if plan.best is None else [plan.best]
    room = _MOST_ROWS - len(best)
    if len(others) > room:
        last = len(others) - 1
        others = [others[round(at * last / (room - 1))] for at in range(room)]
    return best + others


def _cells(fleet: Fleet) -> tuple[str, ...]:
    places = dict.fromkeys(f"{m.offer.cloud} {m.offer.region}" for m in fleet.machines)
    usd = fleet.cost_usd
    return (
        str(fleet),
        ", ".join(places),
        " + ".join(str(each.batch) for each in fleet.machines),
        span(fleet.time_s),
        f"${usd.median:,.2f} ({usd.low:,.2f} to {usd.high:,.2f})",
        fleet.why,
    )


def span(time_s: Interval) -> str:
    """Return a time with its interval, in one unit.

    >>> span(Interval(median=7200.0, low=5400.0, high=9000.0))
    '2.0 h (1.5 to 2.5)'
    """
    units = ((7200, 3600, "h"), (120, 60, "min"), (0, 1, "s"))
    unit, name = next((unit, name) for least, unit, name in units if time_s.median >= least)
    ends = (time_s.median / unit, time_s.low / unit, time_s.high / unit)
    return "{:,.1f} {} ({:,.1f} to {:,.1f})".format(ends[0], name, *ends[1:])


def _where(probe: Probe) -> str:
    return f"{probe.offer.cloud} {probe.offer.zone or probe.offer.region}"


def _ends(interval: Interval) -> dict[str, float]:
    return {"median": interval.median, "low": interval.low, "high": interval.high}
