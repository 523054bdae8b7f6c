"""The dashboard: what 200 readers cost a running study, and how soon a large study is painted.

    python -m bench.bench_dashboard [--quick] [--repeats 3]

*Load*: a study of digits trains while the dashboard serves it from another process and readers in a
third ask as open pages do (``bench.dashboard.readers``). Readers alternate between asking and
resting, so that other load on this machine affects both alike. Each turn of asking is compared with
the turn of rest after it. The readers' own work, which would be on other people's machines, has
the lowest priority.

*First paint*: Chromium opens the overview of 100,000 trials. The time is measured from the request
to the figures, and to the first drawn chart.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from playwright.sync_api import Browser, sync_playwright

import thrifty as th
from bench.common.digits_task import Digits
from bench.common.harness import at_most, equal, finish, parser, table
from bench.common.processes import RESULT, in_fresh_process, say_result
from bench.dashboard.rows import fill
from thrifty.core import EpochDone
from thrifty.store import Store


READERS = 200


def study(url: str, *, num_trials: int) -> None:
    """Train in the child process, and report how long that took."""
    made = th.Study(
        Digits(),
        th.Space(lr=th.Float(0.01, 0.2, log=True)),
        algorithm=th.RandomSearch(max_epochs=9, num_trials=num_trials),
        metric="accuracy",
        mode="max",
        storage=url,
        name="load",
        seed=0,
    )
    epochs: list[float] = []

    class Epochs:
        def on_event(self, event: object) -> None:
            if isinstance(event, EpochDone):
                epochs.append(time.time())

    # If the driver chose the plan itself, runs would differ by more than what is measured.
    executor = th.Local(workers=2, threads=1, pack_size=8)
    made.run(executor=executor, progress=False, observers=[Epochs()])
    say_result({"epochs": epochs})


@contextmanager
def dashboard(url: str) -> Iterator[str]:
    """Start a dashboard in a process of its own, as a user does; yield its address."""
    command = [sys.executable, "-m", "thrifty.cli", "dashboard", url, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1].rstrip("/")
    finally:
        process.terminate()
        process.wait(30)


def watched(folder: Path, *, num_trials: int, readers: int, window_s: float) -> dict[str, Any]:
    """Run a study during which the readers alternate between asking and resting.

    Returns:
        Epochs a second of each turn, and what readers saw.
    """
    url = f"sqlite:///{folder}/t.db"
    with Store.open(url):
        pass  # the dashboard needs an existing database
    command = [sys.executable, "-m", "bench.dashboard.readers"]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    turns: list[float] = []
    with dashboard(url) as address, ThreadPoolExecutor(1) as pool:
        watching = subprocess.Popen([*command, address, str(readers)], **pipes)
        study = pool.submit(
            in_fresh_process, "bench.bench_dashboard", "--study", url, str(num_trials)
        )
        assert watching.stdin is not None
        while not study.done():
            watching.stdin.write("off\n" if len(turns) % 2 else "on\n")
            watching.stdin.flush()
            turns.append(time.time())
            wait([study], timeout=window_s)
        out, _ = watching.communicate("stop\n", timeout=120)
    seen = json.loads(out.rpartition(RESULT)[2])
    epochs = np.array(study.result()["epochs"])
    return {**seen, "rates": _rates(epochs, turns)}


def _rates(epochs: np.ndarray, turns: list[float]) -> list[tuple[float, float]]:
    """Return the epochs a second while readers asked, and in the turn of rest after it."""
    settling = 0.2  # share of a turn in which earlier requests are still answered
    rates: list[float] = []
    for begin, end in pairwise(turns):
        settled = begin + settling * (end - begin)
        num = int(((epochs > settled) & (epochs <= end)).sum())
        is_whole = begin >= epochs.min() and end <= epochs.max()
        rates.append(num / (end - settled) if is_whole else 0.0)
    pairs = zip(rates[::2], rates[1::2], strict=False)
    return [(asked, rested) for asked, rested in pairs if asked and rested]


def load(*, num_trials: int, readers: int, window_s: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        run = watched(Path(name), num_trials=num_trials, readers=readers, window_s=window_s)
    rates = run["rates"]
    return {
        "turns": len(rates),
        "epochs_per_s_alone": median(rested for _, rested in rates),
        "epochs_per_s_watched": median(asked for asked, _ in rates),
        "slower_percent": 100 * (median(rested / asked for asked, rested in rates) - 1),
        "requests": run["requests"],
        "failed_requests": run["failed"],
        "answer_median_ms": run["median_ms"],
        "answer_p99_ms": run["p99_ms"],
    }


def paint(path: Path, *, repeats: int) -> dict[str, Any]:
    """Measure the first paint with a fresh dashboard and a fresh page each time."""
    seconds: list[tuple[float, float, float]] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        browser.new_page().goto("about:blank")
        for _ in range(repeats):
            with dashboard(f"sqlite:///{path}") as address:
                seconds.append(_painted(browser, address))
        browser.close()
    names = ("first_figures_s", "first_chart_s", "list_s")
    return {
        name: median(found) for name, found in zip(names, zip(*seconds, strict=True), strict=True)
    }


def _painted(browser: Browser, address: str) -> tuple[float, float, float]:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    began = time.perf_counter()
    page.goto(f"{address}/#/studies/1/overview")
    page.wait_for_selector(".tile")
    figures = time.perf_counter() - began
    page.wait_for_selector("canvas")
    chart = time.perf_counter() - began
    began = time.perf_counter()
    page.goto(f"{address}/#/")
    page.wait_for_selector("td.name")
    context.close()
    return figures, chart, time.perf_counter() - began


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--study", nargs=2, metavar=("URL", "TRIALS"), help="the child")
    args = arguments.parse_args()
    if args.study:
        study(args.study[0], num_trials=int(args.study[1]))
        return
    num_rows, num_trials = (2_000, 200) if args.quick else (100_000, 6_000)
    readers = 20 if args.quick else READERS
    with tempfile.TemporaryDirectory() as name:
        fill(Path(name) / "rows.db", num_trials=num_rows)
        painted = paint(Path(name) / "rows.db", repeats=args.repeats)
    window_s = 0.5 if args.quick else 4.0
    loaded = load(num_trials=num_trials, readers=readers, window_s=window_s)
    figures = {"readers": readers, **loaded, "rows": num_rows, **painted}
    table([{"figure": name, "value": value} for name, value in figures.items()])
    finish(
        "dashboard",
        figures,
        [
            at_most(f"{readers} readers slow a study by, in %", loaded["slower_percent"], 2.0),
            equal("requests that failed", loaded["failed_requests"], 0),
            at_most(f"first figures of {num_rows:,} trials, in s", painted["first_figures_s"], 2.0),
            at_most(f"first chart of {num_rows:,} trials, in s", painted["first_chart_s"], 2.0),
        ],
    )


if __name__ == "__main__":
    main()
