"""Training of K trials without thrifty: sequentially, in processes, or stacked by ``torch.func``.

    python -m bench.pack.peers METHOD WORKLOAD K STEPS THREADS [--device cuda] [--processes 2]

Data, models and optimizers are made, and a few steps taken, before the clock starts.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
from dataclasses import asdict, dataclass
from itertools import islice
from multiprocessing.synchronize import Barrier
from typing import Any
from unittest import mock

import torch
from torch.func import functional_call, grad, stack_module_state

import thrifty as th
from bench.common.processes import say_result
from bench.pack.zoo import ZOO, Trial, Workload, trials


WARM_UP = 5
MPS = "nvidia-cuda-mps-control"
Tensors = dict[str, torch.Tensor]
Step = Callable[[Tensors], None]

_barrier: Barrier  # in a child process: where all children start


@dataclass(frozen=True, slots=True)
class Measured:
    """Result: trial-steps per second (``rate``), or None with the reason for a failure."""

    rate: float | None
    reason: str = ""


def sequential(workload: Workload, k: int, steps: int, threads: int, device: str) -> Measured:
    """Train one trial after the other in eager PyTorch."""
    torch.set_num_threads(threads)
    began, ended = _train_all(workload, trials(workload, k), steps, device)
    return Measured(k * steps / (ended - began))


def processes(
    workload: Workload, k: int, steps: int, device: str, num_processes: int = 2
) -> Measured:
    """Train in processes of one thread each that start together; the last one ends the clock."""
    num_processes = min(num_processes, k)
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(num_processes)
    with ProcessPoolExecutor(
        num_processes, mp_context=context, initializer=_share, initargs=(barrier,)
    ) as pool:
        parts = [range(i, k, num_processes) for i in range(num_processes)]
        futures = [pool.submit(_part, workload.name, k, p, steps, device) for p in parts]
        began, ended = zip(*(future.result() for future in futures), strict=True)
    return Measured(k * steps / (max(ended) - min(began)))


def mps(workload: Workload, k: int, steps: int, device: str, num_processes: int = 2) -> Measured:
    """Train in processes whose kernels share the GPU by NVIDIA's multi-process service."""
    if not device.startswith("cuda") or shutil.which(MPS) is None:
        return Measured(None, f"needs --device cuda and {MPS}")
    with tempfile.TemporaryDirectory() as folder:
        places = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        with mock.patch.dict(os.environ, places):
            subprocess.run([MPS, "-d"], check=True)
            try:
                return processes(workload, k, steps, device, num_processes)
            finally:
                subprocess.run([MPS], input="quit\n", text=True, check=True)


def vmap(workload: Workload, k: int, steps: int, threads: int, device: str) -> Measured:
    """Train the stacked parameters of all trials in one call of ``torch.vmap``."""
    torch.set_num_threads(threads)
    try:
        ensemble = _Ensemble(workload, trials(workload, k), device)
        ensemble.train(WARM_UP)
        began = _now(device)
        ensemble.train(steps)
        return Measured(k * steps / (_now(device) - began))
    except RuntimeError as error:  # no batching rule, or out of memory
        return Measured(None, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")


class _Alone:
    """One trial as a careful user writes it."""

    def __init__(self, task: th.Task, trial: Trial, train: Sequence[torch.Tensor]) -> None:
        self.model = _model(task, trial).to(train[0].device)
        self._task = task
        self._optimizer = task.optimizer.build(self.model.parameters(), trial.values)
        self._batches = _batches(train, task.batch_size, trial.seed)

    def train(self, steps: int) -> None:
        for batch in islice(self._batches, steps):
            self._optimizer.zero_grad()
            loss = self._task.loss(self.model, batch)
            loss.backward()
            self._optimizer.step()


class _Ensemble:
    """The recipe of PyTorch's tutorial on model ensembling, with a hand-written optimizer.

    Buffers that training does not change are not stacked.
    """

    def __init__(self, workload: Workload, members: Sequence[Trial], device: str) -> None:
        task = workload.make()
        train = _data(task, members[0], device)
        models = [_model(task, trial).to(device) for trial in members]
        params, buffers = stack_module_state(models)
        self.params = {name: p.detach() for name, p in params.items()}
        batches = _stacked_batches(train, workload.batch_size, [t.seed for t in members])
        constant = _constant_buffers(task, models[0], tuple(t[0] for t in next(batches)))
        buffers = {name: b for name, b in buffers.items() if name not in constant}
        template = models[0]

        def loss(params: Tensors, buffers: Tensors, batch: Any) -> torch.Tensor:
            return task.loss(lambda *x: functional_call(template, (params, buffers), x), batch)

        self._grads = torch.vmap(grad(loss), randomness="different")
        self._buffers = buffers
        self._batches = batches
        rates = torch.tensor([trial.values["lr"] for trial in members], device=device)
        update = {torch.optim.SGD: _sgd, torch.optim.AdamW: _adamw}[task.optimizer.factory]
        self._step = update(self.params, rates)

    def train(self, steps: int) -> None:
        for batch in islice(self._batches, steps):
            self._step(self._grads(self.params, self._buffers, batch))


def _sgd(params: Tensors, rates: torch.Tensor, momentum: float = 0.9) -> Step:
    velocities = {name: torch.zeros_like(p) for name, p in params.items()}
    lr = {name: _beside(rates, p) for name, p in params.items()}

    def step(grads: Tensors) -> None:
        for name, p in params.items():
            velocity = velocities[name].mul_(momentum).add_(grads[name])
            p.addcmul_(velocity, lr[name], value=-1)

    return step


def _adamw(params: Tensors, rates: torch.Tensor) -> Step:
    beta1, beta2, eps, decay = 0.9, 0.999, 1e-8, 1e-2
    means = {name: torch.zeros_like(p) for name, p in params.items()}
    squares = {name: torch.zeros_like(p) for name, p in params.items()}
    lr = {name: _beside(rates, p) for name, p in params.items()}
    keep = {name: 1 - rate * decay for name, rate in lr.items()}
    count = 0

    def step(grads: Tensors) -> None:
        nonlocal count
        count += 1
        for name, p in params.items():
            mean = means[name].lerp_(grads[name], 1 - beta1)
            square = squares[name].mul_(beta2).addcmul_(grads[name], grads[name], value=1 - beta2)
            root = square.div(1 - beta2**count).sqrt_().add_(eps)
            p.mul_(keep[name])
            p.addcdiv_(mean * lr[name], root, value=-1 / (1 - beta1**count))

    return step


def _beside(rates: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Return one rate per trial, shaped to act on the parameters stacked in ``p``."""
    return rates.view(-1, *(1 for _ in p.shape[1:]))


def _train_all(
    workload: Workload,
    members: Sequence[Trial],
    steps: int,
    device: str,
    wait: Callable[[], Any] = lambda: None,
) -> tuple[float, float]:
    """Return when training began and when it ended.

    ``wait`` is called between getting ready and the start.
    """
    task = workload.make()
    train = _data(task, members[0], device)
    _Alone(task, members[0], train).train(WARM_UP)
    ready = [_Alone(task, trial, train) for trial in members]
    _now(device)
    wait()
    began = time.perf_counter()
    for alone in ready:
        alone.train(steps)
    return began, _now(device)


def _share(barrier: Barrier) -> None:
    global _barrier
    _barrier = barrier


def _part(name: str, k: int, part: range, steps: int, device: str) -> tuple[float, float]:
    """Train one process's trials; clocks of processes agree."""
    torch.set_num_threads(1)
    members = trials(ZOO[name], k)[part.start :: part.step]
    try:
        return _train_all(ZOO[name], members, steps, device, _barrier.wait)
    except BaseException:
        _barrier.abort()  # otherwise the others wait for ever
        raise


def _now(device: str) -> float:
    """Return the time once the device has finished its queue."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()


def _data(task: th.Task, trial: Trial, device: str) -> tuple[torch.Tensor, ...]:
    return tuple(t.to(device) for t in task.data(th.HyperParameters(trial.values)).train)


def _model(task: th.Task, trial: Trial) -> torch.nn.Module:
    torch.manual_seed(trial.seed)
    return task.model(th.HyperParameters(trial.values))


def _batches(train: Sequence[torch.Tensor], size: int, seed: int) -> Iterator[Any]:
    """Yield batches epoch after epoch: one permutation, and slices of it."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(train[0]), generator=generator).to(train[0].device)
        yield from zip(*(t[order].split(size) for t in train), strict=True)


def _stacked_batches(
    train: Sequence[torch.Tensor], size: int, seeds: Sequence[int]
) -> Iterator[Any]:
    """Yield the batches of several seeds side by side."""
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    while True:
        orders = torch.stack([torch.randperm(len(train[0]), generator=g) for g in generators])
        orders = orders.to(train[0].device)
        yield from zip(*(t[orders].split(size, dim=1) for t in train), strict=True)


def _constant_buffers(task: th.Task, model: torch.nn.Module, batch: Any) -> set[str]:
    tried = deepcopy(model)
    task.loss(tried, batch)
    before = dict(model.named_buffers())
    return {name for name, b in tried.named_buffers() if torch.equal(b, before[name])}


METHODS: dict[str, Callable[[argparse.Namespace], Measured]] = {
    "sequential": lambda a: sequential(ZOO[a.workload], a.k, a.steps, a.threads, a.device),
    "vmap": lambda a: vmap(ZOO[a.workload], a.k, a.steps, a.threads, a.device),
    "processes": lambda a: processes(ZOO[a.workload], a.k, a.steps, a.device, a.processes),
    "mps": lambda a: mps(ZOO[a.workload], a.k, a.steps, a.device, a.processes),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("workload", choices=ZOO)
    parser.add_argument("k", type=int)
    parser.add_argument("steps", type=int)
    parser.add_argument("threads", type=int, help="processes have one each")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    say_result(asdict(METHODS[args.method](args)))


if __name__ == "__main__":
    main()
