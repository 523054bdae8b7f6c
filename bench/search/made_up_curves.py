"""Made-up learning curves with one difficulty each: curves that cross, diverge, drop or are noisy.

Tables of real curves hardly have crossings, because most of them hold one optimizer at a time. In
each family, the loss of a configuration falls from a common start to its own end. Odd tasks are for
development, even ones for judging.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from bench.search.curves import MAX_EPOCHS, POOL, Axis, Task
from thrifty.core import derive_seed


Family = Literal["crossing", "late drop", "divergence", "noisy"]
FAMILIES: tuple[Family, ...] = get_args(Family)
TASKS_OF_A_FAMILY = 8
NUM_AXES = 4


def made_up(*, judged: bool) -> list[Task]:
    """Return the tasks for judging, or those for development."""
    return [
        made_up_task(family, number)
        for family in FAMILIES
        for number in range(int(not judged), TASKS_OF_A_FAMILY, 2)
    ]


def made_up_task(family: Family, number: int) -> Task:
    """Return one task.

    - crossing: the faster a configuration learns, the worse it ends.
    - late drop: the loss falls suddenly at a place of its own, as after a decay.
    - divergence: the best configurations are next to those that diverge midway.
    - noisy: each epoch has noise of a tenth of the spread of the ends.
    """
    rng = np.random.default_rng(derive_seed(0, "made-up curves", family, number))
    points = rng.random((POOL, NUM_AXES))
    best = rng.uniform(0.15, 0.85, NUM_AXES)
    weights = rng.dirichlet(np.ones(NUM_AXES)) * 2.0
    ends = 0.2 + np.square(points - best) @ weights + 0.03 * rng.standard_normal(POOL)
    speeds = 10.0 ** (-0.8 + 0.5 * np.sin(3.0 * points @ rng.normal(size=NUM_AXES)))
    epochs = np.arange(1, MAX_EPOCHS + 1)
    if family == "crossing":
        ranks = ends.argsort().argsort() / POOL
        strength = rng.uniform(0.5, 1.0)
        speeds = 10.0 ** (-1.1 + 1.1 * (strength * ranks + (1 - strength) * rng.random(POOL)))
    falls = np.exp(-np.power(np.outer(speeds, epochs), rng.uniform(0.6, 1.0)))
    losses = ends[:, None] + (1.5 - ends[:, None]) * falls
    if family == "late drop":
        places = rng.integers(6, MAX_EPOCHS - 2, size=POOL)
        drops = rng.uniform(0.2, 0.6) * (losses[:, -1:] - 0.1)
        losses = losses - drops * (epochs >= places[:, None])
    if family == "noisy":
        losses = losses + 0.1 * ends.std() * rng.standard_normal(losses.shape)
    if family == "divergence":
        risk = points[:, 0] + 0.2 * rng.standard_normal(POOL)
        losses = losses - 0.2 * points[:, :1]
        begins = np.where(risk > 0.9, rng.integers(2, MAX_EPOCHS, size=POOL), MAX_EPOCHS + 1)
        losses = np.where(epochs >= begins[:, None], np.inf, losses)
    seconds = rng.lognormal(sigma=0.5, size=POOL)
    return Task(
        f"made up: {family}",
        f"{family} {number}",
        tuple(Axis(f"x{i}", 0.0, 1.0, log=False) for i in range(NUM_AXES)),
        points,
        -losses,
        seconds / seconds.mean(),
    )
