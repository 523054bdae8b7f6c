import warnings

import pytest
import torch
from hypothesis import given, strategies as st

from thrifty.core import LayerError
from thrifty.nn import GyroDropout, GyroSchedule


pytestmark = pytest.mark.slow


def turns(schedule, num):
    """Return the active subnetworks at each of the next ``num`` steps."""
    seen = []
    for _ in range(num):
        seen.append(schedule.active().tolist())
        schedule.step()
    return seen


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@given(
    concurrent=st.integers(1, 6),
    phases=st.integers(1, 6),
    cycles=st.integers(1, 3),
    period=st.integers(1, 5),
    seed=st.integers(0, 100),
)
def test_a_partition_trains_all_equally_often(concurrent, phases, cycles, period, seed):
    subnetworks = concurrent * phases
    steps = phases * cycles * period
    schedule = GyroSchedule(
        subnetworks=subnetworks,
        concurrent=concurrent,
        total_steps=steps,
        cycles=cycles,
        generator=seeded(seed),
    )
    seen = turns(schedule, steps)
    counts = torch.tensor(seen).flatten().bincount(minlength=subnetworks)
    assert (counts == cycles * period).all()
    for begin in range(0, steps, period):
        assert all(active == seen[begin] for active in seen[begin : begin + period])


@given(
    subnetworks=st.integers(1, 20),
    concurrent=st.integers(1, 20),
    steps=st.integers(1, 60),
    seed=st.integers(0, 9),
)
def test_any_numbers(subnetworks, concurrent, steps, seed):
    concurrent = min(concurrent, subnetworks)
    schedule = GyroSchedule(
        subnetworks=subnetworks, concurrent=concurrent, total_steps=steps, generator=seeded(seed)
    )
    seen = turns(schedule, steps)
    assert all(len(active) == concurrent for active in seen)
    phases = -(-subnetworks // concurrent)
    if steps >= phases:
        assert set(range(subnetworks)) == set(torch.tensor(seen).flatten().tolist())
        lengths = torch.tensor([i * phases // steps for i in range(steps)]).bincount()
        assert lengths.max() - lengths.min() <= 1
    # Training beyond the last step starts the schedule again.
    assert turns(schedule, 1) == seen[:1]


def test_legacy_draws_with_replacement():
    shares = []
    for seed in range(20):
        schedule = GyroSchedule(
            subnetworks=256, concurrent=16, total_steps=1600, order="legacy", generator=seeded(seed)
        )
        seen = turns(schedule, 1600)
        assert len({tuple(active) for active in seen}) == 16
        shares.append(len(set(torch.tensor(seen).flatten().tolist())) / 256)
    # 256 draws from 256 leave out (1 - 1/256) to the power of 256 of them.
    assert sum(shares) / len(shares) == pytest.approx(0.633, abs=0.02)


def test_all_at_once_is_one_set():
    schedule = GyroSchedule(subnetworks=5, concurrent=5, total_steps=7)
    assert {tuple(sorted(active)) for active in turns(schedule, 20)} == {(0, 1, 2, 3, 4)}


def test_steps_are_those_of_the_optimizer():
    layer = GyroDropout(0.5, num_features=3, subnetworks=4, concurrent=2, total_steps=4)
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    layer.schedule.follow(optimizer)
    for step in range(3):
        for _ in range(2):  # accumulate the gradients of two batches
            layer(torch.ones(2, 3) * weight).sum().backward()
        assert int(layer.schedule.position) == step
        optimizer.step()


def test_whoever_never_steps_is_told_once():
    layer = GyroDropout(0.5, num_features=1, subnetworks=2, concurrent=1, total_steps=4)
    x = torch.ones(1, 1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2500):
            layer(x)
    assert [str(w.message)[:30] for w in told] == ["1000 forward passes in trainin"]


def test_whoever_steps_is_not_told():
    layer = GyroDropout(0.5, num_features=1, subnetworks=2, concurrent=1, total_steps=4)
    for _ in range(1100):
        layer(torch.ones(1, 1))
        layer.schedule.step()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"subnetworks": 0}, "subnetworks=0; give an integer of at least 1"),
        ({"concurrent": 2.0}, "concurrent=2.0"),
        ({"total_steps": True}, "total_steps=True"),
        ({"cycles": 0}, "cycles=0"),
        ({"concurrent": 9}, "concurrent=9 of subnetworks=4"),
        ({"order": "random"}, "order='random'; give one of 'partition', 'legacy'"),
        ({"order": "legacy", "cycles": 2}, "cycles=2 with order='legacy'"),
    ],
)
def test_bad_options(options, message):
    good = {"subnetworks": 4, "concurrent": 2, "total_steps": 10}
    with pytest.raises(LayerError, match=message):
        GyroSchedule(**good | options)
