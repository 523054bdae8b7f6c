"""The four tasks of ``bench_seeds``: small networks on the data sets that scikit-learn brings.

Each has 16 configurations: eight learning rates over two decades, times two values of another
hyper-parameter. They were fixed before anything was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits
from torch import nn

import thrifty as th


LOADERS: Mapping[str, Callable[..., Any]] = {
    "cancer": load_breast_cancer,
    "diabetes": load_diabetes,
    "digits": load_digits,
}
RATES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What one of the tasks trains, and its configurations."""

    data: str
    optimizer: str
    top_rate: float
    second: tuple[str, tuple[float, float]]
    epochs: int
    hidden: int = 32

    @property
    def configs(self) -> list[dict[str, float]]:
        """The 16 configurations."""
        name, values = self.second
        rates = self.top_rate * np.logspace(-2, 0, RATES)
        return [{"lr": float(lr), name: value} for lr in rates for value in values]


SETTINGS: Mapping[str, Setting] = {
    "digits, SGD": Setting(
        data="digits", optimizer="SGD", top_rate=1.0, second=("momentum", (0.5, 0.9)), epochs=8
    ),
    "digits, AdamW": Setting(
        data="digits", optimizer="AdamW", top_rate=0.1, second=("weight_decay", (0.0, 0.1)),
        epochs=8,
    ),
    "cancer, SGD": Setting(
        data="cancer", optimizer="SGD", top_rate=1.0, second=("momentum", (0.5, 0.9)), epochs=12
    ),
    "diabetes, AdamW": Setting(
        data="diabetes", optimizer="AdamW", top_rate=0.1, second=("weight_decay", (0.0, 0.1)),
        epochs=12,
    ),
}  # fmt: skip


@cache
def arrays(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return standardised inputs and the targets in a fixed random order."""
    x, y = LOADERS[name](return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x = (x - x.mean(0)) / (x.std(0) + 1e-6)
    if name == "diabetes":
        return torch.tensor(x[order]).float(), torch.tensor((y - y.mean()) / y.std())[order].float()
    return torch.tensor(x[order]).float(), torch.tensor(y[order])


def split(name: str) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Return two thirds of the rows for training and the rest for validation."""
    x, y = arrays(name)
    num = 2 * len(x) // 3
    return (x[:num], y[:num]), (x[num:], y[num:])


def make_model(setting: Setting) -> nn.Module:
    x, y = arrays(setting.data)
    outputs = 1 if setting.data == "diabetes" else int(y.max()) + 1
    hidden = nn.Linear(x.shape[1], setting.hidden)
    return nn.Sequential(hidden, nn.ReLU(), nn.Linear(setting.hidden, outputs))


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    scores = model(batch[0])
    if scores.shape[1] == 1:
        return F.mse_loss(scores[:, 0], batch[1])
    return F.cross_entropy(scores, batch[1])


BATCH_SIZE = 32


class Small(th.Task):
    """A task of this bench; its metric is the validation loss."""

    batch_size = BATCH_SIZE

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    def optimizer(self, hp: th.HyperParameters) -> th.Optimizer:
        if self.setting.optimizer == "SGD":
            return th.SGD(lr="lr", momentum="momentum")
        return th.AdamW(lr="lr", weight_decay="weight_decay")

    def data(self, hp: th.HyperParameters) -> th.ArrayData:
        train, valid = split(self.setting.data)
        return th.ArrayData(train=train, valid=valid)

    def model(self, hp: th.HyperParameters) -> nn.Module:
        return make_model(self.setting)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return loss_of(model, batch)

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        return {"valid_loss": loss_of(model, batch)}


def train_plainly(setting: Setting, config: Mapping[str, float], *, seed: int) -> float:
    """Train one configuration with one seed in a plain loop; return its validation loss.

    The loop does nothing that the choice does not need: it evaluates once, at the end. PyTorch's
    fused optimizers are the fastest of its three kinds here.
    """
    train, valid = split(setting.data)
    torch.manual_seed(seed)
    model = make_model(setting)
    kinds: dict[str, Any] = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}
    optimizer = kinds[setting.optimizer](model.parameters(), **config, fused=True)
    for _ in range(setting.epochs):
        for rows in torch.randperm(len(train[0])).split(BATCH_SIZE):
            optimizer.zero_grad()
            loss_of(model, [part[rows] for part in train]).backward()
            optimizer.step()
    with torch.no_grad():
        return loss_of(model, valid).item()
