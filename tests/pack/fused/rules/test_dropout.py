from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import nn

from tests.devices import here
from tests.pack.fused.twin import check, group_of, normal, refused
from thrifty.pack._state import seed_step


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("device")]


FUNCTIONS = [
    (F.dropout, (4, 3)),
    (F.dropout1d, (4, 3, 5)),
    (F.dropout2d, (4, 3, 2, 2)),
    (F.dropout3d, (2, 3, 2, 2, 2)),
]


def alone(function, x, seed, **options):
    torch.default_generator.manual_seed(seed)
    return function(x, **options)


@given(
    size=st.integers(1, 5),
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    p=st.floats(0.0, 1.0),
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from((torch.float32, torch.float64, torch.bfloat16)),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_masks_are_those_of_solo_training_to_the_last_bit(size, shape, p, seed, dtype, data):
    """Masks depend neither on other trials nor on the memory layout, in both of two draws."""
    order = data.draw(st.permutations(range(len(shape))))
    axis = data.draw(st.integers(0, len(shape)))
    x = torch.ones([shape[d] for d in order], dtype=dtype, device=here())
    x = x.permute([order.index(d) for d in range(len(shape))])
    group = group_of(size, seed=seed)
    packed = group.pack(torch.stack([x.permute(order)] * size), 0)
    packed = packed.permute([order.index(d) for d in range(len(shape))])
    packed = group.pack(packed.value.movedim(0, axis), axis)
    once, twice = F.dropout(packed, p), F.dropout(packed, p / 2)
    for k in range(size):
        seed_step(seed + k, here())
        assert torch.equal(group.first(once)[k], F.dropout(x, p))
        assert torch.equal(group.first(twice)[k], F.dropout(x, p / 2))


@pytest.mark.sample(30)
@pytest.mark.parametrize(("function", "shape"), FUNCTIONS)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("p", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_every_dropout(function, shape, axis, p, inplace, training):
    def forward(module, x):
        y = x * 2
        z = function(y, p, training, inplace)
        return y + z, z

    check(forward, lambda s: [normal(*shape, seed=s, axis=axis)])


@pytest.mark.parametrize(
    ("function", "shape"), [(F.dropout1d, (3, 5)), (F.dropout3d, (3, 2, 2, 2)), (F.dropout, ())]
)
def test_without_a_batch(function, shape):
    check(lambda m, x: function(x, 0.4), lambda s: [normal(*shape, seed=s)])


@pytest.mark.filterwarnings("ignore:dropout2d")
def test_dropout2d_of_three_dimensions():
    check(lambda m, x: F.dropout2d(x, 0.4), lambda s: [normal(4, 3, 5, seed=s, axis=1)])


def test_layers_in_a_row():
    check(
        lambda m, x: m(x),
        lambda s: [normal(4, 3, 6, 6, seed=s, axis=1)],
        make=lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.Dropout(0.3), nn.Dropout2d(0.5), nn.Flatten(), nn.Dropout(0.2)
        ),
    )


def test_after_a_transposition():
    check(
        lambda m, x: m(x.transpose(0, 1).contiguous().transpose(0, 1)),
        lambda s: [normal(4, 3, 6, seed=s)],
        make=lambda: nn.Dropout(0.3),
    )


@pytest.mark.parametrize("across", [False, True])
def test_batches_that_differ_in_size(across):
    def forward(module, x):
        y = torch.tanh(x)
        if across:
            y = y.transpose(0, 1).contiguous().transpose(0, 1)
        return F.dropout(F.dropout(y, 0.5), 0.2).pow(2).mean()

    check(forward, lambda s: [normal(5, 3, seed=s)], num_rows=(5, 2, 4), eager=False)


def test_what_is_refused():
    x = normal(4, 3)
    for function in (F.alpha_dropout, F.feature_alpha_dropout):
        refused("AlphaDropout has no batched rule", lambda m, x, f=function: f(x, 0.5, True), x)
        check(lambda m, x, f=function: f(x, 0.5, False), lambda s: [normal(4, 3, seed=s)])
    refused(
        "dropout over other rows than the batch's",
        lambda m, x: F.dropout(x.view(-1), 0.5),
        x,
        num_rows=(4, 2, 3),
        batch=4,
    )
    refused("probability of 1.5", lambda m, x: F.dropout(x, 1.5), x)
    refused("random", lambda m, x: torch.rand_like(x), x)
