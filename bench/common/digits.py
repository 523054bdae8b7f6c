"""The workload of ``bench_sharing``: 81 schedules for a small network on scikit-learn's digits."""

from __future__ import annotations

import math
from typing import Any

import torch
from sklearn.datasets import load_digits

from thrifty.core import derive_seed


SEED = 0
BATCH_SIZE = 64
LEARNING_RATES = (0.1, 0.05, 0.02)
HORIZONS = (81, 60, 40)
Config = dict[str, Any]
Tensors = tuple[torch.Tensor, torch.Tensor]


def configurations(max_epochs: int) -> list[Config]:
    """Return 72 step schedules and 9 cosines as plain dicts, scaled down if ``max_epochs`` < 81."""

    def scaled(epochs: int) -> int:
        return max(1, epochs * max_epochs // 81)

    out: list[Config] = []
    for lr in LEARNING_RATES:
        for first in (10, 20, 30, 40):
            for gamma in (0.1, 0.3):
                for second in (0, 20, 40):
                    drops = [scaled(first)]
                    if second:
                        drops.append(scaled(first) + scaled(second))
                    out.append({"kind": "step", "lr": lr, "drops": drops, "gamma": gamma})
        out += [{"kind": "cosine", "lr": lr, "epochs": scaled(h)} for h in HORIZONS]
    return out


def learning_rates(config: Config, epoch: int, num_steps: int) -> list[float]:
    """Return the learning rate at each step of an epoch, computed by hand."""
    if config["kind"] == "step":
        lr = config["lr"]
        for drop in config["drops"]:
            lr = lr * config["gamma"] if epoch >= drop else lr
        return [lr] * num_steps
    out = []
    for step in range(num_steps):
        progress = (epoch + step / num_steps) / config["epochs"]
        done = progress >= 1.0
        out.append(0.0 if done else config["lr"] * 0.5 * (1.0 + math.cos(math.pi * progress)))
    return out


def load() -> tuple[Tensors, Tensors]:
    """Return 1,437 digits to train on and 360 to validate, drawn once with a fixed seed."""
    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    images, labels = torch.tensor(x / 16, dtype=torch.float32)[order], torch.tensor(y)[order]
    return (images[:1437], labels[:1437]), (images[1437:], labels[1437:])


def make_model() -> torch.nn.Module:
    torch.manual_seed(SEED)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 128),
        torch.nn.ReLU(),
        torch.nn.Linear(128, 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 10),
    )


def make_optimizer(model: torch.nn.Module, lr: float) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def train_epoch(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    train: Tensors,
    *,
    config: Config,
    epoch: int,
) -> None:
    """Train one epoch as a careful user would: data in memory, one permutation, no data loader.

    The permutation is the one that thrifty draws, so every method sees the same batches. Then the
    same configurations win, and a bare loop has the same epochs to train.
    """
    images, labels = train
    generator = torch.Generator().manual_seed(derive_seed(SEED, "data", epoch))
    order = torch.randperm(len(images), generator=generator)
    images, labels = images[order], labels[order]
    num_steps = math.ceil(len(images) / BATCH_SIZE)
    rates = learning_rates(config, epoch, num_steps)
    model.train()
    for step, (x, y) in enumerate(
        zip(images.split(BATCH_SIZE), labels.split(BATCH_SIZE), strict=True)
    ):
        optimizer.param_groups[0]["lr"] = rates[step]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def accuracy(model: torch.nn.Module, valid: Tensors) -> float:
    """Return the accuracy as a count of hits over the size, not a mean in single precision.

    Methods are compared by it, and ties are common.
    """
    model.eval()
    with torch.no_grad():
        return int((model(valid[0]).argmax(1) == valid[1]).sum()) / len(valid[1])


def minimum_epochs(requests: list[tuple[Config, int]]) -> int:
    """Return the exact minimum of epochs: distinct prefixes of per-step learning rates, counted."""
    seen = set()
    for config, target in requests:
        prefix: tuple[Any, ...] = ()
        for epoch in range(target):
            prefix = (hash(prefix), tuple(learning_rates(config, epoch, 23)))
            seen.add((epoch, prefix))
    return len(seen)


def halving_rungs(max_epochs: int) -> list[int]:
    out = [1]
    while out[-1] * 3 <= max_epochs:
        out.append(out[-1] * 3)
    return out


def warm_up() -> None:
    """Let torch import what its first optimizer needs (seconds) before any clock runs."""
    torch.set_num_threads(1)
    make_optimizer(make_model(), 0.1)
    load()
