"""Fits to subsets of the placements, and their mean."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest

from bench.cloud.step_time_models import Paleo
from thrifty.core import UsageError
from thrifty.perf.steptime import Bagged, Setup


SETUPS = [
    Setup(placement=placement, batch=batch)
    for placement in [(1,), (2,), (4,), (1, 1), (2, 1), (2, 2), (4, 4), (1, 1, 1), (4, 4, 4)]
    for batch in (8, 16)
]
TIMES = np.random.default_rng(0).uniform(1.0, 2.0, len(SETUPS))


class Noting:
    """A model that records its fit data and predicts its own creation number in seconds."""

    made: ClassVar[list[Noting]] = []

    def __init__(self):
        Noting.made.append(self)
        self.age = len(Noting.made)

    def fit(self, setups, step_s):
        self.seen = dict(zip(setups, step_s, strict=True))

    def predict(self, setups):
        return np.full(len(setups), float(self.age))


@pytest.fixture
def made(monkeypatch):
    monkeypatch.setattr(Noting, "made", [])
    return Noting.made


def placements(model):
    return {tuple(sorted(s.placement)) for s in model.seen if s.num_devices > 1}


def test_each_fit_sees_whole_placements_and_all_of_one_device(made):
    Bagged(Noting, num=20, share=0.5).fit(SETUPS, TIMES)
    assert len(made) == 20
    for model in made:
        kept = placements(model)
        assert len(kept) == 4  # of 8 placements
        for setup, time in zip(SETUPS, TIMES, strict=True):
            known = setup.num_devices == 1 or tuple(sorted(setup.placement)) in kept
            assert model.seen.get(setup) == (time if known else None)
    assert len({frozenset(placements(model)) for model in made}) > 10


def test_the_order_of_machines_is_no_other_placement(made):
    setups = [Setup(placement=each, batch=8) for each in [(1, 2), (2, 1), (3,), (4,), (5,), (6,)]]
    Bagged(Noting, num=20, share=0.6).fit(setups, np.ones(6))
    assert {len(placements(model)) for model in made} == {3}
    assert {sum(sum(s.placement) == 3 and len(s.placement) == 2 for s in m.seen) for m in made} == {
        0,
        2,
    }


def test_the_mean_is_that_of_logarithms(made):
    model = Bagged(Noting, num=3)
    model.fit(SETUPS, TIMES)
    assert model.predict(SETUPS[:2]) == pytest.approx([6 ** (1 / 3)] * 2)


def test_few_placements_are_all_seen(made):
    Bagged(Noting, num=4, share=0.1).fit(SETUPS[:8], TIMES[:8])  # 1, and 3 of several devices
    assert all(len(model.seen) == 8 for model in made)


def test_all_of_them_is_no_bag():
    one, other = Bagged(Paleo, num=3, share=1.0), Paleo()
    one.fit(SETUPS, TIMES)
    other.fit(SETUPS, TIMES)
    assert one.predict(SETUPS) == pytest.approx(other.predict(SETUPS))


def test_the_seed_decides(made):
    for seed in (0, 0, 1):
        Bagged(Noting, num=5, seed=seed).fit(SETUPS, TIMES)
    parts = [[frozenset(placements(m)) for m in made[at : at + 5]] for at in (0, 5, 10)]
    assert parts[0] == parts[1] != parts[2]


@pytest.mark.parametrize("options", [{"num": 0}, {"share": 0.0}, {"share": 1.1}])
def test_options_that_make_no_sense(options):
    with pytest.raises(UsageError, match="must be at least 1 and `share` from 0 to 1"):
        Bagged(Paleo, **options)
