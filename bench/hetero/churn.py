"""Workers that are killed and others that join, in real processes.

Is the result that of one process?
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from thrifty.core import TooFewWorkersError
from thrifty.hetero import ElasticMembership, HeteroOptions, HeteroTrainer, Place, SampleOrder


SAMPLES, BATCH, EPOCHS = 640, 48, 6
LIMIT_S = 90.0
"""Limit of a whole schedule; workers that take longer hang."""

_WAIT_S = 20.0
_SEED = 11


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The workers of a run, and what happens to them.

    ``sample_ms``: by worker, from which of its steps on and how long a sample takes. ``kills`` and
    ``joins``: how many steps the first worker has trained by then.
    """

    sample_ms: dict[str, Sequence[tuple[int, float]]]
    kills: dict[str, int] = field(default_factory=dict)
    joins: dict[str, int] = field(default_factory=dict)

    @property
    def first(self) -> list[str]:
        return [name for name in self.sample_ms if name not in self.joins]


def planned(workers: int) -> Schedule:
    """Return a schedule with a change of split, a death and a join."""
    names = [f"w{at}" for at in range(workers)]
    speeds: dict[str, Sequence[tuple[int, float]]] = {
        name: [(0, 0.6 + 0.5 * at)] for at, name in enumerate(names)
    }
    speeds["w0"] = [(0, 0.6), (8, 2.4), (36, 0.6)]
    last = names[-1]
    return Schedule(sample_ms={**speeds, "x": [(0, 1.0)]}, kills={last: 20}, joins={"x": 28})


def drawn(seed: int) -> Schedule:
    """Draw a schedule of two to four workers and up to two that join.

    All but the first may be killed.
    """
    rng = random.Random(seed)
    names = [f"w{at}" for at in range(rng.randint(2, 4))]
    late = [f"x{at}" for at in range(rng.randint(0, 2))]
    steps = EPOCHS * -(-SAMPLES // BATCH)
    speed = {
        name: [(0, rng.uniform(1.0, 4.0)), (rng.randrange(1, steps), rng.uniform(1.0, 4.0))]
        for name in [*names, *late]
    }
    kills = {
        name: rng.randrange(1, steps - 4) for name in [*names[1:], *late] if rng.random() < 0.6
    }
    return Schedule(
        sample_ms=speed, kills=kills, joins={name: rng.randrange(1, steps // 2) for name in late}
    )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a schedule."""

    finished: bool
    seconds: float
    reports: dict[str, list[dict[str, Any]]]
    final: dict[str, torch.Tensor] | None
    killed: tuple[str, ...]


def play(schedule: Schedule, address: str) -> Outcome:
    """Run a schedule; kills hit a worker wherever it happens to be."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, _processes() as start:
        place = Path(folder)
        workers = {
            name: start(train, name, address, folder, schedule.sample_ms[name])
            for name in schedule.first
        }
        kills, joins = dict(schedule.kills), dict(schedule.joins)
        killed = []
        lead = schedule.first[0]
        while workers[lead].is_alive() and time.monotonic() - began < LIMIT_S:
            step = _last_step(place / f"{lead}.jsonl")
            for name in [name for name, at in joins.items() if at <= step]:
                del joins[name]
                workers[name] = start(train, name, address, folder, schedule.sample_ms[name])
            for name in [name for name, at in kills.items() if at <= step]:
                if name in workers:
                    del kills[name]
                    killed.append(name)
                    os.kill(workers[name].pid, signal.SIGKILL)
            time.sleep(0.005)
        for worker in workers.values():
            worker.join(max(0.1, LIMIT_S - (time.monotonic() - began)))
        finished = not any(worker.is_alive() for worker in workers.values())
        final = place / f"{lead}.pt"
        return Outcome(
            finished=finished and workers[lead].exitcode == 0,
            seconds=time.monotonic() - began,
            reports={name: _lines(place / f"{name}.jsonl") for name in workers},
            final=torch.load(final, weights_only=True) if final.is_file() else None,
            killed=tuple(killed),
        )


def exact(outcome: Outcome) -> bool:
    """Return whether every epoch's steps had every sample exactly once.

    The sizes that workers report must agree, shares must be adjacent, and each share must be the
    piece of the epoch's order that is due.
    """
    by_step: dict[int, list[dict[str, Any]]] = {}
    for reports in outcome.reports.values():
        for report in reports:
            by_step.setdefault(report["step"], []).append(report)
    order = SampleOrder(SAMPLES, seed=_SEED)
    seen: dict[int, int] = {}
    for step in sorted(by_step):
        told = by_step[step]
        epoch, sizes = told[0]["epoch"], told[0]["sizes"]
        begin = seen.get(epoch, 0)
        due = order.shares(
            Place(epoch=epoch, public=begin), sizes, [str(at) for at in range(len(sizes))]
        )
        for report in told:
            if report["sizes"] != sizes or report["epoch"] != epoch:
                return False
            if tuple(report["share"]) != due[report["rank"]].public:
                return False
        seen[epoch] = begin + sum(sizes)
    steps = sorted(by_step)
    return steps == list(range(1, len(steps) + 1)) and seen == dict.fromkeys(range(EPOCHS), SAMPLES)


def distance(outcome: Outcome) -> tuple[float, float]:
    """Return the distance of parameters and of the last gradient from one process's.

    Distances are relative to their norms.
    """
    if outcome.final is None:
        return float("inf"), float("inf")
    alone = one_process()
    return tuple(  # type: ignore[return-value]
        float((outcome.final[key] - alone[key]).norm() / alone[key].norm())
        for key in ("parameters", "gradient")
    )


def too_few(address: str) -> tuple[bool, float]:
    """Return whether the last worker says clearly that it needs another, and how soon.

    The time is in seconds after the kill.
    """
    with tempfile.TemporaryDirectory() as folder, _processes() as start:
        began = time.monotonic()
        workers = [start(train, name, address, folder, [(0, 1.0)], 2) for name in ("w0", "w1")]
        lines = Path(folder) / "w0.jsonl"
        while _last_step(lines) < 5 and time.monotonic() - began < LIMIT_S:
            time.sleep(0.01)
        os.kill(workers[1].pid, signal.SIGKILL)
        killed = time.monotonic()
        workers[0].join(LIMIT_S)
        error = Path(folder) / "w0.error"
        clear = error.is_file() and "of at least 2 workers" in error.read_text()
        return clear and workers[0].exitcode == 3, time.monotonic() - killed


# -- one worker ------------------------------------------------------------------------------


def network() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 5)
    )


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, 20, generator=generator)
    return TensorDataset(x, (x[:, :5] + x[:, 5:10]).argmax(1))


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(
    name: str,
    address: str,
    folder: str,
    sample_ms: Sequence[tuple[int, float]],
    min_workers: int = 1,
) -> None:
    """Run a worker from start to end."""
    torch.set_num_threads(1)
    model = network()
    done = 0

    def slow_loss(model: nn.Module, batch: Any) -> torch.Tensor:
        ms = [each for since, each in sample_ms if since <= done][-1]
        time.sleep(len(batch[0]) * ms / 1000)
        return loss(model, batch)

    members = ElasticMembership(
        address, name=name, min_workers=min_workers, starts=not name.startswith("x"),
        timeout_s=_WAIT_S,
        quorum_s=10.0 if min_workers > 1 or name.startswith("x") else _WAIT_S,
    )  # fmt: skip
    trainer = HeteroTrainer(
        model, optimizer(model), data(), loss=slow_loss, global_batch=BATCH, seed=_SEED,
        members=members, options=HeteroOptions(admit_every=3, bucket_cap_mb=1e-3),
    )  # fmt: skip
    with (Path(folder) / f"{name}.jsonl").open("w", buffering=1) as lines:
        try:
            for report in trainer.run(epochs=EPOCHS):
                done = report.step
                lines.write(json.dumps({
                    "step": report.step, "epoch": report.epoch, "rank": report.rank,
                    "sizes": report.sizes, "share": report.share.public,
                }) + "\n")  # fmt: skip
        except TooFewWorkersError as error:
            (Path(folder) / f"{name}.error").write_text(str(error))
            raise SystemExit(3) from error
    torch.save(_flat(model), Path(folder) / f"{name}.pt")
    trainer.close()


def one_process() -> dict[str, torch.Tensor]:
    """Train with a plain loop in one process."""
    model, order = network(), SampleOrder(SAMPLES, seed=_SEED)
    step = optimizer(model)
    x, y = data().tensors
    for epoch in range(EPOCHS):
        shuffled = list(order.shares(Place(epoch=epoch), [SAMPLES], ["all"])[0].public)
        for begin in range(0, SAMPLES, BATCH):
            at = shuffled[begin : begin + BATCH]
            step.zero_grad()
            loss(model, (x[at], y[at])).backward()
            step.step()
    return _flat(model)


def _flat(model: nn.Module) -> dict[str, torch.Tensor]:
    parameters = list(model.parameters())
    return {
        "parameters": torch.cat([p.detach().flatten() for p in parameters]),
        "gradient": torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]),
    }


# -- helpers ---------------------------------------------------------------------------------


@contextmanager
def lighthouse() -> Iterator[str]:
    """Start the lighthouse where workers find each other."""
    os.environ.setdefault("RUST_LOG", "error")
    from torchft.coordination import LighthouseServer  # noqa: PLC0415 (optional dependency)

    server = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=2000, quorum_tick_ms=20,
        heartbeat_timeout_ms=1500,
    )  # fmt: skip
    try:
        yield f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
    finally:
        server.shutdown()


@contextmanager
def _processes() -> Iterator[Any]:
    """Start processes that have torch imported already; none outlives the block."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bench.hetero.churn"])
    started = []

    def start(target: Any, *args: Any) -> Any:
        process = context.Process(target=target, args=args, daemon=True)
        process.start()
        started.append(process)
        return process

    try:
        yield start
    finally:
        for process in started:
            if process.is_alive():
                process.kill()
            process.join()


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return whole lines; a killed worker's last one may be cut."""
    if not path.is_file():
        return []
    whole = path.read_text().rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


def _last_step(path: Path) -> int:
    lines = _lines(path)
    return lines[-1]["step"] if lines else 0
