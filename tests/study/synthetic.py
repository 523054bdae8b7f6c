"""Trials without training, for code that only reads results."""

from __future__ import annotations

import numpy as np

from thrifty.space import Choice, Constant, Cosine, Float, Int, Space, Step
from thrifty.study import TrialResult


RATE = Float(1e-4, 1, log=True)
NESTED = Space(
    lr=Choice([Constant(RATE), Cosine(RATE), Step(RATE, [Int(10, 30)])]),
    act=Choice(["relu", "gelu", "tanh"]),
    slope=Float(0.0, 0.3).when(act="relu"),
    width=Int(16, 256, log=True),
    seed=7,
)


def trials_of(space, value, *, num=60, epochs=lambda number: 4, seed=0, **fields):
    """Return ``num`` random trials; ``value(config, rng)`` is the metric after every epoch."""
    rng = np.random.default_rng(seed)
    out = []
    for number in range(num):
        config = space.sample(rng)
        result = value(config, rng)
        length = epochs(number)
        out.append(
            TrialResult(
                number=number,
                config=config,
                state="done",
                epochs=length,
                value=result,
                curve=(result,) * length,
                **fields,
            )
        )
    return out


def peak_rate(config):
    """Return the learning rate of a configuration of ``NESTED``."""
    rate = config["lr"].value
    return rate if isinstance(rate, float) else rate.value


def nested_value(config, rng):
    """Return a metric that depends on the learning rate and the activation, not on the width."""
    bend = (np.log10(peak_rate(config)) + 2) ** 2
    return float(bend + (config["act"] != "relu") + 0.05 * rng.normal())
