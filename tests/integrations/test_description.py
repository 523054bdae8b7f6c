"""Descriptions are equal in every process for equal things, and differ for different ones."""

from __future__ import annotations

import functools
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from thrifty.integrations._adapters import by_shape, described
from thrifty.integrations.sklearn._estimator_task import by_content


pytestmark = pytest.mark.slow


class Thing:
    def __init__(self, size):
        self.size = size

    def double(self):
        return 2 * self.size

    def get_params(self, *, deep):
        return {"size": self.size}


def scaled(by):
    return lambda x: x * by


def looking_back(by):
    def walk(x):
        return walk(x - by) if x > 0 else x

    return walk


def composed(inner):
    return lambda x: inner(x)


MADE = [
    lambda: {"b": 1, "a": [1.5, None, "x"]},
    lambda: {3, 1, 2},
    lambda: functools.partial(scaled(2), 1),
    lambda: scaled(2),
    lambda: composed(scaled(2)),
    lambda: looking_back(2),
    lambda: Thing,
    lambda: math.floor,
    lambda: np.mean,
    lambda: np.arange(3),
]


@pytest.mark.parametrize("otherwise", [by_shape, by_content])
@pytest.mark.parametrize("make", MADE)
def test_what_is_equal(make, otherwise):
    assert described(make(), otherwise=otherwise) == described(make(), otherwise=otherwise)


@pytest.mark.parametrize("otherwise", [by_shape, by_content])
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (1, "1"),
        ({1: "a"}, {"1": "a"}),
        ({1, 2}, {1, 3}),
        (scaled(2), scaled(3)),
        (composed(scaled(2)), composed(scaled(3))),
        (looking_back(2), looking_back(3)),
        (functools.partial(scaled(2), 1), functools.partial(scaled(2), 2)),
        (np.arange(3), np.arange(4)),
        (np.mean, np.sum),
    ],
)
def test_what_differs(one, other, otherwise):
    assert described(one, otherwise=otherwise) != described(other, otherwise=otherwise)


@pytest.mark.parametrize(
    ("one", "other"),
    [(Thing(1), Thing(2)), (np.arange(3), np.arange(1, 4)), (Thing(1).double, Thing(2).double)],
)
def test_only_contents_differ(one, other):
    assert described(one) == described(other)
    assert described(one, otherwise=by_content) != described(other, otherwise=by_content)


def test_what_cannot_be_read_is_equal_to_nothing_else():
    one, other = (
        described(each, otherwise=by_content) for each in ((n for n in ()), (n for n in ()))
    )
    assert one != other


SET_IN_CODE = """
from thrifty.integrations.sklearn._estimator_task import by_content
from thrifty.integrations._adapters import described
print(described(lambda x: x in {"a", "b", "c", "d"}, otherwise=by_content))
"""


@pytest.mark.thorough
def test_the_same_in_every_process():
    found = {
        subprocess.run(
            [sys.executable, "-c", SET_IN_CODE],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parents[2],
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1
