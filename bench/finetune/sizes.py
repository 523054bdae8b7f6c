"""Packs of adapters by their size: ``python -m bench.finetune.sizes``.

One process measures one run by peft and then packs of each size, the largest first; it says each
result as soon as it has it. Two processes with a run each follow. Each figure is of whole epochs
that take long enough; in the last one, each trial of a pack is verified, as at a stage's end.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from bench.common.processes import RESULT, say_result
from bench.finetune.runner import Runner
from bench.finetune.runs import Packed, Solo, memory_now, peak_memory, synchronise
from bench.finetune.setting import Setting, configurations


SECONDS = 2.0
LEAST_STEPS = 200
"""Steps of each measurement, at least: a short stage, whose last epoch thrifty verifies."""
SOLO, TWO, PACK = "peft, one process", "peft, two processes", "thrifty, one pack"


def measure_all(setting: Setting, sizes: Sequence[int], *, limit_s: float) -> list[dict[str, Any]]:
    """Return a row for each method and size: trial-steps a second and the highest memory.

    Sizes for which no time is left, or that fail, have a reason instead.
    """
    command = ["-m", "bench.finetune.sizes", json.dumps(setting.as_dict())]
    command += ["--sizes", ",".join(map(str, sizes)), "--limit", str(limit_s)]
    rows: list[dict[str, Any]] = []
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(RESULT):
            rows.append(json.loads(line.removeprefix(RESULT)))
            print(rows[-1], flush=True)
    if process.wait():
        rows.append({"method": PACK, "reason": f"ended with exit status {process.returncode}"})
    rows.append(_two_processes(setting))
    print(rows[-1], flush=True)
    return rows


def _two_processes(setting: Setting) -> dict[str, Any]:
    """Measure two processes that train one trial each with peft and plain PyTorch."""
    options = {"method": "solo", "trials": 2, "every": 2, "threads": 1}
    with ExitStack() as stack:
        both = [stack.enter_context(Runner(setting, first=first, **options)) for first in range(2)]
        epochs = _first(setting)
        while True:
            for runner in both:
                runner.begin(epochs=epochs)
            found = [runner.result() for runner in both]
            seconds = max(one["ended"] for one in found) - min(one["began"] for one in found)
            if seconds >= 0.7 * SECONDS:
                steps = sum(one["trial_steps"] for one in found)
                peak = sum(one["peak"] for one in found)
                return {"method": TWO, "k": 2, "rate": steps / seconds, "peak_mb": peak / 2**20}
            epochs = _more(epochs, seconds)


def _first(setting: Setting) -> int:
    return -(-LEAST_STEPS // setting.steps)


def _more(epochs: int, seconds: float) -> int:
    return max(2 * epochs, round(1.1 * epochs * SECONDS / max(seconds, 1e-3)))


def measure(run: Packed | Solo, setting: Setting, num_trials: int) -> float:
    """Return trial-steps a second of whole epochs."""
    epochs = _first(setting)
    while True:
        synchronise(setting)
        began = time.monotonic()
        for epoch in range(epochs):
            run.train(ends=epoch == epochs - 1)
        synchronise(setting)
        seconds = time.monotonic() - began
        if seconds >= 0.7 * SECONDS:
            return epochs * setting.steps * num_trials / seconds
        epochs = _more(epochs, seconds)


def _row(setting: Setting, method: str, size: int) -> dict[str, Any]:
    said: dict[str, Any] = {"method": method, "k": size}
    empty = memory_now(setting)
    try:
        with peak_memory(setting) as peak:
            began = time.monotonic()
            configs = configurations(size)
            run = (
                Solo(setting, configs) if method == SOLO else Packed(setting, configs, at_once=size)
            )
            run.train()
            synchronise(setting)
            said["ready_s"] = time.monotonic() - began
            said["rate"] = measure(run, setting, size)
    except Exception as error:  # noqa: BLE001 -- a size that fails is a result
        return {**said, "reason": f"{type(error).__name__}: {error}".partition("\n")[0]}
    if isinstance(run, Packed):
        said["blocks"] = run.num_blocks
    return {**said, "peak_mb": (peak["bytes"] - empty) / 2**20}


def rates_of(rows: Sequence[Mapping[str, Any]], method: str) -> dict[int, float]:
    """Return trial-steps a second of a method by number of trials."""
    return {row["k"]: row["rate"] for row in rows if row["method"] == method and "peak_mb" in row}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("setting", type=json.loads)
    parser.add_argument("--sizes", default="1,4,16,64")
    parser.add_argument("--limit", type=float, default=80.0, help="seconds")
    args = parser.parse_args()
    setting = Setting(**args.setting)
    sizes = sorted((int(size) for size in args.sizes.split(",")), reverse=True)
    began = time.monotonic()
    # What libraries load late is loaded before anything is measured.
    tiny = Setting(hidden=64, layers=1, vocabulary=64, length=8, steps=1, device=setting.device)
    Packed(tiny, configurations(2), at_once=2).train()
    Solo(tiny, configurations(1)).train()
    base = sum(p.numel() * p.element_size() for p in setting.base().parameters())
    say_result({"method": "base", "base_mb": base / 2**20})
    for method, size in [(SOLO, 1), *((PACK, size) for size in sizes)]:
        if time.monotonic() - began > args.limit and method != SOLO:
            say_result({"method": method, "k": size, "reason": "no time was left"})
            continue
        say_result(_row(setting, method, size))
        gc.collect()
        if setting.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
