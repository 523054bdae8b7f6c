"""A ladder of horizons with shared trunks, against separate runs, Optuna and Ray Tune.

    python -m bench.bench_ladder [--quick] [--text FILE]

A character GPT of about one million parameters, ten horizons of 1 to 10 units, cooldowns of 20 %,
two learning rates, one and three shapes of cooldowns. Each horizon, rate and shape is one run. The
peers and the plain loop train each run from its beginning; thrifty trains one trunk for each rate.
All train the same thing: the losses must be equal to the last bit. Each method has a process of its
own with one thread, and trains one run at a time. Imports are not counted; thrifty's worker
process, evaluation after each epoch, checkpoints and checks are.

Without ``--text``, the text is tinyshakespeare from the data folder, or one that the benchmark
makes up.
"""

from __future__ import annotations

from typing import Any

from bench.common.harness import Goal, at_least, equal, finish, parser, table
from bench.common.processes import in_fresh_process
from bench.ladder.methods import law_of_losses
from bench.ladder.setting import GPT, UNIT, Setting, default_text, windows


GOALS = {1: 2.5, 3: 3.5}
"""How many times less time a ladder takes than separate runs, by the number of shapes."""


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--text", default=default_text(), help="a text file to train on")
    args = options.parse_args()
    quick = ["--quick"] if args.quick else []

    def run(method: str, shapes: int) -> dict[str, Any]:
        found = in_fresh_process(
            "bench.ladder.methods", method, "--text", args.text, "--shapes", str(shapes), *quick
        )
        print(f"{method}, {shapes} shapes: {found['seconds']:.1f} s", flush=True)
        return found

    figures: dict[str, Any] = {"text": "made up" if not args.text else args.text.split("/")[-1]}
    goals: list[Goal] = []
    for shapes in GOALS:
        setting = Setting.of(quick=args.quick, text=args.text, shapes=shapes)
        # Ours runs between the others, so that all see the machine at its slowest and fastest.
        order = ["plain", "thrifty"] if shapes == 1 else ["optuna", "plain", "thrifty", "ray"]
        results = {method: run(method, shapes) for method in order}
        print(f"\n{len(setting.schedules())} runs, {shapes} shapes\n")
        rows = [row(setting, method, result, results) for method, result in results.items()]
        table(rows)
        print()
        figures[f"{shapes} shapes"] = {
            "rows": rows,
            "law": results["thrifty"]["law"],
            "losses": results["plain"]["losses"],
            "checks_s": results["thrifty"]["checks_s"],
        }
        goals += goals_of(setting, results)
    _, _, vocabulary = windows(args.text)
    model = GPT(vocabulary, width=setting.width, layers=setting.layers)
    num_parameters: int = sum(int(each.numel()) for each in model.parameters())
    figures["parameters"] = num_parameters
    figures["steps of a unit"] = UNIT * setting.steps
    finish("ladder", figures, goals)


def row(
    setting: Setting, method: str, result: dict[str, Any], results: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    lengths = [int(schedule.epochs) for schedule in setting.schedules()]
    whole = sum(lengths)
    epochs = result.get("unique", whole)
    same = sum(a == b for a, b in zip(result["losses"], results["plain"]["losses"], strict=True))
    return {
        "method": method,
        "units trained": epochs / UNIT,
        "seconds": result["seconds"],
        "times less than separate runs": results["plain"]["seconds"] / result["seconds"],
        "losses equal to separate runs'": same,
        "peak MB": result["peak_mb"],
    }


def goals_of(setting: Setting, results: dict[str, dict[str, Any]]) -> list[Goal]:
    shapes, ours, separate = len(setting.shapes), results["thrifty"], results["plain"]
    same = sum(a == b for a, b in zip(ours["losses"], separate["losses"], strict=True))
    law = law_of_losses(setting, separate["losses"])
    return [
        equal(f"unique epochs, {shapes} shapes", ours["unique"], setting.least_epochs),
        equal(f"planned epochs, {shapes} shapes", ours["planned"], setting.least_epochs),
        equal(f"equal losses, {shapes} shapes", same, len(separate["losses"])),
        equal(f"the same law, {shapes} shapes", float(law == ours["law"]), 1),
        at_least(
            f"times less than separate runs, {shapes} shapes",
            separate["seconds"] / ours["seconds"],
            GOALS[shapes],
        ),
    ]


if __name__ == "__main__":
    main()
