import os
from pathlib import Path

import numpy as np
import pytest

from bench.search.curves import (
    LCBENCH_AXES,
    MAX_EPOCHS,
    Axis,
    Task,
    _ask_surrogate,
    _lcbench_pool,
    deepobs,
    taskset,
)
from thrifty.search import RandomSampler

from ._toy import toy_task


DATA = Path(os.environ.get("THRIFTY_DATA", "../shared/data")).absolute()
needs_data = pytest.mark.skipif(
    not DATA.exists(), reason="needs the learning curves (THRIFTY_DATA)"
)


@pytest.fixture(autouse=True)
def data(monkeypatch):
    monkeypatch.setenv("THRIFTY_DATA", str(DATA))


def test_every_row_is_nearest_to_itself():
    task = toy_task()
    assert task.nearest(task.configs) == list(range(40))


def test_nearest_means_nearest_in_the_unit_cube():
    task = toy_task()
    rng = np.random.default_rng(1)
    configs = [task.space.sample(rng) for _ in range(50)]
    unit = lambda c: np.array([np.log10(c["lr"] / 1e-4) / 3, (c["layers"] - 1) / 4])  # noqa: E731
    for config, row in zip(configs, task.nearest(configs), strict=True):
        distances = [np.square(unit(config) - unit(other)).sum() for other in task.configs]
        assert distances[row] == pytest.approx(min(distances))


def test_regret_of_the_best_is_0_and_of_what_diverged_1():
    task = toy_task(diverging=5)
    assert task.regrets[int(task.scores[:, -1].argmax())] == min(task.regrets) == 0
    assert task.regrets[0] == max(task.regrets) == 1


def test_samplers_can_draw_from_the_space():
    axes = (Axis("a", 1, 9, whole=True), Axis("b", 0.0, 1.0, log=False))
    task = Task("", "", axes, np.ones((1, 2)), np.ones((1, MAX_EPOCHS)), np.ones(1))
    rng = np.random.default_rng(0)
    (config,) = RandomSampler().sample(None, task.space, num=1, rng=rng)
    assert list(config) == ["a", "b"]


@needs_data
@pytest.mark.parametrize(("load", "num"), [(taskset, 9), (deepobs, 18)])
def test_tables_of_curves_are_complete(load, num):
    tasks = load()
    assert len(tasks) == num
    for task in tasks:
        assert task.scores.shape == (len(task.values), MAX_EPOCHS)
        assert not np.isnan(task.scores).any()
        diverged = np.isneginf(task.scores)
        assert (diverged[:, 1:] | ~diverged[:, :-1]).all()
        assert np.isfinite(task.scores[:, -1]).sum() > 10
        assert min(task.regrets) == 0
        assert (task.seconds > 0).all()
        assert task.seconds.mean() == pytest.approx(1)
        assert [task.nearest([task.configs[row]]) for row in (0, 7)] == [[0], [7]]


@needs_data
def test_the_surrogate_answers_with_curves():
    pytest.importorskip("onnxruntime")
    values = _lcbench_pool()[:20]
    assert values.shape == (20, len(LCBENCH_AXES))
    scores, seconds = _ask_surrogate(
        DATA / "curves" / "yahpo_lcbench_onnx" / "model.onnx", 34, values
    )
    assert scores.shape == (20, MAX_EPOCHS)
    assert ((scores > 0) & (scores < 101)).all()
    assert (seconds > 0).all()
    assert scores[:, -1].mean() > scores[:, 0].mean()
