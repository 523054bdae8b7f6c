"""One process of the check on this machine: ``python -m bench.cloud.local_worker '{"core": 0}'``.

It reads requests as lines of JSON and answers each with another line. With ``RANK`` in its
environment it belongs to a gloo group.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thrifty.hetero import profile_step


_WARM_UP = 5
_TURNS = 3


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.body(x))


class Reader(nn.Module):
    """An LSTM with a classifier on the last token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.out = (
            nn.Embedding(500, 64),
            nn.LSTM(64, 128),
            nn.Linear(128, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(self.embed(x.T))[0][-1])


class Encoder(nn.Module):
    """A Transformer encoder with a classifier on the mean."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.1, batch_first=True)
        self.embed, self.out = nn.Embedding(500, 128), nn.Linear(128, 10)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(self.embed(x)).mean(1))


class Holder(nn.Module):
    """A module of parameters, buffers, and some arithmetic that uses none of them.

    It shows what exchanging costs.
    """

    def __init__(self, tensors: int, num_bytes: int, buffers: int) -> None:
        super().__init__()
        size = max(1, num_bytes // 4 // tensors)
        self.held = nn.ParameterList([nn.Parameter(torch.zeros(size)) for _ in range(tensors)])
        for at in range(buffers):
            self.register_buffer(f"buffer{at}", torch.zeros(32))
        self._work = torch.zeros(256, 256)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            self._work @ self._work
        return x + torch.stack([each.sum() for each in self.held]).sum()


def images(channels: int, side: int) -> Callable[[int], Tensor]:
    return lambda num: torch.randn(num, channels, side, side)


def tokens(length: int) -> Callable[[int], Tensor]:
    return lambda num: torch.randint(0, 500, (num, length))


def _mlp(*widths: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    for one, other in pairwise(widths):
        layers += [nn.Linear(one, other), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def _resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        Residual(32), Residual(32), Residual(32),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "MLP": (lambda: _mlp(784, 256, 256, 10), images(1, 28)),
    "wide MLP": (lambda: _mlp(784, 1024, 1024, 10), images(1, 28)),
    "LeNet": (_lenet, images(1, 28)),
    "ResNet": (_resnet, images(3, 32)),
    "LSTM": (Reader, tokens(24)),
    "Transformer": (Encoder, tokens(32)),
}


def loss(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


def trained(name: str) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[int], Any]]:
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    return model, optimizer, lambda num: (inputs(num), torch.randint(0, 10, (num,)))


# -- what is asked -----------------------------------------------------------------------------


def profile(model: str, batches: list[int], budget_s: float) -> Any:
    """Profile one process by itself."""
    net, optimizer, make = trained(model)
    return profile_step(
        net, optimizer, make, loss=loss, batches=batches, budget_s=budget_s
    ).to_json()


def describe(model: str) -> Any:
    """Describe what the costs of wrapping and buffers depend on."""
    net, *_ = trained(model)
    buffers = list(net.buffers())
    return {
        "tensors": len(list(net.parameters())),
        "num_bytes": sum(each.nbytes for each in net.parameters()),
        "buffers": len(buffers),
        "kinds": len({each.dtype for each in buffers}),
    }


def train(model: str, batch: int, steps: int) -> float:
    """Return the seconds of a step of PyTorch's DDP in a plain loop."""
    net, optimizer, make = trained(model)
    parallel = DistributedDataParallel(net)
    x, y = make(batch)

    def step() -> None:
        optimizer.zero_grad()
        loss(parallel, (x, y)).backward()
        optimizer.step()

    return median(_timed(step, steps))


def broadcast(num_bytes: int, repeats: int) -> float:
    """Return the seconds of a broadcast from the first process; each waits until all have it."""
    tensor = torch.zeros(num_bytes // 4)

    def there_and_back() -> None:
        for source in range(dist.get_world_size()):
            dist.broadcast(tensor, source)

    return median(_timed(there_and_back, repeats)) / dist.get_world_size()


def exchange(tensors: int, num_bytes: int, buffers: int, repeats: int) -> float:
    """Return the seconds that DDP adds to a step of a model that only holds parameters.

    Steps with DDP and without alternate.
    """
    x = torch.zeros(1)
    plain, wrapped = (Holder(tensors, num_bytes, buffers) for _ in range(2))
    steps = [_step(DistributedDataParallel(wrapped), x), _step(plain, x)]
    times: list[list[float]] = [[], []]
    for _ in range(_TURNS):
        for step, found in zip(steps, times, strict=True):
            found += _timed(step, repeats // _TURNS)
    with_it, without = map(median, times)
    return with_it - without


def _step(model: nn.Module, x: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    return step


def sum_alone(repeats: int) -> float:
    """Return the seconds of a one-process sum: the way to gloo's thread and back."""
    tensor = torch.zeros(1024)
    return median(_timed(lambda: dist.all_reduce(tensor), repeats))


def _timed(step: Callable[[], Any], repeats: int) -> list[float]:
    times = []
    for _ in range(_WARM_UP + repeats):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return times[_WARM_UP:]


ANSWERS: dict[str, Callable[..., Any]] = {
    each.__name__: each for each in (profile, describe, train, broadcast, exchange, sum_alone)
}


def main() -> None:
    os.sched_setaffinity(0, {json.loads(sys.argv[1])["core"]})
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(ANSWERS[asked.pop("do")](**asked)), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
