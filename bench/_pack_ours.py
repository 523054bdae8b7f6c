"""How K trials are trained by thrifty's back-ends, and sweeps over K of every method on one device.

    python -m bench._pack_ours auto WORKLOAD K STEPS [--processes 2]
    python -m bench._pack_ours sweep WORKLOAD METHOD KS [--device cuda] [--seconds 1] [--max-step 2]

As with the peers, everything is ready and warm before the clock starts, and nothing is evaluated.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from itertools import product
from typing import Any

import torch

import thrifty as th
from bench import _pack_peers as peers
from bench._harness import say_result
from bench._pack_peers import WARM_UP, Measured
from bench._pack_zoo import ZOO, Trial, Workload, trials
from thrifty.pack import (
    AutoBackend,
    Backend,
    BlockOptions,
    Calibration,
    ConcatenatedBackend,
    EpochPlan,
    FusedBackend,
    Member,
    SoloBackend,
)
from thrifty.pack._calibrate import SIZES
from thrifty.perf import PackCurve


Method = Callable[[Workload, int, int, str], Measured]


class Pack:
    """Trials in the slots of a back-end, trained without evaluation: that is what the peers' loops do."""

    def __init__(self, backend: Backend, members: Sequence[Trial]) -> None:
        self._backend = backend
        self._values = {slot: trial.values for slot, trial in enumerate(members)}
        self._epoch = 0
        for slot, trial in enumerate(members):
            backend.stack(slot, Member(values=trial.values, seed=trial.seed))

    def train(self, steps: int) -> None:
        """That many steps of all trials, epoch after epoch; what is left of the last one is dropped."""
        per_epoch = self._backend.num_steps(0, self._values[0])
        while steps > 0:
            plans = {
                slot: EpochPlan(epoch=self._epoch, values=values)
                for slot, values in self._values.items()
            }
            train(self._backend, plans, min(steps, per_epoch))
            self._epoch += 1
            steps -= per_epoch


def train(backend: Backend, plans: Mapping[int, EpochPlan], steps: int) -> None:
    """The first steps of an epoch, in the order in which a back-end's own ``step`` takes them."""
    match backend:
        case AutoBackend():
            for where, own in _shares(backend, plans):
                train(where, own, steps)
        case FusedBackend():
            backend.start(plans)
            for block, _ in product(backend._all_blocks(), range(steps)):
                block.one_step()
        case ConcatenatedBackend():
            backend._start(plans)
            for _, slot in product(range(steps), plans):
                with backend._stream(slot):
                    backend._trials[slot].step()
        case SoloBackend():
            backend._one.start(plans[0])
            for _ in range(steps):
                backend._one.step()


def _shares(
    backend: AutoBackend, plans: Mapping[int, EpochPlan]
) -> Iterator[tuple[Backend, dict[int, EpochPlan]]]:
    """The back-ends that it has chosen, with the plans of each one's own slots."""
    for where in dict.fromkeys(backend._where.values()):
        slots = [slot for slot in plans if backend._where[slot] is where]
        yield where, {backend._inner[slot]: plans[slot] for slot in slots}


# -- a study on the CPU: processes of one thread each ------------------------------------


def auto(
    workload: Workload, k: int, steps: int, *, num_processes: int, sizes: Sequence[int]
) -> dict[str, Any]:
    """Each process has its share of the trials in one ``AutoBackend``; the last one ends the clock."""
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
        "rate": k * steps / seconds,
        "calibration_s": max(p["calibration_s"] for p in parts),
        "choice": ", ".join(dict.fromkeys(p["choice"] for p in parts)),
    }


def _part(
    name: str, k: int, share: range, *, steps: int, sizes: Sequence[int]
) -> dict[str, Any]:
    """One process's trials; clocks of processes agree."""
    try:
        SIZES["cpu"] = tuple(sizes)
        torch.set_num_threads(1)
        members = trials(ZOO[name], k)[share.start :: share.step]
        task = ZOO[name].make()
        Pack(ConcatenatedBackend(task), members[:1]).train(1)  # loads data, imports optimisers
        found: list[tuple[float, Calibration]] = []
        began = time.perf_counter()
        backend = AutoBackend(
            task,
            prefer="auto",
            on_calibrated=lambda c: found.append((time.perf_counter() - began, c)),
        )
        pack = Pack(backend, members)
        pack.train(WARM_UP)
        peers._barrier.wait()
        start = time.perf_counter()
        pack.train(steps)
        return {
            "began": start,
            "ended": time.perf_counter(),
            "calibration_s": found[0][0] if found else 0.0,
            "choice": _words(found[0][1].best) if found else "unfusable",
        }
    except BaseException:
        peers._barrier.abort()  # the others would wait for ever
        raise


def _words(curve: PackCurve) -> str:
    return " ".join(filter(None, [curve.backend, curve.variant, str(max(curve.step_s))]))


# -- sweeps ------------------------------------------------------------------------------


def sweep(
    workload: Workload,
    method: str,
    ks: Sequence[int],
    *,
    device: str,
    seconds: float,
    max_step: float,
) -> dict[str, Any]:
    """Trial-steps per second by K until K trials do not work or a step of all takes too long.

    Peaks are what PyTorch knows of the GPU's memory: nothing for methods that have processes.
    """
    rates: dict[int, float] = {}
    peaks: dict[int, float] = {}
    rate, ended = 0.0, ""
    for k in (ks[0], *ks):  # the first is a pilot: it tells how many steps to take
        _forget(device)
        try:
            measured = SWEPT[method](workload, k, max(3, int(seconds * rate / k)), device)
        except Exception as error:  # noqa: BLE001 (that a method does not work is a result)
            measured = Measured(None, f"{type(error).__name__}: {error}".partition("\n")[0])
        if measured.rate is None:
            ended = f"K = {k}: {measured.reason}"
            break
        rate = rates[k] = measured.rate
        if device != "cpu" and not method.endswith("processes"):
            peaks[k] = torch.cuda.max_memory_allocated(device) / 2**20
        if k / rate > max_step:
            ended = f"K = {k}: a step of all takes {k / rate:.1f} s"
            break
    return {"rates": rates, "peak_gpu_mb": peaks, "ended": ended}


def _forget(device: str) -> None:
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _packed(make: Callable[[th.Task, int, str], Backend]) -> Method:
    def measure(workload: Workload, k: int, steps: int, device: str) -> Measured:
        pack = Pack(make(_task(workload.name), k, device), trials(workload, k))
        pack.train(WARM_UP)
        began = peers._now(device)
        pack.train(steps)
        return Measured(k * steps / (peers._now(device) - began))

    return measure


def _fused(task: th.Task, k: int, device: str, **options: bool) -> Backend:
    return FusedBackend(task, device=device, block=BlockOptions(size=k, **options))


_known: dict[str, Sequence[PackCurve]] = {}


def _auto(task: th.Task, _: int, device: str) -> Backend:
    """Calibrated once, not for every K."""

    def note(calibration: Calibration) -> None:
        _known[calibration.key] = calibration.curves

    return AutoBackend(task, device=device, known=_known, on_calibrated=note)


@cache
def _task(name: str) -> th.Task:
    return ZOO[name].make()


SWEPT: dict[str, Method] = {
    "sequential": lambda w, k, steps, device: peers.sequential(w, k, steps, 1, device),
    "concatenated": _packed(lambda task, _, device: ConcatenatedBackend(task, device=device)),
    "fused": _packed(_fused),
    "fused, channels_last": _packed(partial(_fused, channels_last=True)),
    "fused, cuda_graphs": _packed(partial(_fused, cuda_graphs=True)),
    "fused, compile": _packed(partial(_fused, compile=True)),
    "fused, compile, cuda_graphs": _packed(partial(_fused, compile=True, cuda_graphs=True)),
    "auto": _packed(_auto),
    "vmap": lambda w, k, steps, device: peers.vmap(w, k, steps, 1, device),
    "2 processes": lambda w, k, steps, device: peers.processes(w, k, steps, device, 2),
    "4 processes": lambda w, k, steps, device: peers.processes(w, k, steps, device, 4),
    "2 MPS processes": lambda w, k, steps, device: peers.mps(w, k, steps, device, 2),
    "4 MPS processes": lambda w, k, steps, device: peers.mps(w, k, steps, device, 4),
}


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
    many.add_argument("method", choices=SWEPT)
    many.add_argument("ks", type=_numbers)
    many.add_argument("--device", default="cpu")
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
    say_result(sweep(workload, args.method, args.ks, device=args.device, **limits))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    main()
