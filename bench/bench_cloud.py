"""Which machines to rent: are predictions right, choices good, and plans quick?

::

    python -m bench.bench_cloud [--quick] [--only clusters|prediction|tables|...]
    python -m bench.bench_cloud --device cuda

Measurements of others (Sia and Pollux, PROFET, vTrain, prices and logs of AWS, GCP) are read from
``$THRIFTY_DATA``; ``local`` trains on this machine. With ``--device``, only the steps of this
machine's GPU are forecast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.cloud import (
    choices_report as choices_,
    clusters as clusters_,
    devices as devices_,
    floors as floors_,
    local as local_,
    newer_devices as newer_,
    planning as planning_,
    prediction as sia,
    probed_clusters as probed_,
    profet_vtrain as others,
    repeated_profile as profiles_,
    spot as spot_,
    studies as studies_,
    this_gpu as this_gpu_,
)
from bench.common.harness import (
    Goal,
    Part,
    at_least,
    at_most,
    equal,
    finish,
    parser,
    run_parts,
    table,
)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--only", choices=list(PARTS))
    options.add_argument("--device", help="cuda or cpu: only forecasts of steps on this device")
    args = options.parse_args()
    if args.device is not None:
        if args.only:
            options.error("--device runs one part; leave --only out")
        figures, goals = this_gpu_.this_gpu(quick=args.quick, device=args.device)
        finish("bench_cloud", {"this GPU": figures}, goals)
        return
    figures, goals = run_parts(PARTS, only=args.only, quick=args.quick)
    finish("bench_cloud", figures, goals)


def clusters(*, quick: bool) -> Part:
    """Report errors of ``estimate`` on clusters whose measurements its priors have not seen.

    A cluster is one type of GPU and one network. Then applications are left out on clusters that
    the others have used, and probed.
    """
    rows = clusters_.some_rows(quick=quick)
    priors = clusters_.priors_without(rows)
    found = [clusters_.left_out(rows, name, each) for name, each in priors.items()]
    lines = [line for each in found for line in each["rows"]]
    print("a step of several devices from the profile of one: median absolute error\n")
    table(lines)
    goals = []
    for line in lines:
        if line["application"] == "all":
            name = f"{line['cluster']}, left out"
            goals += [
                at_most(f"{name}: error, median, %", line["median error %"], 15),
                at_least(f"{name}: in the 90 % interval, %", line["in the 90 % interval"], 85),
            ]
    if quick:
        # Quick rows lack the placements that probes use.
        return {"left out": found}, goals
    applications = probed_.new_applications(rows, priors)
    for name, each in applications.items():
        print(f"\nan application that is left out: {name}\n")
        whole = name in ("known cluster", *_PROBED)
        table([line for line in each if whole or line["application"] == "all"])
        if whole:
            goals += _probed_goals(name, each)
    return {"left out": found, "applications left out": applications}, goals


_PROBED = ("known cluster, two probes", "unknown cluster, two probes")


def _probed_goals(name: str, lines: list[dict[str, Any]]) -> list[Goal]:
    goals = []
    for line in lines:
        if line["application"] == "all":
            where = f"{line['cluster']}, {name}"
            covered = line["in the 90 % interval"]
            most = 6 if name in _PROBED else 10
            goals += [
                at_most(f"{where}: error, median, %", line["median error %"], most),
                at_least(f"{where}: in the 90 % interval, %", covered, 85),
                at_most(f"{where}: in the 90 % interval, at most, %", covered, 95),
            ]
    return goals


def devices(*, quick: bool) -> Part:
    """Report errors of a step's time on a GPU from its time on another."""
    found = devices_.left_out_gpus(quick=quick)
    speeds = devices_.fitted_speeds(devices_.steps())
    print("speeds relative to a V100:", {gpu: round(each, 2) for gpu, each in speeds.items()})
    table(found)
    print("\nwith a floor: a part of the step that takes equally long on all GPUs\n")
    with_floors = floors_.floors_left_out(quick=quick)
    table(with_floors)
    print("\nSailor's and Zeus's GPUs, which no speed was fitted to\n")
    others = newer_.forecasts(quick=quick)
    table(others)
    print("\nafter two runs on the GPU: its other batches\n")
    after = devices_.with_two_runs(quick=quick)
    table(after)
    goals = [
        at_least(f"{line['GPU']}, left out: in the 90 % interval, %", line[column], 85)
        for line in found
        if line[column := "left out: in the 90 % interval"] is not None
    ]
    goals += [
        at_least(
            f"{line['source']}, {line['GPU']}: in the 90 % interval, %",
            line["in the 90 % interval"],
            85,
        )
        for line in others
    ]
    figures = {"left out": found, "with a floor": with_floors, "two runs": after}
    figures["Sailor and Zeus"] = others
    return {**figures, "speeds": speeds}, goals


def prediction(*, quick: bool) -> Part:
    """Report errors on sia_pollux, beside the baselines."""
    figures = sia.prediction(quick=quick)
    lines = sia.summary(figures["rows"])
    print("mean absolute percentage error of a step's time, mean over applications and GPUs\n")
    table(lines)
    won = sia.apps_won(figures["rows"])
    print(f"\nrepetitions of one setup differ by {figures['noise_floor']:.1f} % (median table)")
    print(f"better than every baseline on unseen applications: {', '.join(won)}")
    by = {line["held out"]: line for line in lines}
    goals = [
        at_most("random rows: error, %", by["random rows (leaky)"][sia.OURS], 4),
        at_most("placements: error, %", by["placement"][sia.OURS], 6),
        at_most("<= 8 GPUs -> more: error, %", by["<= 8 GPUs -> more"][sia.OURS], 8),
        at_least("unseen applications won, of 5", len(won), 4),
    ]
    covered = by["placement"]["in the 90 % interval"]
    goals += [
        at_least("placements: in the 90 % interval, %", covered, 85),
        at_most("placements: in the 90 % interval, at most, %", covered, 95),
    ]
    return {**figures, "summary": lines, "apps won": won}, goals


def tables(*, quick: bool) -> Part:
    """Report errors on PROFET and vTrain, without goals."""
    figures = {"profet": others.profet(quick=quick), "vtrain": others.vtrain(quick=quick)}
    for name, found in figures.items():
        print(f"\n{name}: mean absolute percentage error\n")
        table(found["rows"])
    return figures, []


def decisions(*, quick: bool) -> Part:
    """Report choices by such forecasts, compared with the best in hindsight."""
    figures = sia.decisions(quick=quick)
    settings = {
        "90 % setting": sia.regret(figures["rows"]),
        "upper ends of all forecasts": sia.regret(figures["rows with the whole interval"]),
    }
    table([{"setting": name, **found} for name, found in settings.items()])
    found = settings["90 % setting"]
    return settings, [
        at_least("choices", found["choices"], 500),
        at_most("regret, median, %", found["median %"], 2),
        at_most("regret, mean, %", found["mean %"], 5),
        at_most("deadlines missed, %", found["deadlines missed %"], 5),
    ]


def choices(*, quick: bool) -> Part:
    """Report choices of ``plan_fleet`` for deadlines and budgets, beside other ways to choose."""
    figures = choices_.choices(quick=quick)
    print(f"{figures['jobs']} jobs, {figures['candidates']:.0f} fleets each on average\n")
    table(figures["table"])
    print("\nby application, cluster of the profile, and limit\n")
    table(figures["parts"])
    print("\nmargins, each rehearsed on the other applications\n")
    table([{"chooses": name, **each} for name, each in figures["margins"].items()])
    goals = [at_least("choices: jobs", figures["jobs"], 2000)]
    for line in figures["table"]:
        if line["chooses"] in {
            choices_.ONE_PROFILE,
            choices_.EACH_GPU,
            choices_.TRIED,
            choices_.PROBED,
            choices_.RUNS,
        }:
            name = line["chooses"]
            goals += [
                at_most(f"{name}: regret, mean, %", line["regret, mean %"], 5),
                at_most(f"{name}: deadlines missed, %", line["deadlines missed %"], 5),
            ]
    return figures, goals


def spot(*, quick: bool) -> Part:
    """Replay jobs on prices and logs of 2019 and 2020."""
    starts = 20 if quick else 1000
    figures = spot_.replay_spot(starts, quick=quick)
    spot_.show(figures)
    return figures, [at_least("starts of each length", starts, 1000)]


def local(*, quick: bool) -> Part:
    """Predict training on this machine from profiles of one process."""
    figures = local_.local_prediction(quick=quick)
    error = figures["median_error"]
    return figures, [
        at_most("1 and 2 processes: error, median, %", error["all"], 8),
        at_most("2 processes: error, median, %", error["2"], 8),
    ]


def profiles(*, quick: bool) -> Part:
    """Profile a job again and again, also beside a busy loop, and compare the choices."""
    figures = profiles_.repeated_profiles(quick=quick)
    table(figures["rows"])
    return figures, [
        equal(f"choices that differ without a word, {name}", num, 0)
        for name, num in figures["unsaid"].items()
    ]


def close_calls(*, quick: bool) -> Part:
    """Report how many choices an error of the profile changes, and how many are close calls."""
    rows = profiles_.drawn_errors(quick=quick)
    table(rows)
    return {"rows": rows}, [
        equal(
            f"errors up to {row['error of steps, up to %']:g} %: differ, and nothing is named",
            row["differ, nothing named"],
            0,
        )
        for row in rows
        if row["error of steps, up to %"] <= 5
    ]


def planning(*, quick: bool) -> Part:
    """Report the seconds of a plan."""
    figures = planning_.planning_times(3, quick)
    table([{"plan": name, "seconds": seconds} for name, seconds in figures.items()])
    return figures, [
        at_most("100 offers, s", figures["small_s"], 0.05),
        at_most("5,000 offers in ten regions, s", figures["spread_s"], 2),
        at_most("5,000 offers that all differ, s", figures["distinct_s"], 2),
    ]


def studies(*, quick: bool) -> Part:
    """Report time and dollars of one study, rented in several ways, without goals."""
    del quick  # it takes a second
    rows = studies_.studies()
    table(rows)
    return {"rows": rows}, []


PARTS: dict[str, Callable[..., Part]] = {
    "clusters": clusters,
    "devices": devices,
    "prediction": prediction,
    "tables": tables,
    "decisions": decisions,
    "choices": choices,
    "spot": spot,
    "local": local,
    "profiles": profiles,
    "close-calls": close_calls,
    "planning": planning,
    "studies": studies,
}


if __name__ == "__main__":
    main()
