"""The results of one step of a live trial and of a restored one."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from thrifty.pack.verify import (
    FIRST_BATCH,
    Probe,
    how_far_apart,
    outside_of_state,
    probes_differ,
    stand_in,
)


PROBE = Probe(
    loss=torch.tensor(1.0),
    batch=[torch.ones(2)],
    tensors={"w": torch.ones(2)},
    moments={"w": {"momentum_buffer": torch.ones(2), "step": 1}},
    metrics={"mse": 0.5},
)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({}, ""),
        ({"batch": [torch.zeros(2)]}, FIRST_BATCH),
        ({"loss": torch.tensor(1.0 + 2**-20)}, "the loss of the next step"),
        ({"tensors": {"w": torch.zeros(2)}}, "'w' after the next step"),
        ({"tensors": {}}, "'w' after the next step"),
        ({"moments": {"w": {"step": 2}}}, "the optimizer's state of 'w' after the next step"),
        ({"metrics": {"mse": 0.6}}, "the metric 'mse'"),
    ],
)
def test_what_differs_is_named(change, named):
    assert probes_differ(PROBE, replace(PROBE, **change)) == named


@pytest.mark.parametrize(
    ("change", "distance"),
    [
        ({}, 0.0),
        ({"loss": torch.tensor(2.0)}, 0.5),
        ({"tensors": {"w": torch.tensor([1.0, 0.75])}}, 0.25),
        ({"batch": [torch.zeros(2)]}, math.inf),
        ({"tensors": {"w": torch.ones(3)}}, math.inf),
        ({"metrics": {"mse": "low"}}, math.inf),
        ({"metrics": {"mse": math.nan}}, math.inf),
        ({"metrics": {"other": 0.5}}, math.inf),
    ],
)
def test_how_far_apart(change, distance):
    assert how_far_apart(PROBE, replace(PROBE, **change)) == distance


def test_a_stand_in_is_a_copy():
    x = torch.ones(1)
    copied = stand_in({"x": (x, 3, object())})
    x.add_(1)
    assert copied["x"][0].item() == 1
    assert copied["x"][1:] == [3, None]


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(1, 1)
        self.calls, self.seen, self.helper = 0, [], object()
        self.register_buffer("scale", torch.ones(1), persistent=False)
        self.register_buffer("kept", torch.ones(1))


def test_attributes_outside_of_the_state_are_named():
    live, restored = Counting(), Counting()
    assert outside_of_state({"model": live}, {"model": restored}) == []
    live.calls, live.inner.extra = 2, 1
    live.seen.append(torch.ones(1))
    live.scale.add_(1)
    live.kept.add_(1)
    live.eval()
    live.register_forward_hook(lambda *_: None)
    assert outside_of_state({"model": live}, {"model": restored}) == [
        "model.calls",
        "model.seen",
        "model.scale (a buffer that is not persistent)",
        "model.inner.extra",
    ]
    meant = ("calls", "scale", "extra")
    assert outside_of_state({"model": live}, {"model": restored}, meant=meant) == ["model.seen"]


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (torch.Generator, lambda v: torch.rand(1, generator=v)),
        (lambda: np.random.default_rng(0), lambda v: v.random()),
        (lambda: np.random.RandomState(0), lambda v: v.rand()),
        (lambda: random.Random(0), lambda v: v.random()),
        (lambda: np.ones(3), lambda v: v.__setitem__(0, 2)),
        (lambda: {"a": [np.ones(3)]}, lambda v: v["a"].append(1)),
    ],
    ids=lambda value: "",
)
def test_equal_content_is_no_difference(make, change):
    one, other = Counting(), Counting()
    one.helper, other.helper = make(), make()
    assert outside_of_state({"model": one}, {"model": other}) == []
    change(one.helper)
    assert outside_of_state({"model": one}, {"model": other}) == ["model.helper"]


def test_numbers_of_numpy_are_compared():
    one, other = Counting(), Counting()
    one.helper, other.helper = np.float32(1), np.float32(2)
    assert outside_of_state({"model": one}, {"model": other}) == ["model.helper"]
