"""A study of at least a minute's training.

    python -m bench.common.long_study pack|sharing [--quick]

A small network trains on generated data, 1,000 steps a trial, through ``th.Study`` with the default
executor. The figure of interest is the part of the time that checks take.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import torch

import thrifty as th
from bench.common.processes import say_result


WIDTH, NUM_INPUTS, NUM_CLASSES, BATCH = 256, 64, 10, 128
STEPS, EPOCHS = 100, 10
"""Steps of an epoch, and epochs of a trial: 1,000 steps."""
NUM_TRIALS = {"pack": 112, "sharing": 144}


class Noise(th.Task):
    """Classes that a random network tells apart."""

    optimizer = th.AdamW(lr="lr", weight_decay="weight_decay")
    batch_size = BATCH

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def data(self, hp: th.HyperParameters) -> th.ArrayData:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn((self.steps + 10) * BATCH, NUM_INPUTS, generator=generator)
        teacher = torch.randn(NUM_INPUTS, NUM_CLASSES, generator=generator)
        labels = (inputs @ teacher).argmax(1)
        split = self.steps * BATCH
        return th.ArrayData(
            train=(inputs[:split], labels[:split]), valid=(inputs[split:], labels[split:])
        )

    def model(self, hp: th.HyperParameters) -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Linear(NUM_INPUTS, WIDTH),
            torch.nn.ReLU(),
            torch.nn.Linear(WIDTH, WIDTH),
            torch.nn.ReLU(),
            torch.nn.Linear(WIDTH, NUM_CLASSES),
        )

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model: torch.nn.Module, batch: Any) -> Mapping[str, Any]:
        return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).float().mean()}


def long_study(kind: str, *, quick: bool) -> dict[str, Any]:
    """Train the study once.

    Args:
        kind: ``"pack"`` for trials that differ from the first step on, ``"sharing"`` for trials
            whose learning rates drop at different epochs.
        quick: Train only as much as shows that it works.
    """
    num_trials, steps, epochs = (4, 5, 2) if quick else (NUM_TRIALS[kind], STEPS, EPOCHS)
    if kind == "pack":
        rates: list[Any] = [10 ** (-2.0 - 2.0 * k / num_trials) for k in range(num_trials)]
    else:
        drops = [epoch for epoch in (2, 4, 6, 8) if epoch < epochs] or [1]
        num = -(-num_trials // len(drops))
        rates = [
            th.Step(10 ** (-2.0 - 2.0 * k / num), [drop]) for k in range(num) for drop in drops
        ]
    with tempfile.TemporaryDirectory() as folder:
        study = th.Study(
            Noise(steps),
            th.Space(lr=th.Choice(rates), weight_decay=0.01),
            algorithm=th.GridSearch(max_epochs=epochs),
            metric="accuracy",
            storage=f"sqlite:///{folder}/bench.db",
            name="bench",
        )
        began = time.perf_counter()
        study.run(progress=False)
        seconds = time.perf_counter() - began
        savings = study.savings
    return {
        "seconds": seconds,
        "training_s": savings.seconds,
        "checks_s": savings.seconds_checks,
        "checks_share": savings.seconds_checks / savings.seconds,
        "epochs": savings.unique_epochs,
        "packed_epochs": savings.packed_epochs,
        "shared_factor": savings.shared_factor,
        "packed_factor": savings.packed_factor,
        "packed_interval": savings.packed_interval,
        "said": str(savings),
    }


def long_row(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of a table."""
    low, high = result["packed_interval"] or (None, None)
    return {
        "study of a minute": f"{result['epochs']} epochs",
        "seconds": result["seconds"],
        "checks s": result["checks_s"],
        "checks_share": result["checks_share"],
        "packed epochs": result["packed_epochs"],
        "shared": result["shared_factor"],
        "packed": result["packed_factor"],
        "low": low,
        "high": high,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=NUM_TRIALS)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    say_result(long_study(args.kind, quick=args.quick))


if __name__ == "__main__":
    main()
