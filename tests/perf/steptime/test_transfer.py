"""Step times of a network that has hardly been measured."""

from __future__ import annotations

import numpy as np
import pytest

from thrifty.core import UsageError
from thrifty.perf.steptime import Overlapping, Setup
from thrifty.perf.steptime._hybrid import overlapped
from thrifty.perf.steptime._transfer import Transfer

from ._draw import PLACEMENTS, grid


PROBES = [(2,), (1, 1), (4, 4)]
OTHERS = grid([(4,), (2, 2), (4, 4, 2), (4,) * 4])
SINGLE = grid([(1,)])


def by_nodes(setup):
    nodes, num = len(setup.placement), setup.num_devices
    return 0.08 * (nodes - 1) if nodes > 1 else 0.02 * np.log2(num)


def by_fullest(setup):
    nodes, num = len(setup.placement), setup.num_devices
    return 0.06 * max(setup.placement) if nodes > 1 else 0.02 * np.log2(num)


def times(setups, exchange, *, volume=1.0, compute=1.0, overlap=1.0):
    return [
        float(overlapped(compute * (0.05 + 0.004 * s.batch), volume * exchange(s), overlap))
        for s in setups
    ]


def known(exchange, **options):
    setups = grid(PLACEMENTS, (8, 32, 128))
    return setups, times(setups, exchange, **options)


def fitted(references, exchange, probes=PROBES, **options):
    setups = SINGLE + grid(probes, (8, 32))
    model = Transfer(references)
    model.fit(setups, times(setups, exchange, **options))
    return model


@pytest.mark.parametrize("volume", [0.2, 1.0, 5.0, 40.0])
@pytest.mark.parametrize("compute", [0.5, 3.0])
def test_a_multiple_of_known_exchange_is_found(volume, compute):
    model = fitted([known(by_nodes)], by_nodes, volume=volume, compute=compute)
    wanted = times(OTHERS, by_nodes, volume=volume, compute=compute)
    assert model.predict(OTHERS) == pytest.approx(wanted, rel=0.04)
    [(found, _, _)] = model._explained
    assert found == pytest.approx(volume, rel=0.05)


@pytest.mark.parametrize("overlap", [1.0, 3.0, 6.0])
def test_a_network_may_overlap_otherwise_than_the_known_one(overlap):
    model = fitted([known(by_nodes)], by_nodes, volume=4.0, overlap=overlap)
    wanted = times(OTHERS, by_nodes, volume=4.0, overlap=overlap)
    assert model.predict(OTHERS) == pytest.approx(wanted, rel=0.05)


def test_without_probes_it_exchanges_as_much_as_the_known_one():
    setups, seconds = known(by_nodes, overlap=2.0)
    model = fitted([(setups, seconds)], by_nodes, probes=(), compute=3.0)
    shape = Overlapping()
    shape.fit(setups, seconds)
    alone = np.array(times(OTHERS, lambda _: 0.0, compute=3.0))
    wanted = overlapped(alone, shape.exchange_s(OTHERS), shape.overlap)
    assert model.predict(OTHERS) == pytest.approx(wanted, rel=1e-6)


def test_probes_that_say_nothing_of_the_volume_leave_it():
    setups = grid([(1,), (1, 1), (4, 4), (4,) * 4], (8, 32))  # the placement (2,) is missing
    reference = (setups, times(setups, by_nodes))
    blind = fitted([reference], by_nodes, probes=[(2,)])
    none = fitted([reference], by_nodes, probes=())
    assert blind.predict(OTHERS) == pytest.approx(none.predict(OTHERS), rel=0.02)


@pytest.mark.parametrize("turned", [False, True])
def test_the_reference_that_explains_the_probes_counts_more(turned):
    references = [known(by_nodes), known(by_fullest)]
    probes = [(1, 1), (1, 1, 1), (4, 4), (1,) * 6]
    model = fitted(references[::-1] if turned else references, by_fullest, probes, volume=3.0)
    far = grid([(1,) * 8, (8, 8)], (8, 32))
    right = np.log(times(far, by_fullest, volume=3.0))
    wrong = np.log(fitted(references[:1], by_fullest, probes, volume=3.0).predict(far))
    both = np.log(model.predict(far))
    assert (np.abs(both - right) < 0.35 * np.abs(wrong - right)).all()


def test_references_that_explain_alike_count_alike():
    once, twice = known(by_nodes), known(by_nodes)
    one = fitted([once], by_fullest)
    two = fitted([once, twice], by_fullest)
    assert two.predict(OTHERS) == pytest.approx(one.predict(OTHERS), rel=1e-12)


def test_one_device_takes_its_own_time():
    model = fitted([known(by_nodes)], by_nodes, volume=3.0, compute=7.0)
    assert model.predict(SINGLE) == pytest.approx(times(SINGLE, by_nodes, compute=7.0), rel=1e-6)


def test_a_transfer_from_nothing():
    with pytest.raises(UsageError, match="a transfer needs measurements of another network"):
        Transfer([])


def test_references_are_checked():
    with pytest.raises(UsageError, match="step times are positive and finite"):
        Transfer([([Setup(placement=(1,), batch=8)], [0.0])])
