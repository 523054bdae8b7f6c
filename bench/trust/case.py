"""A case: what a user might write, in a form that thrifty and a plain loop can both train."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import thrifty as th


NUM_MODELS = 3
NUM_STEPS = 6
ROWS = 16


@dataclass(kw_only=True)
class Case:
    """Models, a loss and batches.

    Each call of ``make`` gives fresh ones, so that nothing leaks between runs.

    Attributes:
        model: Returns the k-th model.
        loss: Returns the loss of a model and a batch.
        metrics: Returns the metrics of a model and a batch; by default the loss.
        optimizer: What trains the models.
        batch: Returns the batch of a step.
        between: Called before each step with the number of the step and the models in training.
        values: Returns the hyper-parameters of the k-th model.
        adapt: Called before each epoch in a study.
    """

    model: Callable[[int], nn.Module]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    metrics: Callable[[nn.Module, Any], Mapping[str, Any]] | None = None
    optimizer: Any = field(default_factory=lambda: th.SGD(lr="lr", momentum=0.9))
    batch: Callable[[int], Any] = lambda step: regression(step)
    between: Callable[[int, Sequence[nn.Module]], None] | None = None
    values: Callable[[int], Mapping[str, Any]] = lambda k: {"lr": 0.05 / (k + 1)}
    task: type[th.Task] | None = None


@dataclass(frozen=True, kw_only=True)
class Named:
    """A case of the corpus.

    Attributes:
        name: What it does.
        make: Returns a fresh case.
        section: Section of the issue that it tries to break: A to E.
        adversarial: Whether it was written to break something, and not only because users write it.
        fuses: Whether it must be fused (it is today, rightly); None if either is fine.
        in_study: Whether it works in a study, where each trial has a model of its own.
    """

    name: str
    make: Callable[[], Case]
    section: str
    adversarial: bool
    fuses: bool | None
    in_study: bool


CORPUS: dict[str, Named] = {}


def case(
    section: str, *, adversarial: bool = False, fuses: bool | None = None, in_study: bool = True
) -> Callable[[Callable[[], Case]], Callable[[], Case]]:
    """Add a function that makes a case to the corpus, under its own name."""

    def add(make: Callable[[], Case]) -> Callable[[], Case]:
        name = make.__name__
        assert name not in CORPUS, name
        CORPUS[name] = Named(
            name=name,
            make=make,
            section=section,
            adversarial=adversarial,
            fuses=fuses,
            in_study=in_study,
        )
        return make

    return add


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def regression(step: int, *, rows: int = ROWS, features: int = 6) -> tuple[torch.Tensor, ...]:
    """Return a batch of a regression problem."""
    x = normal(rows, features, seed=1000 + step)
    return x, x.sin().sum(1, keepdim=True)


def classes(step: int, *, rows: int = ROWS, features: int = 6) -> tuple[torch.Tensor, ...]:
    """Return a batch of a problem with three classes."""
    x = normal(rows, features, seed=2000 + step)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5)


def images(step: int, *, rows: int = 8) -> tuple[torch.Tensor, ...]:
    """Return a batch of small images of three classes."""
    x = normal(rows, 1, 8, 8, seed=3000 + step)
    return x, (x.mean((1, 2, 3)) > 0).long() + (x[:, 0, 0, 0] > 0)


def tokens(step: int, *, rows: int = ROWS, length: int = 5) -> tuple[torch.Tensor, ...]:
    """Return a batch of token sequences of three classes."""
    generator = torch.Generator().manual_seed(4000 + step)
    x = torch.randint(0, 11, (rows, length), generator=generator)
    return x, x.sum(1) % 3


def seeded(k: int, build: Callable[[], nn.Module]) -> nn.Module:
    """Return a model with the initial weights of seed k."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(k)
        return build()


def mlp(k: int = 0, *, outputs: int = 1, width: int = 8) -> nn.Module:
    """Return a small multi-layer perceptron for six features."""
    return seeded(
        k, lambda: nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, outputs))
    )


def mse(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


def by_name(names: Sequence[str]) -> Iterator[Named]:
    """Return the cases of some names, or all."""
    return iter([CORPUS[name] for name in names] if names else CORPUS.values())
