"""A study on a Ray cluster of its own, as a program.

    python -m tests.run.ray_driver FOLDER HOW COUNT

``HOW`` is what it does at event number ``COUNT``: ``kill`` itself, ``interrupt`` (report that it is
ready, and let the test press Ctrl-C), ``lose`` its cluster, or ``nothing``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from functools import partial
from pathlib import Path

import psutil

import thrifty.run._ray as module
from tests.study.helpers import make_study, records
from thrifty.core import WorkerLostError
from thrifty.run import Ray
from thrifty.run._cluster import Pulse
from thrifty.search import SuccessiveHalving


ALGORITHM = SuccessiveHalving(max_epochs=6, num_trials=12, eta=2)
OWN = Ray(address="local", workers=2, threads=1, pack="solo", num_cpus=0.5)


def everything(study):
    """Return all that a study leaves behind, independent of which trial was done first."""
    state, trials, epochs, nodes = records(study)
    return state, trials, sorted(epochs, key=lambda each: each[:2]), nodes


class At:
    """Observer that acts at the n-th event."""

    def __init__(self, count: int, what) -> None:
        self._left = count
        self._what = what

    def on_event(self, event) -> None:
        self._left -= 1
        if self._left == 0:
            self._what()


def say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt() -> None:
    say("now")
    sys.stdin.readline()


def lose() -> None:
    """Kill all processes of the cluster, as a power cut would."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def main(folder: str, how: str, count: int) -> None:
    if how == "lose":
        vars(module)["Pulse"] = partial(Pulse, every_s=0.2, patience_s=2.0)
    what = {"kill": kill, "interrupt": interrupt, "lose": lose, "nothing": list}[how]
    study = make_study(folder, algorithm=ALGORITHM)
    try:
        study.run(progress=False, executor=OWN, observers=[At(count, what)])
    except WorkerLostError as error:
        (Path(folder) / "error").write_text(str(error))
        sys.exit(3)
    say("end")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
