"""A torch optimizer follows scheduled values, and none of its other options are touched."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from thrifty.core import TaskError
from thrifty.pack import SGD, Adam, AdamW, Optimizer, pack_state, times, unpack_state
from thrifty.pack.task._followed_optimizer import FollowedOptimizer


def net():
    torch.default_generator.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def followed(source, values, model=None):
    model = net() if model is None else model
    return FollowedOptimizer(source, dict(model.named_parameters()), values)


def rates(optimizer, option="lr"):
    return [group[option] for group in optimizer.torch.param_groups]


def step(optimizer, model):
    optimizer.torch.zero_grad()
    model(torch.linspace(-1, 1, 15).view(5, 3)).square().mean().backward()
    optimizer.torch.step()


# -- specifications --------------------------------------------------------------------------


def test_each_group_follows_its_own_options():
    groups = {"*.bias": {"lr": times("lr", 2), "weight_decay": 0.0}}
    one = followed(AdamW(lr="lr", weight_decay="wd", groups=groups), {"lr": 0.5, "wd": 0.25})
    one.follow({"lr": 0.25, "wd": 0.5})
    assert rates(one) == [0.25, 0.5]
    assert rates(one, "weight_decay") == [0.5, 0.0]


def test_what_does_not_move_is_not_touched():
    """An optimizer may change its unscheduled options itself."""
    one = followed(SGD(lr="lr", weight_decay=0.1, momentum="m"), {"lr": 0.5, "m": 0.9})
    one.torch.param_groups[0].update(weight_decay=7.0, momentum=0.8)
    one.follow({"lr": 0.25, "m": 0.9})
    (group,) = one.torch.param_groups
    assert (group["lr"], group["weight_decay"], group["momentum"]) == (0.25, 7.0, 0.8)


# -- user-defined factories ------------------------------------------------------------------


def two_groups(parameters, *, lr, weight_decay=0.0):
    """Return an optimizer that trains the head ten times as fast and without weight decay."""
    groups = [
        {"params": parameters[:2]},
        {"params": parameters[2:], "lr": 10 * lr, "weight_decay": 0},
    ]
    return torch.optim.SGD(groups, lr=lr, weight_decay=weight_decay)


def test_groups_of_a_factory_keep_their_ratios():
    one = followed(Optimizer(two_groups, lr="lr", weight_decay="wd"), {"lr": 0.1, "wd": 0.5})
    assert rates(one) == [0.1, 1.0]
    one.follow({"lr": 0.03, "wd": 0.25})
    assert rates(one) == [0.03, 0.3]
    assert rates(one, "weight_decay") == [0.25, 0.0]


def test_ratios_are_found_out_where_a_warm_up_begins_at_zero():
    calls = []

    def make(parameters, *, lr):
        calls.append(lr)
        torch.rand(1)
        return two_groups(parameters, lr=lr)

    one = followed(Optimizer(make, lr="lr"), {"lr": 0.0})
    before = torch.get_rng_state()
    for lr in (0.5, 0.25):
        one.check({"lr"})
        one.follow({"lr": lr})
        assert rates(one) == [lr, 10 * lr]
    assert torch.equal(before, torch.get_rng_state())
    assert len(calls) == 1 + 2  # once for each group, and not again at each step


def test_ratios_within_a_tuple():
    def make(parameters, *, beta):
        half = {"params": parameters[2:], "betas": (beta[0] / 2, beta[1])}
        return torch.optim.Adam([{"params": parameters[:2]}, half], betas=beta)

    def rename(parameters, *, betas):
        return make(parameters, beta=betas)

    one = followed(Optimizer(rename, betas=("b", 0.75)), {"b": 0.0})
    one.follow({"b": 0.5})
    assert rates(one, "betas") == [(0.5, 0.75), (0.25, 0.75)]


def renames(parameters, *, rate):
    return torch.optim.SGD(parameters, lr=rate)


def adds(parameters, *, lr):
    return torch.optim.SGD(parameters, lr=lr + 1.0)


def switches(parameters, *, nesterov):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=not nesterov)


class Picky:
    """A factory that fails for all but one learning rate, so that its options cannot be probed."""

    def __call__(self, parameters, *, lr):
        return torch.optim.SGD(parameters, lr={0.0: 0.0}[lr])


@pytest.mark.parametrize(
    ("factory", "options", "first", "then"),
    [
        (renames, {"rate": "x"}, 0.5, 0.25),
        (adds, {"lr": "x"}, 0.0, 0.25),
        (switches, {"nesterov": "x"}, True, False),
        (Picky(), {"lr": "x"}, 0.0, 0.5),
    ],
    ids=["renamed", "not zero", "no number", "fails"],
)
def test_what_has_no_ratio_is_refused_if_it_moves(factory, options, first, then):
    one = followed(Optimizer(factory, **options), {"x": first})
    one.follow({"x": first})
    one.check({"another"})
    for try_it in (lambda: one.check({"x"}), lambda: one.follow({"x": then})):
        with pytest.raises(TaskError, match=r"no ratio that could be kept.*groups="):
            try_it()


def test_a_factory_that_has_groups_cannot_be_given_groups():
    def make(groups, *, lr):
        return torch.optim.SGD([p for group in groups for p in group["params"]], lr=lr)

    with pytest.raises(TaskError, match="cannot be combined with groups="):
        followed(Optimizer(make, lr="lr", groups={"*.bias": {"lr": 0.0}}), {"lr": 0.1})


def test_a_parameter_that_the_model_does_not_have():
    def make(parameters, *, lr):
        return torch.optim.SGD([*parameters, nn.Parameter(torch.zeros(1))], lr=lr)

    with pytest.raises(TaskError, match="make it a parameter of the model"):
        followed(Optimizer(make, lr="lr"), {"lr": 0.1})


def test_a_factory_that_makes_something_else():
    with pytest.raises(TaskError, match="made a list; its factory must make a torch optimizer"):
        followed(Optimizer(lambda parameters: [1]), {})


# -- methods ---------------------------------------------------------------------------------


def test_a_method_is_followed():
    calls = []

    def method(hp):
        calls.append(1)
        return SGD(lr=hp.lr * 0.5, momentum="m", groups={"*.bias": {"lr": hp.lr}})

    one = followed(method, {"lr": 0.5, "m": 0.9, "width": 3})
    assert one.names == {"lr", "m"}
    one.follow({"lr": 0.5, "m": 0.5, "width": 4})
    assert len(calls) == 1
    one.follow({"lr": 0.25, "m": 0.5, "width": 4})
    assert len(calls) == 2
    assert rates(one) == [0.125, 0.25]
    assert rates(one, "momentum") == [0.5, 0.5]


def test_what_a_method_reads_later_is_followed_then():
    def method(hp):
        return SGD(lr=hp.lr if hp.lr > 0.3 else hp.low)

    one = followed(method, {"lr": 0.5, "low": 0.1})
    one.follow({"lr": 0.25, "low": 0.1})
    one.follow({"lr": 0.25, "low": 0.2})
    assert rates(one) == [0.2]


def test_groups_of_a_method_stay_apart_when_their_options_meet():
    def method(hp):
        return SGD(lr=hp.lr, groups={"*.bias": {"lr": hp.bias_lr}})

    one = followed(method, {"lr": 0.5, "bias_lr": 0.5})
    one.follow({"lr": 0.5, "bias_lr": 0.25})
    assert rates(one) == [0.5, 0.25]


def of_more_ranks(limit):
    return lambda p: p.ndim > limit


def own_factory(rate):
    return lambda parameters: torch.optim.SGD(parameters, lr=rate)


@pytest.mark.parametrize(
    "method",
    [
        lambda hp: SGD(lr=0.1) if hp.x < 1 else Adam(lr=0.1),
        lambda hp: SGD(lr=0.1) if hp.x < 1 else SGD(lr=0.1, weight_decay=0.1),
        lambda hp: SGD(lr=0.1, clip_norm=None if hp.x < 1 else 1.0),
        lambda hp: SGD(lr=0.1, groups={"0.*" if hp.x < 1 else "2.*": {"lr": 0.2}}),
        lambda hp: SGD(lr=0.1, groups={of_more_ranks(hp.x): {"lr": 0.2}}),
        lambda hp: Optimizer(own_factory(hp.x)),
        lambda hp: Optimizer(partial(torch.optim.SGD, lr=hp.x)),
        lambda hp: Optimizer(Picky(), lr=0.0 * hp.x),
    ],
    ids=["class", "options", "clip", "pattern", "function", "closure", "partial", "object"],
)
def test_a_method_whose_result_changes_kind(method):
    one = followed(method, {"x": 0.5})
    one.follow({"x": 0.5})
    with pytest.raises(TaskError, match="another kind of optimizer while it trains"):
        one.follow({"x": 1.5})


@pytest.mark.parametrize(
    "method",
    [
        lambda hp: Optimizer(partial(torch.optim.SGD, nesterov=False), lr=hp.x),
        lambda hp: Optimizer(lambda parameters, lr: torch.optim.SGD(parameters, lr=lr), lr=hp.x),
        lambda hp: SGD(lr=hp.x, groups={lambda p: p.ndim > 1: {"momentum": 0.9}}),
    ],
    ids=["partial", "function", "groups"],
)
def test_a_method_may_make_its_parts_anew(method):
    one = followed(method, {"x": 0.5})
    one.follow({"x": 0.25})
    assert set(rates(one)) == {0.25}


@pytest.mark.parametrize(
    "method",
    [
        lambda hp: Optimizer(lambda parameters: torch.optim.SGD(parameters, lr=hp.lr)),
        lambda hp: SGD(lr=0.1, groups={lambda p: p.ndim > hp.lr: {"lr": 0.2}}),
    ],
    ids=["factory", "groups"],
)
def test_what_is_read_only_when_it_is_built(method):
    one = followed(method, {"lr": 0.5})
    assert one.read_when_built == {"lr"}
    assert not one.names


def test_a_method_that_returns_something_else():
    with pytest.raises(
        TaskError, match=r"returned an object of torch\.optim\.sgd\.SGD; it must return"
    ):
        followed(lambda hp: torch.optim.SGD(net().parameters()), {})


# -- state -----------------------------------------------------------------------------------


def trained(source, values, *, steps=2):
    model = net()
    optimizer = followed(source, values, model)
    for _ in range(steps):
        step(optimizer, model)
    return optimizer, model


def again(source, values, model, state):
    twin = net()
    twin.load_state_dict(model.state_dict())
    optimizer = followed(source, values, twin)
    optimizer.load(unpack_state(pack_state(state)))
    return optimizer, twin


def assert_same_step(one, two):
    step(*one)
    step(*two)
    for a, b in zip(one[1].parameters(), two[1].parameters(), strict=True):
        assert torch.equal(a, b)


ADAM = AdamW(lr="lr", groups={"*.bias": {"lr": times("lr", 0.1)}})


def test_state_is_by_parameter_name_in_the_models_order():
    optimizer, _ = trained(ADAM, {"lr": 0.1})
    state = optimizer.state()
    assert list(state["state"]) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert [group["names"] for group in state["groups"]] == [
        ["0.weight", "2.weight"],
        ["0.bias", "2.bias"],
    ]


def test_state_goes_to_its_parameter_whatever_the_order():
    """State goes to the right parameter even if more or fewer groups change torch's numbering."""
    optimizer, model = trained(AdamW(lr="lr"), {"lr": 0.1})
    moments = optimizer.moments()
    other, _ = again(ADAM, {"lr": 0.1}, model, {})
    other.load_moments(moments)
    for name, parameter in model.named_parameters():
        assert moments[name]["exp_avg"].shape == parameter.shape
        assert torch.equal(other.moments()[name]["exp_avg"], moments[name]["exp_avg"])


class Counting(torch.optim.SGD):
    """An optimizer that keeps state in its param groups, as schedule-free optimizers do."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group.update(k=0, total=torch.zeros(2), name="x", rule=abs, kind=torch.float32)

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            group["total"] += 1
            group["lr"] = group["lr"] / group["k"]
        return super().step(closure)


def test_state_in_param_groups_is_kept():
    spec = Optimizer(Counting, lr="lr")
    optimizer, model = trained(spec, {"lr": 0.1}, steps=3)
    two = again(spec, {"lr": 0.1}, model, optimizer.state())
    (group,) = two[0].torch.param_groups
    assert (group["k"], group["total"].tolist()) == (3, [3.0, 3.0])
    two[0].follow({"lr": 0.1})
    assert_same_step((optimizer, model), two)


@pytest.mark.parametrize("first", [0.1, 0.3])
def test_what_moved_before_a_checkpoint_and_moves_after_it(first):
    """Scheduled values resume correctly, even if built with others or changed at the checkpoint."""
    spec = Optimizer(Counting, lr="lr")
    optimizer, model = trained(spec, {"lr": 0.1})
    optimizer.follow({"lr": 0.2})
    step(optimizer, model)
    two = again(spec, {"lr": first}, model, optimizer.state())
    for lr in (0.2, 0.3, 0.1):
        optimizer.follow({"lr": lr})
        two[0].follow({"lr": lr})
        assert rates(optimizer) == rates(two[0])
        assert_same_step((optimizer, model), two)


def test_a_state_of_numbers_is_still_read():
    """State keyed by number and without groups, as written before version 0.1, can be loaded."""
    optimizer, model = trained(AdamW(lr="lr"), {"lr": 0.1})
    old = optimizer.torch.state_dict()["state"]
    two = again(AdamW(lr="lr"), {"lr": 0.1}, model, old)
    assert_same_step((optimizer, model), two)


def test_a_parameter_that_was_frozen_goes_on_with_its_state():
    optimizer, model = trained(ADAM, {"lr": 0.1})
    model[0].weight.requires_grad_(False)
    step(optimizer, model)
    two = again(ADAM, {"lr": 0.1}, model, optimizer.state())
    assert int(two[0].moments()["0.weight"]["step"]) == 2
    model[0].weight.requires_grad_(True)
    assert_same_step((optimizer, model), two)


def test_a_parameter_without_state_begins_with_none():
    model = net()
    model[0].weight.requires_grad_(False)
    optimizer = followed(ADAM, {"lr": 0.1}, model)
    step(optimizer, model)
    two = again(ADAM, {"lr": 0.1}, model, optimizer.state())
    assert "0.weight" not in two[0].moments()
    model[0].weight.requires_grad_(True)
    assert_same_step((optimizer, model), two)


def test_state_of_a_parameter_that_is_not_trained_now():
    def few(parameters, *, lr):
        return torch.optim.Adam(parameters[2:], lr=lr)

    optimizer, model = trained(Adam(lr="lr"), {"lr": 0.1})
    with pytest.raises(TaskError, match=r"'0\.weight', which the optimizer does not train now"):
        again(
            Optimizer(few, lr="lr"),
            {"lr": 0.1},
            model,
            {"groups": [], **optimizer.state()}
            | {"groups": followed(Optimizer(few, lr="lr"), {"lr": 0.1}).state()["groups"]},
        )


def test_a_state_of_other_groups():
    optimizer, model = trained(ADAM, {"lr": 0.1})
    with pytest.raises(TaskError, match="has other param groups"):
        again(AdamW(lr="lr"), {"lr": 0.1}, model, optimizer.state())


class InSingle(torch.optim.SGD):
    """An optimizer that keeps a master copy in single precision."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("master", p.detach().float())
                state["master"] -= group["lr"] * p.grad.float()
                p.data.copy_(state["master"])


def test_state_keeps_its_dtype():
    model = net().bfloat16()
    spec = Optimizer(InSingle, lr="lr")
    optimizer = followed(spec, {"lr": 0.1}, model)
    optimizer.torch.zero_grad()
    model(torch.ones(2, 3, dtype=torch.bfloat16)).sum().backward()
    optimizer.torch.step()
    twin = followed(spec, {"lr": 0.1}, net().bfloat16())
    twin.load(optimizer.state())
    for name, state in optimizer.moments().items():
        assert twin.moments()[name]["master"].dtype == torch.float32
        assert torch.equal(twin.moments()[name]["master"], state["master"])


def test_state_that_belongs_to_no_parameter():
    class Sharing(torch.optim.SGD):
        def step(self, closure=None):
            self.state["calls"] = self.state.get("calls", 0) + 1

    optimizer, model = trained(Optimizer(Sharing, lr="lr"), {"lr": 0.1})
    two, _ = again(Optimizer(Sharing, lr="lr"), {"lr": 0.1}, model, optimizer.state())
    assert two.torch.state["calls"] == 2


def test_options_that_somebody_else_has_changed_are_set_again():
    one = followed(SGD(lr="lr", weight_decay=0.1), {"lr": 0.5})
    one.torch.param_groups[0].update(lr=3.0, weight_decay=3.0)
    one.forget()
    one.follow({"lr": 0.5})
    (group,) = one.torch.param_groups
    assert (group["lr"], group["weight_decay"]) == (0.5, 3.0)


def test_a_method_sees_a_change_that_python_calls_none():
    seen = []

    def optimizer(hp):
        seen.append(hp.power)
        return SGD(lr=0.1)

    followed = FollowedOptimizer(optimizer, dict(nn.Linear(1, 1).named_parameters()), {"power": 1})
    followed.options({"power": 1})
    followed.options({"power": 1.0})
    assert [*map(type, seen)] == [int, float]
