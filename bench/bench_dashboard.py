"""The dashboard: what 200 readers cost a study that runs, and how soon a large study is painted.

    python -m bench.bench_dashboard [--quick] [--repeats 3]

*Load*: a study of digits trains while the dashboard serves it from another process and readers in a third ask as open pages do
(``_dashboard_readers``). It is run with and without them in turns; medians are compared. The readers' own work, which
would be other people's machines, has the lowest priority. *First paint*: Chromium opens the overview of 100,000 trials; from
the request to the figures, and to the first drawn chart.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from playwright.sync_api import Browser, sync_playwright

import thrifty as th
from bench._dashboard_rows import fill
from bench._digits_task import Digits
from bench._harness import (
    RESULT,
    at_most,
    equal,
    finish,
    in_fresh_process,
    parser,
    say_result,
    table,
)
from thrifty.store import Store


READERS = 200


def study(url: str, *, num_trials: int) -> None:
    """The child: trains, and says how long that took."""
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
    began = time.perf_counter()
    # a plan of its own choice would differ from run to run by more than what is measured
    made.run(executor=th.Local(workers=2, threads=1, pack_size=8), progress=False)
    say_result({"study_s": time.perf_counter() - began})


@contextmanager
def dashboard(url: str) -> Iterator[str]:
    """A dashboard in a process of its own, as a user starts it; its address."""
    command = [sys.executable, "-m", "thrifty.cli", "dashboard", url, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1].rstrip("/")
    finally:
        process.terminate()
        process.wait(30)


def trained(folder: Path, *, num_trials: int, readers: int) -> dict[str, Any]:
    """One run, alone or watched."""
    url = f"sqlite:///{folder}/t.db"
    child = ("bench.bench_dashboard", "--study", url, str(num_trials))
    if not readers:
        return in_fresh_process(*child)
    with Store.open(url):
        pass  # the dashboard needs a database to open
    command = ["nice", "-n", "19", sys.executable, "-m", "bench._dashboard_readers"]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with dashboard(url) as address:
        watching = subprocess.Popen([*command, address, str(readers)], **pipes)
        result = in_fresh_process(*child)
        out, _ = watching.communicate("stop\n", timeout=120)
    seen = json.loads(out.rpartition(RESULT)[2])
    return {**result, **seen}


def load(*, repeats: int, num_trials: int, readers: int) -> dict[str, Any]:
    alone: list[dict[str, Any]] = []
    watched: list[dict[str, Any]] = []
    for repeat in range(repeats):
        turns = [(alone, 0), (watched, readers)]
        for runs, number in turns if repeat % 2 == 0 else reversed(turns):
            with tempfile.TemporaryDirectory() as name:
                runs.append(trained(Path(name), num_trials=num_trials, readers=number))
    before, after = (median(run["study_s"] for run in runs) for runs in (alone, watched))
    return {
        "study_alone_s": before,
        "study_watched_s": after,
        "slower_percent": 100 * (after / before - 1),
        "requests": sum(run["requests"] for run in watched),
        "failed_requests": sum(run["failed"] for run in watched),
        "answer_median_ms": median(run["median_ms"] for run in watched),
        "answer_p99_ms": max(run["p99_ms"] for run in watched),
    }


def paint(path: Path, *, repeats: int) -> dict[str, Any]:
    """A dashboard and a page that have seen nothing before, each time."""
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
        name: median(found)
        for name, found in zip(names, zip(*seconds, strict=True), strict=True)
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
    num_rows, num_trials = (2_000, 4) if args.quick else (100_000, 800)
    readers = 20 if args.quick else READERS
    with tempfile.TemporaryDirectory() as name:
        fill(Path(name) / "rows.db", num_trials=num_rows)
        painted = paint(Path(name) / "rows.db", repeats=args.repeats)
    loaded = load(repeats=args.repeats, num_trials=num_trials, readers=readers)
    figures = {"readers": readers, **loaded, "rows": num_rows, **painted}
    table([{"figure": name, "value": value} for name, value in figures.items()])
    finish(
        "dashboard",
        figures,
        [
            at_most(f"{readers} readers slow a study by, in %", loaded["slower_percent"], 2.0),
            equal("requests that failed", loaded["failed_requests"], 0),
            at_most(
                f"first figures of {num_rows:,} trials, in s", painted["first_figures_s"], 2.0
            ),
            at_most(f"first chart of {num_rows:,} trials, in s", painted["first_chart_s"], 2.0),
        ],
    )


if __name__ == "__main__":
    main()
