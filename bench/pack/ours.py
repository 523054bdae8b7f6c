"""Training of K trials by thrifty's back-ends on the CPU, and of blocks of several sizes.

    python -m bench.pack.ours auto WORKLOAD K STEPS [--processes 2]
    python -m bench.pack.ours sweep WORKLOAD KS [--seconds 1] [--max-step 2]

As with the peers, everything is ready and warm before the clock starts, and nothing is evaluated.
The public interface of the back-ends is driven epoch by epoch.
"""

from __future__ import annotations

import argparse
import gc
import math
import multiprocessing
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import nn

import thrifty as th
from bench.common.processes import say_result
from bench.pack import peers
from bench.pack.peers import WARM_UP
from bench.pack.zoo import NUM_BATCHES, ZOO, Classification, Trial, Workload, trials
from thrifty.pack import (
    AutoBackend,
    Backend,
    BlockOptions,
    ConcatenatedBackend,
    EpochPlan,
    FusedBackend,
    Member,
)
from thrifty.pack.backends._fusion_policy import SIZES


def training_only(base: type[Classification], num_batches: int) -> th.Task:
    """Return a task with ``num_batches`` batches an epoch and no evaluation.

    The peers' loops do not evaluate, either.
    """

    class TrainingOnly(base):  # type: ignore[misc, valid-type]
        def data(self, hp: th.HyperParameters) -> th.ArrayData:
            data = super().data(hp)
            train = (t[: num_batches * self.batch_size] for t in data.train)
            return th.ArrayData(train=tuple(train), valid=tuple(t[:1] for t in data.valid))

        def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
            return {}

    return TrainingOnly()


class Pack:
    """Trials in the slots of a back-end, in training."""

    def __init__(self, backend: Backend, members: Sequence[Trial]) -> None:
        self._backend = backend
        self._values = {slot: trial.values for slot, trial in enumerate(members)}
        self._epoch = 0
        for slot, trial in enumerate(members):
            backend.put(slot, Member(values=trial.values, seed=trial.seed))

    def train(self, steps: int = 1) -> int:
        """Train all trials for whole epochs of at least ``steps`` steps; return the trial-steps."""
        per_epoch = self._backend.num_steps(0, self._values[0])
        epochs = math.ceil(steps / per_epoch)
        for left in reversed(range(epochs)):
            self._one_epoch(is_last=not left)
        return epochs * per_epoch * len(self._values)

    def _one_epoch(self, *, is_last: bool) -> None:
        # As in a worker, the end of the last epoch is verified, and others as far as time allows.
        outcomes = self._backend.step({
            slot: EpochPlan(epoch=self._epoch, values=values, verify=is_last)
            for slot, values in self._values.items()
        })
        self._epoch += 1
        assert len(outcomes) == len(self._values), "epochs of one length end together"
        for outcome in outcomes.values():
            if isinstance(outcome, Exception):
                raise outcome


# -- a study on the CPU: processes of one thread each ------------------------------------


def auto(
    workload: Workload, k: int, steps: int, *, num_processes: int, sizes: Sequence[int]
) -> dict[str, Any]:
    """Train in processes with a share of the trials each, in one ``AutoBackend``.

    The last process ends the clock.
    """
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(num_processes)
    with ProcessPoolExecutor(
        num_processes, mp_context=context, initializer=peers._share, initargs=(barrier,)
    ) as pool:
        shares = [range(i, k, num_processes) for i in range(num_processes)]
        part = partial(_part, workload.name, k, steps=steps, sizes=sizes)
        futures = [pool.submit(part, share) for share in shares]
        parts = [future.result() for future in futures]
    seconds = max(p["ended"] for p in parts) - min(p["began"] for p in parts)
    return {
        "rate": sum(p["trial_steps"] for p in parts) / seconds,
        "calibration_s": max(p["calibration_s"] for p in parts),
        "checks_share": sum(p["checks_s"] for p in parts) / sum(p["seconds"] for p in parts),
        "choice": ", ".join(dict.fromkeys(p["choice"] for p in parts)),
    }


def _part(name: str, k: int, share: range, *, steps: int, sizes: Sequence[int]) -> dict[str, Any]:
    """Train one process's trials; clocks of processes agree."""
    try:
        SIZES["cpu"] = tuple(sizes)
        torch.set_num_threads(1)
        members = trials(ZOO[name], k)[share.start :: share.step]
        task = training_only(ZOO[name].make, min(steps, NUM_BATCHES))
        Pack(ConcatenatedBackend(task), members[:1]).train()  # loads data, imports optimizers
        calibrated: list[float] = []
        began = time.perf_counter()
        backend = AutoBackend(
            task,
            prefer="auto",
            on_calibrated=lambda _: calibrated.append(time.perf_counter() - began),
        )
        pack = Pack(backend, members)
        pack.train(WARM_UP)
        peers._barrier.wait()
        checks_s = backend.checks.spent_s
        start = time.perf_counter()
        trial_steps = pack.train(steps)
        ended = time.perf_counter()
        return {
            "began": start,
            "ended": ended,
            "seconds": ended - start,
            "checks_s": backend.checks.spent_s - checks_s,
            "trial_steps": trial_steps,
            "calibration_s": calibrated[0] if calibrated else 0.0,
            "choice": _choice(backend),
        }
    except BaseException:
        peers._barrier.abort()  # otherwise the others wait for ever
        raise


def _choice(backend: AutoBackend) -> str:
    """Return how the first trial is trained."""
    calibration = backend.calibration(0)
    if calibration is None:
        return "plain"
    fused = (curve for curve in calibration.curves if curve.backend == "fused")
    best = min(fused, key=lambda curve: min(map(curve.per_trial, curve.step_s)))
    return " ".join(filter(None, ["fused", best.variant, str(max(best.step_s))]))


# -- blocks of several sizes -------------------------------------------------------------


def sweep(
    workload: Workload, ks: Sequence[int], *, seconds: float, max_step: float
) -> dict[str, Any]:
    """Return trial-steps per second by K until K trials fail or a step of all takes too long."""
    rates: dict[int, float] = {}
    rate, ended = 0.0, ""
    for k in (ks[0], *ks):  # the first is a pilot that tells how many steps to take
        gc.collect()
        try:
            rate = _fused(workload, k, max(3, int(seconds * rate / k)))
        except Exception as error:  # noqa: BLE001 (a size that fails is a result)
            ended = f"K = {k}: {type(error).__name__}: {error}".partition("\n")[0]
            break
        rates[k] = rate
        if k / rate > max_step:
            ended = f"K = {k}: a step of all takes {k / rate:.1f} s"
            break
    return {"rates": rates, "ended": ended}


def _fused(workload: Workload, k: int, steps: int) -> float:
    """Return trial-steps per second of one block of K trials."""
    task = training_only(workload.make, min(steps, NUM_BATCHES))
    pack = Pack(FusedBackend(task, block=BlockOptions(size=k)), trials(workload, k))
    pack.train(WARM_UP)
    began = time.perf_counter()
    trial_steps = pack.train(steps)
    return trial_steps / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser()
    kinds = parser.add_subparsers(dest="kind", required=True)
    one = kinds.add_parser("auto")
    one.add_argument("workload", choices=ZOO)
    one.add_argument("k", type=int)
    one.add_argument("steps", type=int)
    one.add_argument("--processes", type=int, default=2)
    one.add_argument("--sizes", type=_numbers, default=SIZES["cpu"], help="to calibrate with")
    many = kinds.add_parser("sweep")
    many.add_argument("workload", choices=ZOO)
    many.add_argument("ks", type=_numbers)
    many.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    many.add_argument("--max-step", type=float, default=2.0, help="no larger K beyond that")
    args = parser.parse_args()
    torch.set_num_threads(1)
    workload = ZOO[args.workload]
    if args.kind == "auto":
        processes = {"num_processes": args.processes, "sizes": args.sizes}
        say_result(auto(workload, args.k, args.steps, **processes))
        return
    limits = {"seconds": args.seconds, "max_step": args.max_step}
    say_result(sweep(workload, args.ks, **limits))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    main()
