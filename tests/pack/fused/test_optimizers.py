from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from thrifty.pack import Optimizer
from thrifty.pack.fused._fusable import UnfusableError
from thrifty.pack.fused.optimizers import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    RMSprop,
    Rows,
    clip_rows,
    optimizer_for,
)
from thrifty.pack.fused.optimizers._fused_optimizer import advance
from thrifty.pack.task._optimizer import NO_CLIPPING, Clipping


pytestmark = pytest.mark.slow


WIDTH = 37
NUM_STEPS = 10
KINDS = {
    SGD: torch.optim.SGD,
    Adam: torch.optim.Adam,
    AdamW: torch.optim.AdamW,
    RMSprop: torch.optim.RMSprop,
    Adagrad: torch.optim.Adagrad,
}
OPTIONS = [
    *[(kind, [{}]) for kind in KINDS],
    (SGD, [{"lr": 0.1}, {"lr": 0.2, "weight_decay": 0.1}, {"lr": 0.3}]),
    (
        SGD,
        [
            {"lr": 0.1, "momentum": 0.9},
            {"lr": 0.2, "momentum": 0.5, "nesterov": True, "weight_decay": 0.01},
            {"lr": 0.05, "momentum": 0.7, "dampening": 0.3},
        ],
    ),
    (
        Adam,
        [
            {"lr": 0.1},
            {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-3},
            {"lr": 0.1, "weight_decay": 0.2},
        ],
    ),
    (
        AdamW,
        [
            {"lr": 0.1},
            {"lr": 0.01, "betas": (0.5, 0.99), "eps": 1e-4},
            {"lr": 0.1, "weight_decay": 0.2},
        ],
    ),
    (
        RMSprop,
        [
            {"lr": 0.1},
            {"lr": 0.01, "alpha": 0.9, "eps": 1e-4, "weight_decay": 0.1},
            {"lr": 0.1, "alpha": 0.5},
        ],
    ),
    (RMSprop, [{"lr": 0.1, "momentum": 0.9}, {"lr": 0.01, "momentum": 0.5, "alpha": 0.8}]),
    (
        Adagrad,
        [
            {"lr": 0.1},
            {"lr": 0.2, "lr_decay": 0.1, "weight_decay": 0.1},
            {"lr": 0.1, "initial_accumulator_value": 0.5, "eps": 1e-3},
        ],
    ),
]


@pytest.fixture(autouse=True)
def seeded():
    torch.default_generator.manual_seed(0)


def rows_of(kind, size, *, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return Rows(
        parameters=torch.randn(size, WIDTH, generator=generator, dtype=torch.float64).to(dtype),
        gradients=torch.zeros(size, WIDTH, dtype=dtype),
        moments={name: torch.zeros(size, WIDTH, dtype=dtype) for name in kind.moments},
        steps=[0] * size,
    )


def stepped(kind, rows, options, *, by):
    if by == "step":
        kind().step(rows, options)
        return
    optimizer = kind()
    optimizer.prepare(rows, options)
    optimizer.update(rows, optimizer.table(rows, options))
    advance(rows, len(options))


class Alone:
    """One trial with torch's optimizer. Its options may change from step to step."""

    def __init__(self, kind, row, options):
        self.parameter = torch.nn.Parameter(row.clone())
        self.optimizer = KINDS[kind]([self.parameter], **options)

    def step(self, gradient, options):
        self.optimizer.param_groups[0].update(options)
        self.parameter.grad = gradient.clone()
        self.optimizer.step()


def changed(options, step):
    """Return the options for a later step."""
    out = {**options, "lr": options.get("lr", 0.01) * 0.9**step}
    if "weight_decay" in out:
        out["weight_decay"] = out["weight_decay"] * (1 + step)
    if "betas" in out:
        out["betas"] = (out["betas"][0] * 0.99**step, out["betas"][1])
    return out


def counted(kind, option, *, by) -> bool:
    """Return whether steps are counted; SGD counts updates of its momentum buffer, if any."""
    return by == "update" or kind is not SGD or bool(option.get("momentum"))


@pytest.mark.parametrize("by", ["step", "update"])
@pytest.mark.parametrize(("kind", "options"), OPTIONS)
@pytest.mark.parametrize("change", [False, True])
def test_ten_steps_equal_those_of_torch(kind, options, by, change):
    rows = rows_of(kind, len(options))
    alone = [Alone(kind, row, o) for row, o in zip(rows.parameters, options, strict=True)]
    for step in range(NUM_STEPS):
        gradients = torch.randn(len(options), WIDTH, dtype=torch.float64)
        now = [changed(o, step) if change else o for o in options]
        rows.gradients.copy_(gradients)
        stepped(kind, rows, now, by=by)
        for k, trial in enumerate(alone):
            trial.step(gradients[k], now[k])
            torch.testing.assert_close(
                rows.parameters[k], trial.parameter.detach(), rtol=1e-12, atol=1e-12
            )
    for name in kind.moments:
        for k, trial in enumerate(alone):
            held = trial.optimizer.state[trial.parameter].get(name)
            if held is not None:
                torch.testing.assert_close(rows.moments[name][k], held, rtol=1e-12, atol=1e-12)
    assert rows.steps == [NUM_STEPS * counted(kind, o, by=by) for o in options]


@pytest.mark.sample(10)
@pytest.mark.parametrize("by", ["step", "update"])
@pytest.mark.parametrize(("kind", "options"), OPTIONS)
@given(starts=st.lists(st.integers(0, 5), min_size=3, max_size=3))
@settings(max_examples=8, deadline=None)
def test_rows_that_start_at_different_times(kind, options, by, starts):
    """Only the first rows are updated, and a cleared row restarts beside rows far ahead of it."""
    size = len(options)
    rows = rows_of(kind, size)
    alone = [None] * size
    for step in range(NUM_STEPS):
        for k in range(size):
            if starts[k] == step:
                rows.clear(k)
                alone[k] = Alone(kind, rows.parameters[k], options[k])
        gradients = torch.randn(size, WIDTH, dtype=torch.float64)
        rows.gradients.copy_(gradients)
        stepped(kind, rows, options, by=by)
        for k, trial in enumerate(alone):
            if trial is not None:
                trial.step(gradients[k], options[k])
                torch.testing.assert_close(
                    rows.parameters[k], trial.parameter.detach(), rtol=1e-12, atol=1e-12
                )


@pytest.mark.parametrize("by", ["step", "update"])
@pytest.mark.parametrize(("kind", "options"), OPTIONS)
def test_rows_beyond_the_options_are_left_alone(kind, options, by):
    rows = rows_of(kind, len(options) + 2)
    rows.gradients.fill_(1.0)
    before = rows.parameters.clone()
    stepped(kind, rows, options, by=by)
    assert torch.equal(rows.parameters[-2:], before[-2:])
    assert not torch.equal(rows.parameters[:-2], before[:-2])
    assert rows.steps == [*(counted(kind, o, by=by) for o in options), 0, 0]


@pytest.mark.parametrize(("kind", "options"), OPTIONS)
def test_a_row_that_is_moved_goes_on(kind, options):
    rows = rows_of(kind, len(options))
    trial = Alone(kind, rows.parameters[-1], options[-1])
    place = len(options) - 1
    for step in range(6):
        if step == 3:
            rows.move(place, 0)
            place = 0
        gradient = torch.randn(WIDTH, dtype=torch.float64)
        rows.gradients.copy_(gradient.expand_as(rows.gradients))
        now = list(options)
        now[place] = options[-1]
        kind().step(rows, now)
        trial.step(gradient, options[-1])
        torch.testing.assert_close(
            rows.parameters[place], trial.parameter.detach(), rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize(("kind", "options"), OPTIONS)
def test_a_row_of_which_parts_are_in_use(kind, options):
    rows = rows_of(kind, len(options))
    used = torch.zeros(WIDTH, dtype=torch.bool)
    used[3:11] = used[20:WIDTH] = True
    rows.parameters[-1, ~used] = 0
    rows.use(len(options) - 1, [(3, 11), (20, WIDTH)])
    trial = Alone(kind, rows.parameters[-1], options[-1])
    for _ in range(4):
        rows.gradients.normal_()
        rows.gradients[-1, ~used] = 0
        trial.step(rows.gradients[-1], options[-1])
        kind().step(rows, options)
    own = trial.parameter.detach()
    torch.testing.assert_close(rows.parameters[-1], own, rtol=1e-12, atol=1e-12)
    rows.move(len(options) - 1, 0)
    torch.testing.assert_close(rows.parameters[0], own, rtol=1e-12, atol=1e-12)
    rows.empty(0)
    assert not rows.parameters[0].any()
    assert not any(moment[0][used].any() for moment in rows.moments.values())
    assert rows.steps[0] == 0


@pytest.mark.parametrize("by", ["step", "update"])
@pytest.mark.parametrize(("kind", "options"), OPTIONS)
def test_single_precision(kind, options, by):
    rows = rows_of(kind, len(options), dtype=torch.float32)
    alone = [Alone(kind, row, o) for row, o in zip(rows.parameters, options, strict=True)]
    for _ in range(NUM_STEPS):
        rows.gradients.normal_()
        gradients = rows.gradients.clone()
        stepped(kind, rows, options, by=by)
        for k, trial in enumerate(alone):
            trial.step(gradients[k], options[k])
            torch.testing.assert_close(
                rows.parameters[k], trial.parameter.detach(), rtol=1e-5, atol=1e-5
            )


# -- clipping --------------------------------------------------------------------------------


@given(
    norms=st.lists(st.none() | st.floats(0.01, 20.0), min_size=1, max_size=5),
    scale=st.floats(0.0, 10.0),
)
def test_clipping_equals_that_of_torch(norms, scale):
    gradients = torch.randn(len(norms), WIDTH, dtype=torch.float64) * scale
    expected = gradients.clone()
    for row, limit in zip(expected, norms, strict=True):
        if limit is not None:
            parameter = torch.nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))
            parameter.grad = row
            torch.nn.utils.clip_grad_norm_([parameter], limit)
    clip_rows(gradients, [Clipping(None, norm) for norm in norms])
    torch.testing.assert_close(gradients, expected, rtol=1e-12, atol=1e-12)


def test_a_row_without_a_limit_keeps_what_is_not_finite():
    """An unclipped row stays as it is: values that are not finite are neither hidden nor made."""
    gradients = torch.tensor([[1.0, float("inf")], [3.0, float("nan")], [3.0, 4.0]])
    before = gradients.clone()
    clip_rows(gradients, [NO_CLIPPING, NO_CLIPPING, Clipping(None, 1.0)])
    assert torch.equal(gradients[0], before[0])
    assert torch.equal(gradients[1].isnan(), before[1].isnan())
    assert gradients[1, 0] == 3.0
    torch.testing.assert_close(gradients[2], torch.tensor([0.6, 0.8]))


def test_clipping_by_value_comes_first_and_equals_that_of_torch():
    gradients = torch.randn(4, WIDTH, dtype=torch.float64)
    gradients[1, 0] = float("inf")
    limits = [Clipping(0.5, None), NO_CLIPPING, Clipping(0.5, 1.0), Clipping(None, 1.0)]
    expected = gradients.clone()
    for row, limit in zip(expected, limits, strict=True):
        parameter = torch.nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))
        parameter.grad = row
        limit.apply([parameter])
    clip_rows(gradients, limits)
    assert torch.equal(gradients[:2], expected[:2])
    torch.testing.assert_close(gradients, expected, rtol=1e-12, atol=0)


# -- choosing the optimizer ------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "factory"), KINDS.items())
def test_each_has_its_own(kind, factory):
    found, common = optimizer_for(Optimizer(factory, lr=0.1), {"lr": 0.1})
    assert type(found) is kind
    assert common == (factory.__name__, False)


def test_momentum_sets_apart():
    spec = Optimizer(torch.optim.SGD)
    with_it = optimizer_for(spec, {"lr": 0.1, "momentum": 0.9})[1]
    assert with_it == optimizer_for(spec, {"lr": 0.2, "momentum": 0.5, "foreach": True})[1]
    assert with_it != optimizer_for(spec, {"lr": 0.1})[1]


@pytest.mark.parametrize(
    ("factory", "options", "reason"),
    [
        (torch.optim.Rprop, {}, "no optimizer over rows for Rprop"),
        (torch.optim.Adam, {"lr": torch.tensor(0.1)}, "is a tensor"),
        (torch.optim.Adam, {"amsgrad": True}, "amsgrad=True.*not offered"),
        (torch.optim.SGD, {"maximize": True}, "maximize=True.*not offered"),
        (torch.optim.RMSprop, {"centered": True}, "centered=True.*not offered"),
    ],
)
def test_what_there_is_none_for(factory, options, reason):
    with pytest.raises(UnfusableError, match=reason):
        optimizer_for(Optimizer(factory, **options), options)
