"""One worker of the speed part.

    python -m bench.hetero.speed_worker '{"system": "thrifty", ...}'

It writes a line of JSON for each step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from thrifty.hetero import HeteroOptions, HeteroTrainer, StepReport


SAMPLES = 16_384


def network(name: str) -> nn.Module:
    """Return a plain model with much or with little arithmetic for each number exchanged."""
    torch.manual_seed(0)
    if name == "CNN":
        return nn.Sequential(
            nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(32 * 7 * 7, 10),
        )  # fmt: skip
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(),
        nn.Linear(1024, 10)
    )  # fmt: skip


def data() -> TensorDataset:
    """Return generated images of ten classes."""
    generator = torch.Generator().manual_seed(1)
    y = torch.randint(0, 10, (SAMPLES,), generator=generator)
    centres = torch.randn(10, 1, 28, 28, generator=generator)
    return TensorDataset(centres[y] + torch.randn(SAMPLES, 1, 28, 28, generator=generator), y)


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


def by_thrifty(model: nn.Module, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Train by thrifty, unevenly or alone."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    trainer = HeteroTrainer(
        model, optimizer, data(), loss=loss, global_batch=options["batch"], seed=0,
        # The first worker's lines count, so it must not stand by.
        options=HeteroOptions(stand_by=False),
    )  # fmt: skip
    for report in trainer.run(epochs=1_000_000):
        yield {"sizes": report.sizes, "step_s": report.step_s, "changed": changed(report)}


def changed(report: StepReport) -> str:
    reasons = [event.reason for event in report.events if hasattr(event, "reason")]
    return reasons[-1] if reasons else ""


def by_ddp(model: nn.Module, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Train by PyTorch's own DDP, with even parts."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank, size = dist.get_rank(), dist.get_world_size()
    x, y = data().tensors
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    part = options["batch"] // size
    epoch = 0
    while True:
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))
        epoch += 1
        for begin in range(0, SAMPLES - options["batch"] + 1, options["batch"]):
            began = time.perf_counter()
            mine = order[begin + rank * part : begin + (rank + 1) * part]
            optimizer.zero_grad()
            value = loss(parallel, (x[mine], y[mine]))
            value.backward()
            optimizer.step()
            value.item()
            yield {"sizes": [part] * size, "step_s": time.perf_counter() - began, "changed": ""}


def main() -> None:
    options = json.loads(sys.argv[1])
    os.sched_setaffinity(0, {options["core"]})
    torch.set_num_threads(1)
    model = network(options["network"])
    steps = {"thrifty": by_thrifty, "DDP": by_ddp}[options["system"]]
    for step in steps(model, options):
        print(json.dumps({"t": time.monotonic(), **step}), flush=True)


if __name__ == "__main__":
    main()
