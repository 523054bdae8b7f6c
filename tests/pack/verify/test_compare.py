"""Comparison of a step in a block with the same step alone: what counts as rounding."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from thrifty.pack.verify import (
    Difference,
    KnownRounding,
    StepTaken,
    compare_metrics,
    compare_step,
    is_rounding,
    relative_tolerance,
)


EPS = torch.finfo(torch.float32).eps
BEFORE = {"w": torch.ones(4), "steps": torch.tensor(3)}
ALONE = StepTaken(
    loss=torch.tensor(1.0),
    gradients={"w": torch.full((4,), 0.5), "b": torch.full((1,), 0.1), "idle": None},
    tensors={"w": torch.full((4,), 0.95), "steps": torch.tensor(4)},
)


def compared(**changes):
    for kind in ("gradients", "tensors"):
        if kind in changes:
            changes[kind] = {**getattr(ALONE, kind), **changes[kind]}
    return compare_step(replace(ALONE, **changes), ALONE, before=BEFORE, num_terms=100)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"loss": torch.tensor(1.0 + 8 * EPS)},
        {"gradients": {"w": torch.full((4,), 0.5 * (1 + 16 * EPS))}},
        {"gradients": {"b": torch.full((1,), 0.1 + 5e-7)}},
        {"gradients": {"idle": torch.zeros(2)}},
        {"tensors": {"w": torch.full((4,), 0.95 * (1 + 2 * EPS))}},
        {"tensors": {"w": torch.full((4,), 0.95) + 1e-40}},
    ],
)
def test_rounding_is_no_difference(changes):
    assert compared(**changes) is None


@pytest.mark.parametrize(
    ("changes", "what", "may_be_rounding"),
    [
        ({"loss": torch.tensor(1.001)}, "the loss", True),
        ({"loss": torch.tensor(float("nan"))}, "the loss", True),
        ({"loss": torch.tensor(float("inf"))}, "the loss", True),
        ({"gradients": {"w": torch.full((4,), 0.501)}}, "the gradient of 'w'", True),
        ({"gradients": {"w": torch.full((4,), float("inf"))}}, "the gradient of 'w'", True),
        ({"gradients": {"w": None}}, "the gradient of 'w'", False),
        ({"gradients": {"idle": torch.full((2,), 1e-9)}}, "the gradient of 'idle'", False),
        ({"gradients": {"new": torch.ones(1)}}, "the gradient of 'new'", False),
        ({"tensors": {"w": torch.full((4,), 0.951)}}, "'w' after the step", False),
        ({"tensors": {"w": torch.ones(3)}}, "'w' after the step", False),
        ({"tensors": {"steps": torch.tensor(5)}}, "'steps' after the step", False),
    ],
)
def test_what_is_no_rounding(changes, what, may_be_rounding):
    found = compared(**changes)
    assert found.what == what
    assert found.is_rounding_possible == may_be_rounding
    assert found.found > found.allowed
    assert str(found).startswith(f"{what} differs by ")


def test_a_tensor_that_the_block_forgot():
    packed = replace(ALONE, tensors={"steps": torch.tensor(4)})
    found = compare_step(packed, ALONE, before=BEFORE, num_terms=100)
    assert found.what == "'w', which the pack does not have,"


def test_the_same_that_is_no_number():
    nan = replace(
        ALONE,
        loss=torch.tensor(float("nan")),
        gradients={"w": torch.full((4,), float("nan"))},
        tensors={"w": torch.full((4,), float("nan"))},
    )
    assert compare_step(nan, nan, before=BEFORE, num_terms=100) is None


def test_double_precision_is_judged_more_strictly():
    assert relative_tolerance(torch.float64, num_terms=1) == pytest.approx(1e-10)
    assert relative_tolerance(torch.bfloat16, num_terms=1) > 0.1
    one, two = (relative_tolerance(torch.float32, num_terms=n) for n in (10_000, 40_000))
    assert two == pytest.approx(2 * one)


@pytest.mark.parametrize(
    ("packed", "name"),
    [
        ({"mse": 1.0 + 1e-7}, None),
        ({"mse": 1.01}, "mse"),
        ({}, "mse"),
        ({"mse": 1.0, "x": 0.0}, "x"),
        ({"mse": float("inf")}, "mse"),
        ({"mse": float("nan")}, "mse"),
    ],
)
def test_a_metric_that_differs_is_named(packed, name):
    found = compare_metrics(packed, {"mse": 1.0}, tolerance=1e-5)
    assert (found and found.name) == name
    if found:
        assert f"the metric {name!r} is" in str(found)
    assert compare_metrics({"a": float("nan")}, {"a": float("nan")}, tolerance=0.0) is None


@pytest.mark.parametrize(
    ("alone", "exact", "packed", "loss", "forgiven"),
    [
        # a probability that one of the two rounds to 1, the other to the number below it
        (1e-12, EPS / 4, EPS / 2, 1e-6, True),
        (EPS / 2, EPS / 4, 1e-12, 1e-6, True),
        # more than a step of a probability
        (1e-12, EPS / 4, 1e-5, 1e-6, False),
        # the trial alone is precise, so the pack is wrong by a thousandth, or altogether
        (2e-8, 2e-8, 2e-8 * 1.001, 1e-6, False),
        (2e-8, 2e-8, 4e-8, 1e-6, False),
        # a softmax is not saturated where the loss is large
        (1e-12, EPS / 4, EPS / 2, 2.0, False),
        (1e-12, EPS / 4, EPS / 2, float("nan"), False),
    ],
)
def test_only_a_step_of_a_saturated_softmax_is_forgiven(alone, exact, packed, loss, forgiven):
    def step(gradient, dtype=torch.float32):
        full = torch.full((4,), gradient, dtype=dtype)
        return StepTaken(loss=torch.tensor(loss), gradients={"w": full}, tensors=ALONE.tensors)

    assert compare_step(step(packed), step(alone), before=BEFORE, num_terms=100) is not None
    found = is_rounding(
        step(packed),
        step(alone),
        tensors={"w": torch.ones(4)},
        step=lambda tensors: step(alone),
        in_double=lambda: step(exact, torch.float64),
        num_terms=100,
    )
    assert found == forgiven


@pytest.mark.parametrize("both", [(math.inf, math.nan), (math.nan, -math.inf)])
def test_a_loss_that_overflows_in_both_is_no_difference(both):
    packed, alone = (replace(ALONE, loss=torch.tensor(loss)) for loss in both)
    assert compare_step(packed, alone, before=BEFORE, num_terms=100) is None
    found = compare_step(packed, ALONE, before=BEFORE, num_terms=100)
    assert found is not None
    assert found.what == "the loss"


def test_gradients_of_losses_that_overflow_may_be_finite_in_one_of_both():
    lost = replace(ALONE, loss=torch.tensor(math.nan))
    holes = {**ALONE.gradients, "w": torch.tensor([math.nan, 0.5, math.inf, 0.5])}
    packed = replace(lost, gradients=holes)
    assert compare_step(packed, lost, before=BEFORE, num_terms=100) is None
    assert compare_step(lost, packed, before=BEFORE, num_terms=100) is None
    wrong = replace(lost, gradients={**holes, "w": torch.tensor([math.nan, 0.7, math.inf, 0.5])})
    for one, other in ((wrong, packed), (replace(ALONE, gradients=holes), ALONE)):
        found = compare_step(one, other, before=BEFORE, num_terms=100)
        assert found is not None
        assert found.what == "the gradient of 'w'"


def test_rounding_that_is_known():
    known = KnownRounding()

    def of(what, found, *, is_rounding_possible=True):
        return Difference(
            what=what, found=found, allowed=1.0, is_rounding_possible=is_rounding_possible
        )

    assert not known.covers(of("w", 2.0))
    known.note([of("w", 3.0), of("b", 2.0)])
    known.note([of("w", 2.0)])
    assert known.covers(of("w", 12.0)), "four times what is known"
    assert not known.covers(of("w", 12.1))
    assert not known.covers(of("b", 12.0)), "it is known of another gradient"
    assert not known.covers(of("w", 2.0, is_rounding_possible=False))
    known.note([of("b", 101.0), of("b", math.inf)])
    assert not known.covers(of("b", 12.0)), "a kink of one trial says nothing about the next one"


def test_what_an_optimizer_keeps_for_later_is_compared():
    def with_moments(**changes):
        moments = {("exp_avg", "w"): torch.tensor([1.0, 2.0]), ("sum", "b"): torch.zeros(1)}
        moments |= {(name, "w"): value for name, value in changes.items()}
        return replace(ALONE, moments=moments)

    def found(**changes):
        return compare_step(with_moments(**changes), with_moments(), before=BEFORE, num_terms=9)

    assert found(exp_avg=torch.tensor([1.0, 2.0 + 32 * EPS])) is None
    wrong = found(exp_avg=torch.tensor([1.0, 2.001]))
    assert "the optimizer's 'exp_avg' of 'w'" in str(wrong)
    assert not wrong.is_rounding_possible
    assert found(other=torch.ones(2)) is None, "the trial alone keeps no such tensor"


def test_moments_in_which_a_gradient_cancels():
    """The gradient of ``w`` is 0.5, so the rounding of a sum with it is no error."""
    alone, packed = (
        replace(ALONE, moments={("momentum_buffer", "w"): torch.full((4,), value)})
        for value in (1e-6, 1e-6 + 16 * EPS)
    )
    assert compare_step(packed, alone, before=BEFORE, num_terms=9) is None
