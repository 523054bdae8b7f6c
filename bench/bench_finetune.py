"""Fine-tuning sweeps over one frozen base, against peft in separate processes and Optuna.

    python -m bench.bench_finetune [--quick] [--repeats 5] [--only PART] [--device cpu]
        [--text FILE]

``equality``, ``memory`` and ``speed`` train 16 LoRA configurations (four ranks of 2 to 32, four
rates, two sets of layers) over a Llama of 30 million random weights. Each is compared with its own
run by peft and plain PyTorch: in double precision on a small base after 50 steps, and in single
precision with runs that begin one ulp away. ``speed`` compares trial-steps a second with two
processes that train such runs, one thread each; ours has as many threads as the machine has cores.
The methods take turns, all in processes that are ready and warm; thrifty's checks count. ``memory``
is the highest resident memory beyond that of a process that has trained something tiny.

``heads`` tunes a head, and the top block of six, of a small character model that is pretrained here
on tinyshakespeare from the data folder or, without that, on a text that the benchmark makes up: 32
trials by thrifty and by Optuna, with a plain loop and with features that were computed once. One
thread and one process each. What arithmetic allows is one pass of the trunk over all data, and then
thrifty's own study on these features. ``augmented`` replaces characters at random in each epoch.

``sizes`` measures packs of 1, 4, 16 and 64 adapters, throughput and memory, beside one run by peft
and two processes. On a GPU (``--device cuda``) it has both sizes of batches, on the CPU the small
one, and memory is that of the process.

``quantized`` measures equality in single precision, memory and speed over the same base in 4 and in
8 bits, against peft on the same layers of bitsandbytes.

``checkpoints`` measures the files of trials, and kills a study at random moments.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

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
from bench.common.processes import in_fresh_process
from bench.finetune import sizes as by_size
from bench.finetune.runner import Runner, arguments
from bench.finetune.setting import Setting
from bench.ladder.setting import default_text


TRIALS = 16
TOLERANCE = 1e-10
NUM_MOVED = 3
"""Runs moved by one ulp for each configuration; the median counts."""
SLACK = 1.1
"""What a pack may need besides its base: 16 times what one run needs, times this."""
CHUNKED = 1.5
"""How many times the memory of one run a study may need that trains one trial at a time."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """The options of the command."""

    quick: bool
    rounds: int
    device: str
    text: str
    cases: Sequence[str]


def main() -> None:
    named: dict[str, Callable[..., Part]] = {
        "equality": equality,
        "memory": memory,
        "speed": speed,
        "sizes": sizes,
        "quantized": quantized,
        "heads": heads,
        "rounding": rounding,
        "checkpoints": checkpoints,
    }
    options = parser(__doc__)
    options.set_defaults(repeats=5)
    options.add_argument("--only", choices=named, help="run one part")
    options.add_argument("--device", default="cpu", help="where to train LoRA adapters")
    options.add_argument("--text", default=default_text(), help="a text file, for heads")
    options.add_argument("--case", choices=PEERS, help="run one case of heads; whole takes hours")
    args = options.parse_args()
    figures, goals = run_parts(
        named,
        Given(
            quick=args.quick,
            rounds=2 if args.quick else args.repeats,
            device=args.device,
            text=args.text,
            cases=[args.case] if args.case else list(PEERS),
        ),
        only=args.only,
    )
    figures["device"] = args.device
    finish("finetune", figures, goals)


def settings(given: Given) -> dict[str, tuple[Setting, int]]:
    """Return the settings of memory and speed, with the number of trials in a chunk."""
    device = given.device
    if given.quick:
        small = partial(Setting, hidden=64, layers=2, vocabulary=256, device=device)
        return {
            "1 x 8": (small(length=8, steps=2), 4),
            "2 x 16": (small(batch=2, length=16, steps=1), 1),
        }
    return {
        "1 x 32": (Setting(device=device), 4),
        "8 x 128": (Setting(batch=8, length=128, steps=1, device=device), 1),
    }


# -- 1: the same answer --------------------------------------------------------------------


def equality(given: Given) -> Part:
    """Compare each trial of a pack with its own run by peft."""
    small = Setting(hidden=64, layers=2, vocabulary=128, batch=2, steps=50, double=True)
    single = Setting(steps=20, device=given.device)
    if given.quick:
        small = Setting(hidden=64, layers=1, vocabulary=32, length=8, steps=5, double=True)
        single = Setting(hidden=64, layers=1, vocabulary=32, length=8, steps=5, device=given.device)
    in_double = job("equality", small)
    in_single = job("equality", single, moved=NUM_MOVED)
    drifts = [median(each) for each in in_single["moved"]]
    ratios = [ours / drift for ours, drift in zip(in_single["ours"], drifts, strict=True)]
    table([
        {
            "precision": "double",
            "steps": small.steps,
            "blocks": in_double["blocks"],
            "greatest difference": f"{max(in_double['greatest']):.1e}",
        },
        {
            "precision": "single",
            "steps": single.steps,
            "blocks": in_single["blocks"],
            "greatest difference": f"{max(in_single['greatest']):.1e}",
            "of a run moved by one ulp": _range_of(ratios),
        },
    ])
    goals = [
        at_most("double precision: greatest difference", max(in_double["greatest"]), TOLERANCE),
        at_most("single precision: difference / that of runs moved by one ulp", median(ratios), 1),
    ]
    return {"double": in_double, "single": in_single, "ratios": ratios}, goals


def _range_of(ratios: Sequence[float]) -> str:
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def job(
    name: str, setting: Setting, *, threads: int | None = None, **options: Any
) -> dict[str, Any]:
    """Run a job of ``bench.finetune.runs`` in a process of its own; return its result."""
    return in_fresh_process("bench.finetune.runs", *arguments(name, setting, threads, options))


# -- memory --------------------------------------------------------------------------------


def memory(given: Given) -> Part:
    """Compare the peak memory of a pack, whole and in chunks, with that of one run.

    Packs are measured while all trials wait in memory, and as studies, where they do not.
    """
    figures: dict[str, Any] = {}
    rows, in_studies, goals = [], [], []
    for name, (setting, chunk) in settings(given).items():
        solo = job("memory", setting, method="solo")
        whole = job("memory", setting, at_once=TRIALS)
        parts = job("memory", setting, at_once=chunk)
        base, built, peak = solo["base"], solo["built"], solo["training"]
        limit = base + TRIALS * SLACK * (peak - base)
        figures[name] = {"solo": solo, "whole": whole, "chunks": parts, "limit": limit}
        rows += [
            _memory_row(f"{name}: one run by peft", solo, limit=None),
            _memory_row(f"{name}: {TRIALS} in one pack", whole, limit=limit),
            _memory_row(f"{name}: {TRIALS} in chunks of {chunk}", parts, limit=CHUNKED * peak),
        ]
        highest = max(whole["building"], whole["training"])
        studies = {
            size: job("study_memory", setting, at_once=size)
            for size in dict.fromkeys((TRIALS, chunk, 1))
        }
        figures[name]["studies"] = studies
        for size, found in studies.items():
            in_turn = "one at a time" if size == 1 else f"{size} at a time"
            in_studies.append({
                "a study of 16": f"{name}: {in_turn}",
                "peak, MB": found["training"] / 2**20,
                "kept, MB": found["kept"] / 2**20,
                "peak / one run's": found["training"] / peak,
                "trial-steps a second, with all checks": found["trial_steps_a_second"],
            })
        goals += [
            at_most(f"{name}: peak of a pack / base and 16 runs' needs", highest / limit, 1),
            at_most(
                f"{name}: peak of a study in one pack / base and 16 runs' needs",
                studies[TRIALS]["training"] / limit,
                1,
            ),
            at_most(
                f"{name}: peak of a study one at a time / one run's",
                studies[1]["training"] / max(peak, built),
                CHUNKED,
            ),
        ]
    table(rows)
    table(in_studies)
    return figures, goals


def _memory_row(name: str, found: Mapping[str, Any], *, limit: float | None) -> dict[str, Any]:
    mb = {key: found[key] / 2**20 for key in ("base", "building", "built", "training")}
    return {
        "tokens of a trial": name,
        **{f"{key}, MB": value for key, value in mb.items()},
        "limit, MB": limit and limit / 2**20,
    }


# -- speed ---------------------------------------------------------------------------------


def speed(given: Given) -> Part:
    """Compare trial-steps a second with two processes of separate runs."""
    figures, rows, goals = {}, [], []
    for name, (setting, chunk) in settings(given).items():
        at_once = TRIALS if setting.batch == 1 else 4
        found = _in_turn(setting, at_once=at_once, chunk=chunk, rounds=given.rounds)
        # on one core, since the profiler sees one thread
        shares = job("parts", setting, at_once=at_once, threads=1)
        figures[name] = {"rounds": found, "parts": shares}
        for method, rates in found.items():
            ratios = [own / solo for own, solo in zip(rates, found[SOLO], strict=True)]
            rows.append({
                "tokens of a trial": name,
                "method": method,
                "trial-steps a second": median(rates),
                "of two processes": _range_of(ratios),
            })
            if method == PACK:
                goals.append(
                    at_least(
                        f"{name}: trial-steps a second / two solo processes'",
                        median(ratios),
                        1.5 if setting.batch == 1 else 1.0,
                    )
                )
    table(rows)
    for name, each in figures.items():
        print(f"\nwhere the time of a joint step goes, {name}\n")
        table([
            {"part": part, "share": f"{share:.0%}"}
            for part, share in each["parts"]["parts"].items()
        ])
    return figures, goals


SOLO, PACK = "peft, two processes", "thrifty, one pack"


def _in_turn(setting: Setting, *, at_once: int, chunk: int, rounds: int) -> dict[str, list[float]]:
    """Return the trial-steps a second of each method, one method after the other in each round."""
    cores = os.cpu_count() or 1
    alone = {"threads": 1, "every": 2}
    methods: dict[str, list[dict[str, Any]]] = {
        SOLO: [{"method": "solo", "first": first, **alone} for first in range(2)],
        PACK: [{"at_once": at_once, "threads": cores}],
        "thrifty, two processes": [
            {"at_once": max(1, at_once // 2), "first": first, **alone} for first in range(2)
        ],
        f"thrifty, chunks of {chunk}": [{"at_once": chunk, "threads": cores}],
    }
    rates: dict[str, list[float]] = {method: [] for method in methods}
    with ExitStack() as stack:
        ready = {
            method: [stack.enter_context(Runner(setting, **options)) for options in each]
            for method, each in methods.items()
        }
        for _ in range(rounds):
            for method, runners in ready.items():
                for runner in runners:
                    runner.begin()
                found = [runner.result() for runner in runners]
                began = min(each["began"] for each in found)
                seconds = max(each["ended"] for each in found) - began
                rates[method].append(sum(each["trial_steps"] for each in found) / seconds)
    return rates


# -- a base in 4 and 8 bits ------------------------------------------------------------------


def quantized(given: Given) -> Part:
    """Compare packs over a quantised base with runs by peft over the same one."""
    figures: dict[str, Any] = {}
    rows, goals = [], []
    plain, _ = next(iter(settings(given).values()))
    for bits in ("nf4", "int8"):
        setting = replace(plain, bits=bits)
        same = job("equality", replace(setting, steps=min(20, 2 * setting.steps)), moved=NUM_MOVED)
        drifts = [median(each) for each in same["moved"]]
        apart = median(own / drift for own, drift in zip(same["ours"], drifts, strict=True))
        solo = job("memory", setting, method="solo")
        whole = job("memory", setting, at_once=TRIALS)
        limit = whole["base"] + TRIALS * SLACK * (solo["training"] - whole["base"])
        peak = max(whole["building"], whole["training"])
        rates = _in_turn(setting, at_once=TRIALS, chunk=4, rounds=given.rounds)
        ratios = [own / two for own, two in zip(rates[PACK], rates[SOLO], strict=True)]
        figures[bits] = {"equality": same, "solo": solo, "whole": whole, "rounds": rates}
        rows.append({
            "base": bits,
            "base, MB": whole["base"] / 2**20,
            "blocks": same["blocks"],
            "of a run moved by one ulp": apart,
            "one run, MB": solo["training"] / 2**20,
            f"{TRIALS} in a pack, MB": peak / 2**20,
            "trial-steps a second": median(rates[PACK]),
            "two processes": median(rates[SOLO]),
            "ratio": _range_of(ratios),
        })
        goals += [
            at_most(f"{bits}: difference / that of runs moved by one ulp", apart, 1),
            at_most(f"{bits}: peak of a pack / base and 16 runs' needs", peak / limit, 1),
            at_least(f"{bits}: trial-steps a second / two solo processes'", median(ratios), 1.5),
        ]
    table(rows)
    return figures, goals


# -- packs by size ---------------------------------------------------------------------------


def sizes(given: Given) -> Part:
    """Compare packs of several sizes with one run by peft, and with two processes."""
    figures: dict[str, Any] = {}
    rows, goals = [], []
    of_all = settings(given)
    for name in list(of_all)[: None if given.device == "cuda" else 1]:
        setting, _ = of_all[name]
        found = by_size.measure_all(
            setting if given.quick else replace(setting, steps=10),
            (1, 2) if given.quick else (1, 4, 16, 64),
            limit_s=60.0,
        )
        figures[name] = found
        peers = [
            rate
            for peer in (by_size.SOLO, by_size.TWO)
            for rate in by_size.rates_of(found, peer).values()
        ]
        alone = by_size.rates_of(found, by_size.SOLO).get(1)
        rows += [
            {
                "tokens of a trial": name,
                "method": row["method"],
                "trials": row.get("k"),
                "trial-steps a second": row.get("rate"),
                "times one run": row["rate"] / alone if alone and "rate" in row else None,
                "peak, MB": row.get("peak_mb", row.get("base_mb")),
                "seconds until ready": row.get("ready_s"),
                "blocks": row.get("blocks"),
                "reason": row.get("reason"),
            }
            for row in found
        ]
        best = max(by_size.rates_of(found, by_size.PACK).values(), default=0.0)
        goals.append(at_least(f"{name}: best pack / best of one and two processes",
                              best / max(peers), 1))  # fmt: skip
    print()
    table(rows)
    return figures, goals


# -- 2: a head, and the top block ----------------------------------------------------------


PLAIN, BY_HAND, OURS, ALLOWED = "optuna", "optuna, features", "thrifty", "thrifty, features"
PEERS = {"head": (PLAIN, BY_HAND), "block": (PLAIN, BY_HAND, ALLOWED), "augmented": (PLAIN,)}
SAME = 0.005
"""How much the accuracy of a trial may differ: rounding turns a few samples of 512 around."""


def heads(given: Given) -> Part:
    """Compare studies over a frozen trunk with Optuna's, without and with its features by hand."""
    figures: dict[str, Any] = {}
    rows, goals = [], []
    with tempfile.TemporaryDirectory() as folder:

        def run(method: str, case: str) -> dict[str, Any]:
            more = ["--quick"] if given.quick else []
            return in_fresh_process(
                "bench.finetune.heads",
                method,
                case,
                "--folder",
                folder,
                "--text",
                given.text,
                *more,
            )

        figures["pretraining loss"] = run("pretrain", "head")["loss"]
        for case in given.cases:
            peers = PEERS[case]
            found: dict[str, list[dict[str, Any]]] = {name: [] for name in (OURS, *peers)}
            features = []
            for _ in range(min(given.rounds, 3)):
                for method, results in found.items():
                    results.append(run(method, case))
                if ALLOWED in peers:
                    features.append(run("features", case)["seconds"])
            passes = run("passes", case)["passes"]
            figures[case] = {"rounds": found, "features_s": features, "passes": passes}
            rows += [_head_row(case, name, found) for name in found]
            goals += _head_goals(case, found, features, passes)
    table(rows)
    for case in given.cases:
        print(f"passes of the trunk in a step of all trials, {case}: {figures[case]['passes']}")
    return figures, goals


def rounding(given: Given) -> Part:
    """Compare accuracies with plain runs', beside plain runs that begin one ulp apart.

    At the highest rates, a top block that trains is chaotic: it turns samples around that are next
    to a border, whatever rounds differently, in double precision as well.
    """
    more = ["--quick"] if given.quick else []
    figures: dict[str, Any] = {}
    rows, goals = [], []
    with tempfile.TemporaryDirectory() as folder:

        def run(method: str, *flags: str) -> dict[str, Any]:
            options = (method, "block", "--folder", folder, "--text", given.text)
            return in_fresh_process("bench.finetune.heads", *options, *more, *flags)

        run("pretrain")
        for precision, flags in (("single", []), ("double", ["--double"])):
            ours, plain = run(OURS, *flags)["accuracies"], run("highest", *flags)
            of = [ours[number] for number in plain["configs"]]
            figures[precision] = {"thrifty": of, **plain}
            rows.append(_apart_row(precision, "thrifty's", of, plain["plain"]))
            rows += [
                _apart_row(precision, f"plain, moved by one ulp ({number})", each, plain["plain"])
                for number, each in enumerate(plain["moved"], 1)
            ]
            apart = _apart(of, plain["plain"])
            drift = median(_apart(each, plain["plain"]) for each in plain["moved"])
            name = f"block, {precision} precision: distance / that of runs moved by one ulp"
            goals.append(at_most(name, apart / drift if drift else float(bool(apart)), 1))
    table(rows)
    return figures, goals


def _apart_row(
    precision: str, name: str, found: Sequence[float], plain: Sequence[float]
) -> dict[str, Any]:
    return {
        "precision": precision,
        "runs": name,
        "mean distance, %": 100 * _apart(found, plain),
        "same": _same(found, plain),
    }


def _apart(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the mean distance of accuracies."""
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)


def _same(one: Sequence[float], other: Sequence[float]) -> int:
    return sum(abs(a - b) <= SAME for a, b in zip(one, other, strict=True))


def _head_row(
    case: str, method: str, found: Mapping[str, Sequence[Mapping[str, Any]]]
) -> dict[str, Any]:
    ratios = _times(found, PLAIN, method)
    return {
        "trained": case,
        "method": method,
        "seconds": median(each["seconds"] for each in found[method]),
        "times less than Optuna": _range_of(ratios),
        "best accuracy": max(found[method][0]["accuracies"]),
        "accuracies as Optuna's": _num_same(found[method][0], found[PLAIN][0]),
    }


def _times(found: Mapping[str, Sequence[Mapping[str, Any]]], one: str, other: str) -> list[float]:
    """Return how many times less time a method takes than another one, for each round."""
    pairs = zip(found[one], found[other], strict=True)
    return [a["seconds"] / b["seconds"] for a, b in pairs]


def _num_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> int:
    pairs = zip(one["accuracies"], other["accuracies"], strict=True)
    return sum(abs(a - b) <= SAME for a, b in pairs)


def _head_goals(
    case: str,
    found: Mapping[str, Sequence[Mapping[str, Any]]],
    features: Sequence[float],
    passes: Sequence[float],
) -> list[Goal]:
    ours = found[OURS]
    if case == "augmented":
        return [at_most("augmented: passes of the trunk in a step of all trials", max(passes), 1)]
    goals = [
        equal(
            f"{case}: accuracies as Optuna's",
            _num_same(ours[0], found[PLAIN][0]),
            len(ours[0]["accuracies"]),
        )
    ]
    if case == "head":
        times = median(_times(found, PLAIN, OURS))
        return [*goals, at_least("head: Optuna / thrifty, seconds", times, 5)]
    shares = [
        (trunk + rest["seconds"]) / whole["seconds"]
        for trunk, rest, whole in zip(features, found[ALLOWED], ours, strict=True)
    ]
    return [
        *goals,
        at_least("block: what arithmetic allows / thrifty, seconds", median(shares), 0.9),
        at_least(
            "block: Optuna with features by hand / thrifty, seconds",
            median(_times(found, BY_HAND, OURS)),
            1.5,
        ),
    ]


# -- 3: checkpoints and kills --------------------------------------------------------------


def checkpoints(given: Given) -> Part:
    """Measure the checkpoints of a study, and kill one at random moments."""
    tiny = Setting(hidden=64, layers=2, vocabulary=256, steps=4)
    kills = 2 if given.quick else 20
    files = studies_job("checkpoints", tiny if given.quick else Setting(), trials=4)
    killed = studies_job("kills", tiny, trials=8, kills=kills)
    share = files["bytes"] / files["needed"]
    table([
        {
            "trials": files["trials"],
            "bytes of a trial": f"{files['bytes']:,.0f}",
            "trained parameters and moments": f"{files['needed']:,.0f}",
            "kills": killed["kills"],
            "studies": killed["studies"],
            "with the same records": killed["equal"],
        }
    ])
    return {"files": files, "kills": killed}, [
        at_most("checkpoint bytes / trained parameters and optimizer state", share, 1.1),
        equal(
            f"studies with the same records after {kills} kills", killed["equal"], killed["studies"]
        ),
    ]


def studies_job(name: str, setting: Setting, **options: Any) -> dict[str, Any]:
    given = [name, "--setting", json.dumps(setting.as_dict())]
    for key, value in options.items():
        given += [f"--{key}", str(value)]
    return in_fresh_process("bench.finetune.studies", *given)


if __name__ == "__main__":
    main()
