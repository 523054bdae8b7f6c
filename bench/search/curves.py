"""Measured learning curves as tables: a task is a pool of configurations with curves and times.

The data lie outside of the repository (``THRIFTY_DATA``, default ``../shared/data``). LCBench's
surrogate is asked once, and its answers are cached in the system's temporary folder.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.common.harness import data_file
from thrifty.core import derive_seed
from thrifty.space import Float, Int, Space


MAX_EPOCHS = 27
POOL = 1000
TIME_SPREAD = 0.5
"""Sigma of the lognormal epoch times, where the data have none."""


class Axis(NamedTuple):
    """One hyper-parameter."""

    name: str
    low: float
    high: float
    log: bool = True
    whole: bool = False

    def domain(self) -> Float | Int:
        if self.whole:
            return Int(int(self.low), int(self.high), log=self.log)
        return Float(self.low, self.high, log=self.log)

    def unit(self, value: float) -> float:
        """Return a value's position in ``[0, 1]``."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True, eq=False)
class Task:
    """A pool of configurations (rows), each with one score an epoch.

    Higher scores are better, and ``-inf`` follows divergence. ``seconds`` is what one epoch of a
    row takes, where the mean row takes 1. Any proposal is trained as the row nearest to it in the
    unit cube.
    """

    family: str
    name: str
    axes: tuple[Axis, ...]
    values: np.ndarray
    scores: np.ndarray
    seconds: np.ndarray

    @property
    def is_made_up(self) -> bool:
        return self.family.startswith("made up")

    @cached_property
    def space(self) -> Space:
        return Space(**{axis.name: axis.domain() for axis in self.axes})

    @cached_property
    def configs(self) -> list[dict[str, Any]]:
        columns = [
            [int(v) if axis.whole else float(v) for v in column]
            for axis, column in zip(self.axes, self.values.T, strict=True)
        ]
        names = [axis.name for axis in self.axes]
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]

    @cached_property
    def curves(self) -> list[tuple[float, ...]]:
        return [tuple(curve) for curve in self.scores.tolist()]

    @cached_property
    def epoch_seconds(self) -> list[float]:
        return list(self.seconds.tolist())

    @cached_property
    def regrets(self) -> list[float]:
        """Return the regret by row: 0 is the best fully trained row.

        1 is the median of those that did not diverge, or worse.
        """
        final = self.scores[:, -1]
        finite = final[np.isfinite(final)]
        best, middle = finite.max(), np.median(finite)
        out = np.clip((best - final) / (best - middle), 0.0, 1.0)
        return [float(x) for x in out]

    def prepare(self) -> None:
        """Compute all cached properties, so that forked processes share them."""
        for name, value in vars(type(self)).items():
            if isinstance(value, cached_property):
                getattr(self, name)

    def nearest(self, configs: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the row that each configuration is trained as."""
        places = [[axis.unit(config[axis.name]) for axis in self.axes] for config in configs]
        distances = self._squares - 2.0 * np.array(places) @ self._columns
        return [int(row) for row in distances.argmin(axis=1)]

    @cached_property
    def _columns(self) -> np.ndarray:
        """Return the positions of the rows, one column each."""
        return np.array([
            [axis.unit(value) for value in column.tolist()]
            for axis, column in zip(self.axes, self.values.T, strict=True)
        ])

    @cached_property
    def _squares(self) -> np.ndarray:
        return np.square(self._columns).sum(axis=0)


def load() -> list[Task]:
    """Return all tasks: TaskSet, then DeepOBS, then LCBench."""
    return [*taskset(), *deepobs(), *lcbench()]


def taskset() -> list[Task]:
    """Return nine RNN text classifiers, tuned by Adam's options.

    The score is minus the validation loss.
    """
    return [_taskset(path) for path in sorted(data_file("curves", "taskset").glob("*.npz"))]


def _taskset(path: Path) -> Task:
    with np.load(path) as data:
        names, values = data["hp_names"].tolist(), data["hp"].astype(float)
        scores = -data["valid"][:, 1 : MAX_EPOCHS + 1].astype(float)  # column 0 is untrained
    for i, name in enumerate(names):
        if name.startswith("beta"):  # drawn log-uniformly as one minus beta
            names[i], values[:, i] = f"one_minus_{name}", 1.0 - values[:, i]
    axes = [
        Axis(name, float(column.min()), float(column.max()))
        for name, column in zip(names, values.T, strict=True)
    ]
    name = path.stem.removeprefix("FixedTextRNNClassification_")
    return Task(
        "TaskSet",
        name,
        tuple(axes),
        values,
        once_diverged(scores),
        drawn_seconds(path.stem, len(values)),
    )


def deepobs() -> list[Task]:
    """Return six problems x three optimizers, tuned by 36 learning rates.

    There is no validation split, so the score is by the test loss.
    """
    return [
        _deepobs(path, optimizer)
        for path in sorted(data_file("curves", "deepobs_baselines").glob("*.npz"))
        for optimizer in ("GradientDescentOptimizer", "MomentumOptimizer", "AdamOptimizer")
    ]


def _deepobs(path: Path, optimizer: str) -> Task:
    name = f"{path.stem} {optimizer.removesuffix('Optimizer')}"
    with np.load(path) as data:
        # The other seeds are repeats at one learning rate.
        rows = (data["optimizer"] == optimizer) & (data["seed"] == 42)
        rates = data["lr"][rows].astype(float)
        scores = -data["test_losses"][rows, 1 : MAX_EPOCHS + 1].astype(float)
    axis = Axis("lr", float(rates.min()), float(rates.max()))
    return Task(
        "DeepOBS",
        name,
        (axis,),
        rates[:, None],
        once_diverged(scores),
        drawn_seconds(name, len(rates)),
    )


LCBENCH_AXES = (
    Axis("batch_size", 16, 512, whole=True),
    Axis("learning_rate", 1e-4, 1e-1),
    Axis("momentum", 0.1, 0.99, log=False),
    Axis("weight_decay", 1e-5, 1e-1, log=False),
    Axis("num_layers", 1, 5, log=False, whole=True),
    Axis("max_units", 64, 1024, whole=True),
    Axis("max_dropout", 0.0, 1.0, log=False),
)
"""The axes, in the order in which the surrogate takes them, after the epoch."""


def lcbench() -> list[Task]:
    """Return 34 OpenML tasks with one random pool of configurations for all.

    The score is the validation accuracy.
    """
    folder = data_file("curves", "yahpo_lcbench_onnx")
    codes = json.loads((folder / "encoding.json").read_text())["OpenML_task_id"]
    space = json.loads((folder / "config_space.json").read_text())
    ids = next(h["choices"] for h in space["hyperparameters"] if h["name"] == "OpenML_task_id")
    values = _lcbench_pool()
    scores, seconds = _lcbench_answers(folder, [codes[i] for i in ids], values)
    return [
        Task("LCBench", f"OpenML {i}", LCBENCH_AXES, values, scores[at], seconds[at])
        for at, i in enumerate(ids)
    ]


def _lcbench_pool() -> np.ndarray:
    rng = np.random.default_rng(derive_seed(0, "lcbench pool"))
    space = Space(**{axis.name: axis.domain() for axis in LCBENCH_AXES})
    return np.array([list(space.sample(rng).values()) for _ in range(POOL)], dtype=float)


def _lcbench_answers(
    folder: Path, codes: Sequence[int], values: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return scores (tasks, rows, epochs) and relative seconds an epoch (tasks, rows).

    They come from the temporary folder if they are there.
    """
    model = folder / "model.onnx"
    kept = Path(tempfile.gettempdir()) / f"thrifty-lcbench-{POOL}-{MAX_EPOCHS}.npz"
    if kept.exists():
        with np.load(kept) as data:
            if np.array_equal(data["values"], values) and data["bytes"] == model.stat().st_size:
                return data["scores"], data["seconds"]
    answers = [_ask_surrogate(model, code, values) for code in codes]
    scores = np.stack([scores for scores, _ in answers])
    seconds = np.stack([seconds / seconds.mean() for _, seconds in answers])
    partial = kept.with_suffix(f".{os.getpid()}.npz")
    np.savez(partial, values=values, scores=scores, seconds=seconds, bytes=model.stat().st_size)
    partial.replace(kept)  # atomically: another run may be reading it
    return scores, seconds


def _ask_surrogate(model: Path, code: int, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    import onnxruntime  # noqa: PLC0415 - only needed without cached answers

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(model), options)
    epochs = np.arange(2, MAX_EPOCHS + 2)  # the surrogate's epoch 1 is untrained
    inputs = np.column_stack([np.tile(epochs, len(values)), np.repeat(values, len(epochs), axis=0)])
    (answers,) = session.run(
        None,
        {"x_cat": np.full((len(inputs), 1), code, np.int32), "x_cont": inputs.astype(np.float32)},
    )
    seconds, accuracy = answers[:, 0].astype(float), answers[:, 1].astype(float)
    last = seconds.reshape(len(values), -1)[:, -1]
    # The surrogate's time is not linear in epochs and sometimes nearly zero, so each epoch gets an
    # even share of the whole.
    return accuracy.reshape(len(values), -1), np.maximum(last, 0.05 * last.mean()) / len(epochs)


def once_diverged(scores: np.ndarray) -> np.ndarray:
    """Return the scores with ``-inf`` from the first epoch on that is not finite."""
    diverged = np.logical_or.accumulate(~np.isfinite(scores), axis=1)
    return np.where(diverged, -np.inf, scores)


def drawn_seconds(name: str, num: int) -> np.ndarray:
    """Return lognormal times, drawn once for each row, because the data have none."""
    rng = np.random.default_rng(derive_seed(0, "epoch seconds", name))
    seconds = rng.lognormal(sigma=TIME_SPREAD, size=num)
    return seconds / seconds.mean()
