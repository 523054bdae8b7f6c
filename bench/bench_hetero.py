"""Uneven data parallelism: is the answer that of one process, and does no worker wait?

::

    python -m bench.bench_hetero [--quick] [--only answer|speed|replay|paper|churn]
        [--scenario load] [--networks CNN]
    python -m bench.bench_hetero --device cuda [--quick] [--only mixed|energy] [--cpu-workers 1]

Workers are gloo processes on this machine; slow ones share their core with other work for a bounded
time. Steps of real jobs are read from ``$THRIFTY_DATA``.

With ``--device``, a GPU and processors of this machine train together, and the GPU's joules are
counted. ``--device cpu`` tries these parts without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

from bench.common.harness import Part, at_least, at_most, equal, finish, parser, run_parts, table
from bench.hetero import churn, energy, mixed, paper, replay as rules
from bench.hetero.speed import Run, Scenario, recovery, run, solo


BATCH = {"CNN": 256, "MLP": 512}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--only", choices=[*PARTS, *DEVICE_PARTS])
    options.add_argument("--device", help="cuda or cpu: the parts of a machine with a GPU")
    options.add_argument("--cpu-workers", type=int, default=1, help="of the mixed part")
    options.add_argument("--scenario", default="", help="of the speed part: words of its name")
    options.add_argument("--networks", default="CNN,MLP", help="of the speed part")
    args = options.parse_args()
    networks = args.networks.split(",")
    fits = {None, *(PARTS if args.device is None else DEVICE_PARTS)}
    if args.only not in fits:
        options.error(f"--device belongs to the parts {' and '.join(DEVICE_PARTS)}")
    if args.device is not None:
        together = partial(mixed.mixed, cpu_workers=args.cpu_workers, networks=networks)
        device_parts = {**DEVICE_PARTS, "mixed": together}
        figures, goals = run_parts(
            device_parts, only=args.only, quick=args.quick, device=args.device
        )
        finish("bench_hetero", figures, goals)
        return
    chosen = partial(speed, rounds=args.repeats, only=args.scenario, networks=networks)
    parts = {**PARTS, "speed": chosen}
    figures, goals = run_parts(parts, only=args.only, quick=args.quick)
    finish("bench_hetero", figures, goals)


# -- the answer ------------------------------------------------------------------------------


def answer(*, quick: bool) -> Part:
    """Run one planned schedule for each number of workers."""
    rows, goals = [], []
    with churn.lighthouse() as address:
        for workers in (2,) if quick else (2, 3, 4):
            outcome = churn.play(churn.planned(workers), address)
            parameters, gradient = churn.distance(outcome)
            reports = outcome.reports["w0"]
            rows.append({
                "workers": workers,
                "steps": reports[-1]["step"],
                "splits": len({tuple(report["sizes"]) for report in reports}),
                "killed": ", ".join(outcome.killed),
                "joined": ", ".join(name for name in outcome.reports if name.startswith("x")),
                "parameters": parameters,
                "gradient": gradient,
            })
            goals += [
                at_most(
                    f"{workers} workers: parameters from one process's, relative", parameters, 1e-6
                ),
                at_most(
                    f"{workers} workers: gradient from one process's, relative", gradient, 1e-6
                ),
            ]  # fmt: skip
    table([
        {**row, "parameters": f"{row['parameters']:.1e}", "gradient": f"{row['gradient']:.1e}"}
        for row in rows
    ])
    return rows, goals


# -- speed -----------------------------------------------------------------------------------


def speed(*, quick: bool, rounds: int, only: str, networks: Sequence[str]) -> Part:
    """Run both systems alternately, for several rounds."""
    rows, goals = [], []
    for network in networks[:1] if quick else networks:
        for scenario, least in scenarios(quick=quick):
            if only not in scenario.name:
                continue
            row = compare(network, scenario, rounds=1 if quick else rounds)
            rows.append(row)
            print(f"{network}, {scenario.name}: {row['times as fast']:.2f}x", flush=True)
            goals.append(
                at_least(f"{network}, {scenario.name}: thrifty / DDP", row["times as fast"], least)
            )
            goals.append(
                at_least(
                    f"{network}, {scenario.name}: share of the bound", row["of the bound"], 0.9
                )
            )
            if row["recovery"] is not None:
                goals.append(
                    at_most(f"{network}, {scenario.name}: steps to recover", row["recovery"], 10)
                )
    print()
    table(rows)
    return rows, goals


def scenarios(*, quick: bool) -> list[tuple[Scenario, float]]:
    """Return the other load of the second core, and the goal."""
    if quick:
        return [(Scenario(name="a worker at 1/4 speed", periods=[(0, 3, 3)], seconds=3), 1.5)]
    return [
        (Scenario(name="a worker at 1/4 speed", periods=[(0, 12, 3)], seconds=12), 1.5),
        # The load is there two thirds of the time. At half of it, following it at once would give
        # 1.30x.
        (
            Scenario(name="the load comes and goes", periods=[(4, 16, 3), (20, 32, 3)], seconds=36),
            1.3,
        ),
        (Scenario(name="all equal", seconds=12), 0.98),
    ]


def compare(network: str, scenario: Scenario, *, rounds: int) -> dict[str, Any]:
    """Run DDP, uneven and the lone cores, one after the other, in each round."""
    batch = BATCH[network]
    ratios, shares, recovered = [], [], []
    ours: list[Run] = []
    theirs: list[Run] = []
    for _ in range(rounds):
        theirs.append(run("DDP", network, batch, scenario))
        ours.append(run("thrifty", network, batch, scenario))
        alone = solo(network, [batch // 2, batch // 2], scenario)
        ratios.append(ours[-1].samples_per_s / theirs[-1].samples_per_s)
        shares.append(ours[-1].samples_per_s / sum(each.samples_per_s for each in alone))
        recovered += recovery(ours[-1], scenario)
    return {
        "network": network,
        "scenario": scenario.name,
        "DDP, samples/s": median(each.samples_per_s for each in theirs),
        "thrifty, samples/s": median(each.samples_per_s for each in ours),
        "DDP, ms a step": 1e3 * median(each.step_s for each in theirs),
        "thrifty, ms a step": 1e3 * median(each.step_s for each in ours),
        "times as fast": median(ratios),
        "of the bound": median(shares),
        "recovery": max(recovered) if recovered else None,
        "splits": len({tuple(step["sizes"]) for step in ours[-1].steps}),
    }


# -- policies --------------------------------------------------------------------------------


def replay(*, quick: bool) -> Part:
    """Replay real jobs' step times under several rules."""
    rows = [row for job in rules.JOBS for row in rules.replay(job, quick=quick)]
    table(rows)
    goals = []
    for row in rows:
        if row["rule"] != "thrifty":
            continue
        if row["job"] in rules.CALM:
            goals.append(
                at_most(
                    f"job {row['job']}: false alarms, % of steps",
                    100 * row["false"] / row["steps"], 1.0
                )
            )  # fmt: skip
        else:
            goals.append(
                at_most(
                    f"job {row['job']} (stragglers): max / median", row["max / median, p50"], 1.2
                )
            )
    return rows, goals


def storage(*, quick: bool) -> Part:
    """Simulate a host with drives that compute.

    The papers' figures are printed beside ours but are no goals.
    """
    for name, value in paper.ASSUMPTIONS.items():
        print(f"- {name}: {value}")
    print()
    rows = paper.sweep(quick=quick)
    table(rows)
    ours = paper.gain(paper.Cluster(devices=24), steps=5 if quick else 60)
    print(
        f"\n24 devices: {ours['times as fast']:.2f}x as fast (HyperTune: up to 3.1x), "
        f"{ours['times less energy']:.2f}x less energy (up to 2.45x)"
    )
    return {"assumptions": paper.ASSUMPTIONS, "24 devices": ours, "sweep": rows}, []


# -- churn -----------------------------------------------------------------------------------


def kills(*, quick: bool) -> Part:
    """Run random schedules."""
    rows = []
    with churn.lighthouse() as address:
        for seed in range(2 if quick else 30):
            outcome = churn.play(churn.drawn(seed), address)
            parameters, _ = churn.distance(outcome)
            rows.append({
                "schedule": seed,
                "workers": len(outcome.reports),
                "killed": len(outcome.killed),
                "seconds": outcome.seconds,
                "finished": outcome.finished,
                "every sample once an epoch": churn.exact(outcome),
                "parameters": parameters,
            })
    with churn.lighthouse() as address:
        clear, seconds = churn.too_few(address)
    table([{**row, "parameters": f"{row['parameters']:.1e}"} for row in rows])
    print(
        f"\ntoo few workers: {'a clear error' if clear else 'NO clear error'} after {seconds:.1f} s"
    )
    goals = [
        equal("schedules that did not end", sum(not row["finished"] for row in rows), 0),
        equal(
            "schedules with a sample too many or too few",
            sum(not row["every sample once an epoch"] for row in rows),
            0,
        ),
        at_most(
            "parameters from one process's, at worst", max(row["parameters"] for row in rows), 1e-6
        ),
        equal("too few workers: clear error", float(clear), 1.0),
    ]  # fmt: skip
    return {"schedules": rows, "too few": {"clear": clear, "seconds": seconds}}, goals


PARTS: dict[str, Callable[..., Part]] = {
    "answer": answer,
    "speed": speed,
    "replay": replay,
    "paper": storage,
    "churn": kills,
}

DEVICE_PARTS: dict[str, Callable[..., Part]] = {"mixed": mixed.mixed, "energy": energy.energy}


if __name__ == "__main__":
    main()
