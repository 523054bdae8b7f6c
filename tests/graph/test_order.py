from __future__ import annotations

from itertools import chain

import pytest
import torch
from hypothesis import assume, given, strategies as st

from thrifty.core import GraphError
from thrifty.graph._loader import SeedOrder
from thrifty.pack import epoch_order


def of_ranks(world_size, **options):
    return [SeedOrder(rank=rank, world_size=world_size, **options) for rank in range(world_size)]


def batches(order, epoch=0):
    places = order.of(epoch=epoch)
    return [places[order.part(batch)].tolist() for batch in range(order.num_batches)]


sizes = {
    "num_seeds": st.integers(1, 60),
    "batch_size": st.integers(1, 20),
    "world_size": st.integers(1, 5),
}


@given(**sizes, shuffle=st.booleans())
def test_each_seed_comes_once_an_epoch(num_seeds, batch_size, world_size, shuffle):
    assume(num_seeds >= world_size)
    orders = of_ranks(world_size, num_seeds=num_seeds, batch_size=batch_size, shuffle=shuffle)
    seen = [seed for order in orders for batch in batches(order) for seed in batch]
    assert sorted(seen) == list(range(num_seeds))


@given(**sizes, drop_last=st.booleans())
def test_all_ranks_have_equally_many_batches_of_nearly_equal_size(
    num_seeds, batch_size, world_size, drop_last
):
    assume(num_seeds >= (batch_size * world_size if drop_last else world_size))
    orders = of_ranks(world_size, num_seeds=num_seeds, batch_size=batch_size, drop_last=drop_last)
    for parts in zip(*map(batches, orders), strict=True):
        lengths = {len(part) for part in parts}
        assert max(lengths) - min(lengths) <= 1
        assert min(lengths) >= 1
        # One more where leftover seeds, fewer than there are ranks, joined a batch.
        assert max(lengths) <= batch_size + (world_size > 1)


@given(**sizes)
def test_all_batches_but_the_last_are_full(num_seeds, batch_size, world_size):
    assume(num_seeds >= world_size)
    for order in of_ranks(world_size, num_seeds=num_seeds, batch_size=batch_size):
        assert {len(batch) for batch in batches(order)[:-1]} <= {batch_size}


@given(**sizes)
def test_dropping_the_last_leaves_full_batches_only(num_seeds, batch_size, world_size):
    assume(num_seeds >= batch_size * world_size)
    orders = of_ranks(world_size, num_seeds=num_seeds, batch_size=batch_size, drop_last=True)
    assert {len(batch) for order in orders for batch in batches(order)} == {batch_size}
    assert orders[0].num_batches == num_seeds // (batch_size * world_size)


@given(**sizes)
def test_ranks_together_have_the_global_batches_of_one_process(num_seeds, batch_size, world_size):
    assume(num_seeds % (batch_size * world_size) >= world_size)
    alone = SeedOrder(num_seeds=num_seeds, batch_size=batch_size * world_size)
    orders = of_ranks(world_size, num_seeds=num_seeds, batch_size=batch_size)
    together = [
        list(chain.from_iterable(parts)) for parts in zip(*map(batches, orders), strict=True)
    ]
    assert together == batches(alone)


def test_one_process_has_as_many_batches_as_data_loaders_have():
    for num_seeds in range(1, 12):
        for drop_last in (False, True):
            if drop_last and num_seeds < 3:
                continue
            order = SeedOrder(num_seeds=num_seeds, batch_size=3, drop_last=drop_last)
            loader = torch.utils.data.DataLoader(range(num_seeds), 3, drop_last=drop_last)
            assert order.num_batches == len(loader)


def test_fewer_seeds_than_ranks_join_the_batch_before():
    orders = of_ranks(3, num_seeds=13, batch_size=2, shuffle=False)
    assert [batches(order) for order in orders] == [
        [[0, 1], [6, 7]],
        [[2, 3], [8, 9]],
        [[4, 5], [10, 11, 12]],
    ]


def test_order_is_that_of_the_other_tasks():
    order = SeedOrder(num_seeds=9, batch_size=2, seed=4)
    assert order.of(epoch=3).tolist() == epoch_order(9, seed=4, epoch=3).tolist()


def test_epochs_and_seeds_have_orders_of_their_own():
    first, second = (SeedOrder(num_seeds=50, batch_size=7, seed=seed) for seed in (0, 1))
    orders = {tuple(order.of(epoch=n)) for order in (first, second) for n in (0, 1)}
    assert len(orders) == 4


def test_without_shuffling_seeds_stay_as_they_are():
    order = SeedOrder(num_seeds=5, batch_size=2, shuffle=False)
    assert batches(order, epoch=8) == [[0, 1], [2, 3], [4]]


def test_no_two_batches_of_an_epoch_have_one_number():
    orders = of_ranks(3, num_seeds=40, batch_size=4)
    numbers = [order.number(batch) for order in orders for batch in range(order.num_batches)]
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_seeds": 0}, "there are no seeds"),
        ({"batch_size": 0}, "batch_size=0; give an integer of at least 1"),
        ({"batch_size": 2.0}, "batch_size=2.0"),
        ({"batch_size": True}, "batch_size=True"),
        ({"world_size": 0}, "world_size=0"),
        ({"rank": -1}, "rank=-1"),
        ({"rank": 2, "world_size": 2}, "rank=2 and world_size=2"),
        ({"drop_last": True, "batch_size": 11}, "drop_last=True leaves no batch: 10 seeds"),
        ({"world_size": 11}, "10 seeds for 11 ranks"),
    ],
)
def test_options_that_make_no_sense(options, message):
    with pytest.raises(GraphError, match=message):
        SeedOrder(**{"num_seeds": 10, "batch_size": 2} | options)
