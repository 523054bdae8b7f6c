"""Tasks whose only hyper-parameter is a learning rate, trained here: 36 small networks.

Each has 36 rates from 10^-5 to 10^2 and 27 epochs, as DeepOBS' tasks have, on twelve problems of
scikit-learn, with SGD, momentum and Adam. The networks of one task differ only in their rates, so
they are trained together, as one batch of matrices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import sklearn.datasets as data
import torch
from torch.nn.functional import cross_entropy

from bench.search.curves import MAX_EPOCHS, Axis, Task, drawn_seconds, once_diverged


NUM_RATES = 36
RATES = np.logspace(-5, 2, NUM_RATES)
OPTIMIZERS = ("SGD", "momentum", "Adam")
BATCH_SIZE = 32
TRAIN_SHARE = 0.75


class Problem(NamedTuple):
    """Rows, targets and the sizes of hidden layers; targets that are whole numbers are classes."""

    name: str
    x: np.ndarray
    y: np.ndarray
    hidden: tuple[int, ...]

    @property
    def has_classes(self) -> bool:
        return self.y.ndim == 1


def rate_tasks(*, most: int | None = None) -> list[Task]:
    """Train all tasks, or the first ``most``."""
    chosen = [(problem, name) for problem in problems() for name in OPTIMIZERS][:most]
    return [_task(problem, optimizer) for problem, optimizer in chosen]


def problems() -> Iterator[Problem]:
    digits = data.load_digits()
    pixels = digits.data / 16
    yield Problem("digits, linear", pixels, digits.target, ())
    yield Problem("digits, one layer", pixels, digits.target, (64,))
    yield Problem("digits, three layers", pixels, digits.target, (64, 64, 64))
    yield Problem("digits, autoencoder", pixels, pixels, (16,))
    for name, found, hidden in (
        ("wine", data.load_wine(), (32,)),
        ("cancer", data.load_breast_cancer(), (32, 32)),
    ):
        yield Problem(name, _scaled(found.data), found.target, hidden)
    diabetes = data.load_diabetes()
    yield Problem("diabetes", _scaled(diabetes.data), _scaled(diabetes.target[:, None]), (32,))
    x, y = data.make_moons(800, noise=0.25, random_state=0)
    yield Problem("moons", x, y, (32, 32))
    x, y = data.make_circles(800, noise=0.1, factor=0.6, random_state=0)
    yield Problem("circles", x, y, (16, 16, 16))
    x, y = data.make_classification(1000, 30, n_informative=10, n_classes=5, random_state=0)
    yield Problem("classes", x, y, (64,))
    x, y = data.make_friedman1(800, noise=1.0, random_state=0)
    yield Problem("Friedman", _scaled(x), _scaled(y[:, None]), (64,))
    rng = np.random.default_rng(0)
    x = rng.uniform(-3, 3, (600, 1))
    yield Problem("sine", x, np.sin(2 * x) + 0.1 * rng.normal(size=x.shape), (64, 64))


def _scaled(x: np.ndarray) -> np.ndarray:
    return (x - x.mean(0)) / x.std(0)


def _task(problem: Problem, optimizer: str) -> Task:
    name = f"{problem.name}, {optimizer}"
    return Task(
        "learning rates",
        name,
        (Axis("lr", float(RATES[0]), float(RATES[-1])),),
        RATES[:, None],
        once_diverged(-_losses(problem, optimizer)),
        drawn_seconds(name, NUM_RATES),
    )


def _losses(problem: Problem, optimizer: str) -> np.ndarray:
    """Return the loss on held-out rows for each rate after each epoch."""
    order = np.random.default_rng(1).permutation(len(problem.x))
    x = torch.tensor(problem.x[order], dtype=torch.float32)
    y = torch.tensor(problem.y[order], dtype=torch.long if problem.has_classes else torch.float32)
    num = int(TRAIN_SHARE * len(x))
    generator = torch.Generator().manual_seed(0)
    num_outputs = int(y.max()) + 1 if problem.has_classes else y.shape[1]
    sizes = [x.shape[1], *problem.hidden, num_outputs]
    parameters = []
    for wide, narrow in pairwise(sizes):
        weight = torch.randn(1, wide, narrow, generator=generator) / wide**0.5
        parameters += [
            weight.expand(NUM_RATES, -1, -1).clone().requires_grad_(),
            torch.zeros(NUM_RATES, 1, narrow).requires_grad_(),
        ]
    step = _Steps(optimizer, parameters)
    found = []
    for _ in range(MAX_EPOCHS):
        for rows in torch.randperm(num, generator=generator).split(BATCH_SIZE):
            loss = _loss(_outputs(parameters, x[rows]), y[rows]).sum()
            step(torch.autograd.grad(loss, parameters))
        with torch.no_grad():
            found.append(_loss(_outputs(parameters, x[num:]), y[num:]).numpy())
    return np.array(found, dtype=float).T


def _outputs(parameters: Sequence[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Return outputs of all networks, ``[rates, rows, outputs]``."""
    hidden = x.expand(NUM_RATES, *x.shape)
    layers = list(zip(parameters[::2], parameters[1::2], strict=True))
    for number, (weight, bias) in enumerate(layers, start=1):
        hidden = torch.baddbmm(bias, hidden, weight)
        if number < len(layers):
            hidden = hidden.tanh()
    return hidden


def _loss(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the loss of each network."""
    if y.is_floating_point():
        return (outputs - y).square().mean((1, 2))
    targets = y.expand(NUM_RATES, -1)
    return cross_entropy(outputs.transpose(1, 2), targets, reduction="none").mean(1)


class _Steps:
    """Steps of an optimizer with a rate for each network."""

    def __init__(self, name: str, parameters: Sequence[torch.Tensor]) -> None:
        self._name, self._parameters = name, parameters
        self._rates = torch.tensor(RATES, dtype=torch.float32)[:, None, None]
        self._means = [torch.zeros_like(each) for each in parameters]
        self._squares = [torch.zeros_like(each) for each in parameters]
        self._num = 0

    def __call__(self, gradients: Sequence[torch.Tensor]) -> None:
        self._num += 1
        with torch.no_grad():
            for at, gradient in enumerate(gradients):
                self._parameters[at] -= self._rates * self._direction(at, gradient)

    def _direction(self, at: int, gradient: torch.Tensor) -> Any:
        mean, square = self._means[at], self._squares[at]
        if self._name == "SGD":
            return gradient
        if self._name == "momentum":
            return mean.mul_(0.9).add_(gradient)
        mean.mul_(0.9).add_(gradient, alpha=0.1)
        square.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        root = (square / (1 - 0.999**self._num)).sqrt() + 1e-8
        return mean / (1 - 0.9**self._num) / root
