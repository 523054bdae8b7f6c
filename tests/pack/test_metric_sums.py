"""Metrics are summed in double precision, weighted by samples, both packed and solo."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.devices import here
from tests.pack._drive import Trial, alone, together
from tests.pack._toys import Toy
from thrifty.pack import ArrayData, FusedBackend
from thrifty.pack.fused._evaluation import evaluate_packed, evaluate_whole
from thrifty.pack.trial._plain_evaluation import MetricSums, evaluate


pytestmark = pytest.mark.usefixtures("device")


RNG = np.random.default_rng(0)
SIZES = [7] * 299 + [3]
VALUES = (RNG.random((len(SIZES), 4)) * 10.0 ** RNG.integers(-3, 4, (len(SIZES), 1))).astype(
    np.float32
)


class Batches:
    """A validation set whose batches contain their own number."""

    arrays = None

    def valid_batches(self, *, batch_size):
        return iter([(torch.tensor([float(i)]), size) for i, size in enumerate(SIZES)])


def exact(row):
    terms = [float(v) * size for v, size in zip(VALUES[:, row], SIZES, strict=True)]
    return math.fsum(terms) / sum(SIZES)


def alone_of(row):
    task = SimpleNamespace(
        eval_batch_size=7, metrics=lambda model, batch: {"m": torch.tensor(VALUES[int(batch), row])}
    )
    return evaluate(task, torch.nn.Identity(), source=Batches(), seed=0)


def packed():
    batch = torch.zeros(1)
    tape = SimpleNamespace(outputs=[torch.zeros(4)])
    bound = SimpleNamespace(batch=[batch], names=["m"])

    class Tape:
        @property
        def outputs(self):
            return tape.outputs

        def __call__(self):
            # a tape writes its results to the same memory each time
            tape.outputs[0].copy_(torch.from_numpy(VALUES[int(batch)]))

    bound.tape = Tape()
    bound.run = bound.tape
    programs = SimpleNamespace(
        evaluation=lambda size, shapes: bound, prepare=lambda bound: bound.tape
    )
    return evaluate_packed(programs, Batches(), size=4, batch_size=7)


def whole(at_once):
    structure = SimpleNamespace(
        task=SimpleNamespace(eval_batch_size=7),
        metrics=lambda batch, *, state, size: {"m": torch.from_numpy(VALUES[int(batch), state])},
    )
    state = SimpleNamespace(of_rows=lambda rows: list(rows))
    return evaluate_whole(structure, state, Batches(), size=4, at_once=at_once)


def test_one_trial_is_summed_in_double_precision():
    assert alone_of(0) == {"m": pytest.approx(exact(0), rel=1e-14)}


@pytest.mark.parametrize("found", [packed, lambda: whole(4), lambda: whole(3)])
def test_packed_trials_have_the_bits_of_one_alone(found):
    assert found() == [alone_of(row) for row in range(4)]


@pytest.mark.parametrize(
    "kind", [float, np.float32, torch.tensor, lambda v: torch.tensor([v]), lambda v: v.item()]
)
def test_any_kind_of_number_gives_the_same(kind):
    sums = MetricSums()
    for value, size in zip(VALUES[:, 0], SIZES, strict=True):
        sums.add({"m": kind(value)}, weight=size)
    assert sums.means() == alone_of(0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.bool])
def test_narrow_types_are_widened_before_they_are_weighted(dtype):
    sums = MetricSums()
    for _ in range(3):
        sums.add({"m": torch.tensor(1, dtype=dtype)}, weight=40_000)
    assert sums.means() == {"m": 1.0}


def test_a_metric_of_some_batches_is_the_mean_over_their_samples():
    sums = MetricSums()
    sums.add({"a": 1.0, "b": 0.5}, weight=3)
    sums.add({"a": 0.0}, weight=1)
    assert sums.means() == {"a": 0.75, "b": 0.5}


class Uneven(Toy):
    """A task that validates in batches of 4, 4 and 2."""

    eval_batch_size = 4

    def data(self, hp):
        data = super().data(hp)
        return ArrayData(train=data.train, valid=data.valid)

    def metrics(self, model, batch):
        x, y = batch
        return {**super().metrics(model, batch), "y": (model(x) * 0 + y).mean()}


def test_equal_values_of_batches_give_equal_bits_in_a_study():
    trials = [Trial(config={"lr": lr}, epochs=1) for lr in (0.01, 0.02)]
    fused, solo = together(FusedBackend(Uneven(), device=here()), trials), alone(Uneven(), trials)
    assert [r.metrics[0]["y"] for r in fused] == [r.metrics[0]["y"] for r in solo]
