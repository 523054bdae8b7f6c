"""Output of thrifty rent: the plan as text and as plain data, and what an exported task runs."""

from __future__ import annotations

import ast
import json
import shlex
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from rich.console import Console

from thrifty.agents import SCHEMA_VERSION
from thrifty.agents.documents import FleetDocument, Forecast90, ProbeDocument, RentDocument
from thrifty.cli._options import cell
from thrifty.cloud import Fleet, FleetPlan, Interval, MachineGroup, Probe
from thrifty.core import CloudError, UsageError


_MOST_ROWS = 10


def show_plan(plan: FleetPlan, *, console: Console) -> None:
    """Print the chosen fleet and some others of the Pareto front, each in two lines."""
    rows = _some(plan)
    nearly = [call.fleet for call in plan.close_calls]
    cells = [_cells(fleet) for fleet in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for fleet, line in zip(rows, cells, strict=True):
        chosen = fleet == plan.best
        padded = "  ".join(f"{text:<{width}}" for text, width in zip(line, widths, strict=True))
        mark = "→" if chosen else "≈" if fleet in nearly else " "
        for text in (f"{mark} {_named(fleet)}", f"    {padded.rstrip()}"):
            console.print(cell(text), style="bold" if chosen else None, soft_wrap=True)
    legend = ["batches are those of a device"]
    if any(fleet in nearly for fleet in rows):
        legend.append("≈ is about as good a choice as →")
    if any(each.num_micro > 1 for fleet in rows for each in fleet.machines):
        legend.append("4 x 16 are four micro-batches, one after the other")
    if any(fleet.why == "compute" for fleet in rows):
        legend.append("compute: a step waits for the devices")
    if any(fleet.why == "input" for fleet in rows):
        legend.append("input: a step waits for data")
    if any("network" in fleet.why for fleet in rows):
        legend.append("a network's share is how long a step waits for sums")
    more = len({*plan.front, plan.best, *nearly} - {None}) - len(rows)
    shown = "shown are those that no other is cheaper and faster than"
    rest = [f"{more} more of them with --json"] if more > 0 else []
    notes = [f"{plan.num_considered:,} fleets considered", shown, *legend, *rest]
    console.print("; ".join(notes), highlight=False)


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


def plan_document(plan: FleetPlan, *, notes: Sequence[str]) -> RentDocument:
    """Return a plan as a document, without any probes."""
    return {
        "schema_version": SCHEMA_VERSION,
        "best": None if plan.best is None else _fleet_document(plan.best),
        "front": [_fleet_document(fleet) for fleet in plan.front],
        "num_considered": plan.num_considered,
        "notes": list(notes),
        "probes": [],
        "probes_ended": "",
        "close_calls": [
            {
                "factor": call.factor,
                "fleet": None if call.fleet is None else _fleet_document(call.fleet),
            }
            for call in plan.close_calls
        ],
    }


def _fleet_document(fleet: Fleet) -> FleetDocument:
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
                "micro_batches": each.num_micro,
                "precision": each.precision,
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


def probe_document(probe: Probe) -> ProbeDocument:
    """Return a probe as a document."""
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
    """Return the chosen fleet, close calls, then others along the front, including its ends."""
    calls = [call.fleet for call in plan.close_calls]
    best = list(dict.fromkeys(fleet for fleet in (plan.best, *calls) if fleet is not None))
    others = [fleet for fleet in plan.front if fleet not in best]
    room = _MOST_ROWS - len(best)
    if len(others) > room:
        last = len(others) - 1
        others = [others[round(at * last / (room - 1))] for at in range(room)]
    return best + others


def _named(fleet: Fleet) -> str:
    places = dict.fromkeys(f"{m.offer.cloud} {m.offer.region}" for m in fleet.machines)
    return f"{fleet}, {', '.join(places)}"


def _cells(fleet: Fleet) -> tuple[str, ...]:
    usd = fleet.cost_usd
    return (
        span(fleet.time_s),
        f"${_short(usd.median, 2)} ({_short(usd.low, 2)} to {_short(usd.high, 2)})",
        f"batch {' + '.join(map(_batch, fleet.machines))}",
        fleet.why.removesuffix(" of the step waits for sums"),
    )


def span(time_s: Interval) -> str:
    """Return a time with its interval, in one unit.

    >>> span(Interval(median=7200.0, low=5400.0, high=9000.0))
    '2.0 h (1.5 to 2.5)'
    """
    units = ((7200, 3600, "h"), (120, 60, "min"), (0, 1, "s"))
    unit, name = next((unit, name) for least, unit, name in units if time_s.median >= least)
    middle, low, high = (
        _short(each / unit, 1) for each in (time_s.median, time_s.low, time_s.high)
    )
    return f"{middle} {name} ({low} to {high})"


def _batch(rented: MachineGroup) -> str:
    micro = f"{rented.num_micro} x {rented.micro_batch}"
    batch = micro if rented.num_micro > 1 else str(rented.batch)
    return batch if rented.precision == "float32" else f"{batch} in {rented.precision}"


def _short(value: float, digits: int) -> str:
    """Return a number with these digits after its point, or with none from 100 on."""
    return f"{value:,.{0 if value >= 100 else digits}f}"


def _where(probe: Probe) -> str:
    return f"{probe.offer.cloud} {probe.offer.zone or probe.offer.region}"


def _ends(interval: Interval) -> Forecast90:
    return {"median": interval.median, "low": interval.low, "high": interval.high}


def script_of(file: Path, given: str | None) -> str:
    """Return the script and its arguments; the file itself if no script is given.

    Raises:
        UsageError: There is no such script, or it trains nothing when it runs.
    """
    words = shlex.split(given) if given else [file.name]
    if not words:
        raise UsageError("--script is blank; name a script, and its arguments")
    script = file.resolve().parent / words[0]
    if not script.is_file():
        raise UsageError(
            f"there is no file {words[0]} in {script.parent}, the folder that is copied to the "
            "machines; --script names a file in it"
        )
    if not _does_something(script):
        raise UsageError(
            f"{words[0]} only defines things, so the machines would train nothing: pass "
            "--script with the script that trains, and its arguments, or call your training under "
            'if __name__ == "__main__"'
        )
    return given or file.name


_DEFINITIONS = (
    ast.Import,
    ast.ImportFrom,
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.Pass,
)


def _does_something(script: Path) -> bool:
    """Return whether a script does more than import, define and assign."""
    try:
        tree = ast.parse(script.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as error:
        raise UsageError(f"{script} cannot be read: {error}") from error
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    own = {each.name for each in ast.walk(tree) if isinstance(each, functions)}
    own |= {
        each.id
        for each in ast.walk(tree)
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
    }
    return any(_is_done(each, own) for each in tree.body)


def _is_done(statement: ast.stmt, own: Collection[str]) -> bool:
    """Return whether a statement does something, rather than define it.

    Args:
        statement: A statement of the module.
        own: Functions and variables of the module. An assignment that calls one of them, such as
            ``best = study.run()``, does something.
    """
    if isinstance(statement, _DEFINITIONS):
        return False
    if isinstance(statement, ast.If | ast.Try):  # such as imports for type checkers
        below = [statement.body, statement.orelse]
        below += [each.body for each in getattr(statement, "handlers", [])]
        return any(_is_done(each, own) for part in below for each in part)
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        calls = (
            each.func
            for each in ast.walk(statement.value or statement)
            if isinstance(each, ast.Call)
        )
        names = (each.value if isinstance(each, ast.Attribute) else each for each in calls)
        return any(isinstance(each, ast.Name) and each.id in own for each in names)
    return not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """How thrifty is installed on a rented machine.

    Attributes:
        setup: The command that installs it.
        mounts: Files that are copied there, local paths by remote ones.
    """

    setup: str
    mounts: Mapping[str, str] = field(default_factory=dict)


def installation(folder: Path) -> Installation:
    """Return how to install the thrifty that runs here.

    A version from a package index, a repository or another address is installed from there.
    Otherwise, a wheel is built from the checkout, or the wheel is taken that this one was installed
    from, and copied to the machines.

    Args:
        folder: Where to write a wheel.

    Raises:
        CloudError: Thrifty is not installed, or the wheel cannot be built.
    """
    try:
        installed = distribution("thrifty")
    except PackageNotFoundError as error:
        raise CloudError(
            "thrifty runs from a folder that is not installed; install it, so that the rented "
            "machines can get it: pip install -e CHECKOUT"
        ) from error
    source = json.loads(installed.read_text("direct_url.json") or "{}")
    if not source:
        return Installation(setup=f"pip install thrifty=={installed.version}")
    url = urlsplit(source["url"])
    if url.scheme != "file":
        place, version = source["url"], source.get("vcs_info")
        if version:
            place = f"{version['vcs']}+{place}@{version['commit_id']}"
        return Installation(setup=f"pip install {shlex.quote(place)}")
    path = Path(unquote(url.path))
    wheel = path if path.suffix == ".whl" else _wheel(path, folder)
    if not wheel.is_file():
        raise CloudError(f"thrifty was installed from {wheel}, which is gone; install it again")
    remote = f"~/{wheel.name}"
    return Installation(setup=f"pip install {remote}", mounts={remote: str(wheel.resolve())})


def _wheel(source: Path, folder: Path) -> Path:
    """Build a wheel of a checkout."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-cache-dir"]
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("thrifty-*.whl"):
        old.unlink()
    done = subprocess.run(
        [*command, "--wheel-dir", str(folder), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    found = sorted(folder.glob("thrifty-*.whl"))
    if done.returncode or not found:
        raise CloudError(
            f"no wheel of {source} can be built for the rented machines: "
            f"{done.stderr.strip() or 'pip wrote none'}"
        )
    return found[-1]
