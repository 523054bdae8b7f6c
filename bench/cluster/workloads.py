"""Workloads of the simulated parts of ``bench_cluster``: spaces of schedules, and measured times.

The spaces are ours: sequences of learning rates (warm-up, steps, decay), batch sizes and momentum
over 120 epochs, of the kinds that Hippo (PVLDB 15(5), 2022) tunes. The paper's own spaces are not
available, so ratios beside its figures are no reproduction of them.

An epoch is one of ResNet-18 on CIFAR-10 on one RTX 2080 Ti. The authors of Pollux and Sia measured
step times by batch size (``systems/sia_pollux``); we interpolate, for 50,000 images. Without that
data set a step is assumed to take 50 ms and 0.2 ms for each image.
"""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from bench.common.harness import data_folder
from thrifty.search import (
    ASHA,
    Algorithm,
    GridSampler,
    GridSearch,
    Hyperband,
    RandomSearch,
    SuccessiveHalving,
)
from thrifty.space import (
    Choice,
    Constant,
    Exponential,
    Float,
    MultiStep,
    Schedule,
    Space,
    Step,
    Warmup,
)


EPOCHS = 120
IMAGES = 50_000
GPU = "RTX2080Ti"
APP = "cifar10"
START_S = 5.0
"""Seconds until a process has loaded a state of 45 MB and its first batch: an assumption."""
STATE_BYTES = 90_000_000
"""Size of ResNet-18 and its momentum in single precision."""


def schedules(bases: Sequence[float], *, epochs: int = EPOCHS) -> Iterator[Schedule]:
    """Yield sequences of learning rates: constant, decaying, or dropped once or twice.

    Each starts at once or after a warm-up.
    """
    unit = epochs // 8
    for base in bases:
        plain: list[Schedule] = [Constant(base), Exponential(base, gamma=0.95)]
        for first in (2 * unit, 3 * unit, 4 * unit, 5 * unit):
            plain.append(Step(base, [first]))
            plain += [Step(base, [first, first + gap * unit]) for gap in (1, 2)]
        yield from plain
        yield from (Warmup(max(unit // 3, 1), each) for each in plain)


def space(bases: Sequence[float] = (0.1, 0.05), *, epochs: int = EPOCHS, **more: Any) -> Space:
    half = epochs // 2
    return Space(
        lr=Choice(list(schedules(bases, epochs=epochs))),
        batch=Choice([
            128,
            MultiStep([128, 256], milestones=[half]),
            MultiStep([128, 256], milestones=[half + epochs // 4]),
        ]),
        momentum=Choice([0.9, MultiStep([0.9, 0.95], milestones=[half + epochs // 8])]),
        **more,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Studies that begin together."""

    name: str
    algorithms: tuple[Algorithm, ...]
    space: Space

    @property
    def num_studies(self) -> int:
        return len(self.algorithms)


def studies(*, quick: bool) -> list[Workload]:
    """Return one study by several algorithms, and several studies of one space."""
    whole = space()
    num = int(whole.size())
    few = 24 if quick else num
    halving = SuccessiveHalving(
        max_epochs=EPOCHS, num_trials=few, min_epochs=15, eta=2, sampler=GridSampler()
    )
    drawn = SuccessiveHalving(max_epochs=EPOCHS, num_trials=few // 2, min_epochs=15, eta=2)
    one = [
        Workload(name="one study, halving", algorithms=(halving,), space=whole),
        Workload(
            name="one study, ASHA",
            algorithms=(
                ASHA(
                    max_epochs=EPOCHS, num_trials=few, min_epochs=15, eta=2, sampler=GridSampler()
                ),
            ),
            space=whole,
        ),
    ]
    if not quick:
        one.append(
            Workload(
                name="one study, grid", algorithms=(GridSearch(max_epochs=EPOCHS),), space=whole
            )
        )
    return [
        *one,
        *(
            Workload(name=f"{k} studies, halving", algorithms=(drawn,) * k, space=whole)
            for k in ((2,) if quick else (2, 4, 8))
        ),
    ]


def large(num_trials: int) -> list[Workload]:
    """Return studies for a thousand workers.

    They have many more roots than the other workloads, each the trunk of a few schedules.
    """
    epochs = 24
    wide = space(
        tuple(np.geomspace(0.01, 0.5, 50).round(5).tolist()),
        epochs=epochs,
        weight_decay=Choice(np.geomspace(1e-5, 1e-2, 50).round(8).tolist()),
        width=Choice([16, 32, 64, 128]),
    )
    options = {"max_epochs": epochs, "num_trials": num_trials}
    return [
        Workload(name="ASHA", algorithms=(ASHA(**options, min_epochs=3, eta=2),), space=wide),
        Workload(name="Hyperband", algorithms=(Hyperband(**options, eta=2),), space=wide),
        Workload(name="random search", algorithms=(RandomSearch(**options),), space=wide),
    ]


def unshareable(num_trials: int) -> Workload:
    """Return a workload with continuous values from the first step on.

    No two trials share anything.
    """
    return Workload(
        name="ASHA, nothing to share",
        algorithms=(ASHA(max_epochs=24, num_trials=num_trials, min_epochs=3, eta=2),),
        space=Space(lr=Float(0.01, 0.5, log=True), batch=Choice([128, 256])),
    )


def epoch_seconds() -> tuple[Callable[[Mapping[str, Any]], float], str]:
    """Return a function for the seconds of an epoch by its values, and the source of the times."""
    measured = _measured_steps()
    if measured is None:
        return _assumed, "assumed: 50 ms a step, and 0.2 ms for each image"
    batches, seconds = measured

    def of(values: Mapping[str, Any]) -> float:
        batch = values["batch"]
        return math.ceil(IMAGES / batch) * float(np.interp(batch, batches, seconds))

    return of, f"measured: {APP} on {GPU} (systems/sia_pollux)"


def _assumed(values: Mapping[str, Any]) -> float:
    return math.ceil(IMAGES / values["batch"]) * (0.05 + 0.0002 * values["batch"])


def _measured_steps() -> tuple[list[float], list[float]] | None:
    path = data_folder() / "systems" / "sia_pollux" / "measurements.csv"
    if not path.exists():
        return None
    by_batch: dict[float, list[float]] = defaultdict(list)
    with path.open(newline="") as lines:
        for row in csv.DictReader(lines):
            alone = row["num_nodes"] == row["num_replicas"] == "1"
            if alone and (row["app"], row["gpu_model"]) == (APP, GPU):
                by_batch[float(row["local_bsz"])].append(float(row["step_time"]))
    batches = sorted(by_batch)
    return batches, [median(by_batch[batch]) for batch in batches]
