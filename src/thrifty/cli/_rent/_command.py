"""The command ``thrifty rent FILE``."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from thrifty.cli._options import cell, say
from thrifty.cloud import FleetPlan, launch, plot_front, to_skypilot
from thrifty.core import UsageError, plain_text

from ._inputs import Scene, age_of, hardware_of, load_catalogue, load_market, load_workload
from ._output import plan_json, probe_json, show_plan, show_probes
from ._rent_options import Asked, rent_options


@click.command("rent")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@rent_options
def rent_command(*, file: Path, **given: Any) -> None:
    """Show which machines to rent for the study or the task in FILE.

    The model is timed on this machine's device, which takes some seconds. The speed of other
    devices is estimated from data sheets.
    """
    asked = Asked(**given)
    _check(asked)
    console = Console(stderr=asked.as_json)
    catalogue, source = load_catalogue(asked)
    workload, values = load_workload(file, asked)
    scene = Scene(
        asked=asked,
        workload=workload,
        values=values,
        offers=catalogue.offers,
        estimates=hardware_of(workload.profile.device, named=asked.device),
        market=load_market(asked),
    )
    plan = scene.plan()
    probes, ended = ([], "") if asked.probe is None else scene.probes(asked.probe)
    today = datetime.now(UTC).date()
    notes = [age_of(catalogue, source, today=today), *scene.notes(plan)]
    if asked.as_json:
        data = {**plan_json(plan), "notes": notes}
        if asked.probe is not None:
            data |= {"probes": [probe_json(probe) for probe in probes], "probes_ended": ended}
        click.echo(json.dumps(data, indent=2))
    else:
        show_plan(plan, console=console)
        for note in notes:
            console.print(cell(f"- {note}"))
        if asked.probe is not None:
            show_probes(probes, ended, console=console)
    _hand_over(plan, file, asked)


def _check(asked: Asked) -> None:
    """Reject invalid options before anything is measured."""
    goal = asked.deadline is not None or asked.budget is not None
    for option, value in (
        ("--export", asked.export),
        ("--launch", asked.launch or None),
        ("--probe", asked.probe),
    ):
        if value is not None and not goal:
            raise UsageError(f"{option} needs a choice: give --deadline or --budget")
    if asked.steps is not None and asked.epochs is not None:
        raise UsageError("--steps and --epochs say the same: give one of them")
    for path in (asked.plot, asked.export):
        if path is not None and not path.resolve().parent.is_dir():
            raise UsageError(f"there is no folder {path.resolve().parent}; make it first")


def _hand_over(plan: FleetPlan, file: Path, asked: Asked) -> None:
    """Write the plot and the SkyPilot task, and launch the machines, as requested."""
    if asked.plot is not None:
        figure = plot_front(plan, deadline_s=asked.deadline, budget_usd=asked.budget)
        known = figure.canvas.get_supported_filetypes()
        if asked.plot.suffix[1:].lower() not in known:
            raise UsageError(
                f"{asked.plot}: its ending must be one of {', '.join(sorted(known))}"
            )
        figure.savefig(asked.plot, dpi=150)
        say(f"wrote {asked.plot}", err=asked.as_json)
    if asked.export is None and not asked.launch:
        return
    assert plan.best is not None
    task = to_skypilot(
        plan.best,
        name=re.sub(r"[^A-Za-z0-9]+", "-", file.stem).strip("-") or "thrifty",
        run=asked.script or file.name,
        setup="pip install thrifty",
        workdir=str(file.resolve().parent),
    )
    if asked.export is not None:
        asked.export.write_text(task, encoding="utf-8")
        say(f"wrote {asked.export}: start it with sky launch {asked.export}", err=asked.as_json)
    if asked.launch:
        question = f"rent {plan.best} for about ${plan.best.cost_usd.median:,.2f}?"
        click.confirm(plain_text(question), abort=True, err=asked.as_json)
        say(
            f"SkyPilot's request {launch(task)}: follow it with sky api logs", err=asked.as_json
        )
