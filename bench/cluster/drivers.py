"""Two users, two processes, one plan on PostgreSQL.

What each study needs is trained once, by either process.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections import Counter
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import thrifty as th
from bench.common.digits_task import Digits
from bench.common.harness import Part, equal, table
from bench.common.postgresql import PrivatePostgreSQL
from thrifty.core import EpochDone
from thrifty.plan import SearchPlan
from thrifty.space import Timeline
from thrifty.store import Store


class _Trained:
    def __init__(self) -> None:
        self.epochs: Counter[tuple[int, int]] = Counter()

    def on_event(self, event: object) -> None:
        if isinstance(event, EpochDone):
            self.epochs[event.node, event.epoch] += 1


def algorithms(*, quick: bool) -> dict[str, th.Algorithm]:
    """Return the algorithms by study name: users who search the same space in different ways."""
    epochs = 9 if quick else 27
    return {
        "hyperband": th.Hyperband(max_epochs=epochs, eta=3),
        "halving": th.SuccessiveHalving(max_epochs=epochs, num_trials=12 if quick else 48, eta=3),
    }


def drivers(args: argparse.Namespace) -> Part:
    """Run two studies in two processes on one plan."""
    figures = two_drivers(quick=args.quick)
    table([figures])
    goals = [
        equal(
            "epochs beyond the least", figures["epochs together"] - figures["epochs at least"], 0
        ),
        equal("epochs trained twice", figures["epochs trained twice"], 0),
        equal("answers are those alone", float(figures["same answers"]), 1),
    ]
    return figures, goals


def two_drivers(*, quick: bool) -> dict[str, Any]:
    """Run both studies at once on one plan, and each alone.

    Returns:
        Figures, and whether any answer differs.
    """
    chosen = algorithms(quick=quick)
    with tempfile.TemporaryDirectory() as folder, PrivatePostgreSQL(durable=True) as server:
        trained, together_s = _together(Path(folder), server.url, chosen, quick=quick)
        least = _least(server.url, chosen)
        alone_epochs, same, alone_s = 0, True, 0.0
        for name, algorithm in chosen.items():
            url = f"sqlite:///{folder}/{name}.db"
            counts = _Trained()
            began = time.perf_counter()
            alone = _study(name, algorithm, url, folder=Path(folder) / name)
            alone.run(progress=False, observers=[counts], executor=_EXECUTOR)
            alone_s += time.perf_counter() - began
            alone_epochs += sum(counts.epochs.values())
            shared = _study(name, algorithm, server.url, folder=Path(folder))
            same &= _answers(shared) == _answers(alone)
    return {
        "studies": len(chosen),
        "epochs together": sum(trained.values()),
        "epochs at least": least,
        "epochs trained twice": sum(count - 1 for count in trained.values()),
        "epochs one by one": alone_epochs,
        "same answers": same,
        "together_s": together_s,
        "one_by_one_s": alone_s,
    }


def space(epochs: int) -> th.Space:
    """Return schedules that differ from the start, or from some later epoch on.

    Later ones differ after a ninth, a third or two thirds of the epochs.
    """
    early, third, late = epochs // 9, epochs // 3, 2 * epochs // 3
    drops = [[], [third], [late], [third, late], [early], [early, late]]
    return th.Space(
        lr=th.Choice([
            *(th.Step(lr, drop, gamma=0.1) for lr in (0.03, 0.1, 0.3) for drop in drops),
            *(th.Cosine(lr, epochs=float(epochs)) for lr in (0.03, 0.1, 0.3)),
        ])
    )


_EXECUTOR = th.Local(workers=1, threads=1, pack="solo")


def _together(
    folder: Path, url: str, chosen: dict[str, th.Algorithm], *, quick: bool
) -> tuple[Counter[tuple[int, int]], float]:
    spawn = multiprocessing.get_context("spawn")
    barrier, results = spawn.Barrier(len(chosen)), spawn.Queue()
    children = [
        spawn.Process(
            target=_drive,
            args=(folder, url, name),
            kwargs={"quick": quick, "barrier": barrier, "results": results},
        )
        for name in chosen
    ]
    for child in children:
        child.start()
    total: Counter[tuple[int, int]] = Counter()
    found = [results.get(timeout=3600) for _ in children]
    for child in children:
        child.join()
    for epochs, _, _ in found:
        total.update(epochs)
    return total, max(f[2] for f in found) - min(f[1] for f in found)


def _drive(
    folder: Path, url: str, name: str, *, quick: bool, barrier: Barrier, results: Any
) -> None:
    study = _study(name, algorithms(quick=quick)[name], url, folder=folder)
    trained = _Trained()
    barrier.wait()
    began = time.time()
    study.run(progress=False, observers=[trained], executor=_EXECUTOR)
    results.put((trained.epochs, began, time.time()))


def _study(name: str, algorithm: th.Algorithm, url: str, *, folder: Path) -> th.Study:
    return th.Study(
        Digits(),
        space(algorithm.max_epochs),
        algorithm=algorithm,
        metric="accuracy",
        storage=th.Storage(url=url, checkpoints=str(folder / "checkpoints")),
        name=name,
    )


def _answers(study: th.Study) -> list[tuple[Any, ...]]:
    return [(t.number, t.config, t.curve, t.state) for t in study.trials]


def _least(url: str, chosen: dict[str, th.Algorithm]) -> int:
    """Return the fewest epochs that the union of all trials takes, counted on a plan of its own."""
    plan = SearchPlan()
    with Store.open(url, create=False) as store:
        for name, algorithm in chosen.items():
            for trial in store.studies.load(store.studies.get(name).id).trials:
                node = plan.insert(Timeline(trial.config, epochs=algorithm.max_epochs))
                plan.request((name, trial.number), node, trial.target)
    return plan.num_epochs_needed
