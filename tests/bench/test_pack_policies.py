from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from bench.pack.policies import batch_size_packs, nearest_packs, random_packs
from thrifty.core import UsageError


pytestmark = pytest.mark.slow


VALUES: dict[str, list[Any]] = {
    "batch_size": [20, 30, 40, 50],
    "lr": [1e-3, 1e-2, 1e-1],
    "activation": ["tanh", "relu"],
    "bias": [False, True],
}
config = st.fixed_dictionaries({name: st.sampled_from(v) for name, v in VALUES.items()})
configs = st.lists(config, max_size=30)
sizes = st.integers(1, 12)
rngs = st.integers(0, 5).map(np.random.default_rng)


def distance(one, other) -> int:
    """Compute the distance by hand."""
    return (
        abs(
            VALUES["batch_size"].index(one["batch_size"])
            - VALUES["batch_size"].index(other["batch_size"])
        )
        + abs(VALUES["lr"].index(one["lr"]) - VALUES["lr"].index(other["lr"]))
        + (one["activation"] != other["activation"])
        + (one["bias"] != other["bias"])
    )


def assert_partition(packs, configs, size: int) -> None:
    assert sorted(i for pack in packs for i in pack) == list(range(len(configs)))
    assert all(0 < len(pack) <= size for pack in packs)
    assert all(type(i) is int for pack in packs for i in pack)


@given(configs, sizes, rngs)
def test_random_packs_are_full_but_for_the_last(configs, size, rng):
    packs = random_packs(configs, size=size, rng=rng)
    assert_partition(packs, configs, size)
    assert all(len(pack) == size for pack in packs[:-1])


@given(configs, st.none() | sizes)
def test_batch_size_packs_have_one_batch_size_and_are_as_few_as_can_be(configs, size):
    packs = batch_size_packs(configs, size=size)
    size = size or len(configs) or 1
    assert_partition(packs, configs, size)
    found = [{configs[i]["batch_size"] for i in pack} for pack in packs]
    assert all(len(each) == 1 for each in found)
    counts = [[c["batch_size"] for c in configs].count(b) for b in VALUES["batch_size"]]
    assert len(packs) == sum(-(-count // size) for count in counts)


@given(configs, sizes, rngs)
def test_nearest_packs_have_a_pivot_and_nobody_left_is_nearer(configs, size, rng):
    packs = nearest_packs(configs, size=size, values=VALUES, rng=rng)
    assert_partition(packs, configs, size)
    assert all(len(pack) == size for pack in packs[:-1])
    left = set(range(len(configs)))
    for pack in packs:
        left -= set(pack)
        pivot = configs[pack[0]]
        farthest = max(distance(pivot, configs[i]) for i in pack)
        assert all(distance(pivot, configs[i]) >= farthest for i in left)


def test_equal_generators_give_equal_packs_and_others_give_others():
    configs = [{"lr": lr} for lr in VALUES["lr"]] * 5

    def both(seed: int):
        return (
            random_packs(configs, size=4, rng=np.random.default_rng(seed)),
            nearest_packs(
                configs, size=4, values={"lr": VALUES["lr"]}, rng=np.random.default_rng(seed)
            ),
        )

    assert both(1) == both(1)
    assert all(one != other for one, other in zip(both(1), both(2), strict=True))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda rng: random_packs([{}], size=0, rng=rng), "size=0"),
        (lambda rng: batch_size_packs([{"batch_size": 1}], size=0), "size=0"),
        (lambda rng: nearest_packs([{}], size=-1, values={}, rng=rng), "size=-1"),
        (lambda rng: batch_size_packs([{"lr": 1}], key="batch"), "no 'batch' .it has: lr"),
        (
            lambda rng: nearest_packs([{}], size=1, values={"lr": [1]}, rng=rng),
            "no 'lr' .it has: nothing"
        ),
        (
            lambda rng: nearest_packs([{"lr": 2}], size=1, values={"lr": [1]}, rng=rng),
            "lr=2 of a configuration is not among its values",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_packed(call, message):
    with pytest.raises(UsageError, match=message):
        call(np.random.default_rng(0))
