"""K trials on one GPU: thrifty's packs beside solo training, ``torch.func`` and processes.

    python -m bench.pack.on_gpu MODEL [--device cuda] [--limit 80] [--ks 1,4,16,64]
        [--methods processes,vmap]

Each model has a process, which says the result of each measurement as soon as it has it. A
measurement repeats whole epochs until they have taken long enough; everything is warm before the
clock starts, and the last epoch of thrifty's trials is verified, as in a study.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

import thrifty as th
from bench.common.harness import Goal, at_least, finish, table
from bench.common.processes import RESULT, say_result
from bench.common.roofline import Work, bound_of, reached, work_of
from bench.pack import peers
from bench.pack.ours import Pack, training_only
from bench.pack.peers import WARM_UP
from bench.pack.zoo import NUM_BATCHES, ZOO, Workload, trials
from thrifty.pack import AutoBackend, Backend, BlockOptions, ConcatenatedBackend, FusedBackend


MODELS = ("mlp", "lenet", "resnet20", "resnet20_eighth", "transformer", "sage")
SMALL = ("mlp", "lenet", "resnet20_eighth", "transformer", "sage")
KS = (1, 4, 16, 64)
SECONDS = 1.0
LEAST_STEPS = 400
"""Steps of each measurement, at least: a short stage, whose last epoch thrifty verifies."""

_ALWAYS = 2
"""Methods that no choice leaves out: solo training, and the largest pack."""

Rates = dict[str, dict[int, float]]
"""Trial-steps a second by method and K."""
Train = Callable[[int], int]
"""Trains about so many steps of each trial, and returns how many trial-steps it took."""


def rate_of(train: Train, *, seconds: float) -> float:
    """Return trial-steps a second, from a run that takes at least about so many seconds."""
    steps = LEAST_STEPS
    while True:
        torch.cuda.synchronize()
        began = time.perf_counter()
        num = train(steps)
        torch.cuda.synchronize()
        took = time.perf_counter() - began
        if took >= 0.7 * seconds:
            return num / took
        steps = max(2 * steps, round(1.1 * steps * seconds / took))


def _packed(workload: Workload, k: int, device: str, make: Callable[..., Backend]) -> Train:
    task = training_only(workload.make, NUM_BATCHES)
    pack = Pack(make(task, device=device), trials(workload, k))
    pack.train(WARM_UP)
    return pack.train


def _fused(task: th.Task, *, device: str, size: int, cuda_graphs: bool) -> Backend:
    return FusedBackend(task, device=device, block=BlockOptions(size=size, cuda_graphs=cuda_graphs))


class _Alone:
    """Trials one after the other, as a careful user trains them; optionally compiled."""

    def __init__(self, workload: Workload, device: str, *, compiles: bool) -> None:
        (trial,) = trials(workload, 1)
        task = workload.make()
        self._alone = peers._Alone(task, trial, peers._data(task, trial, device))
        if compiles:
            self._alone.model.compile(mode="reduce-overhead")
        self._alone.train(WARM_UP)

    def train(self, steps: int) -> int:
        self._alone.train(steps)
        return steps


def methods(workload: Workload, device: str, ks: Sequence[int]) -> Iterator[tuple[str, int, Any]]:
    """Yield methods with a K and a function that makes what trains; important ones first.

    ``None`` in its place: so many processes, each with a trial of its own.
    """
    yield "solo, eager", 1, lambda: _Alone(workload, device, compiles=False).train
    most = ks[-1]
    packed = [("thrifty", k, _graphs(workload, k, device)) for k in reversed(ks)]
    yield packed[0]
    yield "processes under MPS", 8, None
    yield "processes", 8, None
    yield "vmap", most, lambda: _vmap(workload, most, device)
    yield "thrifty, chosen by itself", most, partial(_packed, workload, most, device, AutoBackend)
    yield from packed[1:]
    yield "solo, compiled", 1, lambda: _Alone(workload, device, compiles=True).train
    for num in (4, 2):
        yield "processes under MPS", num, None
        yield "processes", num, None
    yield "vmap", ks[-2], lambda: _vmap(workload, ks[-2], device)
    yield "concatenated", ks[-2], partial(_packed, workload, ks[-2], device, ConcatenatedBackend)
    eager = partial(_fused, size=most, cuda_graphs=False)
    yield "thrifty, no CUDA graphs", most, partial(_packed, workload, most, device, eager)


def _graphs(workload: Workload, k: int, device: str) -> Callable[[], Train]:
    return partial(_packed, workload, k, device, partial(_fused, size=k, cuda_graphs=True))


def _vmap(workload: Workload, k: int, device: str) -> Train:
    ensemble = peers._Ensemble(workload, trials(workload, k), device)
    ensemble.train(WARM_UP)

    def train(steps: int) -> int:
        ensemble.train(steps)
        return steps * k

    return train


def measure(
    model: str, *, device: str, limit_s: float, ks: Sequence[int], only: Sequence[str] = ()
) -> None:
    """Say the rate of each method and K until the time is up.

    Args:
        model: Name of a workload.
        device: Where to train.
        limit_s: Seconds after which no method begins.
        ks: Numbers of trials, ascending.
        only: Parts of names of methods to measure besides solo training and the largest pack.
    """
    began = time.perf_counter()
    workload = ZOO[model]
    alone = _Alone(workload, device, compiles=False)
    alone.train(WARM_UP)
    flops_s, bytes_s = reached(device)
    work = work_of(partial(alone.train, 1))
    say_result({"work": work._asdict(), "flops_s": flops_s, "bytes_s": bytes_s})
    del alone
    for number, (method, k, make) in enumerate(methods(workload, device, ks)):
        if number >= _ALWAYS and only and not any(part in method for part in only):
            continue
        name = method if make else f"{k} {method}"
        said: dict[str, Any] = {"method": name, "k": k}
        if time.perf_counter() - began > limit_s:
            say_result({**said, "reason": "no time was left"})
            continue
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        try:
            if make is None:
                run = peers.mps if method.endswith("MPS") else peers.processes
                found = run(workload, k, 300, device, k)
                say_result({**said, "rate": found.rate, "reason": found.reason})
                continue
            start = time.perf_counter()
            train = make()
            ready_s = time.perf_counter() - start
            rate = rate_of(train, seconds=SECONDS)
            del train
            peak = torch.cuda.max_memory_allocated(device) / 2**20
            say_result({**said, "rate": rate, "ready_s": ready_s, "peak_mb": peak})
        except Exception as error:  # noqa: BLE001 (a method that fails is a result)
            said["reason"] = f"{type(error).__name__}: {error}".partition("\n")[0]
            say_result(said)


def run(
    *, models: Sequence[str], device: str, quick: bool, limit_s: float, methods: Sequence[str] = ()
) -> None:
    """Measure all models, each in a process of its own, and print tables and goals."""
    results: dict[str, list[dict[str, Any]]] = {}
    for model in models or MODELS:
        ks = "1,2" if quick else ",".join(map(str, KS))
        command = ["-m", "bench.pack.on_gpu", model, "--device", device, "--ks", ks]
        command += ["--limit", str(limit_s), "--methods", ",".join(methods)]
        process = subprocess.Popen(
            [sys.executable, *command], stdout=subprocess.PIPE, text=True, bufsize=1
        )
        assert process.stdout is not None
        found = results[model] = []
        for line in process.stdout:
            if line.startswith(RESULT):
                found.append(json.loads(line.removeprefix(RESULT)))
                print(f"{model}: {found[-1]}", flush=True)
        if process.wait():
            print(f"{model}: ended with exit status {process.returncode}", flush=True)
    rates = {model: _rates(found) for model, found in results.items()}
    print()
    table([
        {
            "trial-steps/s": f"{model}, {method}",
            **{f"K={k}": by_k.get(k) for k in KS},
            "best / solo": max(by_k.values()) / solo if (solo := _solo(of_model)) else None,
        }
        for model, of_model in rates.items()
        for method, by_k in of_model.items()
    ])
    print()
    table(list(_roofline(results, rates)))
    figures = {"device": torch.cuda.get_device_name(device), "results": results}
    finish("pack", figures, goals(rates))


def _roofline(
    results: Mapping[str, Sequence[Mapping[str, Any]]], rates: Mapping[str, Rates]
) -> Iterator[dict[str, Any]]:
    """Yield what bounds each model's steps alone and in packs, and how near to it they are."""
    for model, found in results.items():
        first = next((each for each in found if "work" in each), None)
        if first is None:
            continue
        work, speeds = Work(**first["work"]), (first["flops_s"], first["bytes_s"])
        for method in ("solo, eager", "thrifty"):
            for k, rate in sorted(rates[model].get(method, {}).items()):
                bound = bound_of(work, k=k, rate=rate, flops_s=speeds[0], bytes_s=speeds[1])
                yield {"model": model, "method": method, "K": k, **bound}


def _rates(found: Sequence[Mapping[str, Any]]) -> Rates:
    out: Rates = {}
    for each in found:
        if each.get("rate"):
            out.setdefault(each["method"], {})[each["k"]] = each["rate"]
    return out


def _solo(of_model: Rates) -> float:
    return max(of_model.get("solo, eager", {}).values(), default=0.0)


def goals(rates: Mapping[str, Rates]) -> list[Goal]:
    out = []
    for model, of_model in rates.items():
        ours = max(of_model.get("thrifty", {}).values(), default=0.0)
        solo = _solo(of_model)
        others = [
            rate
            for method, by_k in of_model.items()
            if method.startswith("solo") or "processes" in method
            for rate in by_k.values()
        ]
        if solo:
            least = 15 if model in SMALL else 1.5
            out.append(at_least(f"{model}: packed / solo", ours / solo, least))
            out.append(
                at_least(f"{model}: packed / best of solo and processes", ours / max(others), 1)
            )
    return out


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=ZOO)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--limit", type=float, default=80.0, help="seconds")
    parser.add_argument("--methods", default="", help="parts of names (default: all)")
    parser.add_argument("--ks", default=",".join(map(str, KS)))
    args = parser.parse_args()
    torch.set_num_threads(1)
    ks = tuple(int(k) for k in args.ks.split(","))
    only = [part for part in args.methods.split(",") if part]
    measure(args.model, device=args.device, limit_s=args.limit, ks=ks, only=only)


if __name__ == "__main__":
    main()
