"""Spaces of schedules for a small network on images, and tables of all their learning curves.

Options of algorithms are chosen on the ``tuning`` workloads (MNIST), and judged on the others
(scikit-learn's digits).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import torch

import thrifty as th
from bench.common import digits, mnist
from bench.common.digits_task import space_of


NUM_IMAGES = 2500
"""Images of MNIST to train on."""
SPACES = ("81 schedules", "WSD", "mixed")
STEPS = "steps"
"""The space on which samplers are compared: a model can learn its hyper-parameters one by one."""
Key = tuple[tuple[str, str], ...]


def key_of(config: Mapping[str, Any]) -> Key:
    """Return a configuration as a key of a table."""
    return tuple(sorted((name, repr(value)) for name, value in config.items()))


class Images(th.Task):
    """Classifies images by a network with two hidden layers.

    The metric is the loss: accuracies of 360 digits tie too often to name a best configuration.
    """

    optimizer = th.SGD(lr="lr", momentum=0.9)
    batch_size = "batch_size"

    def __init__(self, *, is_tuning: bool, seed: int) -> None:
        self.is_tuning, self.seed = is_tuning, seed

    def data(self, hp: th.HyperParameters) -> th.ArrayData:
        if not self.is_tuning:
            train, valid = digits.load()
            return th.ArrayData(train=train, valid=valid)
        (x, y), (x_valid, y_valid) = mnist.load(mnist.FOLDER, NUM_IMAGES)
        return th.ArrayData(train=(x.flatten(1), y), valid=(x_valid.flatten(1), y_valid))

    def model(self, hp: th.HyperParameters) -> torch.nn.Module:
        torch.manual_seed(self.seed)
        inputs = 784 if self.is_tuning else 64
        return torch.nn.Sequential(
            *(torch.nn.Linear(inputs, hp.width), torch.nn.ReLU()),
            *(torch.nn.Linear(hp.width, hp.width // 2), torch.nn.ReLU()),
            torch.nn.Linear(hp.width // 2, 10),
        )

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model: torch.nn.Module, batch: Any) -> Mapping[str, Any]:
        return {"loss": torch.nn.functional.cross_entropy(model(batch[0]).double(), batch[1])}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A space for ``Images``, and one seed of the network's first weights."""

    space_name: str
    is_tuning: bool
    seed: int
    epochs: int

    @property
    def name(self) -> str:
        return f"{self.space_name}, {'MNIST' if self.is_tuning else 'digits'}"

    @property
    def task(self) -> Images:
        return Images(is_tuning=self.is_tuning, seed=self.seed)

    @cached_property
    def params(self) -> dict[str, Any]:
        """The hyper-parameters, as arguments of ``Space``."""
        make = {"81 schedules": _steps, "WSD": _wsd, "mixed": _mixed, STEPS: _choices}[
            self.space_name
        ]
        return {"width": 64, "batch_size": 64, **make(self.epochs, is_tuning=self.is_tuning)}

    def space(self, order: int | None = None) -> th.Space:
        """Return the space, with the options of each choice in an order of their own."""
        if order is None:
            return th.Space(**self.params)
        rng = np.random.default_rng(order)
        shuffled = {
            name: th.Choice([value.options[i] for i in rng.permutation(len(value.options))])
            if isinstance(value, th.Choice)
            else value
            for name, value in self.params.items()
        }
        return th.Space(**shuffled)


def _steps(epochs: int, *, is_tuning: bool) -> dict[str, Any]:
    configs = digits.configurations(epochs)
    if is_tuning:
        rates = {0.1: 0.2, 0.05: 0.05, 0.02: 0.01}
        configs = [{**config, "lr": rates[config["lr"]]} for config in configs]
    return {"lr": space_of(configs)["lr"]}


def _wsd(epochs: int, *, is_tuning: bool) -> dict[str, Any]:
    """Return a stable phase for each of six rates, with twelve cooldowns each."""
    rates = (0.003, 0.01, 0.03, 0.1, 0.2, 0.4) if is_tuning else (0.005, 0.02, 0.05, 0.1, 0.2, 0.5)
    cooldowns = sorted({max(1, epochs * tenths // 10) for tenths in (1, 2, 4, 6)})
    options = [
        th.WSD(rate, epochs=epochs, cooldown=float(cooldown), shape=shape)
        for rate in rates
        for cooldown in cooldowns
        for shape in ("linear", "1-sqrt", "cosine")
    ]
    return {"lr": th.Choice(options)}


def _mixed(epochs: int, *, is_tuning: bool) -> dict[str, Any]:
    """Return nineteen schedules, three widths and two batch sizes."""
    low, middle, high, highest = (0.01, 0.03, 0.1, 0.3) if is_tuning else (0.005, 0.02, 0.05, 0.2)
    schedules: list[th.Schedule] = [th.Constant(rate) for rate in (low, middle, high, highest)]
    schedules += [
        th.Step(rate, [epochs * thirds // 3], gamma=gamma)
        for rate in (middle, high, highest)
        for thirds in (1, 2)
        for gamma in (0.1, 0.3)
    ]
    schedules += [th.Cosine(rate, epochs=float(epochs)) for rate in (middle, high, highest)]
    return {
        "lr": th.Choice(schedules),
        "width": th.Choice([8, 32, 128]),
        "batch_size": th.Choice([32, 128]),
    }


def _choices(epochs: int, *, is_tuning: bool) -> dict[str, Any]:
    """Return a step whose rate, epoch and factor are hyper-parameters, and three widths."""
    rates = (0.01, 0.03, 0.1, 0.3) if is_tuning else (0.005, 0.02, 0.05, 0.2)
    drops = [epochs * thirds // 6 for thirds in (1, 2, 3, 4)]
    return {
        "lr": th.Step(th.Choice(rates), [th.Choice(drops)], gamma=th.Choice([0.1, 0.3, 0.6])),
        "width": th.Choice([8, 32, 128]),
    }


@dataclass(frozen=True, kw_only=True)
class Table:
    """The learning curves of all configurations of a workload."""

    workload: Workload
    curves: dict[Key, tuple[float, ...]]
    unique_epochs: int
    seconds: float

    @cached_property
    def ends(self) -> list[float]:
        """The losses at the end, the best first."""
        return sorted(curve[-1] for curve in self.curves.values())

    def target(self, regret: float) -> float:
        """Return the loss of a regret: 0 is the best of the grid, 1 is its median."""
        best, middle = self.ends[0], float(np.median(self.ends))
        return best + regret * (middle - best)

    def regret(self, loss: float) -> float:
        """Return the regret of a loss, at most 1."""
        best, middle = self.ends[0], float(np.median(self.ends))
        return min((loss - best) / (middle - best), 1.0)


def trained(workload: Workload) -> Table:
    """Train the whole grid, by a study in memory."""
    logging.getLogger("thrifty").setLevel(logging.ERROR)
    study = th.Study(
        workload.task,
        workload.space(),
        algorithm=th.GridSearch(max_epochs=workload.epochs),
        metric="loss",
        mode="min",
        storage="sqlite://",
        name="grid",
    )
    study.run(executor=th.Local(workers=1, threads=1), progress=False)
    savings = study.savings
    return Table(
        workload=workload,
        curves={key_of(trial.config): trial.curve for trial in study.trials},
        unique_epochs=savings.unique_epochs,
        seconds=savings.seconds,
    )


def workloads(*, is_tuning: bool, seeds: int, quick: bool) -> list[Workload]:
    """Return the workloads: each space with some seeds."""
    lengths = {"81 schedules": 81, "WSD": 27, "mixed": 27, STEPS: 27}
    if is_tuning or quick:
        lengths = dict.fromkeys(lengths, 9 if quick else 27)
    return list(
        chain.from_iterable(
            [
                Workload(space_name=name, is_tuning=is_tuning, seed=seed, epochs=epochs)
                for seed in range(seeds)
            ]
            for name, epochs in lengths.items()
        )
    )
