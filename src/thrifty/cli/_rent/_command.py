"""The command ``thrifty rent FILE``, and what it reads."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from thrifty.cli._options import cell, print_document, say
from thrifty.cloud import (
    ACCELERATORS,
    Catalogue,
    FleetOptions,
    FleetPlan,
    HardwareEstimates,
    Offer,
    Probe,
    ProbeResult,
    Probes,
    SpotMarket,
    Workload,
    launch,
    parallelism_phases_of,
    plan_fleet,
    plot_front,
    to_skypilot,
)
from thrifty.core import CloudError, UsageError, plain_text, require
from thrifty.perf import StepProfile

from ._output import (
    installation,
    plan_document,
    probe_document,
    script_of,
    show_plan,
    show_probes,
    show_values,
)
from ._rent_options import RentOptions, chosen_offers, rent_options


_THREADS = re.compile(r"(\d+) thread\(s\)$")


def age_of(catalogue: Catalogue, source: str, *, today: date) -> str:
    """Describe the age of the prices."""
    days = sorted(offer.priced_on for offer in catalogue if offer.priced_on is not None)
    when = "without a date"
    if days:
        when = f"of {days[0]}" + (f" to {days[-1]}" if days[-1] != days[0] else "")
    stale = len(catalogue.stale(today))
    old = f"; {stale} of {len(catalogue)} offers are older than 30 days" if stale else ""
    return f"prices: {source}, {when}{old}"


def load_market(asked: RentOptions) -> SpotMarket | None:
    """Load the history of spot prices; None if no file is given.

    Raises:
        CloudError: The file is invalid.
    """
    if asked.prices is None:
        return None
    market = SpotMarket.from_aws_csv(asked.prices)
    return replace(market, unknown_evictions_per_h=asked.evictions)


def hardware_of(device: str, *, named: str | None) -> HardwareEstimates:
    """Return the hardware estimates for a profiled device.

    Args:
        device: Name of the device in the profile.
        named: Accelerator name given by the user; "" for CPUs, None if not given.

    Raises:
        CloudError: The device is unknown.
    """
    threads = _THREADS.search(device)
    vcpus = float(threads[1]) if threads else 1.0
    if named is not None:
        if named and named not in ACCELERATORS:
            raise CloudError(
                f"--device {named}: use one of {', '.join(sorted(ACCELERATORS))}, or an empty name "
                "for processors"
            )
        return HardwareEstimates(profiled=named, profiled_vcpus=vcpus)
    if threads:
        return HardwareEstimates(profiled_vcpus=vcpus)
    words = {word.upper() for word in re.split(r"[^A-Za-z0-9]+", device)}
    known = [name for name in ACCELERATORS if set(name.upper().split("-")) <= words]
    if not known:
        raise CloudError(
            f"the profile is of {device!r}, which is none of {', '.join(sorted(ACCELERATORS))}: "
            "pass the most similar one with --device"
        )
    return HardwareEstimates(profiled=max(known, key=len))


_STATE = 3
"""Checkpoint bytes per gradient byte: weights, and two moments of the optimizer."""


def load_workload(file: Path, asked: RentOptions) -> tuple[Workload, Mapping[str, Any]]:
    """Return the workload and the hyper-parameters that it was timed with.

    The file is loaded only if necessary.

    Raises:
        UsageError: The file or an option is invalid.
        MissingExtraError: platformdirs is not installed.
    """
    stored = None if asked.profile is None else _stored(asked.profile)
    if stored is not None and asked.steps and asked.batch and not asked.study:
        return _of(stored, asked, steps=asked.steps, batch=asked.batch), {}
    # Imported here because it imports torch, which takes seconds.
    from thrifty.cli._rent._timed_task import load_subject, steps_of  # noqa: PLC0415

    subject = load_subject(file, name=asked.name, hp=dict(asked.hp))
    study, batch = subject.study, asked.batch or subject.batch_size
    if asked.study and study is None:
        raise UsageError(f"{file} defines no study; define one, or leave --study out")
    epochs = asked.epochs or (study.algorithm.max_epochs if study else None)
    if epochs is None and asked.steps is None:
        raise UsageError("say how long the training is: --epochs or --steps")
    source = subject.source()
    profile = stored
    if profile is None:
        with Console(stderr=True).status("timing the model on this machine ..."):
            profile = subject.profile(source, batch=batch, cache=_cache(asked))
    each = steps_of(subject.task, source, batch)
    steps = asked.steps or (epochs or 0) * each
    workload = _of(profile, asked, steps=steps, batch=batch)
    if asked.study and study is not None:
        parallelism_phases = parallelism_phases_of(study.plan().forest, steps_per_epoch=each)
        workload = replace(workload, parallelism_phases=parallelism_phases)
    return workload, {} if stored else subject.values


def _of(profile: StepProfile, asked: RentOptions, *, steps: int, batch: int) -> Workload:
    return Workload(
        profile=profile,
        steps=steps,
        global_batch=batch,
        accumulation="allowed" if asked.accumulation else "never",
        precisions=("float32", *asked.precision) if asked.precision else None,
        state_bytes=_STATE * sum(profile.bucket_bytes),
        other_profiles={
            hardware_of(each.device, named=None).profiled: each
            for each in map(_stored, asked.other_profile)
        },
    )


def _stored(path: Path) -> StepProfile:
    try:
        return StepProfile.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} holds no profile: {error}") from error


def _cache(asked: RentOptions) -> Path:
    if asked.cache is not None:
        return asked.cache
    user_cache_path = require("platformdirs", extra="cloud").user_cache_path
    return Path(user_cache_path("thrifty"))


@dataclass(frozen=True, slots=True, kw_only=True)
class RentalInputs:
    """The inputs of a rental plan.

    Attributes:
        asked: Options of the command.
        workload: The training job.
        values: Hyper-parameters that it was timed with; empty if it was not timed.
        offers: Offers to choose from.
        estimates: Hardware estimates of the offers.
        market: Spot market.
    """

    asked: RentOptions
    workload: Workload
    values: Mapping[str, Any]
    offers: tuple[Offer, ...]
    estimates: HardwareEstimates
    market: SpotMarket | None

    @property
    def options(self) -> FleetOptions:
        """Goal of the choice, and limits on the machines."""
        asked = self.asked
        return FleetOptions(
            deadline_s=asked.deadline,
            budget_usd=asked.budget,
            conservative=not asked.median,
            estimates=self.estimates,
            spot=asked.spot,
            mixed=asked.mixed,
            max_nodes=asked.max_nodes,
            quotas=dict(asked.quota),
            market=self.market,
        )

    def plan(self) -> FleetPlan:
        """Plan what to rent."""
        return plan_fleet(self.workload, self.offers, self.options)

    def probes(self, cap_usd: float) -> tuple[list[Probe], str]:
        """Return what to measure first, and why there are no further probes.

        Each probe assumes that the earlier ones confirmed the estimates.
        """
        probes = Probes(
            self.workload, self.offers, self.options, cap_usd=cap_usd, cap_s=self.asked.probe_time
        )
        found = []
        while (probe := probes.next()) is not None:
            found.append(probe)
            believed = {
                what: (getattr(probes.estimates, what)(probe.offer).median,) for what in probe.finds
            }
            probes.record(probe, ProbeResult(**believed))
        return found, probes.ended

    def notes(self, plan: FleetPlan) -> list[str]:
        """Return the assumptions of a plan."""
        workload, asked = self.workload, self.asked
        with_ = f" with {show_values(self.values)} (others by --hp)" if self.values else ""
        notes = [
            (
                f"a step of up to {workload.profile.batches[-1]} samples was timed on "
                f"{workload.profile.device}{with_}"
            )
        ]
        if workload.profile.is_noisy:
            notes.append(
                f"{workload.profile.disturbance} meanwhile; time it again when nothing else runs"
            )
        notes += [f"a close call: {call}" for call in plan.close_calls]
        notes += plan.notes
        if self.market is not None:
            notes.append(f"{asked.evictions:g} evictions of a spot machine in an hour are assumed")
        chosen = [each.offer for each in (plan.best.machines if plan.best else ())]
        for source in ("data sheets", "measured pairs"):
            guessed = {
                o.device
                for o in chosen
                if self.estimates.speed_from(o) == source
                and o.accelerator not in workload.other_profiles
            }
            if guessed:
                notes.append(
                    f"the speed of {' and '.join(sorted(guessed))} is that of {source}: --probe "
                    "says what is worth measuring"
                )
        return notes


@click.command("rent")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@rent_options
def rent_command(*, file: Path, **given: Any) -> None:
    """Show which machines to rent for the study or the task in FILE.

    The model is timed on this machine's device, which takes some seconds. The speed of other
    devices is estimated from measured pairs of devices, or from data sheets.
    """
    asked = RentOptions(**given)
    _check(asked, file)
    console = Console()
    catalogue, source = chosen_offers(
        asked.catalogue, cloud=asked.cloud, region=asked.region, accelerator=asked.accelerator
    )
    workload, values = load_workload(file, asked)
    scene = RentalInputs(
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
        print_document({
            **plan_document(plan, notes=notes),
            "probes": [probe_document(probe) for probe in probes],
            "probes_ended": ended,
        })
    else:
        show_plan(plan, console=console)
        for note in notes:
            console.print(cell(f"- {note}"))
        if asked.probe is not None:
            show_probes(probes, ended, console=console)
    _hand_over(plan, file, asked)


def _check(asked: RentOptions, file: Path) -> None:
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
        raise UsageError("--steps and --epochs exclude each other; pass one of them")
    for path in (asked.plot, asked.export):
        if path is not None and not path.resolve().parent.is_dir():
            raise UsageError(f"there is no folder {path.resolve().parent}; make it first")
    # Otherwise the plan is printed first; with --json, an error is the only document.
    if asked.as_json and (asked.export is not None or asked.launch):
        script_of(file, asked.script)


def _hand_over(plan: FleetPlan, file: Path, asked: RentOptions) -> None:
    """Write the plot and the SkyPilot task, and launch the machines, as requested.

    Raises:
        UsageError: The extension of the plot is unknown, or there is no script that trains.
    """
    if asked.plot is not None:
        figure = plot_front(plan, deadline_s=asked.deadline, budget_usd=asked.budget)
        known = figure.canvas.get_supported_filetypes()
        if asked.plot.suffix[1:].lower() not in known:
            raise UsageError(
                f"{asked.plot}: its extension must be one of {', '.join(sorted(known))}"
            )
        figure.savefig(asked.plot, dpi=150)
        say(f"wrote {asked.plot}")
    if asked.export is None and not asked.launch:
        return
    assert plan.best is not None
    script = script_of(file, asked.script)  # before a wheel is built
    installed = installation(_cache(asked) / "wheels")
    task = to_skypilot(
        plan.best,
        name=re.sub(r"[^A-Za-z0-9]+", "-", file.stem).strip("-") or "thrifty",
        run=script,
        setup=installed.setup,
        mounts=installed.mounts,
        workdir=str(file.resolve().parent),
    )
    if asked.export is not None:
        asked.export.write_text(task, encoding="utf-8")
        say(f"wrote {asked.export}: start it with sky jobs launch {asked.export}")
    if asked.launch:
        question = f"rent {plan.best} for about ${plan.best.cost_usd.median:,.2f}?"
        click.confirm(plain_text(question), abort=True, err=asked.as_json)
        say(f"SkyPilot's request {launch(task)}: follow it with sky api logs")
