"""For any workers, an epoch ends and contains each sample once."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, strategies as st

from thrifty.hetero import HeteroOptions, Place, Power, StepCurve
from thrifty.hetero._job import WorkerInfo
from thrifty.hetero.balance._allocation import Allocation


def info(*, num_private=0, power=None, **curve):
    return WorkerInfo(
        curve=StepCurve(**{"sample_s": 1.0, **curve}),
        num_private=num_private,
        power=power or Power(idle_w=0.0, busy_w=0.0),
        new=True,
    )


def allocation(infos, *, batch=16, num_public=60, **options):
    return Allocation(
        [f"w{rank}" for rank in range(len(infos))],
        infos,
        batch=batch,
        num_public=num_public,
        seed=1,
        options=HeteroOptions(**options),
    )


def run_epoch(given_out, most_steps=300):
    place, steps = Place(), []
    while given_out.left(place):
        assert len(steps) < most_steps, "the epoch does not end"
        shares = given_out.shares(place)
        assert sum(map(len, shares)), "a step without samples"
        given_out.advance(place, shares)
        steps.append(shares)
    return steps


workers = st.builds(
    info,
    num_private=st.sampled_from([0, 0, 1, 7, 50]),
    sample_s=st.floats(0.1, 5.0),
    fixed_s=st.sampled_from([0.0, 0.5, 40.0]),
    max_samples=st.sampled_from([None, None, 4, 30]),
    min_samples=st.sampled_from([0, 0, 1]),
)


@given(st.lists(workers, min_size=1, max_size=4), st.integers(0, 60), st.integers(4, 16))
def test_each_sample_comes_once_an_epoch(infos, num_public, batch):
    max_samples = [each.curve.max_samples for each in infos]
    assume(None in max_samples or sum(filter(None, max_samples)) >= batch)
    assume(num_public or any(each.num_private for each in infos))
    steps = run_epoch(allocation(infos, batch=batch, num_public=num_public))
    public = [index for shares in steps for share in shares for index in share.public]
    assert sorted(public) == list(range(num_public))
    for rank, each in enumerate(infos):
        own = [index for shares in steps for index in shares[rank].private]
        assert sorted(own) == list(range(each.num_private))
        for shares in steps:
            assert len(shares[rank]) <= (each.curve.max_samples or batch)


def test_the_rest_of_an_epoch_is_split_by_speed_too():
    steps = run_epoch(allocation([info(), info(sample_s=3.0)], num_public=24))
    assert [tuple(map(len, shares)) for shares in steps] == [(12, 4), (6, 2)]


def test_who_would_make_the_step_slower_is_left_out():
    given_out = allocation([info(), info(fixed_s=20.0)])
    assert given_out.split == (16, 0)
    assert given_out.left_out == {"w1"}
    assert [given_out.probe(step) for step in (0, 9, 10, 20)] == [2, 0, 2, 2]


def test_nobody_is_probed_where_all_have_samples():
    assert [allocation([info(), info()]).probe(step) for step in (0, 10)] == [0, 0]


def test_energy_has_a_split_of_its_own():
    infos = [
        info(sample_s=0.01, power=Power(idle_w=0.0, busy_w=100.0)),
        info(sample_s=0.02, power=Power(idle_w=0.0, busy_w=5.0)),
    ]
    power = Power(idle_w=0.0, busy_w=1.0)
    assert allocation(infos, batch=30).split == (20, 10)
    assert allocation(infos, batch=30, objective="energy", power=power).split == (0, 30)


@pytest.mark.parametrize("subsample", [False, True])
def test_subsampling_is_handed_on(subsample):
    given_out = allocation([info(num_private=100), info()], num_public=20, subsample=subsample)
    # The worker's share is half of 120 samples.
    assert given_out.left(Place()) == (80 if subsample else 120)


def test_what_is_left_out_of_an_epoch_is_not_trained_at_its_end():
    """The rest of an epoch takes from each worker's private samples as the whole split does."""
    infos = [info(num_private=20, sample_s=2.0), info(num_private=6, fixed_s=3.0)]
    out = allocation(infos, batch=8, num_public=0, subsample=True)
    due = out.left(Place())
    assert due < 26
    assert sum(len(share) for shares in run_epoch(out) for share in shares) == due
