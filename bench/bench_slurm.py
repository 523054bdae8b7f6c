"""A study on Slurm jobs that run into time limits and are killed, against the same study here.

    python -m bench.bench_slurm [--quick] [--cluster slurm] [--partition debug]

A grid of rates and steps on a small task whose epochs sleep, so that jobs live long. The time limit
is two minutes, of which a job is told 30 s before; while the study runs, random jobs are killed
without notice. The goal is the same records: configurations, states and every value of
every curve. Epochs that were trained twice are those after the last kept state of a killed job.

With ``--cluster local`` the jobs are processes that submitit starts here.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import thrifty as th
from bench.common.harness import at_least, equal, finish, parser, table
from thrifty.core import EpochDone
from thrifty.testing import LineTask


class SleepyTask(LineTask):
    """A task whose epochs take a while, and say which job trains them."""

    def __init__(self, folder: Path, seconds: float) -> None:
        super().__init__()
        self.folder, self.seconds, self.driver = folder, seconds, os.getpid()

    def identity(self) -> dict[str, str]:
        """Return a name: where and how slowly it is trained is no part of it."""
        return {"task": "sleepy"}

    def metrics(self, model: Any, batch: Any) -> dict[str, Any]:
        """Sleep, and return the error."""
        if os.getpid() != self.driver:
            (self.folder / str(os.getpid())).touch()
            time.sleep(self.seconds)
        return dict(super().metrics(model, batch))


class Killer:
    """Kills jobs at random moments, in a thread."""

    def __init__(self, folder: Path, *, every_s: float, most: int) -> None:
        self.killed: list[str] = []
        self._folder, self._every_s, self._most = folder, every_s, most
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        rng = random.Random(0)
        while len(self.killed) < self._most:
            if self._is_over.wait(rng.uniform(0.5, 1.5) * self._every_s):
                return
            alive = [path.name for path in self._folder.iterdir() if _lives(path.name)]
            if alive:
                victim = rng.choice(sorted(alive))
                os.kill(int(victim), signal.SIGKILL)
                self.killed.append(victim)

    def stop(self) -> None:
        """Kill no more."""
        self._is_over.set()
        self._thread.join()


class Counter:
    """Counts the epochs that were trained, each time that they were."""

    def __init__(self) -> None:
        self.num_epochs = 0

    def on_event(self, event: object) -> None:
        """Count an epoch."""
        self.num_epochs += isinstance(event, EpochDone)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--cluster", default="slurm", choices=["slurm", "local"])
    options.add_argument("--partition", default=None)
    args = options.parse_args()
    jobs, rates, epochs, seconds = (3, 2, 8, 0.05) if args.quick else (20, 20, 30, 2.0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        here = study(folder / "here", rates=rates, epochs=epochs, seconds=0.0)
        here.run(progress=False, executor=th.Local(pack="solo"))
        there = study(folder / "there", rates=rates, epochs=epochs, seconds=seconds)
        counter, began = Counter(), time.perf_counter()
        killer = Killer(
            folder / "there" / "jobs",
            every_s=2.0 if args.quick else 6.0,
            most=1 if args.quick else 20,
        )
        there.run(
            progress=False,
            observers=[counter],
            executor=th.Slurm(
                workers=jobs,
                cluster=args.cluster,
                partition=args.partition,
                host="127.0.0.1",
                time=2,
                signal_s=30,
                folder=str(folder / "slurm"),
                pack="solo",
            ),
        )
        killer.stop()
        seconds = time.perf_counter() - began
        num_jobs = len(list((folder / "there" / "jobs").iterdir()))
        same = records(here) == records(there)
        unique = here.savings.unique_epochs
        row = {
            "jobs at a time": jobs,
            "jobs that trained": num_jobs,
            "killed": len(killer.killed),
            "trials": len(here.trials),
            "unique epochs": unique,
            "trained": counter.num_epochs,
            "seconds": seconds,
        }
    table([row])
    goals = [
        equal("records that are those of a local run", float(same), 1.0),
        at_least("jobs that trained / jobs at a time", num_jobs / jobs, 1.0),
    ]
    finish("slurm", {"study": row, "cluster": args.cluster}, goals)


def study(folder: Path, *, rates: int, epochs: int, seconds: float) -> th.Study:
    """Return the study of a grid: each rate alone, and with two steps."""
    jobs = folder / "jobs"
    jobs.mkdir(parents=True)
    values = [0.01 * (1 + i) for i in range(rates)]
    steps = [th.Step(value, [at]) for value in values for at in (epochs // 3, 2 * epochs // 3)]
    return th.Study(
        SleepyTask(jobs, seconds),
        th.Space(lr=th.Choice([*values, *steps])),
        algorithm=th.GridSearch(max_epochs=epochs),
        metric="mse",
        mode="min",
        storage=f"sqlite:///{folder}/t.db",
        name="sleepy",
    )


def records(done: th.Study) -> list[tuple[Any, ...]]:
    """Return what the database says of all trials, without times and machines."""
    return [(trial.number, trial.config, trial.state, trial.curve) for trial in done.trials]


def _lives(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
