"""Hyperband on MNIST, packed: thrifty's measured choice, the pack paper's policies, and no packing.

    python -m bench.bench_pack_hyperband [--quick] [--repeats 1] [--images 1600]
        [--data FOLDER] [--from-scratch]

Liu et al., "Understanding and Optimizing Packed Neural Network Training for Hyper-Parameter
Tuning", DEEM 2021: R=81, eta=3, their search space and three policies, packs of nine. To fit into
minutes, training is on the first 1,600 images of MNIST's test files and validation on the 400 after
them (``--images``); the networks are small. All methods draw the same configurations, keep the best
third of each rung and resume from kept states (the paper starts anew at each rung:
``--from-scratch``). Everything runs in one process with one thread, one method after the other.

*plain* trains one trial after the other.

*paper* trains the packs of a policy on the concatenated back-end, each until its last member is
done. One thing is not copied: in the paper all members of a pack get one batch, padded to the
largest. Here each keeps its own batches, so that its result is that of the trial alone (``padded``
is the share of rows that the paper would have computed for nothing).

*thrifty* gives whole rungs to ``AutoBackend``, which measures what is best for each structure as a
worker has it (``patient``); the measuring is in its time.

*fused* gives it the same packs as *paper*, one after the other.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from bench.common import mnist
from bench.common.harness import Goal, at_least, at_most, equal, finish, median_ratio, parser, table
from bench.pack.policies import batch_size_packs, nearest_packs, random_packs
from thrifty.pack import (
    AutoBackend,
    Backend,
    Calibration,
    ConcatenatedBackend,
    EpochPlan,
    Member,
    SoloBackend,
    State,
    Task,
    borrowed_streams,
)
from thrifty.search import Hyperband


SEED = 0
ETA = 3
PACK_SIZE = 9
Config = dict[str, Any]
Packs = list[list[int]]
Policy = Callable[[Sequence[Config], np.random.Generator], Packs]
Runs = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class Method:
    """A back-end, and which trials of a rung it gets at a time."""

    backend: Callable[..., Backend]
    policy: Policy


def alone(configs: Sequence[Config], _: np.random.Generator) -> Packs:
    return [[i] for i in range(len(configs))]


def whole(configs: Sequence[Config], _: np.random.Generator) -> Packs:
    return [list(range(len(configs)))]


POLICIES: dict[str, Policy] = {
    "random": lambda configs, rng: random_packs(configs, size=PACK_SIZE, rng=rng),
    "batch size": lambda configs, _: batch_size_packs(configs, size=PACK_SIZE),
    "nearest": lambda configs, rng: nearest_packs(
        configs, size=PACK_SIZE, values=mnist.VALUES, rng=rng
    ),
}
METHODS = {
    "plain": Method(backend=SoloBackend, policy=alone),
    **{
        f"paper, {name}": Method(backend=ConcatenatedBackend, policy=policy)
        for name, policy in POLICIES.items()
    },
    "thrifty": Method(backend=AutoBackend, policy=whole),
    **{
        f"fused, {name}": Method(backend=AutoBackend, policy=policy)
        for name, policy in POLICIES.items()
    },
}


@dataclass(eq=False)
class Trial:
    values: Config
    state: State | None = None
    score: float = -math.inf


@dataclass
class Tally:
    epochs: int = 0
    packs: int = 0
    diverged: int = 0
    best: float = 0.0
    rows: int = 0
    padding: int = 0
    calibrations: list[Calibration] = field(default_factory=list)


def main() -> None:
    options = parser(__doc__)
    options.set_defaults(repeats=1)
    options.add_argument("--images", type=int, default=1600, help="images to train on")
    options.add_argument("--data", type=Path, default=mnist.FOLDER, help="folder of MNIST's files")
    options.add_argument(
        "--from-scratch", action="store_true", help="no kept states, as in the paper"
    )
    args = options.parse_args()
    num_images, max_epochs = (200, 9) if args.quick else (args.images, 81)
    try:
        mnist.load(args.data, num_images)
    except (FileNotFoundError, ValueError) as error:
        options.error(str(error))
    print(
        f"trained on {num_images:,} images, validated on {num_images // 4:,}; Hyperband with "
        f"R={max_epochs}, eta={ETA}; "
        f"rungs {'start anew' if args.from_scratch else 'go on from kept states'}; packs of "
        f"{PACK_SIZE}"
    )
    warm_up(args.data)
    runs: Runs = {}
    for _ in range(args.repeats):
        for name, method in METHODS.items():
            task = mnist.Mnist(args.data, num_images=num_images)
            with borrowed_streams():
                result = hyperband(
                    method, task, max_epochs=max_epochs, from_scratch=args.from_scratch
                )
            print(
                f"{name}: {result['seconds']:.2f} s ({result['cpu_seconds']:.2f} s of "
                f"processor time), "
                f"{result['epochs']} epochs",
                flush=True,
            )
            runs.setdefault(name, []).append(result)
    report(runs)


def warm_up(folder: Path) -> None:
    """Let torch import what it needs (seconds) before any clock runs."""
    torch.set_num_threads(1)
    for name in ("plain", "thrifty"):
        hyperband(METHODS[name], mnist.Mnist(folder, num_images=40), max_epochs=1)


def hyperband(
    method: Method, task: Task, *, max_epochs: int, from_scratch: bool = False
) -> dict[str, Any]:
    """Run the whole algorithm; a trial's last epoch decides whether it stays."""
    rng, tally = np.random.default_rng(SEED), Tally()
    told = {"on_calibrated": tally.calibrations.append}
    began, cpu = time.perf_counter(), time.process_time()
    backend = method.backend(
        task, **({**told, "patient": True} if method.backend is AutoBackend else {})
    )
    drawn = iter(configurations())
    for bracket in Hyperband(max_epochs=max_epochs, eta=ETA).brackets():
        trials = [Trial(values) for values in islice(drawn, bracket.num_trials)]
        first = 0
        for last in bracket.epochs:
            for pack in method.policy([trial.values for trial in trials], rng):
                train(backend, [trials[i] for i in pack], epochs=range(first, last), tally=tally)
            alive = [trial for trial in trials if trial.score > -math.inf]
            trials = sorted(alive, key=lambda trial: -trial.score)[: len(trials) // ETA]
            if from_scratch:
                trials = [Trial(trial.values) for trial in trials]
            else:
                first = last
    return {
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - cpu,
        "epochs": tally.epochs,
        "best": tally.best,
        "packs": tally.packs,
        "padding": tally.padding / tally.rows,
        "diverged": tally.diverged,
        "chosen": ["fused" if c.fuses(PACK_SIZE) else "plain" for c in tally.calibrations],
    }


def configurations() -> Iterator[Config]:
    """Yield all configurations in random order: any first ones are a sample without replacement."""
    everything = list(product(*mnist.VALUES.values()))
    for i in np.random.default_rng(SEED).permutation(len(everything)):
        yield dict(zip(mnist.VALUES, everything[i], strict=True))


def train(backend: Backend, trials: Sequence[Trial], *, epochs: range, tally: Tally) -> None:
    """Train a pack until all of it has trained these epochs."""
    note_padding(trials, tally)
    for slot, trial in enumerate(trials):
        state, trial.state = trial.state, None
        backend.put(slot, Member(values=trial.values, seed=SEED, epoch=epochs.start, state=state))
    at = dict.fromkeys(range(len(trials)), epochs.start)
    waiting = set(at)
    while at:
        plans = {s: EpochPlan(epoch=at[s], values=trials[s].values) for s in waiting}
        waiting.clear()
        for slot, outcome in backend.step(plans).items():
            trial = trials[slot]
            tally.epochs += 1
            at[slot] += 1
            if isinstance(outcome, Exception):
                trial.score = -math.inf
                tally.diverged += 1
            elif at[slot] < epochs.stop:
                waiting.add(slot)
                continue
            else:
                trial.score, trial.state = outcome["accuracy"], backend.state(slot)
                tally.best = max(tally.best, trial.score)
            backend.release(slot)
            del at[slot]


def note_padding(trials: Sequence[Trial], tally: Tally) -> None:
    """Count the rows of a joint step if all had the largest batch, and how many are padding."""
    sizes = [trial.values["batch_size"] for trial in trials]
    tally.packs += 1
    tally.rows += len(sizes) * max(sizes)
    tally.padding += len(sizes) * max(sizes) - sum(sizes)


def report(runs: Runs) -> None:
    rows = []
    for name, results in runs.items():
        first = results[0]
        rows.append({
            "method": name,
            "seconds": median(r["seconds"] for r in results),
            "CPU seconds": median(r["cpu_seconds"] for r in results),
            "plain / it": ratio(runs, "plain", name),
            "epochs": first["epochs"],
            "best accuracy": first["best"],
            "packs": first["packs"],
            "padded": first["padding"] if name.startswith("paper") else None,
            "diverged": first["diverged"],
            "structures fused": f"{first['chosen'].count('fused')} of {len(first['chosen'])}"
            if first["chosen"]
            else None,
            "runs": len(results),
        })
    table(rows)
    finish("pack_hyperband", {"rows": rows, "runs": runs}, goals(runs))


def goals(runs: Runs) -> list[Goal]:
    best = [result["best"] for results in runs.values() for result in results]
    epochs = [result["epochs"] for results in runs.values() for result in results]
    others = ["plain", *(name for name in METHODS if name.startswith("paper"))]
    return [
        *(at_least(f"{name} / thrifty", ratio(runs, name, "thrifty"), 1.0) for name in others),
        at_most("best accuracy, largest less smallest", max(best) - min(best), 0.01),
        equal("epochs trained, most less fewest", max(epochs) - min(epochs), 0),
    ]


def ratio(runs: Runs, one: str, other: str) -> float:
    """Return the ratio of processor time; runs have one thread, so others do not disturb it."""
    return median_ratio(runs[one], runs[other], of="cpu_seconds")


if __name__ == "__main__":
    main()
