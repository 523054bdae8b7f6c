"""Training steps with block-wise gyro dropout and ``nn.Dropout``, alternating, and their floor.

The floor is what the operations and bytes of a step allow.

    python -m bench.gyro.speed '{"network": "MLP", "width": 4096, ...}'

It runs in a process of its own, because memory allocation is configured once for a process.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from bench.common.harness import interleaved
from bench.common.processes import say_result
from bench.common.roofline import reached, synchronize
from thrifty.nn import BlockGyroDropout, GyroDropout, GyroSchedule, GyroSequential, _block_kernels


RATE, SUBNETWORKS = 0.5, 256
DEPTH = 3
"""Hidden layers of the perceptron: the paper's has three of equal width."""
NUM_IN, NUM_OUT = 784, 10
STEPS_QUEUED = 10
"""Steps between two waits for a GPU."""
WARM_UP = 3
"""Steps before a capture: kernels are compiled, and layers compared with masks."""
Steps = Mapping[str, Callable[[], None]]


def dropouts(
    kind: str, *, widths: Sequence[int], concurrent: int, group_size: int
) -> list[nn.Module]:
    """Return one dropout layer for each hidden layer; gyros share a schedule."""
    if kind == "none":
        return [nn.Identity() for _ in widths]
    if kind == "dropout":
        return [nn.Dropout(RATE) for _ in widths]
    schedule = GyroSchedule(subnetworks=SUBNETWORKS, concurrent=concurrent, total_steps=100_000)
    if kind == "gyro":
        return [GyroDropout(RATE, num_features=w, schedule=schedule) for w in widths]
    return [
        BlockGyroDropout(RATE, num_features=w, group_size=group_size, schedule=schedule)
        for w in widths
    ]


def mlp(width: int, drops: Sequence[nn.Module], execution: str) -> nn.Module:
    """Return a perceptron of three hidden layers."""
    layers: list[nn.Module] = []
    for num_in, drop in zip([NUM_IN, *[width] * (DEPTH - 1)], drops, strict=True):
        layers += [nn.Linear(num_in, width), nn.ReLU(), drop]
    return GyroSequential(*layers, nn.Linear(width, NUM_OUT), execution=execution)


def feed_forward(width: int, drops: Sequence[nn.Module], execution: str) -> nn.Module:
    """Return the feed-forward layer of a Transformer: four times as wide inside."""
    layers = [nn.Linear(width // 4, width), nn.GELU(), *drops, nn.Linear(width, width // 4)]
    return GyroSequential(*layers, execution=execution)


def contenders(
    network: str,
    *,
    width: int,
    concurrents: Sequence[int],
    group_size: int,
    batch: int,
    device: str,
) -> dict[str, Callable[[], None]]:
    """Return a training step for each kind: forward, backward, SGD with momentum."""
    depth, build = (DEPTH, mlp) if network == "MLP" else (1, feed_forward)
    kinds = [("no dropout", "none", 1, "masked"), ("nn.Dropout", "dropout", 1, "masked")]
    for tau in concurrents:
        kinds += [
            (f"gyro, tau {tau}", "gyro", tau, "masked"),
            (f"block-wise, tau {tau}", "block", tau, "auto"),
            (f"block-wise sliced, tau {tau}", "block", tau, "sliced"),
            (f"block-wise masked, tau {tau}", "block", tau, "masked"),
        ]
    if network == "MLP":
        x = torch.randn(batch, NUM_IN, device=device)
        y = torch.randint(NUM_OUT, (batch,), device=device)
    else:
        x = torch.randn(batch, 128, width // 4, device=device)
        y = torch.randn(batch, 128, width // 4, device=device)
    steps: dict[str, Callable[[], None]] = {}
    for name, kind, tau, execution in kinds:
        torch.manual_seed(0)
        drops = dropouts(kind, widths=[width] * depth, concurrent=tau, group_size=group_size)
        model = build(width, drops, execution).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        for module in model.modules():
            if isinstance(module, GyroSchedule):
                module.follow(optimizer)

        def step(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.zero_grad()
            out = model(x)
            loss = F.cross_entropy(out, y) if network == "MLP" else F.mse_loss(x + out, y)
            loss.backward()
            optimizer.step()

        steps[name] = step
    return steps


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """Return a step as one CUDA graph, which is launched at once.

    The position in the schedule is on the GPU, so a replay moves on to the next subnetworks.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def timed(step: Callable[[], None], device: str, launches: list[float]) -> Callable[[], float]:
    """Return a function that takes the step and returns its milliseconds.

    A training loop does not wait for a GPU at each step, so several steps are queued there. The
    milliseconds that queueing takes, for each step, are added to ``launches``.
    """
    num = STEPS_QUEUED if device == "cuda" else 1

    def run() -> float:
        synchronize(device)
        began = time.perf_counter()
        for _ in range(num):
            step()
        launches.append((time.perf_counter() - began) * 1e3 / num)
        synchronize(device)
        return (time.perf_counter() - began) * 1e3 / num

    return run


def floor(network: str, *, width: int, batch: int, keep: float) -> tuple[float, float]:
    """Return the operations and bytes of a step that cannot be left out.

    Each layer has three products with the part of it that is kept. Each product reads the weights,
    the gradient is written, and the optimizer moves five numbers a weight.
    """
    if network == "MLP":
        shapes = (
            [(NUM_IN, width, keep)]
            + [(width, width, keep * keep)] * (DEPTH - 1)
            + [(width, NUM_OUT, keep)]
        )
        rows = batch
    else:
        shapes = [(width // 4, width, keep), (width, width // 4, keep)]
        rows = batch * 128
    # The first layer's input needs no gradient.
    products = [2 if number == 0 else 3 for number in range(len(shapes))]
    flops = sum(
        n * 2 * rows * a * b * share for n, (a, b, share) in zip(products, shapes, strict=True)
    )
    moved = sum(
        4 * a * b * (n * share + 5) for n, (a, b, share) in zip(products, shapes, strict=True)
    )
    return flops, moved


def measure(
    *,
    network: str,
    width: int,
    batch: int,
    group_size: int,
    concurrents: Sequence[int],
    rounds: int,
    device: str,
    tuned: bool,
    only_compile: bool = False,
) -> dict[str, Any]:
    if tuned:
        from thrifty.graph import tune_allocator  # noqa: PLC0415 (optional dependency)

        tune_allocator()
    steps = contenders(
        network,
        width=width,
        concurrents=concurrents,
        group_size=group_size,
        batch=batch,
        device=device,
    )
    if only_compile:
        for step in steps.values():
            step()
        return {}
    if device == "cuda":
        kinds = [name for name in steps if not name.endswith(" masked")]
        steps |= {f"{name}, captured": captured(steps[name]) for name in kinds}
    flops_s, bytes_s = reached(device)
    launches: dict[str, list[float]] = {name: [] for name in steps}
    runs = {name: timed(step, device, launches[name]) for name, step in steps.items()}
    times = interleaved(runs, rounds=rounds, warm_up=2)
    floors = {}
    for name, keep in (("whole", 1.0), ("kept", 1 - RATE)):
        flops, moved = floor(network, width=width, batch=batch, keep=keep)
        floors[name] = {"flops ms": flops / flops_s * 1e3, "bytes ms": moved / bytes_s * 1e3}
    return {
        "ms": times,
        "launch ms": {name: median(each) for name, each in launches.items()},
        "way": way(device),
        "floors": floors,
        "GFLOP/s": flops_s / 1e9,
        "GB/s": bytes_s / 1e9,
    }


def way(device: str) -> str:
    """Say how sliced products are computed."""
    if _block_kernels.works(torch.device(device)):
        return f"Triton kernels that read the weight in place ({_block_kernels.precision()})"
    return "one part after the other" if device == "cpu" else "gathered, as one batched product"


def main() -> None:
    options = json.loads(sys.argv[1])
    torch.set_num_threads(options.pop("threads", 2))
    say_result(measure(**options))


if __name__ == "__main__":
    main()
