"""A small generated table."""

from __future__ import annotations

import numpy as np

from bench.search.curves import MAX_EPOCHS, Axis, Task


def toy_task(*, num: int = 40, spread: float = 0.5, diverging: int = 0) -> Task:
    """Return curves that rise to the row's level; ``diverging`` rows diverge at epoch 3.

    These are the first rows.
    """
    rng = np.random.default_rng(0)
    values = np.column_stack([10 ** rng.uniform(-4, -1, num), rng.integers(1, 6, num)])
    levels = rng.random(num)
    scores = levels[:, None] * (1 - 0.8 ** np.arange(1, MAX_EPOCHS + 1))
    scores[:diverging, 2:] = -np.inf
    seconds = rng.lognormal(sigma=spread, size=num)
    axes = (Axis("lr", 1e-4, 1e-1), Axis("layers", 1, 5, log=False, whole=True))
    return Task("toy", "toy", axes, values, scores, seconds / seconds.mean())
