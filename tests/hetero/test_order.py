"""Each sample is trained once per epoch, for any split over workers."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import assume, given, strategies as st

from thrifty.core import HeteroError
from thrifty.hetero import Place, SampleOrder
from thrifty.pack import epoch_order


pytestmark = pytest.mark.slow


NAMES = ("a", "b", "c", "d")
numbers = st.integers(0, 40)


def epoch_of(order, split_at, names, epoch=0, first=0, most_steps=400):
    """Return the shares of each step of an epoch; ``split_at(step)`` gives the split of a step."""
    place, steps = Place(epoch=epoch), []
    while order.left(place, split_at(first + len(steps)), names):
        assert len(steps) < most_steps, "the epoch does not end"
        shares = order.shares(place, split_at(first + len(steps)), names)
        order.advance(place, shares, names)
        steps.append(shares)
    return steps


def public_of(steps):
    return list(chain.from_iterable(share.public for shares in steps for share in shares))


def private_of(steps, rank):
    return list(chain.from_iterable(shares[rank].private for shares in steps))


@st.composite
def teams(draw):
    """Draw workers, their private samples, and splits that change at any time."""
    workers = draw(st.integers(1, 4))
    sizes = st.tuples(*[st.integers(1, 9)] * workers)
    splits = draw(st.lists(sizes, min_size=1, max_size=6))
    private = draw(st.tuples(*[numbers] * workers))
    return NAMES[:workers], dict(zip(NAMES, private, strict=False)), splits


@given(teams(), numbers, st.integers(0, 2))
def test_each_sample_comes_once_an_epoch(team, num_public, epoch):
    names, private, splits = team
    assume(num_public or any(private.values()))
    order = SampleOrder(num_public, seed=1, private=private)
    steps = epoch_of(order, lambda step: splits[step % len(splits)], names, epoch=epoch)
    assert sorted(public_of(steps)) == list(range(num_public))
    for rank, name in enumerate(names):
        assert sorted(private_of(steps, rank)) == list(range(private[name]))


@given(teams(), numbers)
def test_no_worker_gets_more_than_its_part(team, num_public):
    names, private, splits = team
    assume(num_public or any(private.values()))
    order = SampleOrder(num_public, seed=1, private=private)
    for step, shares in enumerate(epoch_of(order, lambda step: splits[step % len(splits)], names)):
        for share, size in zip(shares, splits[step % len(splits)], strict=True):
            assert len(share) <= size


@given(teams(), teams(), st.integers(1, 60))
def test_order_of_public_samples_is_no_matter_of_split_or_worker(one, other, num_public):
    orders = [
        public_of(
            epoch_of(
                SampleOrder(num_public, seed=3, private=private),
                lambda step, splits=splits: splits[step % len(splits)],
                names,
                epoch=4,
            )
        )
        for names, private, splits in (one, other)
    ]
    assert orders[0] == orders[1]


def test_epochs_and_seeds_have_orders_of_their_own():
    def whole(seed, epoch):
        order = SampleOrder(50, seed=seed, private={"a": 50})
        return order.shares(Place(epoch=epoch), (100,), ("a",))[0]

    shares = [whole(seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    orders = [share.public for share in shares] + [share.private for share in shares]
    assert len(set(orders)) == 8
    assert whole(1, 1) == shares[3]


def test_order_is_that_of_the_other_tasks():
    share = SampleOrder(9, seed=4).shares(Place(epoch=3), (9,), ("a",))[0]
    assert list(share.public) == epoch_order(9, seed=4, epoch=3).tolist()


def test_an_order_answers_for_any_epoch_at_any_time():
    order = SampleOrder(30, seed=0)
    first, second = (order.shares(Place(epoch=epoch), (30,), ("a",)) for epoch in (0, 1))
    assert order.shares(Place(epoch=0), (30,), ("a",)) == first != second


@given(st.integers(0, 60), st.integers(1, 300), st.integers(1, 12), st.integers(1, 12))
def test_private_samples_are_spread_evenly(num_private, num_public, size_a, size_b):
    # The private samples fit.
    assume(num_private * (size_a + size_b) <= (num_private + num_public) * (size_a - 1))
    order = SampleOrder(num_public, seed=0, private={"a": num_private})
    steps = epoch_of(order, lambda step: (size_a, size_b), ("a", "b"))
    # The last two steps may be small, or replace used-up public samples.
    own = [len(shares[0].private) for shares in steps[:-2]]
    assert all(abs(num - num_private / len(steps)) <= 1 for num in own)


def test_public_samples_top_up_private_ones():
    order = SampleOrder(80, seed=0, private={"a": 20})
    steps = epoch_of(order, lambda step: (8, 2), ("a", "b"))
    assert [[(len(s.private), len(s.public)) for s in shares] for shares in steps] == [
        [(2, 6), (0, 2)]
    ] * 10


def test_who_has_too_many_private_samples_trains_the_rest_at_the_end():
    order = SampleOrder(8, seed=0, private={"a": 30})
    steps = epoch_of(order, lambda step: (2, 2), ("a", "b"))
    sizes = [tuple(map(len, shares)) for shares in steps]
    assert sizes == [(2, 2)] * 4 + [(2, 0)] * 11
    assert sorted(private_of(steps, 0)) == list(range(30))


def test_private_samples_take_the_place_of_public_ones_that_are_used_up():
    """Only the last step is small."""
    order = SampleOrder(12, seed=0, private={"a": 9})
    steps = epoch_of(order, lambda step: (6, 4), ("a", "b"))
    assert [tuple(map(len, shares)) for shares in steps] == [(6, 4), (6, 4), (1, 0)]
    assert [len(shares[0].private) for shares in steps] == [3, 5, 1]


def test_subsampling_leaves_out_what_is_beyond_a_worker_s_share():
    order = SampleOrder(20, seed=0, private={"a": 100}, subsample=True)
    epochs = [
        private_of(epoch_of(order, lambda step: (3, 9), ("a", "b"), epoch=epoch), 0)
        for epoch in range(2)
    ]
    # A quarter of all samples.
    assert [len(own) for own in epochs] == [30, 30]
    assert [len(set(own)) for own in epochs] == [30, 30]
    assert set(epochs[0]) != set(epochs[1])


def test_subsampling_gets_round_to_all_samples_in_time():
    order = SampleOrder(20, seed=0, private={"a": 60}, subsample=True)
    seen = set()
    for epoch in range(12):
        seen.update(private_of(epoch_of(order, lambda step: (5, 5), ("a", "b"), epoch=epoch), 0))
    assert seen == set(range(60))


def test_subsampling_leaves_out_nothing_that_fits():
    order = SampleOrder(30, seed=0, private={"a": 10}, subsample=True)
    steps = epoch_of(order, lambda step: (5, 5), ("a", "b"))
    assert sorted(private_of(steps, 0)) == list(range(10))


def test_samples_of_workers_that_are_gone_are_not_waited_for():
    order = SampleOrder(12, seed=0, private={"a": 5, "b": 50})
    assert order.left(Place(), (2, 2), ("a", "c")) == 17
    assert order.left(Place(public=12, private={"a": 5}), (2,), ("a",)) == 0


def test_a_place_goes_on_where_it_was():
    order = SampleOrder(40, seed=0, private={"a": 9})
    steps = epoch_of(order, lambda step: (4, 4), ("a", "b"))
    place = Place()
    for shares in steps[:3]:
        order.advance(place, shares, ("a", "b"))
    resumed = SampleOrder(40, seed=0, private={"a": 9})
    again = Place(epoch=0, public=place.public, private=dict(place.private))
    assert resumed.shares(again, (4, 4), ("a", "b")) == steps[3]


@pytest.mark.parametrize(
    ("num_public", "private", "message"),
    [
        (0, None, "there are no samples to train on"),
        (0, {"a": 0}, "there are no samples to train on"),
        (-1, {"a": 5}, "numbers of samples are not negative"),
        (5, {"a": -1}, "numbers of samples are not negative"),
    ],
)
def test_numbers_of_samples_that_make_no_sense(num_public, private, message):
    with pytest.raises(HeteroError, match=message):
        SampleOrder(num_public, seed=0, private=private)
