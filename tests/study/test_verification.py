"""A study whose packs go wrong has the results of one that trains each trial alone."""

from __future__ import annotations

import logging
from functools import lru_cache

import pytest
import torch

from tests.pack._faults import wrong_from
from tests.pack._toys import Toy
from thrifty.pack.fused._row_state import RowState
from thrifty.run import Local
from thrifty.search import GridSearch
from thrifty.space import Choice, Constant, Space, Step
from thrifty.study import Study


pytestmark = pytest.mark.slow


SPACE = Space(lr=Choice([Constant(0.05), Step(0.05, [3], gamma=0.5), Constant(0.02)]), width=8)
NUM_STEPS = 3
"""Steps of an epoch of ``Toy``."""


def trained(tmp_path, name, *, pack, task=Toy):
    study = Study(
        task(),
        SPACE,
        algorithm=GridSearch(max_epochs=6),
        metric="mse",
        mode="min",
        storage=f"sqlite:///{tmp_path}/{name}.db",
        name=name,
    )
    study.run(progress=False, executor=Local(pack=pack, threads=1))
    return study


def curves(study):
    return [trial.curve for trial in study.trials]


def assert_same_curves(found, wanted):
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, rel=1e-4)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return curves(trained(tmp_path_factory.mktemp("alone"), "alone", pack="solo"))


def test_packs_that_are_right_are_used(tmp_path, monkeypatch, alone):
    number = wrong_from(monkeypatch, 10**9)
    assert_same_curves(curves(trained(tmp_path, "right", pack="fused")), alone)
    assert number[0] >= 6 * NUM_STEPS


@pytest.mark.sample(3)
@pytest.mark.parametrize("epochs", [0, 1, 2, 4])
def test_no_wrong_epoch_is_ever_seen(tmp_path, monkeypatch, alone, caplog, epochs):
    number = wrong_from(monkeypatch, epochs * NUM_STEPS + 1)
    with caplog.at_level(logging.WARNING, logger="thrifty"):
        study = trained(tmp_path, "wrong", pack="fused")
    assert_same_curves(curves(study), alone)
    assert {trial.state for trial in study.trials} == {"done"}
    assert number[0] > epochs * NUM_STEPS, "it was not fused at all"
    said = [r.getMessage() for r in caplog.records if "not fused" in r.getMessage()]
    assert len(said) == 1
    assert "differs by" in said[0]


def test_a_trial_that_diverges_in_a_pack_is_trained_again(tmp_path, monkeypatch, alone):
    right = RowState.updater
    number = [0]

    def updater(self, options):
        update = right(self, options)

        def broken():
            update()
            number[0] += 1
            if number[0] == 2 * NUM_STEPS + 1:
                self._parameters[0].fill_(float("nan"))

        return broken

    monkeypatch.setattr(RowState, "updater", updater)
    study = trained(tmp_path, "diverged", pack="fused")
    assert_same_curves(curves(study), alone)


@lru_cache
def drawn(num):
    return (torch.rand(num) < 0.7) * 1.0


@lru_cache
def weights(num):
    return torch.arange(num) / num


class Masked(Toy):
    """Task whose mask is drawn by the first call, and kept."""

    mask = staticmethod(drawn)

    def loss(self, model, batch):
        x, y = batch
        return super().loss(model, (x * type(self).mask(6), y))


class Weighted(Masked):
    """Task whose weights are computed by the first call, and kept."""

    mask = staticmethod(weights)


@pytest.mark.sample(1)
@pytest.mark.parametrize("task", [Masked, Weighted])
def test_values_that_are_cached_by_the_first_call(tmp_path, task):
    found = []
    for pack in ("solo", "fused"):
        drawn.cache_clear()
        weights.cache_clear()
        found.append(trained(tmp_path, pack, pack=pack, task=task))
    alone, packed = found
    assert_same_curves(curves(packed), curves(alone))
    assert bool(packed.savings.packed_epochs) == (task is Weighted)
