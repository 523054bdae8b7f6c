"""A ladder of horizons with shared trunks, against separate runs, Optuna and Ray Tune.

    python -m bench.bench_ladder [--quick] [--repeats 1] [--only PART] [--text FILE]

A character GPT of about one million parameters, ten horizons of 1 to 10 units, cooldowns of 20 %,
two learning rates, one and three shapes of cooldowns. Each horizon, rate and shape is one run. The
peers and the plain loop train each run from its beginning; thrifty trains one trunk for each rate.
All train the same thing: the losses must be equal to the last bit. Each method has a process of its
own with one thread, and trains one run at a time. The plain loop and thrifty take turns, a run of
the one and a stage of the other, so that both see the same machine; the others' turns and imports
are not counted. Thrifty's evaluation after each epoch, its checkpoints, checks and database are.

Parts are ``three shapes`` and ``one shape``; the peers train the ladder of one shape. Without
``--text``, the text is tinyshakespeare from the data folder, or one that the benchmark makes up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

from bench.common.harness import Goal, Part, at_least, equal, finish, parser, run_parts, table
from bench.common.processes import in_turns
from bench.ladder.methods import law_of_losses
from bench.ladder.setting import GPT, UNIT, Setting, default_text, windows


GOALS = {1: 2.5, 3: 3.5}
"""How many times less time a ladder takes than separate runs, by the number of shapes."""

Results = dict[str, list[dict[str, Any]]]
"""Results of each method, a round each."""


def main() -> None:
    parts: dict[str, Callable[..., Part]] = {
        "three shapes": partial(ladder, shapes=3),
        "one shape": partial(ladder, shapes=1, peers=("optuna", "ray")),
    }
    options = parser(__doc__)
    options.set_defaults(repeats=1)
    options.add_argument("--text", default=default_text(), help="a text file to train on")
    options.add_argument("--only", choices=parts, help="run one part")
    args = options.parse_args()
    figures, goals = run_parts(
        parts, only=args.only, text=args.text, quick=args.quick, rounds=args.repeats
    )
    setting = Setting.of(quick=args.quick, text=args.text, shapes=1)
    model = GPT(windows(args.text)[2], width=setting.width, layers=setting.layers)
    figures["text"] = args.text.split("/")[-1] or "made up"
    figures["parameters"] = sum(each.numel() for each in model.parameters())
    figures["steps of a unit"] = UNIT * setting.steps
    finish("ladder", figures, goals)


def ladder(*, text: str, quick: bool, rounds: int, shapes: int, peers: Sequence[str] = ()) -> Part:
    """Train a ladder by thrifty and by peers, and each of its runs separately."""
    setting = Setting.of(quick=quick, text=text, shapes=shapes)
    options = ("--text", text, "--shapes", str(shapes), *(["--quick"] if quick else []))
    results: Results = {method: [] for method in ("plain", "thrifty", *peers)}
    for _ in range(rounds):
        for group in (("thrifty", "plain"), *((method,) for method in peers)):
            commands = [("bench.ladder.methods", method, *options) for method in group]
            for method, found in zip(group, in_turns(*commands), strict=True):
                results[method].append(found)
                cpu_s = found.get("cpu_s", 0)
                print(f"{method}: {found['seconds']:.1f} s, CPU {cpu_s:.1f} s", flush=True)
    rows = report(setting, results)
    return {"rows": rows, "runs": results}, goals_of(setting, results)


def report(setting: Setting, results: Results) -> list[dict[str, Any]]:
    """Print a table of the methods, medians over the rounds; return its rows."""
    lengths = [int(schedule.epochs) for schedule in setting.schedules()]
    whole = sum(lengths)
    rows = []
    for method, found in results.items():
        times = ratios(results, method)
        cpu = [result["cpu_s"] for result in found if "cpu_s" in result]
        rows.append({
            "method": method,
            "units trained": found[0].get("unique", whole) / UNIT,
            "seconds": median(result["seconds"] for result in found),
            "CPU seconds": median(cpu) if cpu else None,
            "times less time": median(times),
            **({"least": min(times), "most": max(times)} if len(found) > 1 else {}),
            "losses equal": same(results, method),
            "peak MB": median(result["peak_mb"] for result in found),
        })
    print(f"\n{len(setting.schedules())} runs\n")
    table(rows)
    print()
    return rows


def ratios(results: Results, method: str, *, of: str = "seconds") -> list[float]:
    """Return how many times less a method takes than separate runs, for each round."""
    pairs = zip(results["plain"], results[method], strict=True)
    return [plain[of] / result[of] for plain, result in pairs]


def same(results: Results, method: str) -> int:
    """Count the losses that equal a separate run's in all rounds."""
    wanted = results["plain"][0]["losses"]
    rounds = [result["losses"] for result in results[method]]
    return sum(all(losses[index] == loss for losses in rounds) for index, loss in enumerate(wanted))


def goals_of(setting: Setting, results: Results) -> list[Goal]:
    ours, losses = results["thrifty"][0], results["plain"][0]["losses"]
    shapes, least = len(setting.shapes), setting.least_epochs
    part = "one shape" if shapes == 1 else "three shapes"
    law = law_of_losses(setting, losses)
    return [
        equal(f"{part}: unique epochs against the exact minimum", ours["unique"], least),
        equal(f"{part}: planned epochs against the exact minimum", ours["planned"], least),
        *(
            equal(
                f"{part}, {method}: losses equal to separate runs'",
                same(results, method),
                len(losses),
            )
            for method in results
            if method != "plain"
        ),
        equal(f"{part}: the law of separate runs is the same", float(law == ours["law"]), 1),
        at_least(
            f"{part}: separate runs / thrifty, seconds",
            median(ratios(results, "thrifty")),
            GOALS[shapes],
        ),
        at_least(
            f"{part}: separate runs / thrifty, CPU seconds",
            median(ratios(results, "thrifty", of="cpu_s")),
            GOALS[shapes],
        ),
    ]


if __name__ == "__main__":
    main()
